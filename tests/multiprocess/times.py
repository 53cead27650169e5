"""For workers: a run whose rules have times, beside one put together by hand, under one wrapper."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from foundry_fp8 import FP8Run, FP8State
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling
from tests.multiprocess.elastic import ROWS, loss_of, wrapped
from tests.multiprocess.tensor_parallel import TOKENS, WIDTH, Stack, whole

STEPS = 6
RULES = [
    {"until": 2, "recipe": "high_precision"},
    {"from": 4, "recipe": "current", "gemms": {"wgrad": "high_precision"}},
    {"recipe": "delayed"},
]


def by_hand(layers, step):
    """What ``RULES`` say, of layers that were converted to delayed scaling."""
    for layer in layers:
        layer.wgrad = "high_precision" if step >= 4 else "fp8"
        layer.set_recipe(None if step < 2 else CurrentScaling() if step >= 4 else DelayedScaling())


def trained(how, recipe, hand, parts):
    model = Stack(recompute="recompute" in parts)
    fp8 = FP8Run(recipe=recipe, backend="emulated", steps=STEPS, announce=False)
    fp8.convert(model, precision="fp32")
    layers = list(FP8State.of(model).modules.values())
    if "lora" in parts:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules=["q", "down"], r=4)).base_model.model
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p, std=0.02)
    if how == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
        place, places = dist.get_rank(), dist.get_world_size()
    else:
        model, place, places = wrapped(model, how)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    fp8.start(model, loss_of)
    if "compile" in parts:
        for block in getattr(model, "module", model).blocks:
            block.compile(backend="eager")
    found = []
    for step in range(STEPS):
        random = torch.Generator().manual_seed(step)
        rows = slice(place * ROWS // places, (place + 1) * ROWS // places)
        batch = [torch.randn(ROWS, TOKENS // 2, WIDTH, generator=random)[rows] for _ in range(2)]
        if hand:
            by_hand(layers, step)
        fp8.begin_step(batch)
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        found.append([whole(p.grad).clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        fp8.end_step()
    return found, [sum(layer.ledger.flops.values()) for layer in layers]


def alike(how, *parts):
    """By step, whether all gradients of both runs are equal, and equal to a constant run's; whether both ledgers are."""
    dist.init_process_group("gloo")
    scheduled, ours = trained(how, RULES, False, parts)
    hand, theirs = trained(how, "delayed", True, parts)
    constant, _ = trained(how, "delayed", False, parts)

    def equal(one, other):
        return [len(a) == len(b) > 0 and all(map(torch.equal, a, b)) for a, b in zip(one, other, strict=True)]

    return equal(scheduled, hand), equal(scheduled, constant), ours == theirs
