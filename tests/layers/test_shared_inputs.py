"""Linears that read one tensor quantise it once and keep it once, and compute what they compute from copies of it."""

import copy
import functools
import gc
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL
from foundry_fp8.surgery.apply import apply_fp8
from tests.backends.native.test_linear import CountOps

backends = pytest.mark.parametrize("backend", ["emulated", "native"])
every_recipe = pytest.mark.parametrize("recipe", FOR_ANY_MODEL)


def every_case(*quick):
    """Recipes and backends; of the interpreted ones all but ``quick`` in the full tier."""
    native = [
        pytest.param(recipe, "native", marks=() if recipe in quick else pytest.mark.full)
        for recipe in FOR_ANY_MODEL
    ]
    return pytest.mark.parametrize(
        ("recipe", "backend"), [*((recipe, "emulated") for recipe in FOR_ANY_MODEL), *native]
    )


@pytest.fixture(autouse=True)
def _no_collection():
    """The interpreter leaves cycles with storages in them, and collecting those ends weak references to storages that live on.

    Then an input is quantised once more, which is right and not what is counted here.
    """
    gc.disable()
    yield
    gc.enable()


class Block(nn.Module):
    """Attention's projections, and a parallel one that reads the same tensor after another linear has run."""

    def __init__(self, hand=lambda x: x):
        super().__init__()
        self.q, self.k, self.v, self.out, self.up = (nn.Linear(64, 64) for _ in range(5))
        self.hand = hand

    def forward(self, x):
        q, k, v = (linear(self.hand(x)) for linear in (self.q, self.k, self.v))
        return self.out(torch.tanh(q) * k + v) + self.up(self.hand(x))


class Model(nn.Module):
    def __init__(self, hand=lambda x: x, run=lambda block, x: block(x)):
        super().__init__()
        self.block, self.run = Block(hand), run

    def forward(self, x):
        return self.run(self.block, torch.sin(x))


def make(recipe, backend, device="cpu", hand=lambda x: x, run=lambda block, x: block(x), **options):
    torch.manual_seed(0)
    model = Model(hand, run).to(device)
    apply_fp8(model, recipe=recipe, backend=backend, **options)
    return model


def batch(device="cpu", tokens=32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, tokens // 2, 64, generator=generator).to(device).requires_grad_()


def trained(model, passes=2, autocast=False, device="cpu"):
    """Gradients and outputs of the last pass, so that delayed scales are not all one, and the histories."""
    for number in range(passes):
        model.zero_grad()
        x = batch(device, seed=number)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {
        "x": x.grad,
        "y": y,
    }
    delayed = FP8State.of(model).delayed
    return found if delayed is None else found | {"history": delayed.amax_history}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def kept_fp8(model, x):
    """Addresses of the FP8 tensors that each linear keeps, by its name."""
    found = {}

    def saving(name):
        def pack(t):
            if t.element_size() == 1 and t.is_floating_point():
                found.setdefault(name, []).append(t)
            return t

        return pack

    hooks = {}
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):

            def enter(module, args, name=name):
                hooks[name] = torch.autograd.graph.saved_tensors_hooks(saving(name), lambda t: t)
                hooks[name].__enter__()

            module.register_forward_pre_hook(enter)
            module.register_forward_hook(
                lambda m, a, o, name=name: hooks.pop(name).__exit__(None, None, None)
            )
    y = model(x)
    return {name: [t.data_ptr() for t in tensors] for name, tensors in found.items()}, (found, y)


@every_case("block")
def test_one_input_is_kept_once_and_nothing_changes(recipe, backend, device):
    shared, alone = make(recipe, backend, device), make(recipe, backend, device, hand=torch.clone)
    assert_equal(trained(shared, device=device), trained(alone, device=device))
    if recipe == "delayed" and (backend == "native" or device != "cpu"):
        return  # whether scales are equal, only the device knows
    (addresses, _), (apart, _) = kept_fp8(shared, batch(device)), kept_fp8(alone, batch(device))
    q, k, v, out, up = (addresses[f"block.{name}"] for name in ("q", "k", "v", "out", "up"))
    assert q == k == v == up and len(q) == 1
    assert out != q
    assert len({apart[f"block.{name}"][0] for name in ("q", "k", "v", "out", "up")}) == 5


@every_recipe
def test_one_input_is_quantised_once(recipe, device):
    """Of q, k, v, out and up: five weights, and x once for q, k and v, once for out, and by rows again for up, if those are gone."""
    model = make(recipe, "native", device)
    with CountOps() as shared:
        model(batch(device))
    most = 5 + (3 if recipe != "delayed" else 5)
    assert sum(name.startswith("quantize") for name in shared.calls) <= most


@pytest.mark.parametrize("cache_weights", [False, pytest.param(True, marks=pytest.mark.full)])
@every_case("current")
def test_frozen_siblings_autocast_and_cached_weights(recipe, cache_weights, backend, device):
    if backend == "emulated" and cache_weights:
        return
    made = [
        make(recipe, backend, device, hand, cache_weights=cache_weights)
        for hand in (lambda x: x, torch.clone)
    ]
    for model in made:
        model.block.q.weight.requires_grad_(False)  # the first to read x needs nothing of it for backward
    ours, theirs = (trained(model, autocast=True, device=device) for model in made)
    assert_equal(ours, theirs)


