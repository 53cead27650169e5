"""Out of FP8, against the torch expression: the same bits."""

import pytest
import torch

from foundry_fp8.kernels.dequantize import ELEMENTS, dequantize
from foundry_fp8.numerics.formats import E4M3, E5M2
from tests.kernels.cases import DTYPES

SIZES = {1: [(2, 33, 5)], 2: [(ELEMENTS,), (1, 7)], 3: [(ELEMENTS + 1,), (2, ELEMENTS), (3,)]}


def of(value, device):
    return torch.tensor(value, dtype=torch.float32, device=device)


def reference(parts, scale, amaxes, dtype, *, slot, other, scale_inv):
    """The torch expression that the kernel computes, bit for bit."""
    inverses = [scale.reciprocal().masked_fill(torch.isinf(amax), torch.nan) for amax in amaxes]
    for place, amax in [*((slot, amax) for amax in amaxes), (other[1], other[0])]:
        torch.fmax(place, amax, out=place)
    scale_inv.copy_(inverses[0])
    return [(part.float() * inverse).to(dtype) for part, inverse in zip(parts, inverses, strict=True)]


@pytest.mark.parametrize("parts", SIZES)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_amaxes_and_reciprocals_equal_the_reference(parts, fmt, dtype, device):
    given = [
        torch.arange(torch.Size(shape).numel(), dtype=torch.uint8).view(fmt.dtype).view(shape).to(device)
        for shape in SIZES[parts]
    ]  # every code, NaN and Inf too
    amaxes = [of(value, device) for value in (3.0, torch.inf, torch.nan)[:parts]]
    found = []
    for function in (dequantize, reference):
        slot, other, inverse = of(2.0, device), of(7.0, device), of(0.0, device)
        out = function(
            given,
            of(13.7, device),
            amaxes,
            dtype,
            slot=slot,
            other=(of(8.0, device), other),
            scale_inv=inverse,
        )
        found.append([*out, slot, other, inverse])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(nan=1.0), theirs.nan_to_num(nan=1.0))
    assert float(found[0][-2]) == 8.0 and float(found[0][-3]) == (3.0 if parts == 1 else torch.inf)


def test_slots_are_left_where_none_is_given(device):
    (out,) = dequantize(
        [of([1.0, -2.0], device).to(E4M3.dtype)], of(4.0, device), [of(9.0, device)], torch.float32
    )
    assert out.tolist() == [0.25, -0.5]
