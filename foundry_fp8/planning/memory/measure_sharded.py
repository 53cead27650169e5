"""Measuring a block of a sharded model, inside whole steps: FSDP gathers and reduces its units as a step runs them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.activations.compression.saved import StorageRef
from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.planning.memory.live_bytes import meter_for
from foundry_fp8.planning.memory.measure import clock, gradients, map_input, unchanged
from foundry_fp8.planning.memory.solver import Cost

__all__ = ["ShardedBlockRun"]


class ShardedBlockRun:
    """The figures of :class:`~foundry_fp8.planning.memory.measure.BlockRun`, taken by hooks while the whole model runs.

    A unit's gathered parameters and its unreduced gradients count for the block, as far as the meter sees them: on a GPU it does;
    :class:`~foundry_fp8.planning.memory.live_bytes.LiveBytes` does not see FSDP resize storages. ``block`` is the outermost module around
    it, as configured now: FSDP unit or checkpoint.
    """

    def __init__(
        self,
        block: nn.Module,
        loss_fn: Callable[[], Tensor],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self.block, self.loss_fn, self.parameters, self.device = block, loss_fn, parameters, device
        self._input: StorageRef | None = None

    def bytes(self) -> Cost:
        """What it costs, but for its seconds; parameters that FSDP gathered are cast already, and nothing is cached."""
        live, peak, sizes, input_kept = [], [], [], []
        with unchanged(self.device), meter_for(self.device) as meter:

            def record(x: Tensor | None) -> None:
                live.append(meter.live)
                peak.append(meter.peak)
                sizes.append(0 if x is None else x.untyped_storage().nbytes())
                input_kept.append(self._input is not None and self._input() is not None)
                meter.reset_peak()

            self._step(record)
        # When the forward's hook runs, its caller still holds the input, whoever keeps it later.
        kept = live[1] - live[0] - sizes[1] - (0 if input_kept[2] else sizes[0])
        # The gradient of the output counts for the output, which the model lets go of and a block that runs alone holds.
        return Cost(kept, peak[1] - live[0], peak[3] - live[2] + kept + sizes[1], 0.0)

    def seconds(self) -> float:
        """Its forward and its backward, communication that nothing hides included."""
        times: list[float] = []
        with unchanged(self.device):
            self._step(lambda _: times.append(clock(self.device)))
        return times[1] - times[0] + times[3] - times[2]

    def _step(self, record: Callable[[Tensor | None], None]) -> None:
        """A step that calls ``record`` as the block's forward begins and ends, with its input and output, and as its
        backward does.
        """
        with self._watched(record):
            gradients(self.loss_fn(), self.parameters, sharded=True)

    @contextlib.contextmanager
    def _watched(self, record: Callable[[Tensor | None], None]) -> Iterator[None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return map_input(own_input, args, kwargs)

        def own_input(x: Tensor) -> Tensor:
            # A copy that is the block's own, so that an input that it keeps counts as kept.
            record(x)
            x = x if x.requires_grad else x.detach().requires_grad_()
            x.register_hook(lambda _: record(None))
            own = x.clone()
            self._input = weakref.ref(own.untyped_storage())
            return own

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            out = next(x for x in tree_iter(output) if isinstance(x, Tensor) and x.requires_grad)
            record(out)
            out.register_hook(lambda _: record(None))

        before = self.block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        with before, self.block.register_forward_hook(leave):
            yield
