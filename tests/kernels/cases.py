"""Inputs and comparisons of the kernel tests."""

import pytest
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_DTYPES = (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.full))
"""For products of many cases; float16 differs from bfloat16 in one rounding."""
HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
# Whole tiles, ragged in either dimension, less than one 16-byte word, one element, nothing.
SHAPES = ((128, 256), (200, 144), (37, 130), (5, 3), (1, 1), (0, 48), (48, 0))


def spread(rows, columns, dtype, device, seed=0):
    """Gaussian values whose range differs in every row and column, with zeros, exact ties and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).float())
    x *= torch.exp2(torch.randint(-3, 4, (1, columns), generator=generator).float())
    flat = x.view(-1)
    flat[::7] = 0.0
    flat[3::11] = (
        flat[3::11] * 8
    ).round() / 8 + 0.0625  # halfway between E4M3 neighbours around 1, where scale is 2**k
    flat[5::13] *= 2.0**-20
    return x.to(dtype).to(device)


def poisoned(x, *values):
    """``x`` with ``values`` (inf, nan) spread over it."""
    x = x.clone()
    for index, value in enumerate(values):
        x.view(-1)[(index * 7919 + 13) % x.numel()] = value
    return x


def assert_same_bits(ours, reference, what):
    """Equal shapes, dtypes and bits; any NaN equals any other. Names the first element that differs."""
    if reference is None:
        assert ours is None, f"{what}: made, but not asked for"
        return
    assert ours.dtype == reference.dtype and ours.shape == reference.shape, (
        f"{what}: {ours.dtype} {tuple(ours.shape)}, reference {reference.dtype} {tuple(reference.shape)}"
    )
    a, b = ours.detach().cpu().float(), reference.detach().cpu().float()
    same = (a == b) & (torch.signbit(a) == torch.signbit(b)) | (a.isnan() & b.isnan())
    if not bool(same.all()):
        where = tuple(int(i) for i in (~same).nonzero()[0])
        raise AssertionError(f"{what}{where}: {a[where]}, reference {b[where]}; {int((~same).sum())} differ")
