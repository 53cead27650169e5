"""Fused forms: exact forward, gradients against float64 autograd of the plain expression."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from foundry_fp8.activations.compression.fused_activation import packed_activation
from foundry_fp8.activations.compression.fused_norm import packed_norm
from foundry_fp8.models.fog.feedforward import XIELU
from foundry_fp8.numerics.packed import PackFormat

ACTS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
FORMATS = {"int8": PackFormat(name="int8"), "e4m3": PackFormat(name="e4m3"), "exact": None}
LIMIT = {"int8": 1e-2, "e4m3": 4.5e-2, "exact": 1e-6}
"""e4m3: a product of two packed factors has sqrt(2) of the 2.6e-2 of one, and some margin."""


def check(function, reference, inputs, limit, seed=99):
    """Forward bit-equal to ``reference``; every gradient near the float64 one."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    y = function(*inputs)
    assert torch.equal(y, reference(*[x.detach() for x in inputs]))
    exact = reference(*doubles)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    y.backward(dy.to(y.dtype))
    exact.backward(dy.double())
    for i, (x, d) in enumerate(zip(inputs, doubles, strict=True)):
        error = (x.grad.double() - d.grad).norm() / d.grad.norm()
        assert error < limit, (i, error)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", ACTS)
@pytest.mark.parametrize("gated", [True, False])
def test_activation_and_linear(kind, gated, fmt):
    torch.manual_seed(0)
    act, fmt_ = ACTS[kind], FORMATS[fmt]
    gate, up = torch.randn(3, 50, 96), torch.randn(3, 50, 96)
    weight, bias = torch.randn(64, 96) / 10, torch.randn(64)
    inputs = [gate, up] if gated else [gate]

    def h(*x):
        return act(x[0]) * x[1] if gated else act(x[0])

    def one(*x):
        return packed_activation(x[0], x[1] if gated else None, act, kind, fmt_)

    def two(*x):
        *x, w, b = x
        return packed_activation(x[0], x[1] if gated else None, act, kind, fmt_, weight=w, bias=b)

    check(one, h, inputs, LIMIT[fmt])
    check(two, lambda *x: F.linear(h(*x[:-2]), x[-2], x[-1]), [*inputs, weight, bias], LIMIT[fmt])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_norm(centred, affine, fmt):
    torch.manual_seed(0)
    x = torch.randn(3, 40, 96) * (torch.rand(3, 40, 1) * 5 + 0.5) + centred
    weight, bias = torch.rand(96) + 0.5, torch.randn(96)
    inputs = ([x, weight, bias] if centred else [x, weight]) if affine else [x]

    def norm(x, w=None, b=None):
        if centred:
            return F.layer_norm(x, (96,), w, b, 1e-5)
        return F.rms_norm(x, (96,), w, 1e-5)

    def ours(x, w=None, b=None):
        return packed_norm(x, w, b, lambda x: norm(x, w, b), eps=1e-5, centred=centred, fmt=FORMATS[fmt])

    check(ours, norm, inputs, LIMIT[fmt])


def test_xielu_s_gradients_are_autograd_s():
    """On inputs that int8 packs without loss, and of either sign; the slopes' too, through softplus."""
    torch.manual_seed(0)
    x = torch.randint(-127, 128, (3, 20, 128)) / 32.0
    x[..., 0] = 127 / 32
    x[x == 0] = 1 / 32
    dy, weight = torch.randn(3, 20, 64), torch.randn(64, 128) / 10

    def gradients(function, dtype):
        act = XIELU().to(dtype)
        with torch.no_grad():
            act.p.fill_(0.3), act.n.fill_(-1.2)
        inputs = [x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), act.p, act.n]
        return torch.autograd.grad(function(act, *inputs[:2]), inputs, dy.to(dtype))

    def ours(act, x, w):
        fmt = PackFormat(name="int8")
        return packed_activation(x, None, act, "xielu", fmt, weight=w, slopes=act.slopes())

    exact = gradients(lambda act, x, w: F.linear(act(x), w), torch.float64)
    for a, b in zip(gradients(ours, torch.float32), exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)


