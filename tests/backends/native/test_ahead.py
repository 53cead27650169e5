"""Weights of linears that read one norm, quantised in the first one's launch: the bits are those of each alone, whatever happens in between."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends.native import ahead
from foundry_fp8.kernels.launch import Launch


class Block(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(64, eps=1e-6, dtype=dtype)
        self.q, self.k, self.v = (nn.Linear(64, n, dtype=dtype) for n in (48, 32, 32))
        self.order = "qkv"

    def forward(self, x, between=None):
        y = self.norm(x)
        made = {}
        for name in self.order:
            if between is not None and made:
                between(self)
                between = None
            made[name] = getattr(self, name)(y).float().square().mean()
        return sum(made.values())


def multiplied(block):
    with torch.no_grad():
        block.k.weight.mul_(1.5)


def exchanged(block):
    block.k.weight = nn.Parameter(block.k.weight.detach() * 1.5)


def swapped(block):
    """Which no version counts."""
    block.k.weight.data = block.k.weight.detach() * 1.5


def converted_anew(block):
    block.k = copy.deepcopy(block.k)
    multiplied(block)


def hooked(block):
    """Before the forward: the hook changes the weight as no version counts."""

    def scale(module, args):
        module.weight.data.mul_(1.1)

    block.k.register_forward_pre_hook(scale)


def demoted(block):
    block.k.recipe = None


def shortened(block):
    block.order = "qv"


def turned_round(block):
    block.order = "vkq"


def frozen(block):
    block.k.weight.requires_grad_(False)


QUICK = [multiplied, exchanged, swapped, hooked, shortened, turned_round]
CASES = [
    *QUICK,
    *(pytest.param(one, marks=pytest.mark.full) for one in (None, converted_anew, demoted, frozen)),
]


def run(change, recipe="current", dtype=torch.bfloat16, autocast=False, alone=None, grad=True):
    """Losses and gradients of four steps, in the third of which ``change`` happens behind the first linear."""
    block = Block(dtype).train()
    foundry_fp8.apply_fp8(block, recipe=recipe, backend="native")
    if alone is not None:
        alone.setattr(ahead, "ahead_of", lambda module, x: (None, None))
    found = []
    for step in range(4):
        if step == 2 and change is hooked:
            hooked(block)
        x = torch.linspace(-2, 2, 16 * 64).view(16, 64).sin().to(dtype).requires_grad_()
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
            torch.set_grad_enabled(grad or step > 1),
        ):
            loss = block(x, between=change if step == 2 and change is not hooked else None)
        if loss.requires_grad:
            loss.backward()
        found += [
            loss.detach(),
            x.grad,
            *(None if p.grad is None else p.grad.clone() for p in block.parameters()),
        ]
        block.zero_grad()
    return found


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize("change", CASES, ids=lambda change: getattr(change, "__name__", "nothing"))
def test_the_bits_are_those_of_each_alone(change, device, monkeypatch):
    assert_equal(run(change), run(change, alone=monkeypatch))


def test_a_hook_on_all_modules_is_one_of_each(device, monkeypatch):
    def scale(module, args):
        if getattr(module, "out_features", 0) == 32:
            module.weight.data.mul_(1.1)

    hook = nn.modules.module.register_module_forward_pre_hook(scale)
    try:
        assert_equal(run(None), run(None, alone=monkeypatch))
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"recipe": "delayed"}, marks=pytest.mark.full),
        pytest.param({"dtype": torch.float32, "autocast": True}, marks=pytest.mark.full),
        {"grad": False},
    ],
    ids=["delayed", "autocast", "without gradients"],
)
def test_other_recipes_and_modes(options, device, monkeypatch):
    assert_equal(run(multiplied, **options), run(multiplied, alone=monkeypatch, **options))


@pytest.fixture
def launched(monkeypatch):
    """Names of kernels, counted."""
    counts, call = Counter(), Launch.__call__

    def seen(self, *args):
        counts[self.name] += 1
        call(self, *args)

    monkeypatch.setattr(Launch, "__call__", seen)
    return counts


def test_from_the_second_forward_on_it_is_one_launch(launched, device):
    block = Block(torch.bfloat16).train()
    foundry_fp8.apply_fp8(block, recipe="current", backend="native")
    casts = []
    for _ in range(3):
        launched.clear()
        block(torch.ones(16, 64, dtype=torch.bfloat16))
        casts.append({name: count for name, count in launched.items() if "statistics" not in name})
    first = {
        "_amax_together_kernel": 1,
        "_quantize_together_kernel": 1,
        "_amax_kernel": 2,
        "_quantize_kernel": 2,
    }
    assert casts == [first] + 2 * [{"_amax_together_kernel": 1, "_quantize_together_kernel": 1}]


def test_of_many_readers_some_at_a_time(launched, device):
    """A launch has room for three weights: its own and two more."""
    block = Block(torch.bfloat16).train()
    block.r, block.s, block.t = (copy.deepcopy(block.k) for _ in range(3))
    block.order = "qkvrst"
    foundry_fp8.apply_fp8(block, recipe="current", backend="native")
    for _ in range(2):
        launched.clear()
        block(torch.ones(16, 64, dtype=torch.bfloat16))
    assert (launched["_quantize_together_kernel"], launched["_quantize_kernel"]) == (2, 0)
    block.k.register_forward_hook(lambda module, args, output: None)  # it takes nobody's place
    launched.clear()
    block(torch.ones(16, 64, dtype=torch.bfloat16))
    assert (launched["_quantize_together_kernel"], launched["_quantize_kernel"]) == (2, 0)


def test_weights_that_count_no_versions_are_left_alone(device):
    with torch.inference_mode():
        block = Block(torch.bfloat16).train()
        foundry_fp8.apply_fp8(block, recipe="current", backend="native")
        x = torch.ones(16, 64, dtype=torch.bfloat16)
        assert len({float(block(x)) for _ in range(3)}) == 1


def test_what_nobody_reads_any_more_is_quantised_once_more(launched, device):
    """The third forward still expects the second's readers, the fourth does not."""
    block = Block(torch.bfloat16).train()
    foundry_fp8.apply_fp8(block, recipe="current", backend="native")
    programs = []
    for order in ("qkv", "qkv", "qv", "qv", "qkv"):
        block.order = order
        launched.clear()
        block(torch.ones(16, 64, dtype=torch.bfloat16))
        programs.append((launched["_quantize_together_kernel"], launched["_quantize_kernel"]))
    assert programs == [(1, 2), (1, 0), (1, 0), (1, 0), (1, 1)]


def test_a_model_is_copied_and_pickled_between_forwards(device):
    block = Block(torch.bfloat16).train()
    foundry_fp8.apply_fp8(block, recipe="current", backend="native")
    x = torch.ones(16, 64, dtype=torch.bfloat16)
    wanted = block(x)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        multiplied(block)
        assert torch.equal(other(x), wanted) and torch.equal(other(x), wanted)
