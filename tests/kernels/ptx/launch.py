"""Compile what a host function launches for a GPU that is not there, and run the machine's own code on CPU tensors.

Triton's interpreter runs the kernels' source; what ships is PTX, behind a compiler that fuses, reorders and lays out.
"""

import functools
import itertools

import torch
import triton
import triton.language as tl
from triton._C.libtriton import llvm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tests.kernels.launch_caches import use_empty_caches
from tests.kernels.ptx.machine import Block
from tests.kernels.ptx.memory import Global
from tests.kernels.ptx.program import parse

__all__ = ["TYPES", "compile_launch", "execute"]

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
LANGUAGE = (tl, tl.core, tl.math, tl.tensor, tl.dtype)
PRISTINE = [dict(vars(part)) for part in LANGUAGE]
"""Triton 3.3's interpreter leaves its own functions in the language, with which nothing compiles any more."""
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


@functools.cache
def settle_compiler() -> None:
    """So that no kernel is the first one that this process compiles.

    Triton 3.3 shortens shared memory's pointers to 32 bits (LLVM's option ``nvptx-short-ptr``) when it first writes PTX, which is after
    it gave that kernel its data layout: the first kernel of a process has pointers of 64 bits, and other registers.
    """
    llvm.init_targets()
    nothing = "define void @nothing() { ret void }"
    options = ("nvptx64-nvidia-cuda", "sm_90a", "", ["nvptx-short-ptr"], False, False)
    try:
        llvm.translate_to_asm(nothing, *options)
    except TypeError:  # Triton 3.9 has one more
        llvm.translate_to_asm(nothing, *options, False)


def compile_launch(arch, kernel, args, kwargs):
    """As Triton's JIT specialises a launch: ``(compiled kernel, arguments that are parameters)``."""
    settle_compiler()
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes, passed = {}, {}, {}, []
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
            continue
        passed.append(value)
        signature[param.name] = type_of(value)
        if is_aligned(value):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options), passed


def type_of(value) -> str:
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def is_aligned(value) -> bool:
    """To 16 bytes: what an allocation begins at, so that only the offset inside of it counts."""
    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.element_size() % 16 == 0
    return not isinstance(value, float) and value % 16 == 0


@functools.cache
def parsed(ptx: str):
    return parse(ptx)


def execute(monkeypatch, arch: int = 90) -> None:
    """Until ``monkeypatch`` is undone, every launch on CPU tensors is compiled for ``arch`` and its PTX executed."""

    def run(kernel, *args, grid, warmup=False, **kwargs):
        compiled, passed = compile_launch(arch, kernel, args, kwargs)
        program = parsed(compiled.asm["ptx"])
        memory = Global([value for value in passed if isinstance(value, torch.Tensor)])
        words = [word_of(value) for value in passed] + [0] * (len(program.parameters) - len(passed))
        grid = (*grid, 1, 1)[:3]
        for index in itertools.product(*map(range, grid)):
            Block(program, words, memory, compiled.metadata.shared, index, grid).run()

    restore_language()
    use_empty_caches(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # what lets CPU tensors in; the kernels stay compiled ones
    monkeypatch.setattr(JITFunction, "run", run)


def restore_language() -> None:
    """As it was when this file was imported, that is, before any test ran."""
    for part, before in zip(LANGUAGE, PRISTINE, strict=True):
        for name in set(vars(part)) - set(before):
            delattr(part, name)
        for name, value in before.items():
            if vars(part).get(name) is not value:
                setattr(part, name, value)


def word_of(value) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int(torch.tensor(value, dtype=torch.float32).view(torch.int32).item()) & 0xFFFFFFFF
    return value & 0xFFFFFFFFFFFFFFFF
