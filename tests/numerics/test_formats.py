import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foundry_fp8.numerics.formats import E4M3, E5M2, cast, e8m0_decode, e8m0_round_up

NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_cast_of_every_bf16_equals_ml_dtypes_where_it_does_not_saturate(fmt):
    x = every_bf16().float()
    inside = x.abs() <= fmt.max
    ours = cast(x[inside], fmt).view(torch.uint8).numpy()
    theirs = x[inside].numpy().astype(NUMPY[fmt.name]).view(np.uint8)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_cast_saturates_everything_beyond_and_keeps_nan(fmt):
    x = every_bf16().float()
    beyond = x.abs() > fmt.max  # Inf included
    result = cast(x[beyond], fmt).float()
    torch.testing.assert_close(result, torch.sign(x[beyond]) * fmt.max, rtol=0, atol=0)
    assert cast(x[torch.isnan(x)], fmt).float().isnan().all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_cast_is_nearest_ties_to_even_in_float64(fmt, value):
    grid = np.arange(256, dtype=np.uint8).view(NUMPY[fmt.name]).astype(np.float64)
    codes = np.arange(256)[np.isfinite(grid)]
    grid = grid[np.isfinite(grid)]
    clipped = np.clip(np.float64(value), -fmt.max, fmt.max)
    distance = np.abs(grid - clipped)
    nearest = codes[distance == distance.min()]
    code = int(cast(torch.tensor(value), fmt).view(torch.uint8))
    assert code in nearest
    if len({int(c) & 0x7F for c in nearest}) == 2:  # a tie: the even code wins
        assert code % 2 == 0


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_limits_are_those_of_the_dtype(fmt):
    info = torch.finfo(fmt.dtype)
    smallest = torch.tensor(1, dtype=torch.uint8).view(fmt.dtype).float()
    assert (fmt.max, fmt.min_normal, fmt.min_subnormal) == (info.max, info.tiny, float(smallest))


def reference_e8m0(value: np.float32) -> int:
    """The smallest power of two that is at least ``value``, by exact arithmetic."""
    if np.isnan(value):
        return 255
    if np.isinf(value):
        return 254
    for code in range(255):
        if float(value) <= 2.0 ** (code - 127):
            return code
    return 254  # beyond 2**127


def test_e8m0_rounds_every_positive_bf16_up_to_a_power_of_two():
    x = every_bf16().float()
    x = x[~(x < 0) & ~torch.isnan(x)][::7]
    ours = e8m0_round_up(x).tolist()
    assert ours == [reference_e8m0(v) for v in x.numpy()]


def test_e8m0_rounds_the_next_float32_above_every_power_of_two_up():
    powers = torch.exp2(torch.arange(-126, 127).float())
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert torch.equal(e8m0_round_up(above), e8m0_round_up(powers) + 1)


@given(value=st.floats(min_value=0, width=32))
def test_e8m0_rounds_up_any_float32(value):
    assert int(e8m0_round_up(torch.tensor(value))) == reference_e8m0(np.float32(value))


def test_e8m0_nan_and_decode_match_ml_dtypes():
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    theirs = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(e8m0_decode(codes).numpy(), theirs)
    assert int(e8m0_round_up(torch.tensor(torch.nan))) == 255
