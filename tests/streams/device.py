"""A GPU that is none: torch's Python sees CUDA tensors, streams and events, and every operation, wait and free enters a graph.

Tensors live on the CPU and their operators run there, at once and right. What Python asks of a tensor (``device``, ``is_cuda``) and
of ``torch.cuda`` is answered as on an H100. Which storages are on the device is known from how they were made. Operators are
seen by a dispatch mode, kernels by Triton's interpreter, and what a kernel writes by what changed.

What it cannot show: what C++ decides by the device (autograd's streams, DDP's waits: the tests say what they assume), and anything that
depends on real time.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import foundry_fp8
from tests.streams.graph import HOST, Graph, Memory

GPU = torch.device("cuda", 0)
PACKAGE = os.path.dirname(foundry_fp8.__file__) + os.sep
TESTS = os.path.dirname(os.path.dirname(__file__)) + os.sep
NOTHING = {
    "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "view", "t", "select", "narrow", "slice", "as_strided",
    "_unsafe_view", "detach", "alias", "reshape", "transpose", "unbind", "unsqueeze", "squeeze", "expand", "lift_fresh", "split",
    "permute", "split_with_sizes", "set_", "record_stream", "is_pinned", "_pin_memory", "diagonal", "unfold", "view_as",
}  # fmt: skip
"""Operators that touch no memory."""
WAIT = {
    "_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount", "is_nonzero",
}  # fmt: skip
"""Operators that wait for the device: their result, or its size, is a number on the host."""
FACTORIES = (
    "empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "rand", "randn", "randint", "eye", "linspace", "randperm",
    "scalar_tensor", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
)  # fmt: skip
NEW = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


class Stream:
    """``torch.cuda.Stream``."""

    made = 0

    def __init__(self, device=None, priority=0, name=None):
        Stream.made += 1
        self.name = name or f"stream {Stream.made}"
        self.device, self.cuda_stream, self.stream_id = GPU, Stream.made, Stream.made

    def wait_event(self, event):
        RUNNING.free()
        RUNNING.graph.wait(self.name, event.clock)

    def wait_stream(self, stream):
        RUNNING.free()
        RUNNING.graph.wait(self.name, RUNNING.graph.event(stream.name))

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self):
        RUNNING.graph.synchronize(RUNNING.graph.event(self.name), "Stream.synchronize", place())

    def query(self):
        return RUNNING.graph.reached(RUNNING.graph.event(self.name))


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing=False, **_):
        self.clock, self.captured = {}, False

    def record(self, stream=None):
        self.clock = RUNNING.graph.event((stream or RUNNING.stream).name)
        self.captured = RUNNING.capturing

    def wait(self, stream=None):
        (stream or RUNNING.stream).wait_event(self)

    def query(self):
        if self.captured or RUNNING.capturing:  # cudaErrorCapturedEvent, cudaErrorStreamCaptureUnsupported
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return RUNNING.graph.reached(self.clock)

    def synchronize(self):
        if self.captured or RUNNING.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if not self.query():
            RUNNING.graph.synchronize(self.clock, "Event.synchronize", place())

    def elapsed_time(self, end):
        return 1.0


class Running:
    """The state of the device: which stream is current, what is on it, whether a graph is captured."""

    def __init__(self):
        self.graph = Graph()
        self.default = self.stream = Stream(name="default")
        self.memories: dict[int, tuple[Memory, StorageWeakRef]] = {}
        self.forced: str | None = None
        self.kernels: set[str] = set()
        self.off = 0
        self.capturing = False

    def memory(self, x: Tensor) -> Memory | None:
        """That of ``x``, known from its first use on; ``None`` where it has none."""
        if x.layout != torch.strided or type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            return None
        key = x.untyped_storage()._cdata
        if key not in self.memories:
            self.own(x, HOST)
        return self.memories[key][0]

    def own(self, x: Tensor, home: str) -> None:
        storage = x.untyped_storage()
        made = Memory(f"{tuple(x.shape)} of {place()}", home)
        self.memories[storage._cdata] = made, StorageWeakRef(storage)

    def free(self) -> None:
        """Enter what has been freed since the last operation."""
        for key in [key for key, (_, reference) in self.memories.items() if reference.expired()]:
            self.graph.freed(self.memories.pop(key)[0])

    def on_device(self, x: Tensor) -> bool:
        found = self.memories.get(x.untyped_storage()._cdata) if x.device_before.type == "cpu" else None
        return found is not None and found[0].home != HOST

    def pinned(self, x: Tensor) -> None:
        self.memory(x).name += ", pinned"


RUNNING: Running = None  # type: ignore[assignment]


def place() -> str:
    """The innermost line of the package, or of a test, that runs."""
    frame, test = sys._getframe(1), "torch"
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return f"{name[len(PACKAGE) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        if (
            test == "torch"
            and name.startswith(TESTS)
            and not name.startswith((__file__, TESTS + "streams/group"))
        ):
            test = f"{name[len(TESTS) :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return test


class Recorder(TorchDispatchMode):
    """Enters every operator into the graph."""

    def __torch_dispatch__(self, func, _, args=(), kwargs=None):
        kwargs = kwargs or {}
        if RUNNING.off:
            return func(*args, **kwargs)
        RUNNING.free()
        name = func._schema.name.split("::")[1]
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        forced = RUNNING.forced
        before = {id(m): m for x in given if (m := RUNNING.memory(x))}
        result = func(*args, **kwargs)
        there = [m for m in before.values() if m.home != HOST]
        home = forced if forced is not None and name != "copy_" else "device" if there else HOST
        made = []
        for x in tree_iter(result):
            plain = isinstance(x, Tensor) and type(x) is Tensor and x.layout == torch.strided
            if plain and x.untyped_storage()._cdata not in RUNNING.memories:
                RUNNING.own(x, RUNNING.stream.name if home == "device" else HOST)
                made.append(RUNNING.memory(x))
        if name in NOTHING:
            return result
        written = made + [
            RUNNING.memory(x)
            for argument, value in _bound(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_iter(value)
            if isinstance(x, Tensor) and RUNNING.memory(x)
        ]
        read = [m for m in before.values() if not any(m is w for w in written)]
        both = {m.home != HOST for m in (*read, *written)}
        on = RUNNING.stream.name if True in both else HOST
        if name not in WAIT or on == HOST:
            RUNNING.graph.launched(on, read, written, place())
        else:
            RUNNING.graph.launched(on, read, [], place())
        if on != HOST and (
            name in WAIT or (both == {True, False} and self._blocks(func, name, args, kwargs))
        ):
            what = "copy" if name not in WAIT else name.lstrip("_")
            wait_for_stream(what)
        return result

    def _blocks(self, func, name, args, kwargs):
        """Whether a transfer waits: all but those between pinned memory and the device that are asked not to."""
        if name not in ("copy_", "_to_copy"):
            return False  # a number on the host that a kernel is given by value
        return not any(
            value for argument, value in _bound(func, args, kwargs) if argument.name == "non_blocking"
        )


def _bound(func, args, kwargs):
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def wait_for_stream(what: str) -> None:
    """The host waits for the current stream."""
    if RUNNING.capturing:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
    RUNNING.graph.synchronize(RUNNING.graph.event(RUNNING.stream.name), what, place())


@contextlib.contextmanager
def on_stream(stream: Stream):
    """``torch.cuda.stream``."""
    before, RUNNING.stream = RUNNING.stream, stream or RUNNING.stream
    try:
        yield
    finally:
        RUNNING.stream = before


@contextlib.contextmanager
def _making(where: str | None):
    before, RUNNING.forced = RUNNING.forced, where
    try:
        yield
    finally:
        RUNNING.forced = before


def _home(device) -> str:
    return "device" if torch.device(device).type == "cuda" else HOST


def _factory(make):
    def call(*args, **kwargs):
        device = kwargs.get("device")
        if RUNNING.off or (device is None and not kwargs.get("pin_memory")):
            return make(*args, **kwargs)
        if device is not None and torch.device(device).type not in ("cuda", "cpu"):
            return make(*args, **kwargs)
        home = HOST if device is None else _home(device)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        with _making(home):
            made = make(*args, **kwargs)
        if (
            made.untyped_storage()._cdata not in RUNNING.memories
        ):  # torch.tensor runs no operator that makes it
            RUNNING.own(made, RUNNING.stream.name if home == "device" else HOST)
        if home == "device" and make.__name__ in ("tensor", "as_tensor") and not isinstance(args[0], Tensor):
            RUNNING.graph.launched(RUNNING.stream.name, [], [RUNNING.memory(made)], place())
            wait_for_stream("copy")
        return made

    return call


def _to(self, *args, **kwargs):
    if RUNNING.off:
        return TO(self, *args, **kwargs)
    if args and isinstance(args[0], Tensor):
        device, dtype, non_blocking = args[0].device, args[0].dtype, False
    else:
        copied = {k: v for k, v in kwargs.items() if k != "copy"}
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **copied)
    dtype = dtype or self.dtype
    if device is None or device.type == self.device.type:
        return TO(self, dtype, copy=kwargs.get("copy", False))
    if device.type not in ("cuda", "cpu"):
        return TO(self, *args, **kwargs)
    with _making(_home(device)):
        return TO(self, dtype, non_blocking, True)


TO = Tensor.to


def _kernel(executor_call, changed):
    """A launch of Triton's interpreter: reads its tensors, writes those that it changed."""

    def call(self, *args, **kwargs):
        if RUNNING is None or RUNNING.off:
            return executor_call(self, *args, **kwargs)
        RUNNING.free()
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        memories = [RUNNING.memory(x) for x in tensors]
        with off():
            before = [changed(x) for x in tensors]
            result = executor_call(self, *args, **kwargs)
            touched = [
                m for m, x, b in zip(memories, tensors, before, strict=True)
                if not m.writes or not torch.equal(b, changed(x))
            ]  # fmt: skip
        RUNNING.kernels.add(self.fn.__name__)
        RUNNING.graph.launched(RUNNING.stream.name, memories, touched, f"{place()} ({self.fn.__name__})")
        return result

    return call


