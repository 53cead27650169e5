"""What really went over the wire: counters, clocks, and a process group that counts what passes through it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from foundry_fp8.compat.collective_errors import preserve_errors
from foundry_fp8.compat.fsdp2 import units_of

__all__ = [
    "CountingGroup", "FinishedWork", "Traffic", "average", "average_on_gloo", "inner_group", "reduce_options",
    "reduction_of",
]  # fmt: skip


class Traffic:
    """Bytes this rank sent, and seconds it spent, since it was made. Safe to use from several threads.

    ``sent[op]`` counts bytes given to the network by this rank. An all-to-all sends its input less the chunk that
    stays; an all-gather sends the shard to the W - 1 others; a reduce-scatter ``(W - 1) / W`` of its input and an
    all-reduce twice that, which is what ring algorithms (gloo, NCCL) move. ``logical`` is what the same tensors would
    have taken uncompressed.

    ``seconds["quantize"]`` is time spent coding and decoding, ``seconds["collective"]`` time spent launching collectives
    and waiting for them. What is on the wire while something else is coded is in neither.
    """

    def __init__(self) -> None:
        self.sent: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self.logical = 0
        self.seconds: dict[str, float] = defaultdict(float)
        self.squared_error = 0.0
        self.squared_norm = 0.0
        self.sample = False
        """Measure the quantisation error of what is sent while this is set (costs one more decode)."""
        self.paused = False
        """Count nothing while this is set."""
        self._lock = threading.Lock()
        self._events: list[tuple[str, Any, Any]] = []

    @property
    def wire_bytes(self) -> int:
        """All bytes this rank sent."""
        return sum(self.sent.values())

    def count(self, op: str, nbytes: int) -> None:
        """Add one collective of ``nbytes`` sent bytes."""
        if self.paused:
            return
        with self._lock:
            self.sent[op] += int(nbytes)
            self.calls[op] += 1

    def count_logical(self, nbytes: float) -> None:
        """Add what a collective would have sent uncompressed."""
        if self.paused:
            return
        with self._lock:
            self.logical += int(nbytes)

    def add_error(self, sent: Tensor, meant: Tensor) -> None:
        """Add to the sampled quantisation error: ``sent`` is what receivers decode, ``meant`` what was encoded."""
        difference = float((sent - meant).double().square().sum())
        norm = float(meant.double().square().sum())
        with self._lock:
            self.squared_error += difference
            self.squared_norm += norm

    @contextlib.contextmanager
    def timed(self, what: str, device: torch.device) -> Iterator[None]:
        """Add the time of the enclosed work to ``seconds[what]``: host time on a CPU, stream time on a GPU."""
        # While a graph is captured an event may not be asked, and the host's time says nothing.
        if self.paused or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            yield
            return
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._add_events([(what, start, end)], wait=False)
            return
        begin = time.perf_counter()
        yield
        with self._lock:
            self.seconds[what] += time.perf_counter() - begin

    def settle(self) -> None:
        """Wait for outstanding GPU events and add their times. Call it where the host may wait (when logging)."""
        self._add_events([], wait=True)

    def _add_events(self, new: list[tuple[str, Any, Any]], *, wait: bool) -> None:
        """Add the times of events that the GPU has reached, or of all, so that they do not pile up where nobody logs."""
        with self._lock:
            self._events += new
            while self._events and (wait or self._events[0][2].query()):
                what, start, end = self._events.pop(0)
                end.synchronize()
                self.seconds[what] += start.elapsed_time(end) / 1e3


class FinishedWork(dist.Work):
    """A collective that is done, or on a GPU enqueued on the current stream, by the time it is returned.

    Args:
        result: Its tensors.
    """

    def __init__(self, result: Sequence[Tensor]) -> None:
        super().__init__()
        self._result = result
        self._event = None
        if result and result[0].is_cuda:
            self._event = torch.cuda.current_stream(result[0].device).record_event()

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._result[0].device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Whether the device is done with it."""
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        """True: an error of the wrapped collective is raised where it is waited for."""
        return True

    def result(self) -> Any:
        """What the collective produced."""
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A future that holds the result already."""
        self.wait()
        devices: list[Any] = [] if self._event is None else [self._result[0].device]
        future: torch.futures.Future = torch.futures.Future(devices=devices)
        future.set_result(self._result)
        return future


class CountingGroup(dist.ProcessGroup):
    """A process group that passes every collective on to ``inner`` and counts the bytes this rank sends.

    torch asks a group for all-gathers and reduce-scatters by ``_allgather_base`` and ``_reduce_scatter_base``, since 2.13 by
    ``all_gather_single`` and ``reduce_scatter_single`` (and all-to-alls by ``all_to_all_single``, 2.15): both are answered.

    It also gives gloo the averages that it lacks: torch 2.7's gloo raises on ``all_reduce(AVG)`` and silently returns
    the sum from ``reduce_scatter_tensor(AVG)`` (pytorch issue 162338), which multiplies FSDP2's gradients by the
    number of ranks. Other reductions than SUM and AVG are an error in a reduce-scatter, since gloo would ignore them.
    """

    def __init__(self, inner: dist.ProcessGroup, traffic: Traffic | None = None) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        preserve_errors()
        self.inner = inner_group(inner)
        self.traffic = Traffic() if traffic is None else traffic

    @property
    def averages(self) -> bool:
        """Whether the backend itself can average (NCCL can, gloo cannot)."""
        return "nccl" in dist.get_backend(self.inner)

    def getBackendName(self) -> str:
        """The inner backend's, marked."""
        return f"counting-{self.inner.name()}"

    @property
    def group_name(self) -> str:
        """The inner group's name."""
        return self.inner.group_name

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_splits: list, input_splits: list, opts: Any = None
    ) -> Any:
        """All-to-all; counts the input less what this rank keeps."""
        own = input_splits[self.rank()] if input_splits else input.shape[0] // max(self.size(), 1)
        row = input.numel() // input.shape[0] if input.shape[0] else 0
        self.traffic.count("all_to_all", (input.numel() - own * row) * input.element_size())
        opts = dist.AllToAllOptions() if opts is None else opts
        return self.inner.alltoall_base(output, input, output_splits, input_splits, opts)

    def all_to_all_single(self, *args: Any, **kwargs: Any) -> Any:
        """Newer name of :meth:`alltoall_base`."""
        return self.alltoall_base(*args, **kwargs)

    def all_gather_single(self, *args: Any, **kwargs: Any) -> Any:
        """Newer name of ``_allgather_base``."""
        return self._allgather_base(*args, **kwargs)

    def reduce_scatter_single(self, *args: Any, **kwargs: Any) -> Any:
        """Newer name of ``_reduce_scatter_base``."""
        return self._reduce_scatter_base(*args, **kwargs)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        self.traffic.count("all_gather", input.nbytes * (self.size() - 1))
        opts = c10d.AllgatherOptions() if opts is None else opts
        return self.inner._allgather_base(output, input, opts)

    def allgather(self, outputs: list, inputs: list, opts: Any = None) -> Any:  # type: ignore[override]
        """All-gather into a list."""
        self.traffic.count("all_gather", sum(t.nbytes for t in inputs) * (self.size() - 1))
        opts = c10d.AllgatherOptions() if opts is None else opts
        return self.inner.allgather(outputs, inputs, opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        mean = reduction_of(opts, "reduce-scatter")
        self.traffic.count("reduce_scatter", input.nbytes - input.nbytes // self.size())
        if not mean or self.averages:
            return self.inner._reduce_scatter_base(output, input, opts)
        summed = reduce_options(dist.ReduceOp.SUM, dist.ReduceScatterOptions)
        self.inner._reduce_scatter_base(output, input, summed).wait()
        output.div_(self.size())
        return FinishedWork([output])

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        """All-reduce, in place."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        opts = dist.AllreduceOptions() if opts is None else opts
        nbytes = sum(t.nbytes for t in tensors)
        self.traffic.count("all_reduce", 2 * (nbytes - nbytes // self.size()))
        if opts.reduceOp != dist.ReduceOp.AVG or self.averages:
            return self.inner.allreduce(tensors, opts)
        self.inner.allreduce(tensors, reduce_options(dist.ReduceOp.SUM)).wait()
        for tensor in tensors:
            tensor.div_(self.size())
        return FinishedWork(tensors)

    def broadcast(self, tensors: list, opts: Any) -> Any:  # type: ignore[override]
        """Broadcast; the root is counted as sending to every other rank."""
        if opts.rootRank == self.rank():
            self.traffic.count("broadcast", sum(t.nbytes for t in tensors) * (self.size() - 1))
        return self.inner.broadcast(tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Barrier; sends nothing worth counting."""
        return self.inner.barrier(dist.BarrierOptions() if opts is None else opts)


def inner_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The backend's own group, under a :class:`CountingGroup` or not."""
    return group.inner if isinstance(group, CountingGroup) else group


def reduce_options(op: Any, kind: Callable[[], Any] = dist.AllreduceOptions) -> Any:
    """Options with the reduction ``op``: an all-reduce's, or those of another ``kind``."""
    options = kind()
    options.reduceOp = op
    return options


def reduction_of(opts: Any, what: str) -> bool:
    """Whether the options ask for a mean (``True``) or a sum (``False``); an error for every other reduction."""
    if opts.reduceOp == dist.ReduceOp.AVG:
        return True
    if opts.reduceOp == dist.ReduceOp.SUM:
        return False
    raise RuntimeError(
        f"A {what} through foundry_fp8 can sum or average, not {opts.reduceOp}. A pre-multiplied sum comes from "
        "FSDP2's set_gradient_divide_factor (older torch: set_reduce_scatter_divide_factor): leave it unset with compressed "
        "communication or gloo."
    )


def average(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce ``tensor`` to its mean over ``group``, in place, also where the backend cannot average."""
    group.allreduce([tensor]).wait()
    return tensor.div_(group.size())


def average_on_gloo(model: nn.Module) -> None:
    """Give FSDP2 on gloo the averages that gloo lacks, without compressing: see :class:`CountingGroup`.

    Without it FSDP2 on a CPU multiplies gradients by the number of ranks, and its HSDP raises. Units on a GPU, and units that are
    attached already, are left alone.
    """
    for unit in units_of(model):
        if unit.device.type == "cpu" and not isinstance(unit.shard_group, CountingGroup):
            groups: tuple[Any, ...] = (unit.shard_group, unit.replicate_group, unit.scatter_group)
            unit.replace_groups(*(group and CountingGroup(group) for group in groups))
