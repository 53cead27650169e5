"""``cache_weights: auto``: the weight's transposed layout stays until backward where there is room, and no bit changes."""

import functools
import logging
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import foundry_fp8
from foundry_fp8.backends.native import room
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL
from tests.backends.native.test_fused_models import model_of, step
from tests.backends.native.test_weight_cache import CountQuantizations, make, optimizer_step, run


@pytest.fixture
def unused(monkeypatch):
    """Bytes that the devices are said to have left."""
    there = {"bytes": math.inf}
    monkeypatch.setattr(room, "unused_memory", lambda device: there["bytes"])
    return there


def settled(model, device):
    """After what it takes to know whether there is room."""
    run(model, device)
    optimizer_step(model)
    run(model, device)
    return model


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=() if r == "delayed" else pytest.mark.full) for r in FOR_ANY_MODEL],
)
def test_every_way_to_a_gradient_has_the_same_bits(recipe, device, unused):
    kept, plain = (settled(make(recipe, device, cache), device) for cache in ("auto", False))
    keeps_products = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def twice(model):
        def call(x):
            y = model(x)
            torch.autograd.grad(y.sum(), [*model.parameters()], retain_graph=True)
            return y

        return call

    ways = {
        "plain": lambda model: model,
        "checkpoint": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
        "selective": lambda model: (
            lambda x: checkpoint(model, x, use_reentrant=False, context_fn=keeps_products)
        ),
        "reentrant": lambda model: lambda x: checkpoint(model, x, use_reentrant=True),
        "a second backward": twice,
        "two forwards": lambda model: lambda x: model(x) + model(x * 2),
    }
    for seed, (name, way) in enumerate(ways.items()):
        ours, theirs = (run(model, device, seed, way(model)) for model in (kept, plain))
        assert all(map(torch.equal, ours, theirs)), name
    with CountQuantizations() as quantizations:
        run(kept, device)
    assert quantizations.count == 2 * 3  # x, w and dy of two linears; four where backward quantises w again


def test_a_whole_models_units_keep_theirs_too(device, unused):
    kept, plain = model_of("Llama", blocks=1), model_of("Llama", blocks=1)
    foundry_fp8.apply_fp8(kept, recipe="current", backend="native")
    foundry_fp8.apply_fp8(plain, recipe="current", backend="native", cache_weights=False)
    gradients, counts = [], []
    for model in (kept, plain):
        step(model, 2)
        with CountQuantizations() as quantizations:
            gradients.append(step(model, 1))
        counts.append(quantizations.count)
    ours, theirs = gradients
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    assert counts[1] - counts[0] == 7


@pytest.mark.parametrize(("fuse", "nodes"), [("auto", 1), (False, 2)])
def test_what_is_kept_is_gone_after_backward(fuse, nodes, device, unused):
    model = settled(make("current", device, "auto", fuse=fuse), device)
    y = model(torch.ones(32, 64, device=device).requires_grad_())
    waiting, seen = [y.grad_fn], []
    while waiting:
        node = waiting.pop()
        seen.append(node)
        waiting += [n for n, _ in node.next_functions if n is not None]
    keeping = [node for node in seen if getattr(node, "kept_w", None) is not None]
    assert len(keeping) == nodes
    y.sum().backward()
    assert all(node.kept_w is None for node in keeping)


def test_it_waits_for_a_pass_and_leaves_room_for_an_optimizer(device, unused, caplog):
    """Two linears of 64 x 96: 12,288 bytes of FP8, and 16 bytes for each of 12,352 parameters before a step."""
    caplog.set_level(logging.INFO, "foundry_fp8")
    model = make("current", device, "auto")
    look = model[0].backend.room
    unused["bytes"] = 12_288
    run(model, device)
    assert look.there is None  # a first forward and its backward show what a run takes
    run(model, device)
    assert look.there is None  # an optimizer may still come
    optimizer_step(model)
    run(model, device)
    assert look.there is True
    assert (
        "keeps transposed FP8 weights from forward to backward: 12.00 KiB of 12.00 KiB unused" in caplog.text
    )
    for bytes_left, there in ((12_288 + 16 * 12_352, True), (12_288 + 16 * 12_352 - 1, None)):
        model = make("current", device, "auto")
        unused["bytes"] = bytes_left
        for _ in range(2):
            run(model, device)
        assert model[0].backend.room.there is there
    model = make("current", device, "auto")
    unused["bytes"] = 12_287
    settled(model, device)
    assert model[0].backend.room.there is False


def test_evaluation_and_other_backends_ask_nobody(device, monkeypatch):
    def unexpected(device):
        raise AssertionError("asked")

    monkeypatch.setattr(room, "unused_memory", unexpected)
    model = make("current", device, "auto", evaluate="fp8").eval()
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(16, 64, device=device))
    assert model[0].backend.room.there is None
    emulated = nn.Linear(32, 32)
    foundry_fp8.apply_fp8(nn.Sequential(emulated), recipe="current", backend="emulated")


class Transposed(TorchDispatchMode):
    """How many operands were made in the transposed layout too."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "foundry_fp8" and "quantize_tensorwise" in func._schema.name:
            place = [argument.name for argument in func._schema.arguments].index("columns")
            self.count += args[place]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fuse", ["auto", False])
def test_nothing_is_made_for_a_backward_that_cannot_come(fuse, device):
    """autograd's ``needs_input_grad`` is the same under ``no_grad`` (torch 2.7 to 2.15), so that it has to be asked before."""
    model = make("current", device, False, fuse=fuse, evaluate="fp8")
    counts = []
    for grad in (True, False):
        for mode in (model.train(), model.eval()):
            with torch.set_grad_enabled(grad), Transposed() as transposed:
                mode(torch.ones(32, 64, device=device))
            counts.append(transposed.count)
    assert counts == [2, 2, 0, 0]
    # A reentrant checkpoint's first forward has none either; its recompute does.
    x = torch.ones(32, 64, device=device, requires_grad=True)
    with Transposed() as transposed:
        y = checkpoint(model.train(), x, use_reentrant=True)
        first = transposed.count
        y.sum().backward()
    assert first == 0 and transposed.count == 2 + 4  # x twice; dy and w twice in backward


def test_off_a_gpu_there_is_none():
    assert room.unused_memory(torch.device("cpu")) == 0