SELECTIVE = functools.partial(
    create_selective_checkpoint_contexts,
    [torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default],
)
RUNS = {
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "not reentrant": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "selective": lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=SELECTIVE),
    "selective, inputs read outside": lambda block, x: (
        block.q(x) + checkpoint(block, x, use_reentrant=False, context_fn=SELECTIVE) + block.k(x)
    ),
    "every quantised tensor saved": lambda block, x: (
        block.q(x) + checkpoint(block, x, use_reentrant=False, context_fn=SAVES_QUANTISED) + block.k(x)
    ),
}


def SAVES_QUANTISED():
    from foundry_fp8.backends.native import ops

    assert ops
    return create_selective_checkpoint_contexts(
        [
            getattr(torch.ops.foundry_fp8, name).default
            for name in ("quantize_tensorwise", "quantize_blockwise")
        ]
    )


@pytest.mark.parametrize(
    ("run", "backend"),
    [
        *((run, "emulated") for run in RUNS),
        *(pytest.param(run, "native", marks=pytest.mark.full) for run in RUNS),
    ],
)
def test_recomputes(run, backend, device):
    """A recompute quantises for itself, once for all siblings, and gives the same bits."""
    outside = (
        (lambda block, x: block.q(x) + block(x) + block.k(x))
        if "read outside" in run or "every" in run
        else None
    )
    for recipe in ("current", "block"):
        again = trained(make(recipe, backend, device, run=RUNS[run]), device=device)
        plain = trained(
            make(recipe, backend, device, run=outside or (lambda block, x: block(x))), device=device
        )
        for name in plain:
            torch.testing.assert_close(again[name], plain[name], rtol=1e-5, atol=1e-7)
        alone = trained(make(recipe, backend, device, torch.clone, run=RUNS[run]), device=device)
        assert_equal(again, alone)


def test_a_recompute_shares_too(device):
    model = make("current", "native", device, run=RUNS["not reentrant"])
    y = model(batch(device)).sum()
    with CountOps() as ops:
        y.backward()
    # Recomputed: five weights, x twice at most and out's input. Backward: five gradients, five weights again.
    assert sum(name.startswith("quantize") for name in ops.calls) <= 5 + 3 + 10


@pytest.mark.parametrize("backend", ["emulated", pytest.param("native", marks=pytest.mark.full)])
def test_what_differs_is_not_shared(backend, device):
    """Written to in between, exchanged by a hook, another recipe, another delayed scale, another forward."""

    def write_before_k(model):
        model.block.k.register_forward_pre_hook(lambda module, args: (args[0].mul_(2.0), None)[1])

    def exchange_for_k(model):
        model.block.k.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))

    def other_recipe_for_k(model):
        model.block.k.set_recipe(None)

    for change in (write_before_k, exchange_for_k, other_recipe_for_k):
        made = [make("current", backend, device, hand) for hand in (lambda x: x, torch.clone)]
        for model in made:
            change(model)
        shared, alone = made
        if change is write_before_k:  # the copies of those that follow are of what was written
            alone.block.hand = Writes()
        assert_equal(trained(shared, device=device), trained(alone, device=device))
        addresses, _ = kept_fp8(shared, batch(device))
        assert addresses["block.q"] != addresses.get("block.k")
        assert (addresses["block.q"] == addresses["block.v"]) == (change is not write_before_k)
    model = make("delayed", backend, device)
    model.block.k.slots["x"].record(
        torch.tensor(224.0, device=device)
    )  # from the next pass on its scale is 2
    addresses, _ = kept_fp8(model, batch(device))
    assert addresses["block.q"] != addresses["block.k"]
    model = make("current", backend, device)
    x = batch(device).detach()
    first, graph = kept_fp8(model.block, x)  # no forward of the whole model: nothing is shared
    assert graph and len({first[name][0] for name in ("q", "k", "v", "out", "up")}) == 5


class Writes:
    """Copies for q, k, v and up, as if k's hook had written to one tensor of all."""

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x * 2.0 if self.calls % 4 in (3, 0) else x.clone()


@backends
def test_two_forwards_wait_for_their_backward(backend, device):
    """The same tensor, read in two forwards: each keeps its own, and the sum of both gradients is right."""
    results = []
    for hand in (lambda x: x, torch.clone):
        model = make("current", backend, device, hand)
        model.forward = functools.partial(Block.forward, model.block)  # no sin: x itself is what q reads
        x = batch(device)
        (model(x).sum() + (model(x) * 2).sum()).backward()
        results.append({name: p.grad for name, p in model.named_parameters()} | {"x": x.grad})
    assert_equal(*results)


@backends
def test_nothing_is_held_after_a_forward(backend, device):
    model = make("current", backend, device)
    inputs = FP8State.of(model).backend.inputs
    y = model(batch(device))
    assert inputs._latest is None and not inputs._entries
    y.sum().backward()
    checkpointed = make("current", backend, device, run=RUNS["not reentrant"])
    checkpointed(batch(device)).sum().backward()
    gc.collect()  # torch stops a recompute by an exception, whose traceback holds what it was in the middle of
    inputs = FP8State.of(checkpointed).backend.inputs
    assert inputs._latest is None and not inputs._entries
    with pytest.raises((RuntimeError, ValueError)):
        model(torch.randn(2, 3, device=device))
    assert not inputs._inside


def test_in_inference_mode_and_copies(device):
    model = make("current", "emulated", device, evaluate="fp8").eval()
    with torch.no_grad():
        expected = model(batch(device))
    with torch.inference_mode():
        assert torch.equal(model(batch(device)), expected)
    backend = FP8State.of(model).backend
    backend.inputs.begin_forward()
    backend.inputs.of(batch(device), "how").put("x", batch(device))
    for copied in (copy.deepcopy(backend), pickle.loads(pickle.dumps(backend))):
        assert not copied.inputs._entries
