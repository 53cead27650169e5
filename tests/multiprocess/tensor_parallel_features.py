"""For workers: what runs beside tensor parallelism, on a model in shards and on the same model on one rank."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import LlamaForCausalLM

from foundry_fp8 import (
    ConfigError,
    apply_activation_checkpointing,
    apply_activation_compression,
    apply_fp8,
    export_fp8,
    served_weights,
)
from foundry_fp8.observe.flops.mfu import MFUMeter
from foundry_fp8.observe.health_meter import HealthMeter
from foundry_fp8.observe.kurtosis_meter import KurtosisMeter
from foundry_fp8.surgery.attention import FP8AttentionState
from tests.multiprocess.tensor_parallel import error, whole
from tests.multiprocess.tensor_parallel_models import (
    TOKENS,
    VOCABULARY,
    errors_of,
    made,
    replicas_agree,
    split,
    trained,
)


def pair(name, **options):
    """A converted model on one rank, and the same one in shards on two."""
    shards, plan = made(name, 0)
    apply_fp8(shards, **{"recipe": "current", "backend": "emulated", **options})
    one = copy.deepcopy(shards)  # not the other way: a copy's scales are of the ranks of its original's
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    split(shards, plan, mesh())
    return one, shards


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))["tensor"]


def same_bits(one, shards):
    first, second = trained(one)[-1], trained(shards)[-1]
    return all(map(torch.equal, first.values(), second.values()))


def attention(recipe):
    one, shards = pair("llama", recipe=recipe, attention=True)
    exact = trained(made("llama", 0)[0].double())
    errors = [errors_of(trained(model), exact) for model in (one, shards)]
    states = [FP8AttentionState.of(model).state_dict()["modules"] for model in (one, shards)]
    return *errors, *({name: kept["scale"] for name, kept in state.items()} for state in states)


def observed():
    """``(FLOPs by precision, attention's, kurtosis, health)`` of a step on one rank and in shards."""
    found = []
    for model in pair("llama"):
        flops, kurtosis, health = (
            MFUMeter(model),
            KurtosisMeter(model, interval=1),
            HealthMeter(model, interval=1),
        )
        tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(0))
        for step in range(3):
            for meter, begins in ((flops, ()), (kurtosis, (step,)), (health, (step,))):
                meter.begin(*begins)
            logits = model(input_ids=tokens).logits
            F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            flops.step(tokens, 1.0)
            reports = kurtosis.end()[1], health.end(step + 1).details
        found.append((dict(flops.total.model), flops.total.attention, *reports))
    return found


def checkpointed(name, targets):
    shards = pair(name)[1]
    recomputed = copy.deepcopy(shards)
    report = apply_activation_checkpointing(recomputed, targets=targets)
    return len(report.selected), same_bits(shards, recomputed)


def compressed(name):
    """Errors of gradients with compressed activations, on one rank and in shards, and whether replicas agree."""
    one, shards = pair(name)
    exact = trained(made(name, 0)[0].double())
    for model in (one, shards):
        apply_activation_compression(model)
    errors = [errors_of(trained(model), exact) for model in (one, shards)]
    return *errors, replicas_agree(shards, mesh().get_group())


def exported(folder):
    """What the refusal says, whether shards are served as the whole, and the folder that the way out writes on rank 0."""
    one, shards = pair("llama")
    trained(shards)
    try:
        export_fp8(shards, folder / "shards")
        said = ""
    except RuntimeError as error:
        said = str(error)
    served = [list(served_weights(model)) for model in (one, shards)]
    same = all(
        a == c and torch.equal(b.float(), d.float()) for (a, b, _), (c, d, _) in zip(*served, strict=True)
    )
    state = get_model_state_dict(shards, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        copied = made("llama", 1)[0]
        apply_fp8(copied, recipe="current", backend="emulated")
        copied.load_state_dict(state)
        export_fp8(copied, folder / "gathered")
        export_fp8(one, folder / "whole")
    return said, same


def with_lora(converted_first):
    """How far gradients of shards are from the whole model's, in high precision; how far either's are in FP8 from float64's."""
    dist.init_process_group("gloo")
    exact = gradients_with_lora(lambda model: model.double())
    plain, plain_shards = gradients_with_lora(), gradients_with_lora(sharded=True)

    def convert(model):
        return apply_fp8(model, recipe="delayed", backend="emulated")

    options = {"before" if converted_first else "after": convert}
    one, shards = (gradients_with_lora(sharded=sharded, **options) for sharded in (False, True))
    return max(error(plain_shards, plain).values()), error(one, exact), error(shards, exact)


def gradients_with_lora(after=None, *, before=None, sharded=False):
    """Of the second pass, by name; the plan names what peft makes of a linear."""
    import peft

    model, plan = made("llama", 0)
    names = ["q_proj", "o_proj", "up_proj", "down_proj"]
    if before is not None:
        before(model)
    model = peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules=names, init_lora_weights=False))
    if after is not None:
        after(model)
    if sharded:
        adapted = {name: style for name, style in plan.items() if name.endswith(tuple(names))}
        for name, style in adapted.items():
            side = "lora_B" if isinstance(style, ColwiseParallel) else "lora_A"
            plan = plan | {f"{name}.base_layer": style, f"{name}.{side}.default": style}
        split(model.base_model.model, {n: s for n, s in plan.items() if n not in adapted}, mesh())
    for _ in range(2):
        model.zero_grad()
        tokens = torch.arange(TOKENS).unsqueeze(0) % VOCABULARY
        model(input_ids=tokens, labels=tokens).loss.backward()
    return {n: whole(p.grad).double() for n, p in model.named_parameters() if p.grad is not None}


def compiled(backend):
    """How far gradients of shards are from those of the same shards, compiled."""
    shards = pair("llama")[1]
    traced = copy.deepcopy(shards)
    first = trained(shards)[-1]
    optimized = torch.compile(traced, backend=backend, dynamic=False)
    second = trained(optimized)[-1]
    return max(error(dict(zip(first, second.values(), strict=True)), first).values())


def loaded_in_shards(folder):
    """What the conversion says of a model that ``from_pretrained`` has sharded."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        made("llama", 0)[0].save_pretrained(folder)
    dist.barrier()
    model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto")
    try:
        apply_fp8(model, recipe="current", backend="emulated")
    except ConfigError as error:
        return str(error)
    return ""
