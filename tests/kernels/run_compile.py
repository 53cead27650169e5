"""Compile every kernel, as it would be launched, for a GPU that is not there; print one JSON line a kernel.

Triton ships ptxas and needs no driver to compile. Launches are caught on their way out, with fake CUDA tensors as arguments,
so what is compiled is what the host functions really launch. A worker of ``test_compile.py``, in a process of its own because
the kernels of the test process are the interpreter's.

    python -m tests.kernels.run_compile 90
    REPRESENTATIVES=1 python -m tests.kernels.run_compile 90
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from foundry_fp8.kernels import (
    block_gemm,
    blockwise,
    delayed,
    dequantize,
    gated,
    grouped,
    norms,
    packing,
    tensorwise,
)
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.packed import FORMATS, Packed, PackFormat
from tests.kernels.ptx.launch import compile_launch

label = ""
REPRESENTATIVES = {
    "_amax_kernel": ("current e4m3",),
    "_quantize_kernel": ("delayed e5m2 bias", "norm"),
    "_quantize_together_kernel": ("e5m2 and a weight",),
    "_quantize_blockwise_kernel": ("rows", "mx"),
    "_backward_kernel": ("layernorm",),
    "_sum_kernel": ("layernorm",),
    "_block_gemm_kernel": ("e5m2 by e4m3",),
    "_quantize": ("packed int8",),
    "_dequantize": ("packed int8",),
    "_gated_backward": ("packed int8",),
    "_group_amax_kernel": ("experts, padded",),
    "_group_cast_kernel": ("experts, padded",),
    "_pack_norm_input": ("packed int8",),
}
"""Of kernels that are compiled in several cases, what compiles where the environment's ``REPRESENTATIVES`` says so."""


def report(arch, kernel, *args, grid=None, warmup=False, **kwargs):
    """In place of ``JITFunction.run``: compile for ``arch`` and report, launch nothing."""
    if "REPRESENTATIVES" in os.environ and label not in REPRESENTATIVES.get(kernel.__name__, (label,)):
        return
    compiled, _ = compile_launch(arch, kernel, args, kwargs)
    ptx = compiled.asm["ptx"]
    if len(sys.argv) > 2:
        folder = pathlib.Path(sys.argv[2])
        folder.joinpath(f"{kernel.__name__} {label}.ptx").write_text(ptx)
        folder.joinpath(f"{kernel.__name__} {label}.ttgir").write_text(compiled.asm["ttgir"])
    usage, code = machine_code(compiled.asm["cubin"])
    # Of a quantise kernel's program.
    elements = kwargs["TILE_R"] * kwargs["TILE_C"] if "TILE_R" in kwargs else kwargs.get("ELEMENTS")
    threads = 32 * compiled.metadata.num_warps
    instructions = elements and round(issued(code) * threads / elements, 1)
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "case": label,
                "arch": arch,
                "triton": triton.__version__,
                "contracts": compiled.metadata.enable_fp_fusion,
                "registers": usage["REG"],
                "spill_bytes": usage["LOCAL"] + usage["STACK"],
                "shared_bytes": compiled.metadata.shared,
                "resident_blocks": resident_blocks(usage["REG"], threads, compiled.metadata.shared),
                "instructions_an_element": instructions,
                "code": hashlib.sha256(repr(INSTRUCTION.findall(code)).encode()).hexdigest(),
                "wgmma": sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.\S+", ptx))),
                "mma": sorted(set(re.findall(r"mma\.sync\.aligned\.\S+", ptx))),
                "cvt": sorted(set(re.findall(r"cvt\.rn\.satfinite\.\S+", ptx))),
                "div": sorted(set(re.findall(r"div\.\S+\.f32", ptx))),
                "async_copy": "cp.async" in ptx,
                "loads": dict(Counter(re.findall(r"ld\.global[.\w]*?((?:\.v\d)?\.b\d+)", ptx))),
                "stores": dict(Counter(re.findall(r"st\.global[.\w]*?((?:\.v\d)?\.b\d+)", ptx))),
            }
        ),
        flush=True,
    )


