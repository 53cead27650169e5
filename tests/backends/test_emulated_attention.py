"""FP8 dot-product attention against its unfused definition (bits), float64 (bounds) and autograd (gradients)."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_fp8.backends.emulated import attention as module_under_test
from foundry_fp8.backends.emulated.attention import EmulatedAttention, keep_mask
from foundry_fp8.backends.emulated.dense import round_values_
from foundry_fp8.layers.attention import SLOTS, FP8DotProductAttention, attention_format, attention_slots
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.formats import E4M3, E5M2, cast
from foundry_fp8.numerics.quantize import Quantized, amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling
from tests.backends.attention_definition import attention_reference, fp8_gemm
from tests.backends.attention_masks import common_masks

B, H, HK, S, D = 2, 4, 2, 48, 16
SCALE = D**-0.5


def inputs(seed: int = 0, *, keys: int = S, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int, size: float) -> Tensor:
        # Every head has a range of its own, so that a mixed-up head or scale shows.
        spread = torch.linspace(0.3, 3.0, heads)[None, :, None, None] * size
        return (torch.randn(B, heads, length, D, generator=generator) * spread).to(dtype)

    return draw(H, S, 2.0), draw(HK, keys, 1.5), draw(HK, keys, 0.7), draw(H, S, 1e-3)


def make(recipe: Any, **options: Any) -> tuple[FP8DotProductAttention, DelayedScalingState]:
    attention = FP8DotProductAttention(
        fqn="block.attn", recipe=recipe, backend=EmulatedAttention(), evaluate="fp8", **options
    )
    names = attention_slots(recipe)
    timing = recipe if isinstance(recipe, DelayedScaling) else DelayedScaling()
    state = DelayedScalingState(timing, [attention_format(recipe, name).max for name in names])
    attention.slots = {name: state.slot(i) for i, name in enumerate(names)}
    return attention, state


def run(
    attention: FP8DotProductAttention, q: Tensor, k: Tensor, v: Tensor, do: Tensor, **kwargs: Any
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, softmax_scale=SCALE, **kwargs)
    out.backward(do)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def reference_quantizer(attention: FP8DotProductAttention, recipe: Any) -> Any:
    """Quantisation written again: by slot, delayed scale or this tensor's own."""
    delayed = attention_slots(recipe)

    def quantize(name: str, x: Tensor) -> Quantized:
        fmt = E5M2 if name in ("do", "dp", "dq", "dk", "dv") else E4M3
        amax = x.float().abs().amax()
        scale = attention.slots[SLOTS[name]].scale if SLOTS[name] in delayed else scale_from_amax(amax, fmt)
        if name in ("o", "dq", "dk", "dv") and not isinstance(recipe, DelayedScaling):
            return Unrounded(x)  # type: ignore[return-value]
        if name == "dp" and attention.grad_scores == "bfloat16":
            return Rounded(x)  # type: ignore[return-value]
        return Quantized(cast(x.float() * scale, fmt), 1.0 / scale, None, fmt, amax)

    return quantize


