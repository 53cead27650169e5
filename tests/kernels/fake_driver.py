"""A GPU's driver that launches nothing: Triton's own binder and specialisation run, launches and compilations are counted.

What it is given are CPU tensors, so that everything beside the kernels really runs. Results of kernels are whatever was in memory.
"""

import contextlib
import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from foundry_fp8.kernels import block_gemm, launch, zeros
from tests.kernels.launch_caches import use_empty_caches
from tests.kernels.ptx.launch import restore_language


class Driver:
    """What Triton asks of the active driver before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@dataclasses.dataclass
class Seen:
    """What a GPU would have been asked to do.

    Attributes:
        launches: Kernels of Triton by name, operators of torch that launch something, GEMMs as ``gemm``.
        bound: How often Triton would have bound arguments, by kernel.
        compiled: What Triton's cache would have held at the end.
        timed: Timings of the block GEMM's tilings.
        moved: Bytes that launches read and write, each tensor once, without GEMMs and attention: of ours, and of torch's under
            :class:`TorchLaunches`.
    """

    launches: Counter = dataclasses.field(default_factory=Counter)
    bound: Counter = dataclasses.field(default_factory=Counter)
    compiled: set = dataclasses.field(default_factory=set)
    timed: int = 0
    moved: int = 0
    checks: bool = True
    """Whether a kernel that is launched again has to be the one that Triton would have chosen, and its bytes count. Costs time."""


def bytes_of(name, tensors):
    """What a launch called ``name`` reads and writes; 0 of a GEMM or of attention."""
    if "gemm" in name or name in ("mm", "_scaled_mm") or "attention" in name:
        return 0
    found = {(t.data_ptr(), t.shape): t.nbytes for t in tensors if isinstance(t, torch.Tensor)}
    return sum(found.values())


@dataclasses.dataclass
class Compiled:
    """What Triton would have compiled."""

    again: Callable

    def __getitem__(self, grid):
        return self.again


LAUNCH_NOTHING = {
    "empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "view", "t", "select", "narrow", "slice", "as_strided",
    "_unsafe_view", "detach", "alias", "reshape", "transpose", "unbind", "unsqueeze", "squeeze", "expand", "lift_fresh", "split",
    "resize_",
}  # fmt: skip


class TorchLaunches(TorchDispatchMode):
    """Counts operators that would launch a kernel on a GPU, in a run that does not notice it: as nobody watches a real one."""

    def __init__(self, seen):
        super().__init__()
        self.seen, self.unnoticed = seen, pytest.MonkeyPatch()

    def __enter__(self):
        from foundry_fp8.backends.native import ops  # as below

        self.unnoticed.setattr(ops, "watching_modes", lambda: 0)
        return super().__enter__()

    def __exit__(self, *raised):
        super().__exit__(*raised)
        self.unnoticed.undo()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        out = func(*args, **(kwargs or {}))
        if name not in LAUNCH_NOTHING and func.namespace == "aten":
            self.seen.launches[name] += 1
            self.seen.moved += bytes_of(name, tree_leaves((args, kwargs, out)))
        return out


@contextlib.contextmanager
def fake_driver(monkeypatch):
    """Until it is left, launches are counted in what it yields. The caller does not run under a mode of its own."""
    kernel_modules = _kernel_modules()  # before the variable below: compiled kernels
    from foundry_fp8.backends.native import ops, products, room

    assert ops
    restore_language()
    seen = Seen()

    def forget():
        for module in (launch, block_gemm, *kernel_modules):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()

    def specialized(kernel, args, kwargs):
        _, specialization, options = kernel.device_caches[0][-1](*args, **kwargs)
        return kernel.__name__, str(specialization), str(sorted(options.items()))

    def run(kernel, *args, grid, warmup=False, **kwargs):
        seen.launches[kernel.__name__] += 1
        seen.moved += bytes_of(kernel.__name__, args)
        seen.bound[kernel.__name__] += 1
        seen.compiled.add(key := specialized(kernel, args, kwargs))

        def again(*values):
            seen.launches[kernel.__name__] += 1
            if seen.checks:
                seen.moved += bytes_of(kernel.__name__, values)
                options = {name: kwargs[name] for name in kwargs if name not in kernel.arg_names}
                assert specialized(kernel, values, options) == key

        return Compiled(again)

    def multiply(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
        seen.launches["gemm"] += 1
        return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype)

    def time(run, config):
        seen.timed += 1
        return float(config.block_m)

    before = dict(vars(driver))  # Triton 3.6 would look for a GPU, if asked for the active one
    with monkeypatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "1")  # lets CPU tensors in; the kernels stay compiled ones
        patched.setattr(JITFunction, "run", run)
        patched.setattr(products, "defined", lambda a: False)
        patched.setattr(room, "unused_memory", lambda device: 2**36)
        patched.setattr(zeros, "_stream_of_blocks", lambda device: 0)
        patched.setattr(zeros, "_blocks", {})
        use_empty_caches(patched)
        forget()
        patched.setattr(block_gemm, "_time", time)
        patched.setattr(block_gemm, "_tuned", {})
        patched.setattr(block_gemm, "interpreting", lambda: False)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patched.setattr(block_gemm, "_processors", lambda device: 132)
        driver.set_active(Driver())
        scaled_mm = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torchs have one for CPUs
            scaled_mm.impl("_scaled_mm", multiply, "CPU")
        try:
            yield seen
        finally:
            scaled_mm._destroy()
            vars(driver).clear()
            vars(driver).update(before)
            forget()


def _kernel_modules():
    from foundry_fp8.kernels import blockwise, delayed, norms, tensorwise

    return blockwise, delayed, norms, tensorwise
