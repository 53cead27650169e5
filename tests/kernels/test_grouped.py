"""Casts of all experts' rows against their torch expressions, bit for bit."""

import pytest
import torch

from foundry_fp8.backends.native.grouped import Rows
from foundry_fp8.kernels.grouped import (
    group_amax,
    group_amax_reference,
    quantize_groups,
    quantize_groups_reference,
)
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import scale_from_amax

SIZES = ([16, 32, 48], [5, 0, 70, 1], [0, 0, 3], [130, 0])


def ranged(rows, columns, dtype, device):
    x = torch.randn(rows, columns) * torch.exp2(torch.randint(-6, 7, (rows, 1)).float())
    return x.to(device, dtype)


def same(ours, theirs):
    assert ours.dtype == theirs.dtype
    return torch.equal(ours.float().nan_to_num(nan=1e9), theirs.float().nan_to_num(nan=1e9))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_bits_are_the_reference_s(sizes, dtype, fmt, device):
    x = ranged(sum(sizes), 144, dtype, device)
    x[0, 0], x[-1, 5] = float("nan"), 0.0
    rows = Rows.of(sizes, torch.device(device))
    maps = rows.group, rows.source
    amax = group_amax(x, *maps, len(sizes))
    assert torch.equal(amax, group_amax_reference(x, *maps, len(sizes)))
    scale = scale_from_amax(amax, fmt)
    ours = quantize_groups(x, scale, *maps, fmt, rows=True, columns=True)
    theirs = quantize_groups_reference(x, scale, *maps, fmt, rows=True, columns=True)
    assert same(ours[0], theirs[0]) and same(ours[1], theirs[1])
    alone = quantize_groups(x, scale, *maps, fmt, rows=False, columns=True)
    assert alone[0] is None and same(alone[1], ours[1])


def test_rows_of_a_matrix_that_is_part_of_another(device):
    """Experts of equal size, without padding between them, and rows far apart in memory."""
    whole = ranged(64, 96, torch.bfloat16, device)
    x, group = whole[:, 16:80], torch.arange(64, device=device, dtype=torch.int32) // 16
    amax = group_amax(x, group, None, 4)
    assert torch.equal(amax, x.float().abs().view(4, -1).amax(1))
    scale = scale_from_amax(amax, E4M3)
    ours = quantize_groups(x, scale, group, None, E4M3, rows=True, columns=True)
    theirs = quantize_groups_reference(x, scale, group, None, E4M3, rows=True, columns=True)
    assert all(same(*pair) for pair in zip(ours, theirs, strict=True))


def test_an_infinite_row_shows_in_its_expert_alone(device):
    x = ranged(32, 32, torch.bfloat16, device)
    x[20, 3] = float("inf")
    group = torch.arange(32, device=device, dtype=torch.int32) // 16
    amax = group_amax(x, group, None, 2)
    assert torch.isfinite(amax[0]) and torch.isinf(amax[1])
