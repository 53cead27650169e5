"""The reference against the formulas of Transformer Engine, written a second time in numpy, element by element."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import (
    amax_of,
    quantize_block,
    quantize_constant,
    quantize_mx,
    quantize_rows,
    quantize_tensor,
    scale_from_amax,
)

F32_MAX = np.finfo(np.float32).max
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


def np_cast(v, fmt):
    dtype = ml_dtypes.float8_e4m3fn if fmt is E4M3 else ml_dtypes.float8_e5m2
    with np.errstate(all="ignore"):
        clipped = np.where(np.isnan(v), v, np.clip(v, -fmt.max, fmt.max)).astype(np.float32)
        return clipped.astype(dtype).view(np.uint8)


def np_amax(v):
    v = np.abs(v[~np.isnan(v)])
    return np.float32(v.max()) if v.size else np.float32(0)


def np_scale(amax, fmt, power_2, value_for_inf=F32_MAX):
    """recipe_common.cuh, compute_scale_from_amax, line by line."""
    if not np.isfinite(amax) or amax == 0:
        return np.float32(1)
    with np.errstate(all="ignore"):
        scale = np.float32(fmt.max) / np.float32(amax)
    if np.isinf(scale):
        scale = np.float32(value_for_inf)
    if power_2:
        scale = np.float32(scale).view(np.uint32) & np.uint32(0xFF800000)
        scale = scale.view(np.float32)
    return np.float32(scale)


INPUTS = {
    "gaussian": lambda: torch.randn(70, 96),
    "wide_range": lambda: torch.randn(70, 96) * torch.exp2(torch.randint(-60, 60, (70, 1)).float()),
    "zeros": lambda: torch.zeros(70, 96),
    "some_zero_blocks": lambda: torch.randn(70, 96) * (torch.arange(70)[:, None] % 3 == 0),
    "bf16_subnormals": lambda: torch.full((70, 96), 2.0**-130) * torch.randint(0, 8, (70, 96)),
    "amax_at_e4m3_max": lambda: torch.rand(70, 96).mul(448).index_fill(1, torch.tensor([3]), 448.0),
    "amax_at_e5m2_max": lambda: torch.rand(70, 96).mul(57344).index_fill(1, torch.tensor([3]), 57344.0),
    "huge": lambda: torch.randn(70, 96) * 1e38,
    "inf": lambda: torch.randn(70, 96).index_fill(0, torch.tensor([5]), torch.inf),
    "minus_inf_and_nan": lambda: (
        torch.randn(70, 96)
        .index_fill(0, torch.tensor([2]), -torch.inf)
        .index_fill(1, torch.tensor([9]), torch.nan)
    ),
    "all_nan": lambda: torch.full((70, 96), torch.nan),
}
every_input = pytest.mark.parametrize("kind", INPUTS)


def bf16(kind):
    return INPUTS[kind]().bfloat16()


def check_bytes(ours, expected_codes):
    nan = np.isin(expected_codes & 0x7F, [0x7F, 0x7D, 0x7E])  # NaN has several bytes; any of them is NaN
    codes = ours.view(torch.uint8).numpy()
    np.testing.assert_array_equal(codes[~nan], expected_codes[~nan])
    assert torch.isnan(ours.float()).numpy()[nan & np.isnan(ours.float().numpy())].all()


@FORMATS
@every_input
@pytest.mark.parametrize("power_2", [False, True])
def test_current_scaling_is_bit_exact(kind, fmt, power_2):
    x = bf16(kind)
    amax = amax_of(x)
    q = quantize_tensor(x, scale_from_amax(amax, fmt, power_2=power_2), fmt, amax)
    v = x.float().numpy()
    scale = np_scale(np_amax(v), fmt, power_2)
    assert q.scale_inv.item() == np.float32(1) / scale
    with np.errstate(all="ignore"):
        check_bytes(q.data, np_cast(v * scale, fmt))


@FORMATS
@every_input
@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_constant_scaling_is_bit_exact(kind, fmt, scale):
    x = bf16(kind)
    q = quantize_constant(x, scale, fmt)
    v = x.float().numpy()
    assert q.scale_inv.item() == 1 / scale
    with np.errstate(all="ignore"):
        check_bytes(q.data, np_cast(np.where(np.isinf(v), np.nan, v * np.float32(scale)), fmt))


@FORMATS
@every_input
@pytest.mark.parametrize(
    ("power_2", "block"),
    [
        (False, (1, 32)),
        (True, (32, 32)),
        *(
            pytest.param(power_2, block, marks=pytest.mark.full)
            for power_2, block in ((True, (1, 32)), (False, (32, 32)), (False, (32, 1)), (True, (32, 1)))
        ),
    ],
    ids=str,
)
def test_block_scaling_is_bit_exact_with_ragged_edges(kind, fmt, block, power_2):
    x = bf16(kind)[:, :90]  # 70 and 90 are multiples of neither 32 nor 128
    q = quantize_block(x, block, fmt, power_2=power_2)
    v = x.float().numpy()
    for i in range(q.scale_inv.shape[0]):
        for j in range(q.scale_inv.shape[1]):
            rows = slice(i * block[0], (i + 1) * block[0])
            columns = slice(j * block[1], (j + 1) * block[1])
            scale = np_scale(np_amax(v[rows, columns]), fmt, power_2, torch.finfo(torch.bfloat16).max)
            assert q.scale_inv[i, j].item() == np.float32(1) / scale
            with np.errstate(all="ignore"):
                check_bytes(q.data[rows, columns], np_cast(v[rows, columns] * scale, fmt))


@FORMATS
@every_input
@pytest.mark.parametrize("block", [(1, 32), (32, 1)], ids=str)
def test_mxfp8_is_bit_exact(kind, fmt, block):
    x = bf16(kind)
    q = quantize_mx(x, block, fmt)
    v = x.float().numpy()
    for i in range(q.scale_inv.shape[0]):
        for j in range(q.scale_inv.shape[1]):
            piece = v[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            amax = np_amax(piece)
            if np.isinf(amax):
                exponent = 127
            elif amax == 0:
                exponent = -127
            else:  # exact: ceil(log2(amax / max)) through frexp in float64, floored at the format's least exponent
                m, e = np.frexp(np.float64(amax) / fmt.max)
                exponent = max(int(e) - (m == 0.5), -127)
            assert q.scale_inv[i, j].item() == 2.0**exponent
            with np.errstate(all="ignore"):
                expected = np_cast((piece.astype(np.float64) * 2.0**-exponent).astype(np.float32), fmt)
            check_bytes(
                q.data[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]], expected
            )


@pytest.mark.parametrize(
    "quantize",
    [
        lambda x: quantize_tensor(x, scale_from_amax(amax_of(x), E4M3), E4M3),
        lambda x: quantize_block(x, (1, 128), E4M3),
        lambda x: quantize_mx(x, (1, 32), E4M3),
        lambda x: quantize_constant(x, 1.0, E4M3),
    ],
    ids=["current", "block", "mxfp8", "unit"],
)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_is_not_finite_when_dequantised(quantize, value):
    x = torch.randn(4, 256).bfloat16()
    x[2, 200] = value
    back = quantize(x).dequantize()
    assert not torch.isfinite(back[2, 200])
    if quantize(x).block is not None:
        assert torch.isfinite(back[2, :128]).all() and torch.isfinite(back[:2]).all()


@FORMATS
@settings(max_examples=60, deadline=None)
@given(
    x=hnp.arrays(np.float32, (3, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    exponent=st.integers(-20, 20),
)
def test_power_of_two_scales_commute_with_powers_of_two(fmt, x, exponent):
    x = torch.from_numpy(x)
    x[x.abs() < 1e-20] = 0
    shifted = x * 2.0**exponent
    for quantize in (
        lambda t: quantize_mx(t, (1, 32), fmt),
        lambda t: quantize_block(t, (1, 64), fmt, power_2=True),
    ):
        torch.testing.assert_close(
            quantize(shifted).dequantize(), quantize(x).dequantize() * 2.0**exponent, rtol=0, atol=0
        )


@FORMATS
def test_round_trip_error_is_within_half_an_ulp(fmt):
    x = torch.randn(64, 256)
    q = quantize_tensor(x, scale_from_amax(amax_of(x), fmt), fmt)
    ulp_at_one = 2.0**-3 if fmt is E4M3 else 2.0**-2  # spacing of the mantissa relative to the binade's start
    normal = (x / q.scale_inv).abs() >= fmt.min_normal
    error = (q.dequantize() - x).abs()[normal] / x.abs()[normal]
    assert error.max() <= ulp_at_one / 2 + 1e-6


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_a_tensor_without_elements_has_amax_0_and_scale_1(shape):
    x = torch.empty(shape)
    assert amax_of(x).shape == () and amax_of(x) == 0 and scale_from_amax(amax_of(x), E4M3) == 1


@FORMATS
@every_input
@pytest.mark.parametrize(
    ("power_2", "along"),
    [
        (False, 1),
        (True, 0),
        pytest.param(False, 0, marks=pytest.mark.full),
        pytest.param(True, 1, marks=pytest.mark.full),
    ],
)
def test_each_row_is_quantised_like_a_tensor_of_its_own(kind, fmt, along, power_2):
    x = bf16(kind)
    ours = quantize_rows(x, fmt, along=along, power_2=power_2)
    ours, x = (ours, x) if along == 1 else (ours.t(), x.t())
    assert ours.scale_inv.shape == (len(x), 1) and ours.block == (1, x.shape[1])
    for row, values in enumerate(x.float().numpy()):
        amax = np_amax(values)
        scale = np_scale(amax, fmt, power_2)
        with np.errstate(all="ignore"):
            check_bytes(ours.data[row], np_cast(values * scale, fmt))
        assert ours.scale_inv[row].item() == np.float32(1) / scale and ours.amax[row].item() == amax
        assert ours.gemm_scale[row].isnan().item() == np.isinf(amax)
