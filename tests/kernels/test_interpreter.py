"""What ``tests/kernels/interpreter.py`` repairs, and that it still needs repairing."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from foundry_fp8.numerics.formats import E4M3, E5M2, cast
from tests.kernels.interpreter import (
    convert_float,
    interpreters_own_convert_float,
    interpreters_own_maxnumf,
    maxnumf,
)

CASES = ((E4M3, tl.float8e4nv), (E5M2, tl.float8e5))


def bits_by(routine, values, target):
    return torch.from_numpy(
        routine(values.numpy(), tl.float32, target, interpreter._ir.ROUNDING_MODE.RTNE).copy()
    )


@pytest.mark.parametrize(("fmt", "target"), CASES, ids=["e4m3", "e5m2"])
def test_repaired_cast_is_the_reference_cast(fmt, target):
    """Every float8 value, every midpoint between neighbours, and both sides of each midpoint."""
    grid = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    grid = grid[torch.isfinite(grid)].sort().values
    middle = (grid[1:] + grid[:-1]) / 2
    up, down = (torch.from_numpy(np.nextafter(middle.numpy(), np.float32(end))) for end in (np.inf, -np.inf))
    values = torch.cat([grid, middle, up, down])
    assert torch.equal(bits_by(convert_float, values, target), cast(values, fmt).view(torch.uint8))


@pytest.mark.parametrize(("fmt", "target"), CASES, ids=["e4m3", "e5m2"])
def test_triton_still_rounds_ties_away_from_zero(fmt, target):
    """Fails when Triton's interpreter casts as the hardware does: then delete the repair."""
    tie = torch.tensor([1.0 + fmt.min_subnormal / fmt.min_normal / 2])
    ours, exact = bits_by(interpreters_own_convert_float, tie, target), cast(tie, fmt).view(torch.uint8)
    assert int(ours) == int(exact) + 1


def test_triton_still_loses_the_carry_and_nan():
    values = torch.tensor([1.99, float("nan")])
    by_triton = (
        bits_by(interpreters_own_convert_float, values, tl.float8e4nv).view(torch.float8_e4m3fn).float()
    )
    assert by_triton[0] != 2.0
    assert not by_triton[1].isnan()


TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])


def test_triton_before_39_hands_nan_on_from_a_maximum():
    builder = interpreter.InterpreterBuilder()
    nan, one = (
        interpreter.TensorHandle(np.full(4, value, np.float32), tl.float32) for value in (np.nan, 1.0)
    )
    assert (maxnumf(builder, nan, one).data == 1).all()
    handed_on = np.isnan(interpreters_own_maxnumf(builder, nan, one).data)
    assert not handed_on.any() if TRITON >= (3, 9) else handed_on.all()