class Unrounded:
    """Stands where current scaling leaves an output in high precision."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def dequantize(self) -> Tensor:
        return self.x


class Rounded(Unrounded):
    """To bfloat16, without a scale."""

    def __init__(self, x: Tensor) -> None:
        super().__init__(x.bfloat16().float())
        self.data, self.gemm_scale = self.x, torch.ones(())


MASKS = {
    **common_masks(B, S),
    "bias": AttentionMask(causal=True, bias=torch.linspace(-2, 2, H * S).view(1, H, 1, S)),
    "boolean": AttentionMask(bias=torch.ones(S, S).tril(3).bool()),
}


class Definition:
    """:func:`attention_reference`, and how far float32 accumulation in any order may be from it.

    u = 2^-24. A sum of n products in float32 errs by at most n u sum |a| |b| (the products of FP8 numbers are exact). That moves a
    logit by ``dp`` and so a probability by the factor 1 + eps; casts are monotone, so what the other implementation quantised lies
    between the casts of both ends. Widths of such intervals, and the errors of the sums, are then added up GEMM by GEMM.
    """

    def __init__(
        self,
        attention: FP8DotProductAttention,
        inputs: tuple[Tensor, ...],
        mask: AttentionMask,
        dropout_p: float = 0.0,
        seed: Tensor | None = None,
    ) -> None:
        quantizer = reference_quantizer(attention, attention.recipe)
        self.seen: dict[str, tuple[Tensor, Any]] = {}

        def quantize(name: str, x: Tensor) -> Any:
            self.seen[name] = (x, quantizer(name, x))
            return self.seen[name][1]

        result = attention_reference(
            *inputs, quantize=quantize, mask=mask, softmax_scale=SCALE, dropout_p=dropout_p, seed=seed
        )
        q8, k8, v8, do8 = (self.seen[n][1].dequantize().double() for n in ("q", "k", "v", "do"))
        k8, v8 = (x.repeat_interleave(H // HK, 1) for x in (k8, v8))
        keep = torch.ones(())
        if seed is not None:
            keep = keep_mask(seed, 0, B * H, 0, S, 0, S, dropout_p).view(B, H, S, S) / (1 - dropout_p)
        # Two implementations err, and a handful of roundings besides the sums: twice, and 16 terms more.
        u, keys, d, rows = 2 * 2.0**-24, S + 16, D + 16, S * H // HK + 16
        s, p = result.s.double(), result.p.double().abs().nan_to_num(posinf=0.0)
        dp = d * u * (SCALE * (q8.abs() @ k8.abs().mT) + p)
        eps = dp + dp.amax(-1, keepdim=True) + keys * u
        ds = do8 @ v8.mT * keep
        delta_ds = d * u * (do8.abs() @ v8.abs().mT) * keep
        center = ds - (s * ds).sum(-1, keepdim=True)
        delta_sum = (s * ((eps + keys * u) * ds.abs() + delta_ds)).sum(-1, keepdim=True)
        delta_dp = s * ((eps + 2 * u) * center.abs() + delta_ds + delta_sum)
        s_ends = self.interval("s", s * keep, eps * s * keep)
        dp_ends = self.interval("dp", s * center, delta_dp)

        def gemm(ends: tuple[Tensor, Tensor], other: Tensor, terms: int) -> Tensor:
            low, high = ends
            return (high - low + terms * u * torch.maximum(low.abs(), high.abs())) @ other.abs()

        def of_group(ends: tuple[Tensor, Tensor], other: Tensor) -> Tensor:
            return gemm((ends[0].mT, ends[1].mT), other, rows).view(B, HK, H // HK, S, -1).sum(2)

        self.bounds = {
            "o": gemm(s_ends, v8, keys),
            "dq": gemm(dp_ends, k8, keys) * SCALE,
            "dk": of_group(dp_ends, q8) * SCALE,
            "dv": of_group(s_ends, do8),
        }

    def interval(self, name: str, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """What ``x - delta`` and ``x + delta`` become when they are quantised."""
        quantized = self.seen[name][1]
        if isinstance(quantized, Rounded):
            return (x - delta).float().bfloat16().double(), (x + delta).float().bfloat16().double()
        if isinstance(quantized, Unrounded):
            return x - delta, x + delta
        scale, fmt = 1.0 / quantized.scale_inv.double(), quantized.fmt
        delta = delta + 2.0**-22 * x.abs()  # the scale's reciprocal and the product round
        low, high = (cast((end * scale).float(), fmt).double() / scale for end in (x - delta, x + delta))
        return low, high

    def check(self, found: list[Tensor]) -> None:
        """Every element of o, dq, dk and dv lies in its interval, and the intervals are narrow."""
        for (name, bound), a in zip(self.bounds.items(), found, strict=True):
            exact = self.seen[name][0].double()
            low, high = self.interval(name, exact, bound)
            slack = 2.0**-22 * exact.abs()
            outside = (a.double() < low - slack) | (a.double() > high + slack)
            assert not outside.any(), f"{name}: {int(outside.sum())} of {a.numel()} outside"
            assert a.abs().max() > 0
            # What float32 may cost at worst, all signs alike, is a part of what FP8 does.
            assert bound.norm() < 0.1 * exact.norm(), name


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=4), CurrentScaling()], ids=["delayed", "current"]
)
@pytest.mark.parametrize("name", MASKS)
def test_blockwise_is_the_unfused_definition_but_for_float32_sums(
    name: str, recipe: Any, monkeypatch: Any
) -> None:
    rows = 5  # 48 leave a ragged block
    monkeypatch.setattr(module_under_test, "BLOCK_ELEMENTS", H // HK * S * rows)
    attention, state = make(recipe)
    run(attention, *inputs(), mask=MASKS[name])
    state.update()  # scales that are not 1
    found = run(attention, *inputs(), mask=MASKS[name])
    Definition(attention, inputs(), MASKS[name]).check(found)


def test_gradients_of_the_logits_in_bfloat16_are_the_definitions() -> None:
    (attention, _), (in_fp8, _) = make(CurrentScaling(), grad_scores="bfloat16"), make(CurrentScaling())
    mask = MASKS["documents"]
    found = run(attention, *inputs(), mask=mask)
    Definition(attention, inputs(), mask).check(found)
    other = run(in_fp8, *inputs(), mask=mask)
    assert [torch.equal(a, b) for a, b in zip(found, other, strict=True)] == [True, False, False, True]
    recorded = [a.slots["dp"].amax for a in (attention, in_fp8)]
    assert float(recorded[0]) == float(recorded[1]) > 0  # so that a resumed run may take either
    half = attention.ledger.flops["fprop", "fp8"]
    assert attention.ledger.flops["dgrad", "fp8"] == attention.ledger.flops["dgrad", "bf16"] == half


@pytest.mark.parametrize("rows", [1, 7, 48])
def test_dropout_is_the_unfused_definitions_in_any_blocking(rows: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(module_under_test, "BLOCK_ELEMENTS", H // HK * S * rows)
    attention, state = make(DelayedScaling())
    mask = AttentionMask(causal=True)
    run(attention, *inputs(1), mask=mask)
    state.update()
    torch.manual_seed(5)
    found = run(attention, *inputs(1), mask=mask, dropout_p=0.25)
    torch.manual_seed(5)
    Definition(attention, inputs(1), mask, 0.25, torch.randint(2**62, ())).check(found)
    plain = run(attention, *inputs(1), mask=mask)
    assert not torch.equal(plain[0], found[0])


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_rounding_in_float32_is_the_cast(fmt: Any) -> None:
    """Every sign, exponent and leading mantissa bits, with what follows them just below, at and just above a tie."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    bits = torch.cat([high, high | 1, high | 0x7FFF, high | 0x8000, high | 0xFFFF])
    x = bits.view(torch.float32)
    found = round_values_(x.clone(), fmt, torch.empty_like(bits))
    torch.testing.assert_close(found, cast(x, fmt).float(), rtol=0, atol=0, equal_nan=True)


