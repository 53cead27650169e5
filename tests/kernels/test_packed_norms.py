"""The packed norm's kernels against the torch path: interpreted, or on the GPU if there is one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foundry_fp8.activations.compression.packing import dequantize_blocks_reference, quantize_blocks_reference
from foundry_fp8.kernels.norms import norm_backward, pack_norm_input
from foundry_fp8.numerics.packed import Packed, PackFormat
from tests.kernels.cases import DTYPES, HALF_ULP, assert_same_bits, poisoned, spread
from tests.kernels.definitions import norm_backward_reference, norm_statistics_reference

# Whole blocks, one block, three blocks of eight, blocks that cross rows, one row.
SHAPES = ((40, 256), (5, 128), (6, 384), (37, 130), (7, 50), (1, 64), (0, 64))
both_formats = pytest.mark.parametrize("name", ["int8", "e4m3"])
both_norms = pytest.mark.parametrize("centered", [False, True], ids=["rmsnorm", "layernorm"])


def packed_by_reference(x, fmt):
    return Packed(*quantize_blocks_reference(x.reshape(-1), fmt), fmt, x.numel(), x.dtype)


def assert_packed_alike(x, fmt, centered):
    ours, mean, rstd = pack_norm_input(x, fmt, 1e-5, centered=centered)
    reference = packed_by_reference(x, fmt)
    expected_mean, expected_rstd = norm_statistics_reference(x.double(), 1e-5, centered=centered)
    assert torch.equal(ours.scale_inv, reference.scale_inv)
    assert_same_bits(dequantize_blocks_reference(ours), dequantize_blocks_reference(reference), "values")
    torch.testing.assert_close(rstd.double(), expected_rstd.double(), rtol=1e-5, atol=0, equal_nan=True)
    assert (mean is None) == (not centered)
    if mean is not None:
        scale = x.double().abs().amax(1) if x.numel() else 1.0
        error = (mean.double() - expected_mean.double()) / scale
        assert bool((error.abs() < 1e-6)[error.isfinite()].all())
        assert torch.equal(mean.isfinite(), expected_mean.isfinite())


@both_formats
@both_norms
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_pass_gives_the_packed_bytes_and_the_statistics(shape, centered, name, device):
    fmt = PackFormat(name=name).within(shape[1])
    assert_packed_alike(spread(*shape, torch.float32, device) + 0.5, fmt, centered)


@both_formats
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_what_is_not_finite(dtype, name, device):
    x = poisoned(torch.randn(20, 256), float("nan"), float("inf"), -float("inf")).to(dtype).to(device)
    assert_packed_alike(x, PackFormat(name=name), centered=True)


@both_formats
@pytest.mark.parametrize(
    ("dtype", "centered"),
    [
        pytest.param(
            dtype,
            centered,
            marks=()
            if (dtype, centered) in ((torch.float32, True), (torch.bfloat16, False))
            else pytest.mark.full,
            id=f"{dtype}-{'layernorm' if centered else 'rmsnorm'}",
        )
        for dtype in DTYPES
        for centered in (False, True)
    ],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_reads_the_codes(shape, dtype, centered, name, device):
    """Against the unpacked input's gradients by the torch expression; one rounding to the dtype may fall either way."""
    torch.manual_seed(0)
    x, dy = (torch.randn(*shape, device=device).mul_(2).add_(centered).to(dtype) for _ in range(2))
    weight = torch.rand(shape[1], device=device) + 0.5
    packed = packed_by_reference(x, PackFormat(name=name).within(shape[1]))
    mean, rstd = norm_statistics_reference(x, 1e-5, centered=centered)
    ours = norm_backward(dy, packed, rstd, weight, mean=mean)
    unpacked = dequantize_blocks_reference(packed).view(shape)
    expected = norm_backward_reference(dy, unpacked, rstd, weight, mean=mean)
    assert ours[0].dtype == dtype
    torch.testing.assert_close(
        ours[0], expected[0], rtol=4 * HALF_ULP[dtype] + 1e-5, atol=2e-5 + HALF_ULP[dtype]
    )
    for a, b in zip(ours[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    again = norm_backward(dy, packed, rstd, weight, mean=mean)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@both_norms
def test_forward_and_backward_together_are_near_float64_autograd(centered, device):
    torch.manual_seed(0)
    x, dy = torch.randn(2, 37, 160, device=device)
    weight, bias = torch.rand(160, device=device) + 0.5, torch.zeros(160, device=device)
    packed, mean, rstd = pack_norm_input(x, PackFormat().within(160), 1e-5, centered=centered)
    ours = norm_backward(dy, packed, rstd, weight, mean=mean)
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = (
        F.layer_norm(exact[0], (160,), *exact[1:], 1e-5)
        if centered
        else F.rms_norm(exact[0], (160,), exact[1], 1e-5)
    )
    y.backward(dy.double())
    for a, b in zip(ours, exact, strict=True):
        if b.grad is not None:
            assert float((a.double() - b.grad).norm() / b.grad.norm()) < 1e-2


def test_a_poisoned_block_poisons_its_row_alone(device):
    x, dy = torch.randn(2, 8, 256, device=device)
    x = poisoned(x, float("nan"))  # element 13 of row 0
    packed, _, rstd = pack_norm_input(x, PackFormat(), 1e-5, centered=False)
    dx, dweight, _ = norm_backward(dy, packed, rstd, None)
    assert bool(dx[0].isnan().all()) and bool(dx[1:].isfinite().all())
    assert bool(dweight.isnan().any())


def test_rows_too_wide_are_refused(device):
    with pytest.raises(ValueError, match="65537 features"):
        pack_norm_input(torch.zeros(1, 65537, device=device), PackFormat(), 1e-5, centered=False)
