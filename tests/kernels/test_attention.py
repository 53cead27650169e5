"""The attention kernels against their definition in float64: the same FP8 operands, every matrix in memory."""

import dataclasses
import math

import pytest
import torch

from foundry_fp8.kernels import attention as forward_module
from foundry_fp8.kernels.attention import AttentionShape, attention_forward, attention_forward_reference
from foundry_fp8.kernels.attention_backward import (
    attention_backward,
    attention_backward_reference,
    attention_row_sums,
)
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.tensorwise import quantize_tensorwise
from foundry_fp8.numerics.formats import E4M3, E5M2

ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _tensors_are_made_there(device):
    with torch.device(device):
        yield


SHAPE = AttentionShape(
    batch=2, heads=4, kv_heads=2, queries=150, keys=150, head_dim=64, softmax_scale=0.125, right=0
)


@dataclasses.dataclass
class Case:
    """Quantised operands of one attention."""

    shape: AttentionShape
    q: object
    k: object
    v: object
    do: object
    segments: tuple | None = None

    @property
    def scales(self):
        return tuple(x.stats[1] for x in (self.q, self.k, self.v, self.do))

    def values(self, x, heads, length):
        """[batch, heads, length, head_dim] of the FP8 values, each key head as often as it is used."""
        s = self.shape
        x = x.data[: s.batch * length].view(s.batch, length, heads, s.head_dim).transpose(1, 2)
        return x.float().repeat_interleave(s.heads // heads, 1)

    def seen(self):
        s = self.shape
        rows = torch.arange(s.queries)[:, None] + s.keys - s.queries
        columns = torch.arange(s.keys)[None, :]
        seen = torch.ones(s.queries, s.keys, dtype=torch.bool)
        if s.right is not None:
            seen &= columns <= rows + s.right
        if s.left is not None:
            seen &= columns >= rows - s.left
        seen = seen[None, None]
        if self.segments is not None:
            seen = seen & (self.segments[0][:, None, :, None] == self.segments[1][:, None, None, :])
        return seen


def case(shape, *, segments=None, seed=0, dtype=torch.bfloat16, size=1.0, poison=None):
    """``poison``: an operand and the value that its first head has in one feature of token 5 of the first sequence."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def make(name, length, heads, fmt, factor):
        x = torch.randn(shape.batch * length, heads * shape.head_dim, generator=generator) * factor
        if poison is not None and poison[0] == name:
            x[5, 3] = poison[1]
        return quantize_tensorwise(Producer.identity(x.to(dtype)), fmt)

    return Case(
        shape,
        make("q", shape.queries, shape.heads, E4M3, 2.0 * size),
        make("k", shape.keys, shape.kv_heads, E4M3, 1.5),
        make("v", shape.keys, shape.kv_heads, E4M3, 0.7),
        make("do", shape.queries, shape.heads, E5M2, 1e-3),
        segments,
    )


def forward(c, **kwargs):
    return attention_forward(
        c.shape,
        c.q.data,
        c.k.data,
        c.v.data_t,
        c.scales[:3],
        out_dtype=torch.float32,
        segments=c.segments,
        **kwargs,
    )


def reference(c):
    s = c.shape
    return attention_forward_reference(
        s,
        c.values(c.q, s.heads, s.queries),
        c.values(c.k, s.kv_heads, s.keys),
        c.values(c.v, s.kv_heads, s.keys),
        c.scales[:3],
        c.seen(),
        block=forward_module.TILES[s.block_d].keys,
    )


def documents(s):
    of = (torch.arange(s.keys) // 37).expand(s.batch, -1).to(torch.int32).contiguous()
    return of[:, s.keys - s.queries :].contiguous(), of


SHAPES = {
    "causal": SHAPE,
    "full": dataclasses.replace(SHAPE, right=None),
    "window": dataclasses.replace(SHAPE, left=20),
    "two-sided window": dataclasses.replace(SHAPE, left=5, right=30),
    "wide window": dataclasses.replace(
        SHAPE, batch=1, heads=2, kv_heads=1, queries=20, keys=340, left=250, right=3
    ),  # blocks of keys that are seen in part on both sides of one that is seen whole
    "head size 80, one key head": dataclasses.replace(SHAPE, head_dim=80, kv_heads=1, heads=2),
    "fewer queries": dataclasses.replace(SHAPE, queries=70),
    "more queries": dataclasses.replace(SHAPE, keys=70),
    "ragged": dataclasses.replace(SHAPE, queries=37, keys=37, heads=2, kv_heads=2, head_dim=16),
}


def backward(c, out, lse, dp_scale):
    amax = torch.zeros(())
    sums = attention_row_sums(c.shape, c.do.data, c.scales[3], out)
    grads = attention_backward(
        c.shape,
        (c.q.data, c.q.data_t),
        (c.k.data, c.k.data_t),
        c.v.data,
        (c.do.data, c.do.data_t),
        c.scales,
        lse,
        sums,
        out_dtype=torch.float32,
        dp_scale=dp_scale,
        amax_dp=amax,
        segments=c.segments,
    )
    return [g.transpose(1, 2) for g in grads], amax


DOCUMENTS = {f"{name}, documents": SHAPES[name] for name in ("causal", "two-sided window", "fewer queries")}
# A tensor core keeps 14 bits of a sum of FP8 products (DeepSeek-V3, section 3.3.2).
TOLERANCE = {"rtol": 2e-3, "atol": 2e-3} if ON_GPU else {"rtol": 1e-5, "atol": 1e-5}


def assert_near(ours, exact, what):
    """float32 sums of exact products, in the mean; a value whose sum lies on a rounding edge moves by an FP8 step."""
    error = float((ours.double() - exact).norm() / exact.norm())
    assert error < (1e-2 if ON_GPU else 1e-4), (what, error)


QUICK = (
    "wide window",
    "head size 80, one key head",
    "fewer queries",
    "ragged",
    "two-sided window, documents",
)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in (*SHAPES, *DOCUMENTS)],
)
def test_forward_and_backward(name, device):
    c = case(SHAPES.get(name) or DOCUMENTS[name])
    s = c.shape
    if name in DOCUMENTS:
        c.segments = documents(s)
    amax_s = torch.zeros(())
    out, lse = forward(c, amax_s=amax_s)
    exact_out, exact_lse = reference(c)
    torch.testing.assert_close(lse.double(), exact_lse, **TOLERANCE)
    assert_near(out.transpose(1, 2), exact_out, "o")
    dp_scale = torch.tensor(2.0**24)
    ours, amax = backward(c, out, lse, dp_scale)
    *exact, exact_dp, exact_s = backward_reference(c, out, dp_scale)
    torch.testing.assert_close(amax_s.double(), exact_s.max(), **TOLERANCE)
    for what, a, b in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert_near(a, b, what)
    torch.testing.assert_close(amax.double(), exact_dp.abs().max(), **TOLERANCE)


@pytest.mark.parametrize("name", ["ragged", pytest.param("fewer queries", marks=pytest.mark.full)])
def test_gradients_of_the_logits_in_bfloat16(name, device):
    c = case(SHAPES[name])
    out, lse = forward(c)
    ours, amax = backward(c, out, lse, None)
    *exact, exact_dp, _ = backward_reference(c, out, None)
    for what, a, b in zip(("dq", "dk", "dv"), ours, exact, strict=True):
        assert_near(a, b, what)
    torch.testing.assert_close(amax.double(), exact_dp.abs().max(), **TOLERANCE)
    in_fp8, _ = backward(c, out, lse, torch.tensor(2.0**24))
    assert not torch.equal(in_fp8[0], ours[0]) and torch.equal(in_fp8[2], ours[2])


def backward_reference(c, out, dp_scale):
    s = c.shape
    return attention_backward_reference(
        s,
        c.values(c.q, s.heads, s.queries),
        c.values(c.k, s.kv_heads, s.keys),
        c.values(c.v, s.kv_heads, s.keys),
        c.values(c.do, s.heads, s.queries),
        c.scales,
        c.seen(),
        out.transpose(1, 2),
        dp_scale=dp_scale,
        do_format=E5M2,
    )


def test_a_sink_flushes_its_own_block_alone(device):
    """The first key's logit is 2^19 times above the others', its value is zero: what counts are the others, which E4M3 flushes beside it."""
    keys, block = 1024, forward_module.TILES[64].keys
    shape = dataclasses.replace(SHAPE, batch=1, heads=1, kv_heads=1, queries=32, keys=keys, right=None)
    c = case(shape, size=0.1)
    q, k, v = (x.data.float() for x in (c.q, c.k, c.v))
    q /= 64
    k /= 64
    q[:, 0], k[:, 0], k[0], v[0] = 448.0, 0.0, 0.0, 0.0
    k[0, 0] = 448.0
    unit = 19.0 / 448.0**2
    c.shape = dataclasses.replace(
        shape, softmax_scale=unit / (math.log2(math.e) * float(c.scales[0] * c.scales[1]))
    )
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    c.q, c.k = c.q._replace(data=q), c.k._replace(data=k)
    c.v = c.v._replace(data=v, data_t=v.t().contiguous())
    out, _ = forward(c)
    logits = q[: shape.queries].double() @ k[:keys].double().t() * unit
    p = torch.exp2(logits - logits.amax(-1, keepdim=True))
    beside_the_sink = (p * 256).float().to(torch.float8_e4m3fn).double() / 256
    values = v[:keys].double() * c.scales[2].double()
    exact, flushed = (x @ values / p.sum(-1, keepdim=True) for x in (p, beside_the_sink))
    error, other = (float((x - exact).norm() / exact.norm()) for x in (out[0, :, 0].double(), flushed))
    assert error < 1.5 * math.sqrt(block / keys) and other > 0.9, (error, other)


def test_queries_that_see_nothing(device):
    """Their output is 0 and they give no gradient."""
    c = case(dataclasses.replace(SHAPE, heads=2, head_dim=16, queries=40, keys=40))
    of_keys = torch.zeros(2, 40, dtype=torch.int32)
    of_keys[:, :11] = -(2**31)
    c.segments = (torch.zeros(2, 40, dtype=torch.int32), of_keys)
    out, lse = forward(c)
    (dq, dk, dv), _ = backward(c, out, lse, torch.tensor(2.0**24))
    assert not out[:, :11].any() and bool((lse[:, :, :11] == math.inf).all())
    assert not dq[:, :, :11].any() and not dk[:, :, :11].any() and not dv[:, :, :11].any()
    assert all(bool(torch.isfinite(x).all()) for x in (out, dq, dk, dv))


BECOMES_NAN = {
    "q": {"out": slice(5, 6), "dq": slice(5, 6), "dk": slice(6)},
    "k": {"out": slice(5, None), "dq": slice(5, None), "dk": slice(5, 6), "dv": slice(5, 6)},
    "v": {"out": slice(5, None), "dq": slice(5, None), "dk": slice(5, 6)},
    "do": {"dq": slice(5, 6), "dk": slice(6), "dv": slice(6)},
}
"""After a NaN in token 5 of an operand of a causal attention: which tokens of what, at least."""


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("which", BECOMES_NAN)
def test_what_is_not_finite_stays_visible(which, value, device):
    """A NaN in its own sequence and where it is read; an Inf, which has no FP8 scale, everywhere."""
    shape = dataclasses.replace(SHAPES["ragged"], queries=70, keys=70)
    c = case(shape, poison=(which, value))
    out, lse = forward(c)
    found = {"out": out.transpose(1, 2)}
    found |= dict(zip(("dq", "dk", "dv"), backward(c, out, lse, torch.tensor(2.0**24))[0], strict=True))
    for name, tokens in BECOMES_NAN[which].items():
        nan = found[name].isnan()
        assert bool(nan[0, 0, tokens].any(-1).all()), name
        if value == math.inf and name != "dv":
            assert bool(nan.all()), name
        elif math.isnan(value):
            assert not nan[1].any(), name
