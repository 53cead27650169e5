"""The Triton kernels against the torch reference: interpreted, or on the GPU if there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foundry_fp8.activations.compression.packing import dequantize_blocks_reference, quantize_blocks_reference
from foundry_fp8.kernels import packing as kernels
from foundry_fp8.numerics.packed import FORMATS, Packed, PackFormat
from tests.kernels.interpreter import only_from


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
@pytest.mark.parametrize("nonzero", [False, True])
def test_bytes_equal_the_reference(nonzero, name, numel, dtype, device):
    fmt = PackFormat(name=name)
    x = case(numel, dtype).to(device)
    if nonzero:
        x = x.relu()
    codes, scales = kernels.quantize_blocks(x, fmt, nonzero=nonzero)
    expected_codes, expected_scales = quantize_blocks_reference(x, fmt, nonzero=nonzero)
    assert torch.equal(scales, expected_scales)
    if (
        name == "e4m3"
    ):  # by value: the sign of a zero and the codes of a block that is NaN by its scale do not matter
        ours, theirs = (
            dequantize_blocks_reference(Packed(c, scales, fmt, numel, torch.float32))
            for c in (codes, expected_codes)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    else:
        assert torch.equal(codes, expected_codes)
    packed = Packed(expected_codes, expected_scales, fmt, numel, dtype)
    torch.testing.assert_close(
        kernels.dequantize_blocks(packed), dequantize_blocks_reference(packed), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_gated_backward_is_autograd_of_the_unpacked_inputs(name, kind, device):
    torch.manual_seed(0)
    fmt = PackFormat(name=name)
    gate, up, dh = torch.randn(3, 2500, device=device).unbind()
    packed = [Packed(*quantize_blocks_reference(x, fmt), fmt, 2500, x.dtype) for x in (gate, up)]
    dgate, dup, h = kernels.gated_backward(dh.contiguous(), *packed, kind)
    g, u = (dequantize_blocks_reference(p).double().requires_grad_() for p in packed)
    expected = (F.silu(g) if kind == "silu" else F.gelu(g)) * u
    expected.backward(dh.double())
    for ours, exact in ((dgate, g.grad), (dup, u.grad), (h, expected.detach())):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)


def test_offsets_past_2_to_the_31(device, monkeypatch):
    """Of memory that is asked for and, but for its end, never touched; only the last programs run."""
    fmt = PackFormat(name="int8")
    numel = 2**31 + 3 * kernels.ROWS * fmt.block
    first = 2**31 // (kernels.ROWS * fmt.block)
    only_from(monkeypatch, first, kernels, "_quantize", "_dequantize", "_gated_backward")
    flat = torch.empty(numel, dtype=torch.bfloat16)
    flat[2**31 :] = torch.randn(numel - 2**31)
    codes, scales = kernels.quantize_blocks(flat, fmt)
    tail = first * kernels.ROWS
    expected_codes, expected_scales = quantize_blocks_reference(flat[2**31 :].clone(), fmt)
    assert torch.equal(codes[tail:], expected_codes)
    assert torch.equal(scales[tail * 4 :], expected_scales)
    packed = Packed(codes, scales, fmt, numel, torch.bfloat16)
    end = Packed(expected_codes, expected_scales, fmt, numel - 2**31, torch.bfloat16)
    assert torch.equal(kernels.dequantize_blocks(packed)[2**31 :], dequantize_blocks_reference(end))

    found = [x[2**31 :].clone() for x in kernels.gated_backward(flat, packed, packed, "silu")]
    g, u = (dequantize_blocks_reference(end).double().requires_grad_() for _ in range(2))
    h = F.silu(g) * u
    h.backward(flat[2**31 :].double())
    for ours, exact in zip(found, (g.grad, u.grad, h.detach()), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2.0**-8, atol=1e-6)
