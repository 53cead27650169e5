"""Who reads back what was saved: known nodes bear rounding, the others get the very values, by whatever route."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from foundry_fp8.activations.compression.readers import Reads, reads_of
from foundry_fp8.activations.compression.saved import Compressor
from foundry_fp8.numerics.packed import FORMATS, PackFormat
from tests.activations.compression.inside import Spy, inside

ROWS, WIDTH = 256, 128
SEED = torch.Generator().manual_seed(0)
W = torch.randn(WIDTH, WIDTH, generator=SEED) / 11
OTHER = torch.randn(ROWS, WIDTH, generator=SEED)
# Of the relative error of one rounding (numerics/packed.py); products of two rounded factors, and softmax, make more of it.
LIMIT = {"int8": 3e-2, "e4m3": 1e-1, "int4": 4e-1}


def heads(x):
    return x.view(2, 4, ROWS // 8, WIDTH)


SMOOTH = {
    "matmul": lambda x: x @ (W * x[:WIDTH]),
    "linear": lambda x: F.linear(x, W * x[:WIDTH], x[0]),
    "bmm": lambda x: torch.bmm(x.view(2, -1, WIDTH), (W * x[:WIDTH]).expand(2, -1, -1)),
    "baddbmm": lambda x: torch.baddbmm(
        x.view(2, -1, WIDTH), x.view(2, -1, WIDTH), W.expand(2, -1, -1) * x[0]
    ),
    "mv": lambda x: x @ (x[0] * x[1]),
    "convolution": lambda x: F.conv1d(x.view(2, WIDTH, -1), (W * x[:WIDTH]).unsqueeze(-1)),
    "product": lambda x: x * (x * OTHER),
    "addcmul": lambda x: torch.addcmul(x, x, x * OTHER),
    "square": torch.square,
    "cube": lambda x: x**3,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "glu": F.glu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), x[0], x[1]),
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x * OTHER), heads(x)),
    "attention, no kernel": lambda x: torch.ops.aten._scaled_dot_product_attention_math(
        heads(x), heads(x * OTHER), heads(x)
    )[0],
    "relu": F.relu,
    "relu, squared": lambda x: F.relu(x).square(),
    "relu in place": lambda x: F.relu(x * 1, inplace=True),
}
EXACT = {
    "relu6": F.relu6,
    "relu in place on a view": lambda x: (x * 1).view(-1).relu_(),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "prelu": lambda x: F.prelu(x, torch.full((WIDTH,), 0.2)),
    "elu": F.elu,
    "selu": F.selu,
    "hardswish": F.hardswish,
    "clamp": lambda x: x.clamp(0),
    "clamp between": lambda x: x.clamp(-0.5, 0.5),
    "clamp in place": lambda x: (x * 1).clamp_(min=0),
    "maximum": lambda x: torch.maximum(x, OTHER * 0),
    "minimum": lambda x: torch.minimum(x, OTHER),
    "amax": lambda x: x.amax(-1),
    "threshold": lambda x: F.threshold(x, 0.1, 0.0),
    "abs": torch.abs,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-4),
    "sqrt": lambda x: x.abs().sqrt(),
    "root": lambda x: (x.abs() + 1e-6) ** 0.5,
    "reciprocal": torch.reciprocal,
    "quotient": lambda x: OTHER / x,
    "quotient of both": lambda x: (x + 5) / x,
    "logarithm": lambda x: x.abs().log(),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "std": lambda x: x.std(-1),
    "sin": lambda x: (1000 * x).sin(),
    "prod": lambda x: x.view(-1, 4).prod(-1),
}


def gradient(fmt, function):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    spy = Spy(fmt, min_numel=64)
    # Squares behind the function, as a model goes on: what the function saved is settled in its midst.
    y = inside(spy, lambda x: function(x * 1.0).square(), x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad(y, x, dy)[0], spy


@pytest.mark.parametrize("function", SMOOTH.values(), ids=SMOOTH)
def test_known_nodes_bear_rounding(function):
    exact, _ = gradient(None, function)
    for name in FORMATS:
        rounded, spy = gradient(PackFormat(name=name), function)
        error = (rounded - exact).norm() / exact.norm()
        assert 1e-5 < error < LIMIT[name], (name, error)
        assert not spy.saved.exact.total(), spy.saved.exact


@pytest.mark.parametrize("function", EXACT.values(), ids=EXACT)
def test_what_other_nodes_saved_is_not_rounded(function):
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dy = None
    found = []
    for fmt in (None, PackFormat(name="int4")):
        compressor = Compressor(fmt, min_numel=64)
        y = inside(compressor, lambda x: function(x * 1.0), x)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)) if dy is None else dy
        found.append(torch.autograd.grad(y, x, dy)[0])
    assert torch.equal(*found)
    assert compressor.saved.packed == 0 and compressor.saved.exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowest", [-torch.inf, -3e38, -1e4, 0.0])
def test_what_attention_adds_to_its_scores_is_not_rounded(lowest, dtype):
    """Masks that blocks make themselves (Gemma 3, ModernBERT, CLIP), and ALiBi: a column far away, and neighbours close by."""
    length = ROWS // 8
    distance = torch.arange(length) - torch.arange(length)[:, None]
    far = torch.tensor(lowest).clamp(min=torch.finfo(dtype).min if lowest > -torch.inf else -torch.inf)

    def function(x):
        q, k, v = (heads(x * factor).to(dtype) for factor in (1.0, OTHER, 2.0))
        mask = torch.where(distance > 0, far, 0.3 * distance).to(dtype).expand(2, 4, -1, -1).clone()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).float()

    (exact, _), (rounded, spy) = gradient(None, function), gradient(PackFormat(), function)
    assert (rounded - exact).norm() / exact.norm() < LIMIT["int8"]
    assert list(spy.saved.exact) == ["ScaledDotProductFlashAttentionForCpuBackward0"]
    assert spy.saved.exact.total() == 2 * 4 * length**2 * dtype.itemsize


def test_attention_inside_a_checkpoint_is_not_run_again_in_the_forward():
    """Its node is reached from what follows, and its mask is the checkpoint's."""
    ran = []

    def attention(x):
        ran.append(x.shape)
        mask = torch.zeros(ROWS // 8, ROWS // 8)
        return F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=mask).reshape(x.shape)

    def function(x):
        return torch.utils.checkpoint.checkpoint(attention, x, use_reentrant=False) * (x * OTHER)

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    y = inside(Compressor(PackFormat(), min_numel=64), function, x)
    assert len(ran) == 1
    y.sum().backward()
    assert len(ran) == 2


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "activation", [F.relu, lambda x: F.relu(x).square(), lambda x: F.relu(x * 1, inplace=True)]
)
def test_relu_passes_gradients_exactly_where_it_did(name, activation):
    x = torch.randn(64, 128, requires_grad=True)
    y = inside(Compressor(PackFormat(name=name), min_numel=1), activation, x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, x > 0)