@contextlib.contextmanager
def off():
    """Tensors are the CPU's, and nothing is seen."""
    RUNNING.off += 1
    try:
        yield
    finally:
        RUNNING.off -= 1


def _bits(x):
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).clone()


@contextlib.contextmanager
def fake_gpu(monkeypatch):
    """Until it is left, there is a GPU; yields its :class:`Running`. Kernels run if the caller has them interpreted."""
    global RUNNING
    from triton.runtime import interpreter

    from foundry_fp8.backends.native import ops
    from foundry_fp8.compat import selective_checkpoint
    from foundry_fp8.kernels import zeros

    running = RUNNING = Running()
    base = torch._C.TensorBase

    def device(self):
        inner = getattr(self, "_local_tensor", None)
        if inner is not None:
            return inner.device
        found = base.device.__get__(self)
        if (
            running.off
            or found.type != "cpu"
            or type(self) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
        ):
            return found
        return GPU if running.on_device(self) else found

    properties = {
        "device": property(device),
        "device_before": property(lambda self: base.device.__get__(self)),
        "is_cuda": property(lambda self: self.device.type == "cuda"),
        "is_cpu": property(lambda self: self.device.type == "cpu"),
    }
    methods = {
        "to": _to,
        "cpu": lambda self, **_: _to(self, "cpu"),
        "cuda": lambda self, *_, **__: _to(self, GPU),
        "get_device": lambda self: 0 if self.is_cuda else -1,
        "is_pinned": lambda self, *_: RUNNING.memory(self).name.endswith("pinned"),
        "record_stream": lambda self, stream: RUNNING.memory(self).recorded.add(stream.name),
    } | {name: _factory(getattr(base, name)) for name in NEW}
    properties_of_device = types.SimpleNamespace(
        multi_processor_count=132, total_memory=80 << 30, name="NVIDIA H100 80GB HBM3", major=9, minor=0
    )
    cuda = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties_of_device,
        "get_device_name": lambda device=None: properties_of_device.name,
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": lambda device=None: running.stream,
        "default_stream": lambda device=None: running.default,
        "synchronize": lambda device=None: [s.synchronize() for s in [running.default]],
        "is_current_stream_capturing": lambda: running.capturing,
        "mem_get_info": lambda device=None: (60 << 30, 80 << 30),
        "memory_allocated": lambda device=None: 1 << 20,
        "memory_reserved": lambda device=None: 2 << 20,
        "max_memory_allocated": lambda device=None: 4 << 20,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    with monkeypatch.context() as patched, contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            patched.setattr(torch.cuda, name, value)
        for name in FACTORIES:
            patched.setattr(torch, name, _factory(getattr(torch, name)))
        for name, value in (properties | methods).items():
            setattr(Tensor, name, value)
            stack.callback(_forget, name)
        for module in (ops, selective_checkpoint, zeros):  # the recorder is none that the program asked for
            patched.setattr(module, "watching_modes", lambda: 0)
        patched.setattr(zeros, "_blocks", {})
        executor = interpreter.GridExecutor
        patched.setattr(executor, "__call__", _kernel(executor.__call__, _bits))
        try:
            with Recorder():
                yield running
        finally:
            RUNNING = None


INHERITED = {name: vars(Tensor)[name] for name in ("cpu", "to") if name in vars(Tensor)}


def _forget(name):
    delattr(Tensor, name)
    if name in INHERITED:
        setattr(Tensor, name, INHERITED[name])