def test_xielu_has_no_jump_where_an_input_packs_to_zero():
    """Autograd has 1/2 - an in (-1e-6, 0], and 1/2 on either side."""
    x = torch.full((2, 128), 1e-5, requires_grad=True)
    with torch.no_grad():
        x[:, ::2] *= -1
        x[:, 5] = 10.0
    act = XIELU()
    y = packed_activation(x, None, act, "xielu", PackFormat(name="int8"), slopes=act.slopes())
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx[:, 6:], torch.full_like(dx[:, 6:], 0.5), rtol=0, atol=1e-4)


def test_bfloat16_and_autocast():
    torch.manual_seed(0)
    gate, up = (torch.randn(4, 32, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weight = torch.nn.Parameter(torch.randn(48, 64) / 8)

    def run(function):
        for t in (gate, up, weight):
            t.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = function()
        y.float().square().sum().backward()
        return y, [t.grad.float() for t in (gate, up, weight)]

    y, ours = run(lambda: packed_activation(gate, up, F.silu, "silu", PackFormat(name="int8"), weight=weight))
    expected_y, expected = run(lambda: F.linear(F.silu(gate) * up, weight))
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected_y)
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).norm() / b.norm() < 2e-2


def test_modules_that_are_run_again_in_backward_may_be_watched():
    """torch's FLOP counter hooks every module and asks its inputs for their nodes; it counts products of both passes."""
    torch.manual_seed(0)
    inputs = [torch.randn(6, 16), torch.randn(6, 16), torch.randn(8, 16), torch.ones(16)]
    act, norm = torch.nn.SiLU(), torch.nn.RMSNorm(16, eps=1e-6)

    def gradients(watch):
        gate, up, weight, scale = (x.clone().requires_grad_() for x in inputs)
        norm.weight = torch.nn.Parameter(scale.detach())
        with watch:
            normed = packed_norm(gate * 1, norm.weight, None, norm, eps=1e-6, centred=False, fmt=None)
            packed_activation(normed, up * 1, act, "silu", None, weight=weight).sum().backward()
        return [gate.grad, up.grad, weight.grad, norm.weight.grad]

    plain = gradients(contextlib.nullcontext())
    for a, b in zip(gradients(counter := FlopCounterMode(display=False)), plain, strict=True):
        assert (a - b).norm() / b.norm() < 1e-6  # the counter takes some operators apart
    assert counter.get_total_flops() == 3 * 2 * 6 * 16 * 8


def test_other_dtypes_and_no_grad_run_the_plain_expression():
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)
    fmt = PackFormat(name="int8")
    torch.autograd.gradcheck(lambda x: packed_activation(x, x * 2, F.silu, "silu", fmt), (x,))
    with torch.no_grad():
        assert packed_activation(x.float(), None, F.silu, "silu", fmt).grad_fn is None
    z = torch.randn(8, dtype=torch.complex64, requires_grad=True)
    assert packed_activation(z, z, torch.tanh, "silu", fmt).dtype == torch.complex64


def test_double_backward_is_refused():
    x = torch.randn(8, 16, requires_grad=True)
    y = packed_activation(x, None, F.silu, "silu", PackFormat(name="int8"))
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_not_finite_inputs_stay_visible():
    x = torch.randn(8, 128, requires_grad=True)
    with torch.no_grad():
        x[3, 5] = float("inf")
    for y in (
        packed_activation(x, None, F.gelu, "gelu", PackFormat(name="int8")),
        packed_norm(
            x,
            None,
            None,
            lambda x: F.rms_norm(x, (128,)),
            eps=1e-6,
            centred=False,
            fmt=PackFormat(name="e4m3"),
        ),
    ):
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert not dx[3].isfinite().all() and dx[4].isfinite().all()
