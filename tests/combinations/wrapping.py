"""Wrappers of a model, and what is read through them: whole parameters, before and in a forward, whole gradients, their norm."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from foundry_fp8.compat.amax_group import AmaxGroup
from foundry_fp8.layers.delayed_scaling import states_of
from foundry_fp8.layers.frozen_weight import in_high_precision
from tests.combinations.models import blocks_of

MAX_NORM = 0.1


@functools.cache
def mesh(*shape: int) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrap(kind: str, model: nn.Module, source: Any = None) -> nn.Module:
    """``source``: of the weights of a model that has none (building.py's)."""
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
            clean(name): in_high_precision(p.full_tensor() if isinstance(p, DTensor) else p, p.dtype)
            .detach()
            .clone()
            for name, p in model.named_parameters()
            if "_flat_param" not in name
        }


class ForwardWeights:
    """The weights that a model's training forwards compute with: what its units gathered, whole, by name.

    Every gather between two calls of :meth:`taken`, those of recomputes too, has to bring the same.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._found: dict[str, Tensor] = {}
        inside = {clean(f"{name}.").strip("."): m for name, m in model.named_modules()}  # of its wrappers
        units = [""] + [
            clean(f"{name}.").strip(".")
            for name, module in model.named_modules()
            if isinstance(module, FSDP1 | FSDPModule)
        ]
        held: dict[str, list[str]] = {unit: [] for unit in units}
        for name in names:
            held[max((u for u in held if not u or name.startswith(f"{u}.")), key=len)].append(name)
        for unit, own in held.items():
            hook = functools.partial(self._see, {name: inside[name.rpartition(".")[0]] for name in own})
            inside[unit].register_forward_pre_hook(hook)

    def _see(self, owners: dict[str, nn.Module], unit: nn.Module, args: Any) -> None:
        for name, owner in owners.items() if unit.training else ():
            weight = getattr(owner, name.rpartition(".")[2]).detach()
            weight = in_high_precision(weight, weight.dtype).clone()
            found = self._found.setdefault(name, weight)
            assert torch.equal(found, weight), f"{name} is not what an earlier forward of the step was given"

    def taken(self) -> dict[str, Tensor]:
        """Those of the forwards since the last call."""
        found, self._found = self._found, {}
        return found


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name, float64."""
    if any("_flat_param" in name for name, _ in model.named_parameters()):
        return _flat_gradients_of(model)
    whole = has_fsdp1(model) and FSDP1.summon_full_params(model, with_grads=True, writeback=False)
    with whole or contextlib.nullcontext():
        return {
            clean(name): (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).double()
            for name, p in model.named_parameters()
            if p.grad is not None and p.requires_grad  # summoned, FSDP1's frozen ones have one too
        }


@torch.no_grad()
def _flat_gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """FSDP1 takes flat weights apart for anyone, flat gradients for nobody: so gradients stand in the weights' place meanwhile.

    Not read from what a step moved: that holds the rounding of the weights, which are a hundred times as large as a clipped step.
    """
    flat = list(model.parameters())
    weights = [parameter.clone() for parameter in flat]
    torch._foreach_copy_(flat, [parameter.grad for parameter in flat])
    found = {name: gradient.double() for name, gradient in parameters_of(model).items()}
    torch._foreach_copy_(flat, weights)
    return found


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


def clip(model: nn.Module) -> None:
    if isinstance(model, FSDP1):
        model.clip_grad_norm_(MAX_NORM)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def with_amaxes_of_all_ranks(model):
    """``model``, in no wrapper, whose gradients a test averages by hand, as ``amax_group: world`` makes it."""
    for state in states_of(model):
        state.group = AmaxGroup("world")
    return model
