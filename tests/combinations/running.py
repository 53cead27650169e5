"""One case on this rank: the model with everything switched on, beside the model with its numerics alone."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import foundry_fp8
from tests.combinations.models import batch, blocks_of, build
from tests.combinations.space import Case

STEPS = 3
"""The first has delayed scaling's first scales, the second knows one amax; cached weights are stale in the third, if ever."""
LEARNING_RATE = 0.25
MAX_NORM = 0.1
LOSS_SCALE = 2.0**8
"""Under float16, as Composer's scaler would."""
NATIVE = {
    "llama": ["*.1.self_attn.q_proj", "*.1.self_attn.k_proj"],
    "plain": ["*.0.attention.qkv", "*.1.mlp.down"],
    "odd": ["*.1.mlp.up", "*.1.mlp.gate"],
}
"""What is converted to native: Triton's interpreter takes a tenth of a second a layer and step."""
LORA = {"llama": ["q_proj", "v_proj", "up_proj"], "plain": ["qkv", "up"], "odd": ["qkv", "gate"]}


def numerics(case: Case, *, weights: bool = True, **fp8: Any) -> nn.Module:
    """The model of a case in its number formats; nothing else is switched on. Without weights it is on the meta device."""
    model = build(case.model, tied=case.tied)
    if case.lora:
        add_lora(model, LORA[case.model])
    if case.frozen:
        freeze(model)
    if not weights:
        take_weights(model)
        fp8["device"] = "cpu"
    if case.fp8 != "none":
        backend, _, recipe = case.fp8.rpartition("-")
        if backend:
            fp8["include"] = [
                p + s for p in NATIVE[case.model] for s in ([".base_layer"] if in_lora(case, p) else [""])
            ]
        foundry_fp8.apply_fp8(
            model, recipe=recipe, backend=backend or "emulated", attention=case.attention, **fp8
        )
    return model


def in_lora(case: Case, pattern: str) -> bool:
    return case.lora and pattern.rpartition(".")[2] in LORA[case.model]


def add_lora(model: nn.Module, targets: list[str]) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(3)  # both halves random: with B = 0, as usual, A has no gradient
    inject_adapter_in_model(LoraConfig(r=4, target_modules=targets, init_lora_weights=False), model)


def freeze(model: nn.Module) -> None:
    """The embedding and the first block."""
    frozen = [m for m in model.modules() if isinstance(m, nn.Embedding)] + blocks_of(model)[:1]
    for module in frozen:
        module.requires_grad_(False)