def test_dropout_drops_its_share_without_pattern() -> None:
    keep = keep_mask(torch.tensor(123456789), 0, 8, 0, 256, 0, 256, 0.3).double()
    n = keep.numel()
    assert abs(keep.mean() - 0.7) < 4 * (0.21 / n) ** 0.5
    for dim, shift in itertools.product((1, 2), (1, 2)):
        a, b = keep.narrow(dim, shift, 256 - shift), keep.narrow(dim, 0, 256 - shift)
        correlation = ((a - 0.7) * (b - 0.7)).mean() / 0.21
        assert abs(correlation) < 4 / n**0.5
    assert not torch.equal(keep, keep_mask(torch.tensor(123456790), 0, 8, 0, 256, 0, 256, 0.3).double())


def float64_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    logits = q @ k.transpose(2, 3) * SCALE
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    return logits.softmax(-1) @ v


def test_each_gemm_is_within_its_bound_of_float64() -> None:
    """A product of E4M3 numbers errs by at most u = 2^-4 relative in each operand (half an ulp of 3 mantissa bits).

    For normal numbers |fl(a) fl(b) - a b| <= (2 u + u^2) |a| |b|; an element below the least normal errs by at most half the
    least subnormal, 2^-10 (E5M2: u = 2^-3, 2^-17), in scaled units. Summed over the GEMM's K this bounds the logits (q, k) and,
    with the float32 matrices that go in, O, dV, dS, dQ and dK.
    """
    half = {"e4m3": (2.0**-4, 2.0**-10), "e5m2": (2.0**-3, 2.0**-17)}

    def bound(a: Quantized, ha: Tensor, b: Quantized, hb: Tensor) -> Tensor:
        ea, eb = (
            half[x.fmt.name][0] * h.abs() + half[x.fmt.name][1] * x.scale_inv
            for x, h in ((a, ha.double()), (b, hb.double()))
        )
        ha, hb = ha.double().abs(), hb.double().abs()
        return ea @ hb.transpose(-1, -2) + (ha + ea) @ eb.transpose(-1, -2)

    q, k, v, do = inputs(3)
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    generator = torch.Generator().manual_seed(0)
    s = torch.randn(B, H, S, S, generator=generator).softmax(-1)
    dp = torch.randn(B, H, S, S, generator=generator) * 1e-4

    def quantized(x: Tensor, fmt: Any) -> Quantized:
        return quantize_tensor(x, scale_from_amax(amax_of(x), fmt), fmt)

    gemms = {  # a[M, K] b[N, K]^T
        "P": (q, E4M3, k, E4M3),
        "O": (s, E4M3, v.transpose(2, 3), E4M3),
        "dV": (s.transpose(2, 3), E4M3, do.transpose(2, 3), E5M2),
        "dS": (do, E5M2, v, E4M3),
        "dQ": (dp, E5M2, k.transpose(2, 3), E4M3),
        "dK": (dp.transpose(2, 3), E5M2, q.transpose(2, 3), E4M3),
    }
    for name, (a, fa, b, fb) in gemms.items():
        a8, b8 = quantized(a, fa), quantized(b, fb)
        found = fp8_gemm(a8.data, b8.data.float().transpose(2, 3)) * (a8.scale_inv * b8.scale_inv)
        exact = a.double() @ b.double().transpose(2, 3)
        error, limit = (found - exact).abs(), bound(a8, a, b8, b) * (1 + 1e-6)
        assert (error <= limit).all(), name
        assert error.max() > 0


