"""Every kernel compiles for GPUs that are not there, and the machine code is of the kind it was written for.

Not a run on hardware: what is checked is that Triton and ptxas accept the kernels, and that the instructions are there.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

RUN = pathlib.Path(__file__).with_name("run_compile.py")


@pytest.fixture(scope="module")
def compiled():
    """The worker's lines for sm_90, one process for all tests."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, RUN, "90"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def named(compiled, *kernels):
    found = [line for line in compiled if line["kernel"] in kernels]
    assert found, f"no launch of {kernels}"
    return found


def test_every_kernel_is_among_them(compiled):
    kernels = {line["kernel"] for line in compiled}
    assert kernels == {
        "_amax_kernel",
        "_quantize_kernel",
        "_quantize_blockwise_kernel",
        "_update_kernel",
        "_statistics_kernel",
        "_backward_kernel",
        "_block_gemm_kernel",
        "_quantize",
        "_dequantize",
        "_gated_backward",
        "_pack_norm_input",
    }


def test_nothing_spills(compiled):
    spilling = [
        (line["kernel"], line["case"], line["spill_bytes"]) for line in compiled if line["spill_bytes"]
    ]
    assert spilling == []


def test_casts_are_the_saturating_instruction(compiled):
    for line in named(compiled, "_quantize_kernel", "_quantize_blockwise_kernel"):
        wanted = "e5m2" if "e5m2" in line["case"] else "e4m3"
        assert line["cvt"] == [f"cvt.rn.satfinite.{wanted}x2.f32"], line["case"]


def test_memory_is_accessed_in_whole_words(compiled):
    """16 bytes at a time for the tensors; what is smaller is a scale. A mask the compiler cannot see through shows here."""
    for line in named(compiled, "_quantize_kernel", "_quantize_blockwise_kernel"):
        assert line["stores"].get(".v4.b32", 0) >= 4, line["case"]
        assert not any(width == ".b8" for width in line["stores"]), line["case"]
        assert line["loads"][".v4.b32"] >= 4, line["case"]


def test_the_gemm_uses_hoppers_fp8_tensor_cores(compiled):
    for line in named(compiled, "_block_gemm_kernel"):
        kinds = "e5m2.e4m3" if "e5m2" in line["case"] else "e4m3.e4m3"
        assert line["wgmma"] and all(op.endswith(f"k32.f32.{kinds}") for op in line["wgmma"]), line["case"]
        assert line["async_copy"] and line["shared_bytes"] <= 227 * 1024, line["case"]


def test_scales_divide_exactly(compiled):
    for line in named(compiled, "_quantize_kernel", "_quantize_blockwise_kernel"):
        if line["case"] not in ("mx", "swiglu", "rows and columns, swiglu"):
            assert all(op.startswith("div.rn") for op in line["div"]), line["case"]
