"""Cross-entropy by chunks: torch's values and gradients, NaN and Inf where torch has them, less memory."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foundry_fp8.activations.compression import cross_entropy
from foundry_fp8.activations.compression.cross_entropy import lean_cross_entropy
from foundry_fp8.planning.memory.live_bytes import LiveBytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = ("none", "mean", "sum")
EPS = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", 64)


def eager(x, t, **options):
    return F.cross_entropy(x if x.dtype == torch.float64 else x.float(), t, **options)


def run(function, x, t, dtype=None, **options):
    """Loss and gradient; rows of ``none`` have upstream gradients that differ."""
    x = x.detach().to(dtype or x.dtype).requires_grad_()
    loss = function(x, t, **options)
    weight = torch.linspace(-1.0, 2.0, loss.numel()) if loss.dim() else torch.tensor(0.7)  # float32 for both
    (grad,) = torch.autograd.grad(loss, x, weight.to(loss.dtype))
    return loss.detach(), grad


def check(x, t, **options):
    loss, grad = run(lean_cross_entropy, x, t, **options)
    assert loss.dtype == torch.float32 and grad.dtype == x.dtype and grad.shape == x.shape
    for dtype in (torch.float64, None):
        loss_, grad_ = run(eager, x, t, dtype, **options)
        torch.testing.assert_close(loss, loss_.float(), rtol=1e-5, atol=1e-6, equal_nan=True)
        off, allowed = (grad.double() - grad_.double()).abs(), roundings(x, t, **options)
        if dtype is None:
            allowed *= 2  # eager rounds as much itself
        same = (grad == grad_) | (grad.isnan() & grad_.isnan())
        assert bool((same | (off <= allowed)).all()), (off / allowed)[~same].max()
    if options.get("reduction") == "none":
        torch.testing.assert_close(loss, loss_, rtol=0, atol=0, equal_nan=True)


def roundings(x, t, reduction="mean", ignore_index=-100):
    """How far the roundings of ``p * scale``, at the target ``p * scale - scale``, may bring a gradient from the exact one, per element.

    In units of float32's, relative: an exponential has the rounding of its argument ``d`` below the row's largest, which costs ``d``,
    and two of its own (an ulp); the largest is exactly 1. What all exponentials of a row have moves their sum. That is added up by at
    least 8 lanes: its roundings count as squares, three times. The quotient has two, ``p * scale`` one. At the target, where ``p`` may be
    near 1, all of these stay of the difference, which has its own, and the mean's scale one. Then the logits' dtype rounds.
    """
    counted = t != ignore_index
    scale = {
        "none": torch.linspace(-1.0, 2.0, len(t)).abs(),
        "sum": torch.full_like(t, 0.7, dtype=torch.float32),
        "mean": torch.full_like(t, 0.7, dtype=torch.float32) / counted.sum(),
    }[reduction]
    scale = scale.where(counted, 0.0)[:, None].double()
    logits = x.double()
    below, p = logits.amax(1, keepdim=True) - logits, logits.softmax(1)
    exponential = torch.where((below == 0) | (p == 0), 0.0, below + 2)
    others = (p * exponential).sum(1, keepdim=True) - p * exponential
    additions = x.shape[1] / 8 + 3
    hot = F.one_hot(t.where(counted, 0), x.shape[1])
    units = p * (exponential * (1 - p) + others + math.sqrt(3 * additions) + 3) + hot * (1 - p)
    size = (p - hot).abs()
    in_float32 = scale * (units + size) * 2.0**-24 + torch.finfo(torch.float32).tiny
    of_dtype = 0.0 if x.dtype == torch.float32 else EPS[x.dtype] * (scale * size + in_float32)
    return in_float32 + of_dtype + (2.0**-25 if x.dtype == torch.float16 else 0.0)  # half of its least step


def sample(n, v, dtype=torch.float32, ignore_index=-100, share=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, v, generator=generator) * 3).to(dtype)
    t = torch.randint(v, (n,), generator=generator)
    return x, torch.where(torch.rand(n, generator=generator) < share, ignore_index, t)


@pytest.mark.parametrize("ignore_index", [-100, 3, -1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(dtype, reduction, ignore_index):
    x, t = sample(37, 19, dtype, ignore_index)
    check(x, t, reduction=reduction, ignore_index=ignore_index)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 40),
    v=st.integers(1, 90),
    dtype=st.sampled_from(DTYPES),
    reduction=st.sampled_from(REDUCTIONS),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)
@example(n=3, v=3, dtype=torch.float32, reduction="none", share=0.0, seed=17)
def test_any_shape(n, v, dtype, reduction, share, seed):
    """Rows longer than a chunk, a column, a row, chunks that do not divide the rows, all ignored."""
    check(*sample(n, v, dtype, share=share, seed=seed), reduction=reduction)


def test_default_chunk_gives_the_same(monkeypatch):
    x, t = sample(37, 19)
    small = run(lean_cross_entropy, x, t)
    monkeypatch.setattr(cross_entropy, "CHUNK", 2**18)
    for a, b in zip(small, run(lean_cross_entropy, x, t), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_ignored(reduction):
    x, _ = sample(9, 5)
    loss, grad = run(lean_cross_entropy, x, torch.full((9,), -100), reduction=reduction)
    assert bool(loss.isnan() if reduction == "mean" else (loss == 0).all())
    assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_are_where_torch_has_them(dtype, reduction):
    """In rows that count and in ignored ones, at the target and beside it."""
    rows, targets = [], []
    for bad in ([math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.inf, math.nan], None):
        for target in (-100, 0, 7, 20):
            row = torch.randn(21)
            if bad is None:
                row[:] = -math.inf
            else:
                row[7 : 7 + len(bad)] = torch.tensor(bad)
            rows += [row, torch.randn(21)]
            targets += [target, 1]
    x, t = torch.stack(rows).to(dtype), torch.tensor(targets)
    check(x, t, reduction=reduction)
    _, grad = run(lean_cross_entropy, x, t, reduction=reduction)
    assert bool(grad[0].isnan().all()) and t[0] == -100  # the gradient of an ignored row with a NaN
    assert bool(grad[1::2].isfinite().all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_upstream_nan_and_inf(value):
    x, t = sample(6, 9, share=0)
    t[4] = -100
    dy = torch.tensor([1.0, value, 1.0, 0.0, value, 1.0])
    grads = []
    for function in (lean_cross_entropy, eager):
        y = x.clone().requires_grad_()
        grads += torch.autograd.grad(function(y, t, reduction="none"), y, dy)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4])
def test_extreme_logits(offset, dtype):
    """A common offset costs nothing, which ``logits - logsumexp`` in float32 would not give."""
    x, t = sample(30, 17)
    x = (x + offset).to(dtype)
    check(x, t, reduction="none")
    x = torch.where(torch.rand(x.shape) < 0.3, 1e4, torch.where(torch.rand(x.shape) < 0.5, -1e4, x.float()))
    check(x.to(dtype), t, reduction="none")


@pytest.mark.parametrize("target", [19, -1, 2**40])
def test_target_out_of_range(target):
    x, t = sample(37, 19)
    t[33] = target
    for function in (eager, lean_cross_entropy):
        with pytest.raises(IndexError, match="out of bounds"):
            function(x.clone().requires_grad_(), t)


@pytest.mark.parametrize("which", ["logits", "targets"])
def test_in_place_modification_raises(which):
    x, t = sample(37, 19)
    x.requires_grad_()
    y = x * 1.0
    loss = lean_cross_entropy(y, t)
    with torch.no_grad():
        (y if which == "logits" else t).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_double_backward_raises():
    """At once: a gradient penalty would otherwise be a constant, and silently so."""
    x, t = sample(8, 5)
    x.requires_grad_()
    for loss in (lean_cross_entropy(x, t), lean_cross_entropy(x, t).square()):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("layout", ["slice", "columns", "transposed", "expanded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(layout, dtype):
    base = torch.randn(3, 8, 24).to(dtype)
    t = torch.randint(12, (3, 8))
    view, targets = {
        "slice": lambda b: (b[:, :-1].reshape(-1, 24), t[:, 1:].reshape(-1)),
        "columns": lambda b: (b[0, :, 3::2], t.t()[:, 1] % 11),
        "transposed": lambda b: (b[0].t(), torch.arange(48)[::2] % 8),
        "expanded": lambda b: (b[:1, 0].expand(24, 24), t.view(-1)),
    }[layout](base)
    assert layout == "slice" or not view.is_contiguous()
    results = []
    for function in (lean_cross_entropy, eager):
        leaf = view.detach().requires_grad_()  # of the same strides
        loss = function(leaf, targets)
        results.append((loss.detach(), *torch.autograd.grad(loss, leaf)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4 * EPS[dtype], atol=1e-6)


def test_language_model_shift_through_the_whole_graph():
    """MPT's: rows without reduction, weighted and summed by the model."""
    hidden, weight = torch.randn(2, 9, 8), torch.randn(30, 8, requires_grad=True)
    t = torch.randint(30, (2, 9))
    grads = []
    for function in (lean_cross_entropy, eager):
        logits = F.linear(hidden, weight)[:, :-1]
        losses = function(logits.reshape(-1, 30), t[:, 1:].reshape(-1), reduction="none")
        grads += torch.autograd.grad((losses * torch.arange(16)).sum() / 16, weight)
    torch.testing.assert_close(*grads)


