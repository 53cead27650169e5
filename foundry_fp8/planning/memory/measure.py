"""Measuring a step: every option of every kind of block on its real input, and what the rest of the model holds."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.compat.pytree import tree_iter, tree_map
from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.planning.memory.live_bytes import meter_for
from foundry_fp8.planning.memory.solver import Frame

__all__ = [
    "BlockRun",
    "Call",
    "CostModel",
    "capture_calls",
    "clock",
    "gradients",
    "local_numel",
    "map_input",
    "measure_frame",
    "unchanged",
]


CACHE_BYTES = 128 * 2**20
"""At least the last-level cache of a device: 126 MB of L2 on a B200, 50 MB on an H100, 32 MB a CPU complex."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds without a machine to measure on: arithmetic plus memory traffic of every op.

    The defaults are an H100 SXM's dense bfloat16 peak and HBM3 bandwidth (NVIDIA's data sheet), at the fractions that
    large matmuls and copies reach in practice by common experience: a ranking of options, not a forecast.
    """

    flops_per_second: float = 0.6 * 989e12
    bytes_per_second: float = 0.8 * 3.35e12


@dataclasses.dataclass
class Call:
    """How the model calls a block: its arguments, and autocast's state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: bool
    autocast_dtype: torch.dtype

    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that cost the same."""
        shapes = [
            (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else None
            for x in tree_iter((self.args, self.kwargs))
        ]
        return (*shapes, self.autocast, self.autocast_dtype)


def capture_calls(
    blocks: Sequence[nn.Module],
    run: Callable[[], Any],
    device: torch.device,
    keep: Callable[[int, Call], bool],
) -> list[Call]:
    """Run the model without gradients and note how each block is called.

    Args:
        blocks: In forward order.
        run: Runs a microbatch.
        device: Where.
        keep: Whether a call's tensors are needed later; of the others only the signature's shapes are (as meta tensors).
    """
    calls: dict[int, Call] = {}

    def note(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            kind = autocast_type(device)
            call = Call(
                args,
                dict(kwargs),
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
            )
            if not keep(index, call):
                call.args, call.kwargs = tree_map(
                    lambda x: x.to("meta") if isinstance(x, Tensor) else x, (call.args, call.kwargs)
                )
            calls[index] = call

        return hook

    handles = [b.register_forward_pre_hook(note(i), with_kwargs=True) for i, b in enumerate(blocks)]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return [calls[i] for i in range(len(blocks))]


def local_numel(x: Tensor) -> int:
    """Elements that this rank holds."""
    return x.to_local().numel() if isinstance(x, DTensor) else x.numel()


def map_input(f: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A block's arguments with ``f`` of its hidden states."""
    if args:
        return (f(args[0]), *args[1:]), kwargs
    return args, {k: f(x) if k == "hidden_states" else x for k, x in kwargs.items()}


