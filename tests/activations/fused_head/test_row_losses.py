"""Losses of rows by chunks: torch's values, gradients within the stated rounding of float64, NaN where torch has it, no whole logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foundry_fp8.activations.fused_head.row_losses import HeadCall, row_losses
from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.planning.memory.live_bytes import LiveBytes

N, D, V, CHUNK = 22, 16, 40, 5


def inputs(dtype=torch.float32, seed=0, n=N):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(D, V, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    rows = torch.randn(n, D, generator=generator).to(dtype)
    targets = torch.randint(V, (n,), generator=generator)
    targets[[3, 4, n - 1]] = -100
    return head, rows, targets


def fused(head, rows, targets, chunk=CHUNK, logits=None):
    return row_losses(HeadCall(head, logits or head.forward, rows), rows, targets, chunk)[0]


def whole(head, rows, targets):
    return F.cross_entropy(head(rows), targets, reduction="none")


def gradients(function, head, rows, targets, factors):
    rows = rows.detach().requires_grad_()
    losses = function(head, rows, targets)
    found = torch.autograd.grad(losses, [rows, *head.parameters()], factors.to(losses.dtype))
    return losses.detach(), found


@pytest.mark.parametrize("chunk", [1, CHUNK, N, 2 * N])
def test_losses_and_gradients_are_those_of_float64_for_any_factor_of_a_row(chunk):
    head, rows, targets = inputs()
    factors = torch.linspace(-1, 2, N)
    losses, found = gradients(lambda *a: fused(*a, chunk), head, rows, targets, factors)
    exact = inputs()[0].double()
    losses_, found_ = gradients(whole, exact, rows.double(), targets, factors)
    torch.testing.assert_close(losses.double(), losses_, rtol=1e-5, atol=1e-6)
    for got, wanted in zip(found, found_, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)


def test_float64_is_summed_in_float64():
    head, rows, targets = inputs(torch.float64)
    factors = torch.linspace(-1, 2, N)
    losses, found = gradients(fused, head, rows, targets, factors)
    losses_, found_ = gradients(whole, head, rows, targets, factors)
    for got, wanted in zip([losses, *found], [losses_, *found_], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_gradient_of_the_weight_is_within_its_bound(dtype):
    """u |dW_c| for each chunk and u |dW| at the end, and float32's for the additions inside; dlogits as autograd rounds them."""
    head, rows, targets = inputs(dtype, n=400)
    factors = torch.linspace(-1, 2, 400)
    _, (_, got, _) = gradients(lambda *a: fused(*a, 8), head, rows, targets, factors)
    u = torch.finfo(dtype).eps / 2
    total, allowed = torch.zeros(V, D).double(), torch.zeros(V, D).double()
    for start in range(0, 400, 8):
        some = slice(start, start + 8)
        x = head(rows[some]).detach().float().requires_grad_()
        F.cross_entropy(x, targets[some], reduction="none").backward(factors[some])
        dx, h = x.grad.to(dtype).double(), rows[some].double()
        total += dx.T @ h
        allowed += u * (dx.T @ h).abs() + 2.0**-20 * (dx.abs().T @ h.abs())
    allowed += u * total.abs() + 1e-6
    error = (got.double() - total).abs()
    assert (error <= 1.01 * allowed).all()
    # Sums in the dtype of the weight would not be: they lose what 50 chunks add to a large sum.
    low = torch.zeros(V, D, dtype=dtype)
    for start in range(0, 400, 8):
        some = slice(start, start + 8)
        x = head(rows[some]).detach().float().requires_grad_()
        F.cross_entropy(x, targets[some], reduction="none").backward(factors[some])
        low += x.grad.to(dtype).T @ rows[some]
    assert error.norm() < 0.6 * (low.double() - total).norm()


def test_under_autocast_the_head_runs_in_it_again_and_nothing_stays_in_its_cache():
    head, rows, targets = inputs()
    weight = head.weight
    with torch.autocast("cpu", torch.bfloat16):
        ones = fused(head, rows.requires_grad_(), targets)
        wanted = whole(
            head, rows, targets
        )  # after it: a cast made without a graph would leave the weight without a gradient
    assert torch.equal(ones, wanted)
    got = torch.autograd.grad(ones.sum(), [rows, weight])
    for a, b in zip(got, torch.autograd.grad(wanted.sum(), [rows, weight]), strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert (a - b).norm() < 2.0**-7 * b.norm()


def test_what_stays_still_has_no_gradient():
    head, rows, targets = inputs()
    head.requires_grad_(False)
    rows.requires_grad_()
    fused(head, rows, targets).sum().backward()
    assert head.weight.grad is None
    (wanted,) = torch.autograd.grad(whole(head, rows, targets).sum(), rows)
    torch.testing.assert_close(rows.grad, wanted)
    head.requires_grad_(True)
    fused(head, rows.detach(), targets).sum().backward()
    (wanted,) = torch.autograd.grad(whole(head, rows, targets).sum(), head.weight)
    torch.testing.assert_close(head.weight.grad, wanted)
    with torch.no_grad():
        assert torch.allclose(fused(head, rows, targets), whole(head, rows, targets))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_stay_where_torch_has_them(bad):
    head, rows, targets = inputs()
    rows[3, 0] = rows[7, 1] = bad  # of these the first is ignored
    factors = torch.ones(N)
    losses, found = gradients(fused, head, rows, targets, factors)
    losses_, found_ = gradients(whole, head, rows, targets, factors)
    assert losses.isnan().any()
    for got, wanted in zip([losses, *found], [losses_, *found_], strict=True):
        assert torch.equal(got.isfinite(), wanted.isfinite())


def test_dropout_inside_the_head_draws_the_same_again():
    head, rows, targets = inputs()
    layer = nn.Sequential(nn.Dropout(0.5), head)
    rows.requires_grad_()
    torch.manual_seed(5)
    losses = fused(layer, rows, targets)
    torch.randn(3)
    before = torch.get_rng_state()
    got = torch.autograd.grad(losses.sum(), [rows, head.weight])
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(5)
    parts = [whole(layer, rows[i : i + CHUNK], targets[i : i + CHUNK]) for i in range(0, N, CHUNK)]
    assert torch.equal(losses, torch.cat(parts))
    wanted = torch.autograd.grad(torch.cat(parts).sum(), [rows, head.weight])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


class Largest(TorchDispatchMode):
    """Elements of the largest result, but for gradients of the weight."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_iter(out) if isinstance(x, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_logits_are_never_whole():
    n, words, width = 512, 2048, 32
    head, rows, targets = (
        nn.Linear(width, words, bias=False),
        torch.randn(n, width),
        torch.randint(words, (n,)),
    )

    def step(function):
        with Largest() as largest, LiveBytes() as meter:
            function(head, rows, targets).mean().backward()
        return largest.elements, meter.peak

    largest, peak = step(lambda *a: fused(*a, 16))
    whole_largest, whole_peak = step(whole)
    assert whole_largest == n * words and largest == words * width
    chunk, weight, hidden = 16 * words * 4, words * width * 4, n * width * 4
    assert peak < 3.2 * chunk + 2 * weight + 2 * hidden < 0.1 * whole_peak


def test_a_second_derivative_is_refused():
    head, rows, targets = inputs()
    losses = fused(head, rows.requires_grad_(), targets)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(losses.sum(), rows, create_graph=True)
