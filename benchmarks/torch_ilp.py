"""torch's own planner of checkpoints, the integer programme of ``torch.distributed._tools``, to compare with.

It needs ``pip install 'foundry-fp8[benchmarks]'`` (pulp, pwlf). It decides for each module what share of its activations to drop, and in each which operators to run again.
Its seconds come from a roofline that asserts a CUDA device; here it is given one of this machine's rates (:class:`Rates`), which is all that is
changed, but for modules without gradients (rotary embeddings), which it does not know and which are left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import io
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
from torch.distributed._tools.mem_tracker import MemTracker, _ModState
from torch.distributed._tools.runtime_estimator import _IGNORE_OPS, RuntimeEstimator
from torch.distributed._tools.sac_estimator import SACEstimator, SACStats
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

__all__ = ["TorchPlan", "TorchPlanner", "missing"]


@dataclasses.dataclass(frozen=True)
class Rates:
    """What an operator takes: ``max(flops / flops_per_second, bytes / bytes_per_second)``."""

    flops_per_second: float
    bytes_per_second: float

    @classmethod
    def of_this_machine(cls) -> Rates:
        """A product of 1024 x 1024 matrices, and a copy of 64 MiB, the fastest of ten."""
        a, b = torch.randn(2, 1024, 1024)
        x, y = torch.randn(2, 2**24)
        return cls(2 * 1024**3 / _fastest(lambda: a @ b), 2 * x.nbytes / _fastest(lambda: y.copy_(x)))

    def estimate(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        """The operator's result, and milliseconds."""
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in _IGNORE_OPS:
            return out, 0.0
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        moved = sum(x.untyped_storage().nbytes() for x in tensors)
        flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
        return out, 1e3 * max(flops / self.flops_per_second, moved / self.bytes_per_second)


@dataclasses.dataclass(frozen=True)
class TorchPlan:
    """What the programme chose.

    Attributes:
        predicted_peak: Its own upper bound, in bytes.
        saved: Module name: ``(operator, whether its output is kept)`` in the order in which they run.
    """

    predicted_peak: int
    saved: dict[str, list[tuple[str, int]]]

    def apply(self, model: nn.Module) -> None:
        """Checkpoint ``model`` so."""
        for name, saved in self.saved.items():
            module = model.get_submodule(name)
            module.forward = functools.partial(  # type: ignore[method-assign]
                checkpoint,
                module.forward,
                use_reentrant=False,
                context_fn=functools.partial(_contexts, saved),
            )


class TorchPlanner:
    """The figures of one step of a model, from which a plan for any budget follows.

    Args:
        build: Makes the model.
        loss_of: ``loss_of(model, tokens)()`` is the loss.
        shape: Of the tokens.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        loss_of: Callable[[nn.Module, Tensor], Callable[[], Tensor]],
        shape: tuple[int, int],
    ) -> None:
        rates = Rates.of_this_machine()
        memory, seconds, operators = MemTracker(), RuntimeEstimator(), SACEstimator()
        model = build().to("meta")
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            mock.patch.object(RuntimeEstimator, "_roofline_estimate", rates.estimate),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            model.to_empty(device="cpu")
            run = loss_of(model, torch.zeros(shape, dtype=torch.long))
            run().backward()  # tables that later steps share
            model.zero_grad()
            memory.track_external(model)
            for watching in (memory, seconds("operator-level-cost-model")):
                with watching:
                    run().backward()
                model.zero_grad()
            with operators("operator-level-cost-model"):
                run()
        _leave_out_what_has_no_gradient(memory, seconds)
        info = aggregate_stats(model, memory, seconds, operators, torch.device("cpu"))
        self._graph = parse_module_info(info)
        self._operators: dict[str, SACStats] = operators.sac_mod_stats
        self._root = f"{type(model).__name__}."

    def plan(self, budget: int) -> TorchPlan | None:
        """The plan within ``budget`` bytes of parameters, gradients and activations; ``None`` where it finds none."""
        from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

        dropped, _, peak = sac_milp(self._graph, budget / 2**30)
        if peak < 0:
            return None
        saved = {}
        for name, share in dropped.items():
            known = self._operators[name]
            kept = get_optimal_checkpointing_policy_per_module(known, 1 - share)
            saved[name.removeprefix(self._root)] = list(zip(known.func_names, kept, strict=True))
        return TorchPlan(peak, saved)


def missing() -> list[str]:
    """What is not installed of what the programme needs."""
    return [name for name in ("pulp", "pwlf") if importlib.util.find_spec(name) is None]


def _leave_out_what_has_no_gradient(memory: MemTracker, seconds: RuntimeEstimator) -> None:
    known = {
        stats.mod_fqn
        for stats in memory.memory_tracking.values()
        if {_ModState.PRE_BW, _ModState.PEAK_BW} <= stats.snapshots.keys()
    }
    for module, stats in list(memory.memory_tracking.items()):
        if stats.mod_fqn not in known:
            del memory.memory_tracking[module]
    for name in ("mod_fw_pre_order", "mod_bw_pre_order", "mod_fw_post_order", "mod_bw_post_order"):
        order = getattr(seconds, name)
        order[:] = [one for one in order if one in known]


def _contexts(saved: list[tuple[str, int]]) -> tuple[Any, Any]:
    """For one forward and its recompute. Copies, of which the programme does not know, are computed again."""
    runs = {recompute: iter(saved) for recompute in (False, True)}
    due = {recompute: next(run) for recompute, run in runs.items()}

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, kept = due[context.is_recompute]
        if name != func._overloadpacket.__name__:
            return CheckpointPolicy.MUST_RECOMPUTE
        due[context.is_recompute] = next(runs[context.is_recompute], ("", 0))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _fastest(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(10):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