def switch_on(case: Case) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a case, wrapped, and what its features say about themselves."""
    reports: dict[str, Any] = {}
    has_weights = case.init == "cpu" or (case.init == "mixed" and dist.get_rank() == 0)
    model = numerics(case, weights=has_weights, cache_weights=case.cache_weights)
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
        from foundry_fp8.distributed.fsdp2_units import average_on_gloo

        average_on_gloo(model)
    return model, reports


def take_weights(model: nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                module._parameters[name] = empty
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")


class Source:
    """Where a model without weights gets them: from a copy on this rank (``meta``), or from rank 0 (``mixed``)."""

    def __init__(self, case: Case) -> None:
        self.mixed = case.init == "mixed"
        self.model = numerics(Case(model=case.model, lora=case.lora, frozen=case.frozen))

    def tensor(self, name: str) -> Tensor:
        """The parameter or buffer ``name``, whole."""
        found = self.model.get_parameter(name) if name in self.parameters else self.model.get_buffer(name)
        found = found.detach().clone()
        if self.mixed:
            if dist.get_rank() != 0:
                found.zero_()
            dist.broadcast(found, 0)
        return found

    @functools.cached_property
    def parameters(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}

    def fsdp1(self, model: nn.Module) -> dict[str, Any]:
        """What torch's FSDP1 is told. It sends rank 0's weights to the others itself, but not on a CPU, unless not asked."""
        names = {module: clean(name) for name, module in model.named_modules()}

        def initialise(module: nn.Module) -> None:
            module.to_empty(device=torch.device("cpu"), recurse=False)
            with torch.no_grad():
                for name, tensor in (
                    *module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False),
                ):
                    if not self.mixed:
                        tensor.copy_(self.tensor(f"{names[module]}.{name}".lstrip(".")))

        if self.mixed:
            from torch.distributed.fsdp import _init_utils

            _init_utils._check_module_states_for_sync_module_states = lambda module: None
        return {"param_init_fn": initialise, "sync_module_states": self.mixed}

    def fill(self, model: nn.Module) -> None:
        """Every shard of an FSDP2 model."""
        if next(model.parameters()).device.type == "meta":
            model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                whole = self.tensor(clean(name))
                assert isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
            for name, buffer in model.named_buffers():
                buffer.copy_(self.tensor(clean(name)))


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"policy": "selective"},
    "targets": {"targets": {"*.mlp": "first-1", "*attention|*self_attn": "last-1"}},
    "offload": {"offload": True},
}


def save_less(case: Case, model: nn.Module) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    if case.checkpoint != "none":
        options = dict(CHECKPOINTS[case.checkpoint])
        if case.checkpoint == "targets":
            attention = "*.self_attn" if case.model == "llama" else "*.attention"
            options["targets"] = {"*.mlp": "first-1", attention: "last-1"}
        reports["checkpoint"] = foundry_fp8.apply_activation_checkpointing(model, **options)
    if case.compression != "none":
        reports["compression"] = foundry_fp8.apply_activation_compression(
            model, format=case.compression, min_numel=256
        )
    return reports


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrap(kind: str, model: nn.Module, source: Source | None = None) -> nn.Module:
    if kind == "none":
        return model
    if kind == "ddp":
        return DDP(model, bucket_cap_mb=0.02)
    world, blocks = dist.get_world_size(), blocks_of(model)
    two_by_two = mesh(2, world // 2) if kind.startswith("hsdp") else None
    if kind in ("fsdp1", "fsdp1-flat", "hsdp1"):
        return FSDP1(
            model,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD if two_by_two else ShardingStrategy.FULL_SHARD,
            device_id=torch.device("cpu"),
            auto_wrap_policy=functools.partial(
                lambda_auto_wrap_policy, lambda_fn=lambda m: any(m is b for b in blocks)
            ),
            use_orig_params=kind != "fsdp1-flat",
            device_mesh=two_by_two,
            **({} if source is None else source.fsdp1(model)),
        )
    if two_by_two is not None:
        from foundry_fp8.compat import cpu_stream_events

        cpu_stream_events.apply()
    for module in (*blocks, model):
        fully_shard(module, mesh=two_by_two or mesh(world))
    if source is not None:
        source.fill(model)
    return model


def clean(name: str) -> str:
    for part in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(part, "")
    return name.removeprefix("module.")


def has_fsdp1(model: nn.Module) -> bool:
    """Itself, or in it: Composer wraps what its model holds."""
    return any(isinstance(module, FSDP1) for module in model.modules())


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name, copied."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays gathered after an evaluation
    whole = FSDP1.summon_full_params(model, writeback=False) if has_fsdp1(model) else None
    with whole or contextlib.nullcontext(), torch.no_grad():
        return {
            clean(name): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
            if "_flat_param" not in name
        }


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name, float64."""
    whole = has_fsdp1(model) and FSDP1.summon_full_params(model, with_grads=True, writeback=False)
    with whole or contextlib.nullcontext():
        return {
            clean(name): (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).double()
            for name, p in model.named_parameters()
            if p.grad is not None and p.requires_grad  # summoned, FSDP1's frozen ones have one too
        }


@contextlib.contextmanager
def unsynchronised(model: nn.Module, really: bool) -> Iterator[None]:
    """A backward without a reduction."""
    if not really or not isinstance(model, DDP | FSDP1 | FSDPModule):
        yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