@pytest.mark.parametrize("name", ["full", "causal", "documents"])
def test_gradients_are_those_of_float64_attention(name: str) -> None:
    """With 5 % relative rounding in a handful of places the gradients stay within 12 % (norm) of exact ones."""
    attention, state = make(CurrentScaling())
    q, k, v, do = inputs(2)
    q, k = q * 0.3, k * 0.3  # logits of order 1: elsewhere rounding moves the softmax itself
    mask = MASKS[name]
    run(attention, q, k, v, do, mask=mask)
    state.update()
    found = run(attention, q, k, v, do, mask=mask)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    seen, _ = mask.block(0, S, 0, S, S, S, q.device)
    exact = float64_attention(*leaves, seen)
    exact.backward(do.double())
    for a, b in zip(found, (exact.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        assert (a - b).norm() / b.norm() < 0.12


def test_the_definitions_backward_is_autograds() -> None:
    """Without rounding (FP8 swapped for the identity) the definition is plain attention, forward and backward."""

    class Exact:
        def __init__(self, x: Tensor) -> None:
            self.data = x.double()
            self.gemm_scale = torch.ones((), dtype=torch.float64)

        def dequantize(self) -> Tensor:
            return self.data

    q, k, v, do = inputs(4)
    found = attention_reference(
        q,
        k,
        v,
        do,
        quantize=lambda _, x: Exact(x),
        mask=AttentionMask(causal=True),
        softmax_scale=SCALE,  # type: ignore[arg-type, return-value]
    )
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = float64_attention(*leaves, torch.ones(S, S).tril().bool())
    exact.backward(do.double())
    for a, b in zip((found.o, found.dq, found.dk, found.dv), (exact, *(x.grad for x in leaves)), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_fewer_queries_than_keys_stand_at_the_end() -> None:
    attention, _ = make(DelayedScaling())  # fixed scales: the rounding of a row does not depend on the others
    q, k, v, _ = inputs(6)
    whole = attention(q, k, v, mask=AttentionMask(causal=True), softmax_scale=SCALE)
    tail = attention(q[:, :, -3:], k, v, mask=AttentionMask(causal=True), softmax_scale=SCALE)
    assert torch.equal(tail, whole[:, :, -3:])


def test_amaxes_are_recorded_by_slot_and_only_in_training() -> None:
    attention, state = make(DelayedScaling())
    q, k, v, do = inputs(7)
    attention.eval()
    run(attention, q, k, v, do, mask=AttentionMask(causal=True))
    assert float(state.amax_history.max()) == 0
    attention.train()
    found = attention_reference(
        q,
        k,
        v,
        do,
        quantize=reference_quantizer(attention, DelayedScaling()),
        mask=AttentionMask(causal=True),
        softmax_scale=SCALE,
    )
    run(attention, q, k, v, do, mask=AttentionMask(causal=True))
    recorded = dict(zip(attention_slots(DelayedScaling()), state.amax_history[0].tolist(), strict=True))
    assert recorded["qkv"] == max(float(x.abs().max()) for x in (q, k, v))
    assert recorded["s"] == float(found.s.max()) == 1.0  # the first query sees itself alone
    assert recorded["do"] == float(do.abs().max())
    assert all(value > 0 for name, value in recorded.items() if name not in ("dqkv", "dp"))


def test_a_recompute_changes_neither_numbers_nor_amaxes() -> None:
    made = {checkpoint: make(DelayedScaling()) for checkpoint in (False, True)}
    q, k, v, do = inputs(8)

    def train(checkpoint: bool) -> list[Tensor]:
        attention, state = made[checkpoint]
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]

        def forward(*x: Tensor) -> Tensor:
            return attention(*x, mask=AttentionMask(causal=True), softmax_scale=SCALE, dropout_p=0.1)

        torch.manual_seed(0)
        out = (
            torch.utils.checkpoint.checkpoint(forward, *leaves, use_reentrant=False)
            if checkpoint
            else forward(*leaves)
        )
        out.backward(do)
        return [out.detach(), *(leaf.grad for leaf in leaves), state.amax_history[0].clone()]  # type: ignore[list-item]

    for _ in range(2):
        first, second = train(False), train(True)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    gemm = 2 * B * H * S * S * D
    for checkpoint, (attention, _) in made.items():
        assert attention.ledger.flops["fprop", "fp8"] == 2 * 2 * gemm
        assert attention.ledger.flops["dgrad", "fp8"] == 2 * 4 * gemm
        assert attention.ledger.recomputed_flops["fprop", "fp8"] == 2 * 2 * gemm * checkpoint


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_non_finite_stays_visible(bad: float) -> None:
    attention, _ = make(CurrentScaling())
    q, k, v, do = inputs(9)
    broken = do.clone()
    broken[0, 0, 5, 3] = bad
    grads = run(attention, q, k, v, broken, mask=AttentionMask(causal=True))[1:]
    assert all(not torch.isfinite(g).all() for g in grads)
    v = v.clone()
    v[1, 0, 2, 2] = bad
    out = attention(q, k, v, mask=AttentionMask(causal=True), softmax_scale=SCALE)
    assert not torch.isfinite(out).all()


def test_nothing_of_queries_times_keys_is_kept_for_backward() -> None:
    attention, _ = make(DelayedScaling())
    q, k, v, _ = inputs(10)
    sizes = []

    @contextlib.contextmanager
    def watch() -> Any:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel() * t.element_size()) or t, lambda t: t
        ):
            yield

    with watch():
        attention(
            *(x.clone().requires_grad_() for x in (q, k, v)),
            mask=AttentionMask(causal=True),
            softmax_scale=SCALE,
        )
    assert sum(sizes) <= q.numel() + k.numel() + v.numel() + 64  # a byte an element, and six numbers