def machine_code(cubin):
    """Registers, local and stack bytes a thread; and the disassembly, by the tools that Triton ships.

    Kept beside what Triton keeps, by the code's own hash: the tool takes ten times longer to start than to read.
    """
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cache = os.environ.get("TRITON_CACHE_DIR") or pathlib.Path.home() / ".triton" / "cache"
    kept = pathlib.Path(cache, "disassembly", hashlib.sha256(cubin).hexdigest())
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            binary, text = pathlib.Path(folder, "code.cubin"), pathlib.Path(folder, "text")
            binary.write_bytes(cubin)
            options = ["--dump-resource-usage", "-sass"]
            text.write_text(
                subprocess.run([tool, *options, binary], capture_output=True, text=True, check=True).stdout
            )
            text.replace(kept)
    code = kept.read_text()
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", code)}, code


def resident_blocks(registers, threads, shared):
    """Thread blocks that one multiprocessor holds at once: 64 K registers in eights a thread, 2048 threads, 227 KiB."""
    by_registers = 65536 // (-(-registers // 8) * 8 * threads)
    return min(by_registers, 2048 // threads, 32, 227 * 1024 // (shared + 1024))


INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", re.M)


def issued(sass):
    """Instructions that a thread of a whole tile issues: the common path, from the top to the first unconditional exit.

    A branch over a call is the fast path of a division, which is what all but subnormal operands take.
    """
    code = [(int(address, 16), text.strip()) for address, text in INSTRUCTION.findall(sass)]
    place, index, count = {address: i for i, (address, _) in enumerate(code)}, 0, 0
    while index < len(code) and count < 100_000:
        _, text = code[index]
        predicate, text = re.match(r"(@!?U?P\w+\s+)?(.*)", text).groups()
        count += 1
        if text.startswith("EXIT") and predicate is None:
            break
        if text.startswith("BRA"):
            target = place[int(re.search(r"0x([0-9a-f]+)", text)[1], 16)]
            skipped = [body for _, body in code[index + 1 : index + 11]]
            if predicate is None or (target > index and any("CALL" in body for body in skipped)):
                index = target
                continue
        index += 1
    return count


@contextlib.contextmanager
def moved_by_a_line(module):
    """``module`` again, from a copy of its file with an empty line on top."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, pathlib.Path(module.__file__).name)
        file.write_text("\n" + pathlib.Path(module.__file__).read_text())
        spec = importlib.util.spec_from_file_location(f"{module.__name__}_moved", file)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        yield found


def launch_everything(gemm):
    """Call each host function in the variants that training uses."""
    global label
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    vector = torch.empty(4096, dtype=torch.float32, device="cuda")
    scale = torch.empty((), device="cuda")
    identity = Producer.identity(x)
    norm = Producer.norm(x, vector, vector, mean=vector, bias=vector)
    swiglu = Producer.activation("silu", x, up=x)
    gelu, gelu_tanh = (Producer.activation(name, x) for name in ("gelu", "gelu_tanh"))
    activations = {"swiglu": swiglu, "gelu": gelu, "gelu tanh": gelu_tanh}

    label = "rows"  # before all others: the first that this process compiles
    with moved_by_a_line(blockwise) as moved:
        moved.quantize_blockwise(identity, E4M3, columns=False)
    label = "current e4m3"
    tensorwise.quantize_tensorwise(identity, E4M3)
    label = "delayed e4m3"
    tensorwise.quantize_tensorwise(identity, E4M3, scale=scale, amax_slot=scale)
    label = "delayed e5m2 bias"
    tensorwise.quantize_tensorwise(identity, E5M2, scale=scale, amax_slot=scale, column_sum=True)
    for label, source in {"norm": norm, **activations}.items():  # noqa: B007 - report reads it
        tensorwise.quantize_tensorwise(source, E4M3, scale=scale, amax_slot=scale)
    label = "norm, three weights"
    casts = [
        tensorwise.Cast(one, E4M3, power_2=False, rows=True, columns=True, column_sum=False)
        for one in (norm, identity, identity, identity)
    ]
    given = [(one.pointers, vector, None, vector, None) for one in (norm, identity, identity, identity)]
    tensorwise.Measure(norm, identity, identity, identity)(*[one[:2] for one in given])
    tensorwise.Casts(casts)(given)
    label = "e5m2 and a weight"
    casts[0] = tensorwise.Cast(identity, E5M2, power_2=False, rows=True, columns=True, column_sum=True)
    casts[1] = tensorwise.Cast(identity, E4M3, power_2=False, rows=False, columns=True, column_sum=False)
    tensorwise.Casts(casts[:2])([(identity.pointers, *given[0][1:]), given[1]])
    label = "rows and columns"
    blockwise.quantize_blockwise(identity, E4M3)
    label = "rows"
    blockwise.quantize_blockwise(identity, E4M3, columns=False)
    label = "columns"
    blockwise.quantize_blockwise(identity, E4M3, rows=False)
    label = "rows and columns, swiglu"
    blockwise.quantize_blockwise(swiglu, E4M3)
    label = "square"
    blockwise.quantize_blockwise(identity, E4M3, square=True)
    label = "mx"
    blockwise.quantize_blockwise(identity, E4M3, group=32)
    label = "layernorm"
    norms.norm_statistics(x, 1e-5, centered=True)
    norms.norm_backward(x, x, vector, vector, mean=vector)
    for label, source in activations.items():  # noqa: B007
        gated.activation_backward(x, source)
    label = "xielu"
    gated.xielu_backward(x, x, vector)
    group = torch.empty(4096, dtype=torch.int32, device="cuda")
    for source in (group, None):
        label = "experts" if source is None else "experts, padded"
        grouped.group_amax(x, group, source, 8)
        grouped.quantize_groups(x, vector, group, source, E4M3, rows=True, columns=True)
    label = "delayed"
    delayed.update_delayed_(vector, torch.empty(1024, 4096, device="cuda"), vector, use_max=True)
    for name in FORMATS:
        label, fmt = f"packed {name}", PackFormat(name=name)
        packed = Packed(*packing.quantize_blocks(x.view(-1), fmt), fmt, x.numel(), x.dtype)
        packing.quantize_blocks(x.view(-1), fmt, nonzero=True)
        packing.dequantize_blocks(packed)
        if name != "int4":
            packing.gated_backward(x.view(-1), packed, packed, "silu")
            norms.pack_norm_input(x, fmt, 1e-5, centered=True)
            norms.norm_backward(x, packed, vector, vector, mean=vector)
    if not gemm:
        return
    data = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="cuda")
    by_row, by_tile = torch.empty(32, 4096, device="cuda"), torch.empty(32, 32, device="cuda")
    wgrad = block_gemm.WITHOUT_SPILLS if int(sys.argv[1]) >= 100 else block_gemm.CONFIGS
    for config in dict.fromkeys((*block_gemm.CONFIGS, *wgrad)):
        block_gemm._choose = lambda run, key, configs, config=config: config
        for square, b_scale in ((True, by_tile), (False, by_row)):
            if config not in (block_gemm.CONFIGS if square else wgrad):
                continue
            label = f"{config} square_b={square}"
            block_gemm.block_gemm(
                data, by_row, data, b_scale, m=4096, n=4096, out_dtype=torch.bfloat16, square_b=square
            )
    label, one = "three of e5m2", torch.empty((), device="cuda")
    parts = [torch.empty(4096, 1024, dtype=torch.float8_e5m2, device="cuda") for _ in range(3)]
    dequantize.dequantize(parts, one, [one] * 3, torch.bfloat16, slot=one, other=(one, one))
    label = "e5m2 by e4m3"
    block_gemm._choose = lambda run, key, configs: configs[-1]
    data_e5m2 = torch.empty(4096, 4096, dtype=torch.float8_e5m2, device="cuda")
    block_gemm.block_gemm(data_e5m2, by_row, data, by_row, m=4096, n=4096, out_dtype=torch.bfloat16)


if __name__ == "__main__":
    arch = int(sys.argv[1])
    # Apart from what other processes keep, whose first kernel is of another kind (see ``settle_compiler``).
    kept = os.environ.get("TRITON_CACHE_DIR") or pathlib.Path.home() / ".triton" / "cache"
    os.environ["TRITON_CACHE_DIR"] = str(pathlib.Path(kept, "settled"))
    block_gemm._processors = lambda device: 132
    torch.cuda.get_device_properties = lambda device: type("P", (), {"multi_processor_count": 132})
    torch.cuda.get_device_capability = lambda device: divmod(arch, 10)
    JITFunction.run = lambda self, *args, **kwargs: functools.partial(report, arch)(self, *args, **kwargs)
    with FakeTensorMode():
        torch.empty(
            1, device="cuda"
        )  # the first fake CUDA tensor installs a device guard that needs no driver
        launch_everything(gemm=arch >= 90)
