"""The Triton kernels through Triton's interpreter, against the torch reference. They have not run on a GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import foundry_fp8.kernels
from foundry_fp8.activations.packing import (
    FORMATS,
    Packed,
    PackFormat,
    dequantize_blocks_reference,
    quantize_blocks_reference,
)


@pytest.fixture(scope="module")
def kernels():
    """The module once more, its kernels interpreted: triton.jit reads the environment when it decorates."""
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        path = Path(foundry_fp8.kernels.__file__).with_name("activations.py")
        spec = importlib.util.spec_from_file_location("_interpreted_activations", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        yield module
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def case(numel, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * torch.logspace(-6, 6, numel)
    x[5] = 0.0
    if numel > 2000:
        x[1000:1200] = 0.0
        x[1500], x[1700] = float("inf"), float("nan")
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [17, 1024, 2500])
@pytest.mark.parametrize("name", FORMATS)
def test_bytes_equal_the_reference(kernels, name, numel, dtype):
    fmt = PackFormat(name=name)
    x = case(numel, dtype)
    codes, scales = kernels.quantize_blocks(x, fmt)
    expected_codes, expected_scales = quantize_blocks_reference(x, fmt)
    assert torch.equal(scales, expected_scales)
    if name == "e4m3":  # the interpreter rounds ties away from zero
        a, b = (c.view(torch.float8_e4m3fn).float() for c in (codes, expected_codes))
        differ = a != b
        assert differ.float().mean() < 0.02
        midpoint = (a[differ] + b[differ]).abs() / 2
        assert (a[differ].abs() > b[differ].abs()).all() and (midpoint > 0).all()
    else:
        assert torch.equal(codes, expected_codes)
    packed = Packed(expected_codes, expected_scales, fmt, numel, dtype)
    torch.testing.assert_close(
        kernels.dequantize_blocks(packed), dequantize_blocks_reference(packed), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_gated_backward_is_autograd_of_the_unpacked_inputs(kernels, name, kind):
    torch.manual_seed(0)
    fmt = PackFormat(name=name)
    gate, up, dh = torch.randn(3, 2500).unbind()
    packed = [Packed(*quantize_blocks_reference(x, fmt), fmt, 2500, x.dtype) for x in (gate, up)]
    dgate, dup, h = kernels.gated_backward(dh.contiguous(), *packed, kind)
    g, u = (dequantize_blocks_reference(p).double().requires_grad_() for p in packed)
    expected = (F.silu(g) if kind == "silu" else F.gelu(g)) * u
    expected.backward(dh.double())
    for ours, exact in ((dgate, g.grad), (dup, u.grad), (h, expected.detach())):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu_the_bytes_equal_the_reference(name):
    from foundry_fp8.kernels import activations

    fmt = PackFormat(name=name)
    x = case(2500, torch.bfloat16).cuda()
    for ours, reference in zip(activations.quantize_blocks(x, fmt), quantize_blocks_reference(x, fmt), strict=True):
        assert torch.equal(ours, reference)