class Largest(TorchDispatchMode):
    """The most bytes of any tensor that is made while it is entered."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return out


def test_no_tensor_grows_with_the_square_of_the_sequence() -> None:
    attention, _ = make(DelayedScaling())
    sequence = 4096
    q, k, v, do = (torch.randn(1, 1, sequence, D) for _ in range(4))
    with Largest() as largest:
        run(attention, q, k, v, do, mask=AttentionMask(causal=True, key_padding=torch.ones(1, sequence)))
    assert largest.nbytes <= 8 * module_under_test.BLOCK_ELEMENTS < sequence**2 / 4  # int64 places of a mask


def test_autocast_does_not_reach_the_gemms() -> None:
    first, second = (make(CurrentScaling())[0] for _ in range(2))
    plain = run(first, *inputs(11), mask=AttentionMask(causal=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(second, *inputs(11), mask=AttentionMask(causal=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_a_trainable_bias_is_refused() -> None:
    attention, _ = make(DelayedScaling())
    q, k, v, _ = inputs()
    bias = torch.zeros(1, H, S, S, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"block\.attn: .*no gradient for a trainable attention bias"):
        attention(q, k, v, mask=AttentionMask(bias=bias), softmax_scale=SCALE)


def test_set_recipe_demotes_and_refuses_a_recipe_without_state() -> None:
    attention, _ = make(CurrentScaling())
    attention.set_recipe(None)
    assert not attention.runs_fp8
    attention.set_recipe(CurrentScaling(power_2_scales=True))
    assert attention.runs_fp8
    with pytest.raises(RuntimeError, match="delayed is not what this attention was converted with"):
        attention.set_recipe(DelayedScaling())
