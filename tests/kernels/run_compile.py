"""Compile every kernel, as it would be launched, for a GPU that is not there; print one JSON line a kernel.

Triton ships ptxas and needs no driver to compile. Launches are caught on their way out, with fake CUDA tensors as arguments,
so what is compiled is what the host functions really launch. A worker of ``test_compile.py``, in a process of its own because
the kernels of the test process are the interpreter's.

    python tests/kernels/run_compile.py 90
"""

import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections import Counter

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from foundry_fp8.kernels import block_gemm, blockwise, delayed, gated, norms, packed_norms, tensorwise
from foundry_fp8.kernels import packing as activations
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.packed import FORMATS, Packed, PackFormat

TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
label = ""


def compile_launch(arch, kernel, *args, grid=None, warmup=False, num_warps=4, num_stages=3, **kwargs):
    """In place of ``JITFunction.run``: compile for ``arch`` and report, launch nothing."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[param.name] = "constexpr"
            constants[(index,)] = value
            continue
        if isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
        if not isinstance(value, float) and (isinstance(value, torch.Tensor) or value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    ptx = compiled.asm["ptx"]
    if len(sys.argv) > 2:
        pathlib.Path(sys.argv[2]).joinpath(f"{kernel.__name__} {label}.ptx").write_text(ptx)
        pathlib.Path(sys.argv[2]).joinpath(f"{kernel.__name__} {label}.ttgir").write_text(
            compiled.asm["ttgir"]
        )
    usage = resource_usage(compiled.asm["cubin"])
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "case": label,
                "arch": arch,
                "registers": usage["REG"],
                "spill_bytes": usage["LOCAL"] + usage["STACK"],
                "shared_bytes": compiled.metadata.shared,
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


def resource_usage(cubin):
    """Registers, local and stack bytes a thread, by cuobjdump."""
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def launch_everything(gemm):
    """Call each host function in the variants that training uses."""
    global label
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="cuda")
    vector = torch.empty(4096, dtype=torch.float32, device="cuda")
    scale = torch.empty((), device="cuda")
    identity = Producer.identity(x)
    norm = Producer.norm(x, vector, vector, mean=vector, bias=vector)
    swiglu = Producer.activation("silu", x, up=x)
    xielu = Producer.activation("xielu", x, alpha=torch.empty(2, device="cuda"))

    label = "current e4m3"
    tensorwise.quantize_tensorwise(identity, E4M3)
    label = "delayed e5m2 bias"
    tensorwise.quantize_tensorwise(identity, E5M2, scale=scale, amax_slot=scale, column_sum=True)
    for label, source in (("norm", norm), ("swiglu", swiglu), ("xielu", xielu)):  # noqa: B007 - compile_launch reads it
        tensorwise.quantize_tensorwise(source, E4M3, scale=scale, amax_slot=scale)
    label = "rows and columns"
    blockwise.quantize_blockwise(identity, E4M3)
    label = "rows and columns, swiglu"
    blockwise.quantize_blockwise(swiglu, E4M3)
    label = "square"
    blockwise.quantize_blockwise(identity, E4M3, square=True)
    label = "mx"
    blockwise.quantize_blockwise(identity, E4M3, group=32)
    label = "layernorm"
    norms.norm_statistics(x, 1e-5, centered=True)
    norms.norm_backward(x, x, vector, vector, mean=vector)
    for label, source in (("swiglu", swiglu), ("xielu", xielu)):  # noqa: B007
        gated.activation_backward(x, source)
    label = "delayed"
    delayed.update_delayed_(vector, torch.empty(1024, 4096, device="cuda"), vector, use_max=True)
    for name in FORMATS:
        label, fmt = f"packed {name}", PackFormat(name=name)
        packed = Packed(*activations.quantize_blocks(x.view(-1), fmt), fmt, x.numel(), x.dtype)
        activations.quantize_blocks(x.view(-1), fmt, nonzero=True)
        activations.dequantize_blocks(packed)
        if name != "int4":
            activations.gated_backward(x.view(-1), packed, packed, "silu")
            packed_norms.pack_norm_input(x, fmt, 1e-5, centered=True)
            norms.norm_backward(x, packed, vector, vector, mean=vector)
    if not gemm:
        return
    data = torch.empty(4096, 4096, dtype=torch.float8_e4m3fn, device="cuda")
    by_row, by_tile = torch.empty(32, 4096, device="cuda"), torch.empty(32, 32, device="cuda")
    for config in block_gemm.CONFIGS:
        block_gemm._choose = lambda run, key, config=config: config
        for square, b_scale in ((True, by_tile), (False, by_row)):
            label = f"{config} square_b={square}"
            block_gemm.block_gemm(
                data, by_row, data, b_scale, m=4096, n=4096, out_dtype=torch.bfloat16, square_b=square
            )
    label = "e5m2 by e4m3"
    data_e5m2 = torch.empty(4096, 4096, dtype=torch.float8_e5m2, device="cuda")
    block_gemm.block_gemm(data_e5m2, by_row, data, by_row, m=4096, n=4096, out_dtype=torch.bfloat16)


if __name__ == "__main__":
    arch = int(sys.argv[1])
    block_gemm._processors = lambda device: 132
    torch.cuda.get_device_properties = lambda device: type("P", (), {"multi_processor_count": 132})
    JITFunction.run = lambda self, *args, **kwargs: functools.partial(compile_launch, arch)(
        self, *args, **kwargs
    )
    with FakeTensorMode():
        torch.empty(
            1, device="cuda"
        )  # the first fake CUDA tensor installs a device guard that needs no driver
        launch_everything(gemm=arch >= 90)
