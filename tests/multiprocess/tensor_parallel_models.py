"""For workers: models of other libraries under torch's tensor parallelism, beside the same model on one rank and in float64."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from foundry_fp8 import FP8State, apply_fp8
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.models.fog import FogConfig, FogForCausalLM
from foundry_fp8.models.fog.tensor_parallel import feed_forward_plan
from tests.multiprocess.tensor_parallel import error, whole

VOCABULARY, TOKENS = 64, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "max_position_embeddings": TOKENS,
}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen3():
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def fog():
    return FogForCausalLM(FogConfig(variant="fog-max", tie_word_embeddings=False, **SIZES))


def mpt():
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    return MPTForCausalLM(
        MPTConfig(
            vocab_size=VOCABULARY,
            d_model=256,
            n_heads=4,
            n_layers=2,
            expansion_ratio=2,
            max_seq_len=TOKENS,
            attn_config={"attn_impl": "torch"},
            init_config={"init_device": "cpu"},
        )
    )


# A gain that a rank's own heads go through: its gradient is a part of a sum.
ON_HEADS = SequenceParallel(sequence_dim=2, use_local_output=True)
COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
DECODER = {name: ColwiseParallel() for name in COLWISE}
DECODER |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
# MPT and FOG have q, k and v in one matrix, whose rows no plan of torch's can give to heads.
PLANS = {
    llama: DECODER,
    qwen3: DECODER | {"self_attn.q_norm": ON_HEADS, "self_attn.k_norm": ON_HEADS},
    mpt: {"ffn.up_proj": ColwiseParallel(), "ffn.down_proj": RowwiseParallel()},
}


def made(name, seed):
    """A model and its blocks' plan."""
    build = globals()[name]
    torch.manual_seed(seed)
    return build(), PLANS.get(build)


def blocks_of(model):
    return model.transformer.blocks if hasattr(model, "transformer") else model.model.layers


def split(model, plan, mesh):
    for block in blocks_of(model):
        parallelize_module(block, mesh, plan or feed_forward_plan(block))


def trained(model, share=slice(None), passes=3):
    """Gradients of each of some passes but the first, which delayed scaling has no history for."""
    found = []
    for seed in range(passes):
        model.zero_grad()
        torch.manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, (2, TOKENS))[share]
        logits = model(input_ids=tokens).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        found.append({name: whole(p.grad).double() for name, p in model.named_parameters()})
    return found[1:]


def replicas_agree(model, group):
    """Whether gradients of what each rank of ``group`` holds whole are the same to the bit."""
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            placements = dict(zip(grad.device_mesh.mesh_dim_names, grad.placements, strict=True))
            if placements.get("tensor", Replicate()) != Replicate():
                continue
            grad = grad.to_local()
        each = [torch.empty_like(grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(each, grad.contiguous(), group)
        if not all(torch.equal(grad, other) for other in each):
            return False
    return True


def mean(errors):
    return {name: sum(e[name] for e in errors) / len(errors) for name in errors[0]}


def errors_of(found, exact):
    """The mean over the passes of each gradient's relative error."""
    return mean([*map(error, found, exact)])


def alike(name, recipe, data=1, seeds=3):
    """Gradient errors of one rank and of shards (beside FSDP2 over ``data`` ranks), their scales, and whether replicas agree.

    Errors are means over ``seeds`` models of two batches each.
    """
    dist.init_process_group("gloo")
    shape = (data, dist.get_world_size() // data)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    together, apart, scales, same = [], [], [], True
    for seed in range(seeds):
        one, plan = made(name, seed)
        shards, exact = copy.deepcopy(one), copy.deepcopy(one).double()
        for model in (one, shards):
            apply_fp8(model, recipe=recipe, backend="emulated")
        split(shards, plan, mesh["tensor"])
        share = slice(None)
        if data > 1:
            for part in (*blocks_of(shards), shards):
                fully_shard(part, mesh=mesh["data"])
            average_on_gloo(shards)
            share = slice(mesh["data"].get_local_rank(), mesh["data"].get_local_rank() + 1)
        exact = trained(exact)
        together += map(error, trained(one), exact)
        apart += map(error, trained(shards, share), exact)
        states = [FP8State.of(model).state_dict()["modules"] for model in (one, shards)]
        scales = [{layer: kept["scale"] for layer, kept in state.items()} for state in states]
        same = same and replicas_agree(shards, mesh["tensor"].get_group())
    return mean(together), mean(apart), scales, same