def test_a_function_of_one_s_own_is_not_known_unless_it_says_so():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, smooth):
            ctx.save_for_backward(x)
            if smooth:
                ctx.reads_smoothly = True
            return x.square()

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return 2 * x * dy, None

    x, dy = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    for smooth in (False, True):
        compressor = Compressor(PackFormat(), min_numel=64)
        x.requires_grad_()
        y = inside(compressor, lambda x: Square.apply(x, smooth), x)  # noqa: B023
        assert compressor.saved.exact == ({} if smooth else {"SquareBackward": x.nbytes})
        error = (torch.autograd.grad(y, x, dy)[0] - 2 * x * dy).norm() / (2 * x * dy).norm()
        assert (1e-4 < error < 1e-2) if smooth else error == 0


def test_a_function_that_makes_a_graph_of_its_own_is_left_alone():
    """The newest node is not the one that saves, then."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                ctx.inner, ctx.outer = inner, (inner * 2.0 * inner).sum(-1)
            ctx.save_for_backward(x)
            return ctx.outer.detach()

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensors
            return 4 * x * dy.unsqueeze(-1)

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    dy = torch.randn(ROWS)
    y = inside(Compressor(PackFormat(name="int4"), min_numel=64), Inner.apply, x)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], 4 * x.detach() * dy.unsqueeze(-1))


def test_a_tensor_that_one_node_needs_exactly_is_not_kept_twice():
    def function(x):
        h = x * 1.0
        return h.abs() + h * OTHER * h

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    compressor = Compressor(PackFormat(), min_numel=64)
    inside(compressor, function, x)
    assert compressor.saved.exact == {"AbsBackward0": x.nbytes}
    assert compressor.saved.original == 2 * x.nbytes  # OTHER, and h * OTHER


def test_flash_attention_s_functions_are_known_by_their_module():
    """Its log-sum-exp is float32 of two or three dimensions, beside half-precision tensors of three or four."""

    class FlashAttnVarlenFunc(torch.autograd.Function):
        __module__ = "flash_attn.flash_attn_interface"
        __qualname__ = "FlashAttnVarlenFunc"

        @staticmethod
        def forward(ctx, q):
            ctx.save_for_backward(q, q.float().sum(-1))
            return q * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * 2

    q = torch.randn(64, 4, 32, dtype=torch.bfloat16, requires_grad=True)
    spy = Spy(min_numel=64)
    y = inside(spy, FlashAttnVarlenFunc.apply, q)
    assert reads_of(y.grad_fn) is Reads.ATTENTION
    assert [x.dtype for x in spy.packed] == [torch.bfloat16] and [x.dtype for x in spy.passed] == [
        torch.float32
    ]
