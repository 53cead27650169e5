"""The hooks: what must not be packed, leaks, stale caches, in-place writes, layouts."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foundry_fp8.activations.compression.saved import Compressor, compresses_inside, is_parameter
from foundry_fp8.numerics.packed import PackFormat
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from tests.activations.compression.inside import INT8, Spy, inside


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_weights_and_their_casts_and_views_pass():
    linear = nn.Linear(128, 128)
    flat = nn.Parameter(torch.randn(2 * 64 * 128))
    x = torch.randn(64, 128, requires_grad=True)
    spy = Spy(min_numel=1)

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.linear(linear(x), flat[: 64 * 128].view(64, 128))  # as FSDP1 hands out parameters
            return h @ flat[64 * 128 :].view(64, 128).t().t()

    inside(spy, function, x).sum().backward()
    shapes = [tuple(t.shape) for t in spy.passed]
    assert len(shapes) >= 3 and all(is_parameter(t) for t in spy.passed)
    assert not any(is_parameter(t) for t in spy.packed)
    assert spy.packed


def test_statistics_masks_indices_small_and_handed_tensors_pass():
    x = torch.randn(2, 4, 64, 32, requires_grad=True)  # [B, H, T, D]
    norm, table = nn.LayerNorm(32), nn.Embedding(50, 32)

    class Block(nn.Module):
        def forward(self, x, rotation, mask):
            y = norm(x) * rotation + table(torch.arange(64) % 50)
            y = F.scaled_dot_product_attention(y, y * 2, y * 3)
            y = y.masked_fill(mask, 0.0)
            return y * torch.tensor(2.0) + y.double().mul(y.double()).float()

    block, spy = Block(), Spy(min_numel=512)
    spy.attach(block)
    rotation, mask = torch.randn(2, 4, 64, 32), torch.rand(2, 4, 64, 32) > 0.5
    block(x, rotation=rotation, mask=mask).sum().backward()
    passed = {(tuple(t.shape), t.dtype) for t in spy.passed}
    assert ((2, 4, 64), torch.float32) in passed  # log-sum-exp
    assert ((2, 4, 64, 1), torch.float32) in passed  # mean and rstd
    assert ((2, 4, 64, 32), torch.bool) in passed
    assert ((2, 4, 64, 32), torch.float64) in passed
    assert any(t is rotation or t.data_ptr() == rotation.data_ptr() for t in spy.passed)
    assert all(t.shape == (2, 4, 64, 32) and t.dtype == torch.float32 for t in spy.packed) and spy.packed


def test_saved_outputs_do_not_leak():
    """An op that saves its own output, kept with its graph, is a cycle that not even gc frees."""
    for dtype in (torch.float32, torch.float64):  # packed, and passed through
        x = torch.randn(64, 128, dtype=dtype, requires_grad=True)
        y = inside(Compressor(INT8, min_numel=1), lambda x: torch.softmax(x.exp(), -1).tanh(), x)
        dead = weakref.ref(y.untyped_storage())
        del y
        gc.collect()
        assert dead() is None


def test_the_original_is_freed_during_forward():
    linears = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.SiLU()) for _ in range(8)))
    x = torch.randn(256, 64, requires_grad=True)

    def live(compressor):
        if compressor:
            for linear in linears:
                compressor.attach(linear)
        with LiveBytes() as meter:
            y = linears(x)
            return meter.live - y.nbytes

    plain, packed = live(None), live(Compressor(INT8, min_numel=1))
    assert packed < 0.3 * plain


def test_a_tensor_saved_twice_is_packed_once():
    spy = Spy(min_numel=1)
    x = torch.randn(4, 64, 64, requires_grad=True)
    a, b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def function(x):
        h = x * 1.0
        return a(h) + b(h.view(256, 64)).view(4, 64, 64) + h * h

    y = inside(spy, function, x)
    assert len(spy.packed) >= 4 and spy.saved.original == x.nbytes
    y.sum().backward()


def test_reused_memory_is_not_taken_for_the_tensor_that_was_there():
    """A key holds addresses, which freed storages leave to new ones; an unchecked cache gave gradients 95 % wrong.

    Which addresses come back is the allocator's business, so the new tensor's key is given the old one's entry here.
    """
    compressor = Compressor(INT8, min_numel=1, boundary=True)
    old, new = torch.randn(64, 64), torch.randn(64, 64)
    kept = compressor.pack(old)
    ((_, entry),) = compressor._kept.items()
    compressor.pack(new)
    key = next(reversed(compressor._kept))
    compressor._kept[key] = entry
    assert relative(compressor.unpack(compressor.pack(new)), new) < 1e-2
    assert relative(compressor.unpack(kept), old) < 1e-2


def test_what_is_written_to_after_it_was_saved_is_the_saved_value_or_an_error():
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)

    def packed_before_it_is_written_to(w):
        h = w * 1.0
        y = (
            (h * x).square().sum()
        )  # the square is saved after the product: by then it is known who reads h back
        h.detach().mul_(100.0)
        return y

    y = inside(Compressor(INT8, min_numel=1), packed_before_it_is_written_to, w)
    assert relative(torch.autograd.grad(y, w)[0], 2 * w.detach() * x.square()) < 1e-2

    def written_to(w):
        h = w * 1.0
        y = (h * h).sum()
        h.detach().mul_(100.0)
        return y

    for dtype in (
        torch.float32,
        torch.float64,
    ):  # too early to be packed, and passed through: the value is gone
        w = torch.randn(64, 64, dtype=dtype, requires_grad=True)
        y = inside(Compressor(INT8, min_numel=1), written_to, w)
        with pytest.raises(RuntimeError, match=r"shape \[64, 64\] that backward needs was modified in place"):
            y.backward()


@pytest.mark.parametrize(("name", "bound"), [("int8", 5e-2), ("e4m3", 5e-2)])
def test_gradients_of_peaked_attention(name, bound):
    """Scores of standard deviation 4 and values with a mean: what a bias in small probabilities costs most."""
    torch.manual_seed(0)
    scores = (4 * torch.randn(4, 512, 512)).masked_fill(torch.ones(512, 512).triu(1).bool(), -1e30)
    values, dy = torch.randn(4, 512, 64) + 1.0, torch.randn(4, 512, 64)

    def gradients(fmt):
        s, v = scores.clone().requires_grad_(), values.clone().requires_grad_()
        return torch.autograd.grad(inside(Compressor(fmt), lambda s, v: s.softmax(-1) @ v, s, v), (s, v), dy)

    for ours, reference in zip(gradients(PackFormat(name=name)), gradients(None), strict=True):
        assert relative(ours, reference) < bound


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(1, 2),
        lambda x: x[:, ::2],
        lambda x: x[:, :1].expand(-1, 8, -1),
        lambda x: x.unfold(1, 3, 2),
        lambda x: x.flatten(),
        lambda x: x[0, 0, 0],
    ],
    ids=["transposed", "strided", "expanded", "overlapping", "flat", "scalar"],
)
def test_any_layout_comes_back_with_its_shape_and_values(view):
    x = torch.randn(4, 8, 16)
    compressor = Compressor(INT8, min_numel=0, boundary=True)
    seen = view(x)
    back = compressor.unpack(compressor.pack(seen))
    assert back.shape == seen.shape
    assert relative(back, seen) < 2e-2
    if seen.is_contiguous() or seen.shape == (4, 16, 8):
        assert back.stride() == seen.stride()


def test_double_use_gradient_accumulation_and_tied_weights():
    torch.manual_seed(0)
    tied = nn.Parameter(torch.randn(64, 64) / 8)

    def function(x):
        h = torch.tanh(x @ tied)
        return (h @ tied.t()) * h + h.pow(2)

    def accumulated(fmt):
        tied.grad = None
        compressor = Compressor(fmt, min_numel=1)
        for seed in range(3):
            x = torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))
            inside(compressor, function, x).square().mean().backward()
        return tied.grad.clone()

    assert 1e-4 < relative(accumulated(INT8), accumulated(None)) < 1e-2


def test_attach_and_detach_leave_the_module_as_it_was():
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    compressor = Compressor(INT8, min_numel=1)
    compressor.attach(module[0])
    assert compresses_inside(module) == "0"
    compressor.detach(module)
    assert compresses_inside(module) is None
    assert not module[0]._forward_hooks and not module[0]._forward_pre_hooks