def gradients(loss: Tensor, parameters: Sequence[nn.Parameter], *, sharded: bool) -> list[Tensor | None]:
    """Backward from ``loss``. The parameters' ``.grad`` stays as it is; under FSDP it must be ``None``.

    DDP's reducer wants every gradient that is accumulated, once; FSDP reduces in hooks of accumulating alone.
    """
    if not sharded:
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))
    loss.backward()
    found = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def clock(device: torch.device) -> float:
    """Seconds, when ``device`` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class BlockRun:
    """One block, run alone on its real input as the model runs it.

    Args:
        block: With or without checkpoints and packing.
        call: From :func:`capture_calls`.
        device: Where it runs.
        cost_model: Seconds from a model instead of a clock.
    """

    def __init__(
        self, block: nn.Module, call: Call, device: torch.device, cost_model: CostModel | None = None
    ) -> None:
        self.block, self.call, self.device, self.cost_model = block, call, device, cost_model
        self._zero = torch.zeros((), device=device, requires_grad=True)
        self.leaves: list[Tensor] = [p for p in block.parameters() if p.requires_grad] or [self._zero]

    def forward(self) -> Tensor:
        """The block's output, with a graph."""

        # Not a leaf: autograd would keep a leaf alive for its gradient, which the model does not.
        def fresh(x: Any) -> Any:
            return x + self._zero.to(x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        args, kwargs = map_input(fresh, self.call.args, self.call.kwargs)
        with torch.autocast(
            autocast_type(self.device), enabled=self.call.autocast, dtype=self.call.autocast_dtype
        ):
            out = self.block(*args, **kwargs)
        return next(x for x in tree_iter(out) if isinstance(x, Tensor) and x.requires_grad)

    def step(self) -> None:
        """Forward and backward."""
        self._backward(self.forward())

    def _backward(self, out: Tensor) -> None:
        torch.autograd.grad(out, self.leaves, torch.ones_like(out), allow_unused=True)

    def bytes(self) -> tuple[int, int, int]:
        """``(kept, forward_peak, backward_peak)`` of :class:`Cost`."""
        with unchanged(self.device):
            dy = torch.ones_like(self.forward())
            with meter_for(self.device) as meter:
                out = self.forward()
                forward_peak, kept = meter.peak, meter.live - out.untyped_storage().nbytes()
                meter.reset_peak()
                # dy is not counted and the output is; in the model it is the other way round, and they are of one size.
                grads = torch.autograd.grad(out, self.leaves, dy, allow_unused=True)
                backward_peak = meter.peak
            del out, grads
        return kept, forward_peak, backward_peak

    def seconds(self) -> float:
        """A forward and a backward, timed or computed."""
        with unchanged(self.device):
            if (model := self.cost_model) is not None:
                with FlopCounterMode(display=False) as flops, _Traffic() as traffic:
                    self.step()
                arithmetic = flops.get_total_flops() / model.flops_per_second
                return arithmetic + traffic.bytes / model.bytes_per_second
            start = clock(self.device)
            out = self.forward()
            taken = clock(self.device) - start
            # Between the two, the rest of the model runs: what was kept is in no cache by the time it is read.
            torch.empty(CACHE_BYTES, dtype=torch.uint8, device=self.device).fill_(0)
            start = clock(self.device)
            self._backward(out)
            return taken + clock(self.device) - start


def measure_frame(
    blocks: Sequence[nn.Module],
    kept: Sequence[int],
    loss_fn: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
    device: torch.device,
    static: int,
    *,
    sharded: bool = False,
) -> Frame:
    """Run a whole step, blocks as they are configured now, and take from its bytes what the blocks hold.

    Args:
        blocks: In forward order.
        kept: What each block keeps in its present configuration (:attr:`Cost.kept`).
        loss_fn: Runs a microbatch and returns the loss.
        parameters: Of the whole model.
        device: Where.
        static: Bytes of parameters, buffers and optimizer state.
        sharded: Whether FSDP wraps the model.
    """
    seen: dict[str, int] = {}
    starts: list[int | None] = [None] * len(blocks)
    with unchanged(device), meter_for(device) as meter:

        def at_output(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                out = next(x for x in tree_iter(output) if isinstance(x, Tensor))
                if out.requires_grad:  # not behind frozen blocks
                    out.register_hook(lambda _: at_backward(index))
                if index == len(blocks) - 1:
                    seen["blocks"] = meter.live
                    meter.reset_peak()

            return hook

        def at_backward(index: int) -> None:
            starts[index] = meter.live
            if index == len(blocks) - 1:
                seen["head_peak"] = meter.peak

        def at_start(module: nn.Module, args: Any, kwargs: Any) -> None:
            for x in tree_iter((args, kwargs)):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(lambda _: meter.reset_peak())
                    break

        handles = [
            *(block.register_forward_hook(at_output(i)) for i, block in enumerate(blocks)),
            blocks[0].register_forward_pre_hook(at_start, with_kwargs=True),
        ]
        try:
            trained = [p for p in parameters if p.requires_grad]
            grads = gradients(loss_fn(), trained, sharded=sharded)
            end_peak = max(meter.peak, meter.live)
        finally:
            for handle in handles:
                handle.remove()
        del grads
    left = [0]
    for start, end, held in zip(starts[1:], starts[:-1], kept[1:], strict=True):
        left.append(0 if start is None or end is None else max(end - start + held, 0))
    return Frame(
        static=static,
        before=max(seen["blocks"] - sum(kept), 0),
        head_peak=max(seen.get("head_peak", end_peak) - seen["blocks"], 0),
        after_head=max((starts[-1] or 0) - seen["blocks"], 0),
        left=tuple(left),
        end_peak=end_peak,
    )


@contextlib.contextmanager
def unchanged(device: torch.device) -> Iterator[None]:
    """Random state is as before afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        yield


class _Traffic(TorchDispatchMode):
    """Bytes that ops read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [x for x in tree_iter((args, kwargs, out)) if isinstance(x, Tensor)]
            self.bytes += sum(x.numel() * x.element_size() for x in tensors)
        return out
