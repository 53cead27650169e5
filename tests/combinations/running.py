"""One case on this rank: the model with everything switched on, beside the model with its numerics alone."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import foundry_fp8
from tests.combinations import bounds
from tests.combinations.building import Source, build_exact, numerics
from tests.combinations.keeping import MIN_NUMEL, Watched, watch
from tests.combinations.models import batch
from tests.combinations.space import Case
from tests.combinations.wrapping import (
    MAX_NORM,
    ForwardWeights,
    clip,
    gradients_of,
    parameters_of,
    unsynchronised,
    with_amaxes_of_all_ranks,
    wrap,
)

STEPS = 3
"""The first has delayed scaling's first scales, the second knows one amax; cached weights are stale in the third, if ever."""
LEARNING_RATE = 0.25
LOSS_SCALE = 2.0**8
"""Under float16, as Composer's scaler would."""


def switch_on(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a case, wrapped, and what its features say about themselves."""
    reports: dict[str, Any] = {}
    has_weights = case.init == "cpu" or (case.init == "mixed" and dist.get_rank() == 0)
    kept = {"frozen_weights": "fp8"} if case.frozen_weights else {}
    model = numerics(case, weights=has_weights, cache_weights=case.cache_weights, **kept)
    if case.wrapped == "last":
        reports |= save_less(case, model)
    model = wrap(case.wrapper, model, source=None if case.init == "cpu" else Source(case))
    if case.wrapped == "first":
        reports |= save_less(case, model.module if isinstance(model, DDP) else model)
    if case.communicates:
        reports["communication"] = foundry_fp8.apply_compressed_communication(
            model,
            gradients=case.gradients,
            parameters=case.parameters,
            warmup=0,
            min_bytes=0,
            scope="all",
            block_size=32,
        )
    elif case.wrapper in ("fsdp2", "hsdp2"):
        from foundry_fp8.distributed.traffic import average_on_gloo

        average_on_gloo(model)
    return model, reports


def checkpoints(case: Case) -> dict[str, Any]:
    """Options of a case's checkpoints."""
    attention = "*.self_attn" if case.model == "llama" else "*.attention"
    options: dict[str, dict[str, Any]] = {
        "full": {},
        "selective": {"policy": "selective"},
        "targets": {"targets": {"*.mlp": "first-1", attention: "last-1"}},
        "offload": {
            "offload": True,
            "targets": [{"target": attention}, {"target": "*.mlp", "policy": "offload"}],
        },
    }
    return options[case.checkpoint]


def save_less(case: Case, model: nn.Module) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    if case.checkpoint != "none":
        reports["checkpoint"] = foundry_fp8.apply_activation_checkpointing(model, **checkpoints(case))
    if case.compression != "none":
        reports["compression"] = foundry_fp8.apply_activation_compression(
            model, format=case.compression, min_numel=MIN_NUMEL
        )
    if case.fused_head:
        name = "model.lm_head" if case.model == "llama" else "head"
        reports["head"] = foundry_fp8.apply_fused_head(model, head=name, chunk_tokens=11)
    return reports


def backward(
    case: Case, model: nn.Module, step: int, dtype: torch.dtype | None = None, head: Any = None
) -> None:
    """The gradients of one step of this rank's microbatches. ``head``: fused, needs its targets."""
    parts = 1 if case.accumulation == "one" else 2
    scale = LOSS_SCALE if case.dtype == "float16" else 1.0

    def loss(part: int) -> Tensor:
        return loss_of(case, model, batch(step, dist.get_rank(), part), dtype, head) / parts

    if case.accumulation == "two-forwards":
        sum(loss(part) for part in range(parts)).backward()
    else:
        for part in range(parts):
            last = part == parts - 1
            with unsynchronised(model, case.accumulation == "two-unsynchronised" and not last):
                loss(part).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(scale)


def loss_of(
    case: Case, model: nn.Module, microbatch: Any, dtype: torch.dtype | None = None, head: Any = None
) -> Tensor:
    """The loss of one microbatch, scaled as a step scales it."""
    tokens, labels = microbatch
    low = torch.float32 if dtype is not None else getattr(torch, case.dtype)
    if head is not None:
        head.expect(labels)
    with torch.autocast("cpu", low, enabled=low != torch.float32):
        logits = model(tokens)
    assert isinstance(logits, Tensor) == (head is None)
    loss = F.cross_entropy((logits if dtype else logits.float()).flatten(0, 1), labels.flatten())
    return loss * (LOSS_SCALE if case.dtype == "float16" else 1.0)


def averaged(case: Case, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The ranks' mean of a plain model's gradients in float64, clipped where asked for; and the mean of their norms."""
    named = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    flat = torch.cat([g.flatten() for g in named.values()])
    norms = torch.stack([g.norm() for g in named.values()])
    if case.wrapper != "none":
        for x in (flat, norms):
            dist.all_reduce(x)
            x.div_(dist.get_world_size())
    factor = min(1.0, MAX_NORM / (float(flat.norm()) + 1e-6)) if case.clip else 1.0
    parts = (flat * factor).split([g.numel() for g in named.values()])
    gradients = {name: part.view_as(g) for (name, g), part in zip(named.items(), parts, strict=True)}
    return gradients, dict(zip(named, (norms * factor).tolist(), strict=True))


def run(case: Case) -> dict[str, Any]:
    """What this rank saw of a case: errors by step and parameter, digests of what replicas must share, and activity."""
    dist.init_process_group("gloo")
    with interpreted(case):
        found = _run(case)
    dist.barrier()  # and no destroy_process_group: tests/multiprocess/ranks.py says why
    return found


@contextlib.contextmanager
def interpreted(case: Case) -> Iterator[None]:
    if not case.fp8.startswith("native"):
        yield
        return
    import pytest

    from tests.kernels.interpreter import interpret

    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        yield


def _run(case: Case) -> dict[str, Any]:
    model, reports = switch_on(case)
    watched = watch(model, reports["compression"]) if case.compression != "none" else []
    reference = numerics(case.numerics)
    if case.wrapper != "none":
        with_amaxes_of_all_ranks(reference)
    initial = parameters_of(model)
    forward = ForwardWeights(model, initial)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    found: dict[str, Any] = {"steps": []}
    for step in range(STEPS):
        if "communication" in reports:
            reports["communication"].start_batch(step)
        before = parameters_of(model)
        backward(case, model, step, head=reports.get("head"))
        weights = forward.taken()
        for target in watched:
            target.end_step()
        wanted, norms = step_of(case, reference, weights, step)
        if case.clip:
            clip(model)
        got = gradients_of(model)
        optimizer.step()
        after = parameters_of(model)
        moved = {name: (before[name].double() - after[name]) / LEARNING_RATE for name in before}
        assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
        optimizer.zero_grad()
        if case.evaluate:
            evaluate(model), evaluate(reference)
        found["steps"].append(
            {
                "errors": {
                    n: (float((got[n] - w).norm()), float(w.norm()), norms[n]) for n, w in wanted.items()
                },
                "weights": [
                    n
                    for n, x in before.items()
                    if not ((weights[n] - x).abs() <= bounds.gathered(case, x)).all()
                ],
                # torch's maximum, which keeps NaN; Python's does not.
                "update": torch.stack(
                    [
                        (moved[n] - got.get(n, torch.zeros(()))).abs().max()
                        / torch.stack([before[n].abs().max(), after[n].abs().max()]).max().clamp(min=1e-30)
                        for n in moved
                    ]
                )
                .max()
                .item(),
                "digest": digest(weights) + digest(after),
            }
        )
    found["numerics"] = numerics_error(case, reference, build_exact(case), initial)
    found["active"] = activity(case, model, reports, watched)
    found["kept"] = [text for target in watched for text in target.wrong]
    return found


def step_of(
    case: Case, plain: nn.Module, parameters: dict[str, Tensor], step: int, dtype: torch.dtype | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A plain model's gradients of one step at the given parameters."""
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(parameters[name])
    plain.zero_grad()
    backward(case, plain, step, dtype)
    return averaged(case, plain)


def numerics_error(
    case: Case, reference: nn.Module, exact: nn.Module, initial: dict[str, Tensor]
) -> dict[str, Any]:
    """How far the number formats alone are from float64, at the parameters that the run began with, whose amaxes are known by now.

    Not where three steps led: a step may double what delayed scaling then cuts off (of tied weights, a sixth of attention's output),
    and logits of 70 make another result of any format's noise. Nothing is clipped, which would make norms equal.
    """
    case = dataclasses.replace(case, clip=False)
    wanted, _ = step_of(case, reference, initial, STEPS)
    true, norms = step_of(case, exact, initial, STEPS, torch.float64)
    g, w = (torch.cat([x[n].flatten() for n in true]) for x in (wanted, true))
    return {
        "errors": {n: (float((wanted[n] - t).norm()), float(t.norm()), norms[n]) for n, t in true.items()},
        "direction": float((g / g.norm() - w / w.norm()).norm()),
        "ratio": float(g.norm() / w.norm()),
    }


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(batch(99, dist.get_rank(), 0)[0])
    model.train()


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def activity(
    case: Case, model: nn.Module, reports: dict[str, Any], watched: list[Watched]
) -> dict[str, bool]:
    """Whether each feature that is on did something."""
    from foundry_fp8.layers.attention import FP8DotProductAttention
    from foundry_fp8.layers.linear import FP8Linear

    active, backend = {}, case.fp8.rpartition("-")[0]
    if case.fp8 != "none":
        linears = [m for m in model.modules() if isinstance(m, FP8Linear)]
        active["fp8"] = bool(linears) and all(m.ledger.flops["fprop", "fp8"] > 0 for m in linears)
    if case.attention:
        attentions = [m for m in model.modules() if isinstance(m, FP8DotProductAttention)]
        active["attention"] = bool(attentions) and all(
            m.ledger.flops["fprop", "fp8"] > 0 and m.backend.name == (backend or "emulated")
            for m in attentions
        )
    if case.checkpoint != "none":
        active["checkpoint"] = bool(reports["checkpoint"].selected)
    if case.compression != "none":
        packs = case.compression != "exact"
        active["compression"] = bool(watched) == packs
    if case.communicates:
        traffic = reports["communication"].traffic
        active["communication"] = 0 < traffic.wire_bytes < traffic.logical
    if case.lora:
        active["lora"] = any("lora_A" in name for name, p in model.named_parameters())
    return active