def backward(case: Case, model: nn.Module, step: int, dtype: torch.dtype | None = None) -> None:
    """The gradients of one step of this rank's microbatches."""
    parts = 1 if case.accumulation == "one" else 2
    scale = LOSS_SCALE if case.dtype == "float16" else 1.0
    low = torch.float32 if dtype is not None else getattr(torch, case.dtype)

    def loss(part: int) -> Tensor:
        tokens, labels = batch(step, dist.get_rank(), part)
        with torch.autocast("cpu", low, enabled=low != torch.float32):
            logits = model(tokens)
        return F.cross_entropy((logits if dtype else logits.float()).flatten(0, 1), labels.flatten()) * (
            scale / parts
        )

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


def clip(model: nn.Module) -> None:
    if isinstance(model, FSDP1):
        model.clip_grad_norm_(MAX_NORM)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


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
    dist.barrier()
    dist.destroy_process_group()
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
    reference = numerics(case.numerics)
    exact = build_exact(case)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    found: dict[str, Any] = {"steps": []}
    for step in range(STEPS):
        if "communication" in reports:
            reports["communication"].start_batch(step)
        before = parameters_of(model)
        wanted, norms = step_of(case, reference, before, step)
        backward(case, model, step)
        if case.clip:
            clip(model)
        got = None if case.wrapper == "fsdp1-flat" else gradients_of(model)
        optimizer.step()
        after = parameters_of(model)
        moved = {name: (before[name].double() - after[name]) / LEARNING_RATE for name in before}
        if got is None:
            got = {name: moved[name] for name in wanted}
        assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
        optimizer.zero_grad()
        if case.evaluate:
            evaluate(model), evaluate(reference)
        found["steps"].append(
            {
                "errors": {
                    n: (float((got[n] - w).norm()), float(w.norm()), norms[n]) for n, w in wanted.items()
                },
                "update": max(
                    float((moved[n] - got.get(n, torch.zeros(()))).abs().max())
                    / max(1e-3, float(before[n].abs().max()))
                    for n in moved
                ),
                "digest": digest(after),
            }
        )
        if step == STEPS - 1:
            found["numerics"] = numerics_error(case, exact, wanted, before, step)
    found["active"] = activity(case, model, reports)
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


def build_exact(case: Case) -> nn.Module:
    high = Case(**{**{f: getattr(case, f) for f in ("model", "lora", "frozen", "tied")}})
    return numerics(high).double()


def numerics_error(case, exact, wanted, parameters, step):
    """How far the number formats alone are from float64."""
    true, norms = step_of(case, exact, parameters, step, torch.float64)
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


def activity(case: Case, model: nn.Module, reports: dict[str, Any]) -> dict[str, bool]:
    """Whether each feature that is on did something."""
    from foundry_fp8.layers.linear import FP8Linear

    active = {}
    if case.fp8 != "none":
        linears = [m for m in model.modules() if isinstance(m, FP8Linear)]
        active["fp8"] = bool(linears) and all(m.ledger.flops["fprop", "fp8"] > 0 for m in linears)
    if case.checkpoint != "none":
        active["checkpoint"] = bool(reports["checkpoint"].selected)
    if case.compression != "none":
        active["compression"] = compresses(case, reports["compression"])
    if case.communicates:
        traffic = reports["communication"].traffic
        active["communication"] = 0 < traffic.wire_bytes < traffic.logical
    if case.lora:
        active["lora"] = any("lora_A" in name for name, p in model.named_parameters())
    return active


def compresses(case: Case, report: Any) -> bool:
    """Whether compression did what its report says; a report in which everything is left says so by itself."""
    doing = {how for _, how, form in report.rows if how not in ("left", "fp8") and form != "exact"}
    no_gradient = case.frozen and case.lora  # what needs none is kept by whoever made it
    return (
        not doing or no_gradient or report.saved.packed > 0 or any(how.startswith("fused") for how in doing)
    )
