"""Measuring a step: every option of every kind of block on its real input, and what the rest of the model holds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from foundry_fp8.compat.pytree import tree_iter, tree_map
from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.layers.state import FP8State
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.live_bytes import meter_for
from foundry_fp8.planning.memory.solver import Cost, Frame

__all__ = [
    "BlockRun", "Call", "capture_calls", "clock", "gradients", "held_bytes", "local_numel", "map_input",
    "measure_frame", "unchanged",
]  # fmt: skip


CACHE_BYTES = 128 * 2**20
"""At least the last-level cache of a device: 126 MB of L2 on a B200, 50 MB on an H100, 32 MB a CPU complex."""


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

    Of calls that ``keep`` does not want only the signature's shapes are kept, as meta tensors.
    """
    calls: dict[int, Call] = {}

    def note(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            kind = autocast_type(device)
            call = Call(args, dict(kwargs), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            if not keep(index, call):
                call.args, call.kwargs = tree_map(
                    lambda x: x.to("meta") if isinstance(x, Tensor) else x, (call.args, call.kwargs)
                )
            calls[index] = call

        return hook

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for i, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_pre_hook(note(i), with_kwargs=True))
        run()
    return [calls[i] for i in range(len(blocks))]


def held_bytes(value: Tensor) -> int:
    """What ``value`` keeps on this rank; of a tensor that is made of others (sharded, quantised) what they keep."""
    if hasattr(value, "__tensor_flatten__"):
        return sum(held_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size()


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

    Its linears share what they share in a forward of ``model``.
    """

    def __init__(
        self,
        block: nn.Module,
        call: Call,
        device: torch.device,
        cost_model: CostModel | None = None,
        *,
        model: nn.Module,
    ) -> None:
        self.block, self.call, self.device, self.cost_model = block, call, device, cost_model
        fp8 = FP8State.of(model)
        self._within = contextlib.nullcontext if fp8 is None else functools.partial(fp8.within_forward, model)
        self._zero = torch.zeros((), dtype=torch.float32, device=device, requires_grad=True)
        self.leaves: list[Tensor] = [p for p in block.parameters() if p.requires_grad] or [self._zero]

    def forward(self) -> Tensor:
        """The block's output, with a graph."""

        # Not a leaf: autograd would keep a leaf alive for its gradient, which the model does not.
        def fresh(x: Any) -> Any:
            return x + self._zero.to(x.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        args, kwargs = map_input(fresh, self.call.args, self.call.kwargs)
        with self._autocast(), self._within():
            out = self.block(*args, **kwargs)
        return next(x for x in tree_iter(out) if isinstance(x, Tensor) and x.requires_grad)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            autocast_type(self.device), enabled=self.call.autocast, dtype=self.call.autocast_dtype
        )

    def step(self) -> None:
        """Forward and backward."""
        self._backward(self.forward())

    def _backward(self, out: Tensor) -> None:
        torch.autograd.grad(out, self.leaves, torch.ones_like(out), allow_unused=True)

    def bytes(self) -> Cost:
        """What it costs, but for its seconds."""
        with unchanged(self.device):
            dy = torch.ones_like(self.forward())
            with meter_for(self.device) as meter:
                with self._autocast():  # as in the model, where it ends after the last block
                    out = self.forward()
                    forward_peak, cached = meter.peak, meter.live
                kept, cached = meter.live - out.untyped_storage().nbytes(), cached - meter.live
                meter.reset_peak()
                # dy is not counted and the output is; in the model it is the other way round, and they are of one size.
                grads = torch.autograd.grad(out, self.leaves, dy, allow_unused=True)
                backward_peak = meter.peak
            del out, grads
        return Cost(kept, forward_peak, backward_peak, 0.0, cached)

    def seconds(self) -> float:
        """A forward and a backward, timed or computed."""
        with unchanged(self.device):
            if (model := self.cost_model) is not None:
                with model.counting() as counted:
                    self.step()
                return counted()
            start = clock(self.device)
            out = self.forward()
            taken = clock(self.device) - start
            # Between the two, the rest of the model runs: what was kept is in no cache by the time it is read.
            torch.empty(CACHE_BYTES, dtype=torch.uint8, device=self.device).fill_(0)
            start = clock(self.device)
            self._backward(out)
            return taken + clock(self.device) - start


def measure_frame(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    costs: Sequence[Cost],
    loss_fn: Callable[[], Tensor],
    device: torch.device,
    static: int,
    *,
    accumulates: bool = False,
    sharded: bool = False,
) -> Frame:
    """Run a whole step, blocks as they are configured now, and take from its bytes what the blocks hold.

    ``costs`` are those of the present configuration, ``static`` is of parameters, buffers and optimizer state. A step that ``accumulates``
    runs all its microbatches but the first beside the gradients of those before.
    """
    seen: dict[str, int] = {}
    starts: list[int | None] = [None] * len(blocks)
    ends_with_blocks = False
    with unchanged(device), meter_for(device) as meter:

        def at_output(index: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                out = next(x for x in tree_iter(output) if isinstance(x, Tensor))
                if out.requires_grad:  # not behind frozen blocks
                    out.register_hook(lambda _: at_backward(index))
                if index == len(blocks) - 1:
                    seen["hidden"] = out.untyped_storage().nbytes()
                    seen["blocks"] = meter.live - seen["hidden"]
                    meter.reset_peak()

            return hook

        def at_backward(index: int) -> None:
            starts[index] = meter.live
            if index == len(blocks) - 1:
                seen["head_backward"] = meter.peak

        def at_start(module: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal ends_with_blocks
            trained = (x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad)
            x = next(trained, None)
            ends_with_blocks = x is None  # the embedding is frozen
            if x is not None:
                x.register_hook(lambda _: meter.reset_peak())

        with contextlib.ExitStack() as hooks:
            for i, block in enumerate(blocks):
                hooks.enter_context(block.register_forward_hook(at_output(i)))
            hooks.enter_context(blocks[0].register_forward_pre_hook(at_start, with_kwargs=True))
            trained = [p for p in model.parameters() if p.requires_grad]
            loss = loss_fn()
            seen["head"] = meter.peak
            meter.reset_peak()
            grads = gradients(loss, trained, sharded=sharded)
            end_peak = meter.live if ends_with_blocks else max(meter.peak, meter.live)
        del grads, loss
    left = [0]
    for start, end, cost in zip(starts[1:], starts[:-1], costs[1:], strict=True):
        left.append(0 if start is None or end is None else max(end - start + cost.kept, 0))
    before = max(seen["blocks"] - sum(cost.kept + cost.cached for cost in costs), 0)
    # The last block's output is the head's input: the head holds it, and the blocks' backward its gradient.
    beside_blocks = before + sum(cost.kept for cost in costs)
    frame = Frame(
        static=static,
        before=before,
        head_peak=max(seen["head"] - seen["blocks"], 0),
        head_backward_peak=max(seen.get("head_backward", end_peak) - beside_blocks, 0),
        after_head=max((starts[-1] or 0) - beside_blocks - seen["hidden"], 0),
        left=tuple(left),
        end_peak=end_peak,
        hidden=seen["hidden"],
    )
    return _beside_gradients(frame, model, blocks) if accumulates else frame


def _beside_gradients(frame: Frame, model: nn.Module, blocks: Sequence[nn.Module]) -> Frame:
    """The frame of a later microbatch: gradients are there from the start, and what a backward makes is added to them and freed.

    Only the embedding's gradient counts twice at the end, where it is the last that is made. A head that is tied to it frees
    nothing before.
    """
    of_blocks = [_gradient_bytes(block.parameters()) for block in blocks]
    embedding = _gradient_bytes(
        p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    )
    total = _gradient_bytes(model.parameters())
    return dataclasses.replace(
        frame,
        static=frame.static + total,
        after_head=max(frame.after_head - (total - sum(of_blocks) - embedding), 0),
        left=tuple(max(left - own, 0) for left, own in zip(frame.left, of_blocks, strict=True)),
        end_peak=max(frame.end_peak - total + embedding, 0),
    )


def _gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(local_numel(p) * p.element_size() for p in parameters if p.requires_grad)


@contextlib.contextmanager
def unchanged(device: torch.device) -> Iterator[None]:
    """Random state is as before afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        yield
