"""Outputs that are computed again in backward: which they are, that they are the same bits, and that they do not stay."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foundry_fp8.activations.compression.fused_activation import packed_activation
from foundry_fp8.activations.compression.fused_norm import packed_norm
from foundry_fp8.activations.compression.recompute import recomputation
from foundry_fp8.activations.compression.saved import Compressor
from foundry_fp8.numerics.packed import PackFormat
from tests.activations.compression.inside import inside

SEED = torch.Generator().manual_seed(0)
X = torch.randn(4, 16, 64, generator=SEED)


def normed(x, weight, fmt=None):
    def norm(x):
        return F.rms_norm(x, (64,), weight, 1e-5)

    return packed_norm(x, weight, None, norm, eps=1e-5, centred=False, fmt=fmt)


def gated(x, weight, fmt=None):
    return packed_activation(x * weight, x, F.silu, "silu", fmt)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", [normed, gated])
def test_what_is_reshaped_or_cast_is_computed_again_bit_for_bit(form, autocast):
    weight = torch.rand(64, generator=SEED).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = form(X.clone().requires_grad_(), weight)
    for out in (y, y.view(64, 64), y.bfloat16().unsqueeze(1), y.flatten().to(torch.float64)):
        again = recomputation(out)
        assert again is not None
        assert again().dtype == out.dtype and torch.equal(again(), out)
    assert recomputation(y, exact=True) is not None
    rounded = form(X.clone().requires_grad_(), weight, PackFormat())
    assert recomputation(rounded, exact=True) is None
    again = recomputation(rounded)
    assert again is not None and 0 < (again() - y).norm() / y.norm() < 2e-2


def test_other_views_and_what_was_written_to_are_not():
    weight = torch.ones(64, requires_grad=True)
    y = normed(X, weight)
    for out in (y[1:], y.transpose(0, 1), y[..., ::2], y * 2, X, y.expand(2, -1, -1, -1)):
        assert recomputation(out) is None
    y.mul_(2.0)
    assert recomputation(y) is None


def test_the_output_goes_when_the_norm_s_backward_has_run():
    """Projections that share it make it once; nothing holds it before backward or after the norm's."""
    norm_weight, seen, count = torch.ones(64, requires_grad=True), [], 0
    linears = [nn.Linear(64, 64, bias=False) for _ in range(3)]

    def norm(x):
        nonlocal count
        count += 1
        return F.rms_norm(x, (64,), norm_weight, 1e-5)

    x = X.clone().requires_grad_()

    def function(x):
        y = packed_norm(x, norm_weight, None, norm, eps=1e-5, centred=False, fmt=None)
        return (
            y.grad_fn,
            weakref.ref(y.untyped_storage()),
            sum(linear(y).square().sum() for linear in linears),
        )

    node, kept, loss = inside(Compressor(None, min_numel=1), function, x)
    assert kept() is None and node.output is None and count == 1
    handle = linears[0].weight.register_hook(lambda _: seen.append(node.output is not None))
    weights = [linear.weight for linear in linears]
    ours = torch.autograd.grad(loss, [*weights, x])
    handle.remove()
    assert seen == [True] and node.output is None and count == 2
    y = F.rms_norm(x, (64,), norm_weight, 1e-5)
    plain = torch.autograd.grad(sum(linear(y).square().sum() for linear in linears), [*weights, x])
    for a, b in zip(ours[:3], plain[:3], strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(ours[3], plain[3], rtol=1e-4, atol=1e-5)


def test_a_second_backward_through_a_kept_graph_is_the_same():
    weight, linear = torch.ones(64, requires_grad=True), nn.Linear(64, 8)
    loss = inside(Compressor(None, min_numel=1), lambda x: linear(normed(x, weight)).square().sum(), X)
    step = functools.partial(torch.autograd.grad, loss, [weight, linear.weight], retain_graph=True)
    for a, b in zip(step(), step(), strict=True):
        assert torch.equal(a, b)