def test_saved_tensors_are_the_inputs():
    x, t = sample(37, 19)
    x.requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        lean_cross_entropy(x, t).backward()
    assert [s.data_ptr() for s in saved] == [x.data_ptr(), t.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    x, t = sample(37, 19, dtype)
    plain = run(lean_cross_entropy, x, t)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(lean_cross_entropy, x, t)
    for a, b in zip(plain, inside, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_what_is_not_taken_is_torch_s(monkeypatch):
    monkeypatch.setattr(cross_entropy, "_LeanCrossEntropy", None)
    x, t = sample(8, 5)
    x.requires_grad_()

    class Sub(torch.Tensor):
        pass

    for logits, targets in [
        (x.double(), t),
        (x, torch.rand(8, 5)),
        (x.bfloat16().unsqueeze(-1), t.unsqueeze(-1)),
        (x[0], torch.tensor(2)),
        (x.as_subclass(Sub), t),
        (x[:0], t[:0]),
    ]:
        ours, theirs = lean_cross_entropy(logits, targets), eager(logits, targets)
        assert ours.dtype == theirs.dtype and type(ours) is type(theirs)
        assert ours.requires_grad and bool((ours == theirs) | ours.isnan() & theirs.isnan())
    with torch.no_grad():
        assert torch.equal(lean_cross_entropy(x.half(), t), eager(x.half(), t))
    with pytest.raises(ValueError, match="not a valid value for reduction"):
        lean_cross_entropy(x, t, reduction="median")
    with pytest.raises(ValueError, match="batch_size"):
        lean_cross_entropy(x, t[:-1])


def test_meta_device():
    x = torch.empty(37, 19, device="meta", requires_grad=True)
    lean_cross_entropy(x, torch.empty(37, dtype=torch.int64, device="meta")).backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory(dtype, device, monkeypatch):
    n, v, chunk = 512, 1024, 2**14
    monkeypatch.setattr(cross_entropy, "CHUNK", chunk)
    x, t = sample(n, v, dtype)
    x, t = x.to(device).requires_grad_(), t.to(device)

    def peaks(function):
        x.grad = None
        with LiveBytes() as meter:
            loss = function(x, t)
            forward = meter.peak
            loss.backward()
            return forward / x.nbytes, meter.peak / x.nbytes

    chunks = chunk * 4 * (1 if dtype == torch.float32 else 2) / x.nbytes
    forward, both = peaks(lean_cross_entropy)
    assert forward <= 0.1 + chunks
    assert both <= 1.1 + chunks
    assert peaks(eager)[1] > (2.9 if dtype == torch.float32 else 5.9)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_on_cuda(dtype, reduction, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_CUDA", 3000)
    x, t = (y.cuda() for y in sample(37, 1001, dtype))
    x[5, 7], x[6, 8], t[6] = math.nan, math.inf, -100
    results = []
    for function in (lean_cross_entropy, eager):
        y = x.clone().requires_grad_()
        loss = function(y, t, reduction=reduction)
        results.append((loss.detach(), *torch.autograd.grad(loss, y, torch.ones_like(loss))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4 * EPS[dtype], atol=1e-6, equal_nan=True)
