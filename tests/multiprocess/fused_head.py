"""A rank of test_fused_head.py: the gradients of a model without logits under each wrapper, beside those of the plain one."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy

import foundry_fp8
from foundry_fp8.distributed.traffic import average_on_gloo
from tests import model_zoo as zoo
from tests.combinations.wrapping import gradients_of


def _labels(rank, part=0):
    generator = torch.Generator().manual_seed(10 * part + rank)
    labels = torch.randint(1, zoo.VOCABULARY, (2, 12), generator=generator)
    labels[0, 3:6] = -100
    return labels


def _step(model, rank, parts=2):
    for part in range(parts):
        labels = _labels(rank, part)
        (model(input_ids=labels.clamp(min=0), labels=labels).loss / parts).backward()


def _plain(model, low):
    """The ranks' mean, of parameters in bfloat16 where FSDP computes with such."""
    model = copy.deepcopy(model)
    if low:
        model.bfloat16()
    total = {}
    for part in range(2):
        labels = _labels(dist.get_rank(), part)
        (model(input_ids=labels.clamp(min=0), labels=labels).loss / 2).backward()
        for name, p in model.named_parameters():
            total[name] = total.get(name, 0) + p.grad.double()
        model.zero_grad()
    for gradient in total.values():
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return total


def _wrapped(kind, model, own_unit, low):
    blocks = list(model.model.layers)
    units = [*blocks, model.lm_head] if own_unit else blocks
    if kind == "fsdp1":
        precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16) if low else None
        policy = CustomPolicy(lambda module: any(module is unit for unit in units))
        return FSDP1(
            model,
            device_id=torch.device("cpu"),
            auto_wrap_policy=policy,
            use_orig_params=True,
            mixed_precision=precision,
        )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    for unit in (*units, model):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    average_on_gloo(model)
    return model


def run(kind):
    """``{case: (error with logits, without)}``, of all gradients together, and what LoRA on a head of its own says."""
    dist.init_process_group("gloo")
    found = {}
    for own_unit in (False, True):
        for low in (False, True):
            torch.manual_seed(1)
            plain = zoo.hugging_face("Llama", tie_word_embeddings=not own_unit).train()
            wanted, errors = _plain(plain, low), []
            for fuse in (False, True):
                model = _wrapped(kind, copy.deepcopy(plain), own_unit, low)
                if fuse:
                    foundry_fp8.apply_fused_head(model, chunk_tokens=7)
                _step(model, dist.get_rank())
                got = gradients_of(model)
                assert got.keys() == wanted.keys()
                norm = sum(float(w.norm()) ** 2 for w in wanted.values()) ** 0.5
                errors.append(sum(float((got[n] - w).norm()) ** 2 for n, w in wanted.items()) ** 0.5 / norm)
            found[f"own unit {own_unit}, bf16 {low}"] = errors
    from peft import LoraConfig, inject_adapter_in_model

    model = zoo.hugging_face("Llama")
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["lm_head"]), model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.lm_head.lora_A.children(), model):
        fully_shard(module, mesh=mesh)
    try:
        foundry_fp8.apply_fused_head(model)
    except foundry_fp8.ConfigError as error:
        found["lora"] = str(error)
    dist.barrier()  # and no destroy_process_group: ranks.py says why
    return found
