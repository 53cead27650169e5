"""Norms and MLPs called, watched and changed in ways in which they are not fused, or their output is read late: as without fusing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import foundry_fp8
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import parse_recipe


class GatedNorm(nn.RMSNorm):
    """As Mamba 2's: of one tensor it has a form, of two it computes something else."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * F.silu(gate))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act, self.drop = nn.SiLU(), nn.Dropout(0.0)

    def forward(self, x, scale=1.0):
        return self.down(self.drop(self.act(self.gate(x)) * self.up(x))) * scale


class Block(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.norm, self.mlp, self.last, self.call = GatedNorm(64, eps=1e-5), MLP(), nn.Linear(64, 64), call

    def forward(self, x):
        return self.last(self.call(self, x))


def found(call, change, fuse, steps=2, recipe="current"):
    """Output and gradients of the last step."""
    torch.manual_seed(0)
    block = Block(call)
    report = foundry_fp8.apply_fp8(block, recipe=recipe, backend="native", fuse=fuse)
    assert len(report.fused) == (2 if fuse else 0)
    change(block)
    for number in range(steps):
        block.zero_grad()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(number)).requires_grad_()
        y = block(x)
        y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in block.named_parameters()}


def assert_alike(call, change=lambda block: None, **options):
    ours, theirs = (found(call, change, fuse, **options) for fuse in ("auto", False))
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            ours[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()), msg=name
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda block, x: block.mlp(block.norm(x, x.flip(0))),
        lambda block, x: block.mlp(block.norm(x, gate=x.flip(0))),
        lambda block, x: block.mlp(x=block.norm(x=x)),
        lambda block, x: block.mlp(block.norm(x), 2.0),
        lambda block, x: block.mlp(block.norm(x), scale=2.0),
    ],
)
def test_other_arguments_than_one_input(call, device):
    assert_alike(call)


def plain(block, x):
    return block.mlp(block.norm(x))


def test_a_hook_on_an_activation_sees_it_and_may_change_it(device):
    assert_alike(plain, lambda block: block.mlp.act.register_forward_hook(lambda *args: args[-1] * 2))


def test_children_that_changed_since(device):
    assert_alike(plain, lambda block: setattr(block.mlp, "act", nn.ReLU()))
    ours = found(plain, lambda block: setattr(block.mlp.drop, "p", 1.0), "auto")
    assert not ours["mlp.gate.weight"].any() and ours["mlp.down.bias"].any()


class Doubled(nn.Module):
    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * 2


def test_a_parametrisation_is_computed_once_a_call(device):
    calls = []

    def change(block):
        doubled = Doubled()
        parametrize.register_parametrization(block.mlp.up, "weight", doubled, unsafe=True)
        calls.append((doubled, doubled.calls))

    assert_alike(plain, change)
    assert {doubled.calls - before for doubled, before in calls} == {calls[-1][0].calls - calls[-1][1]}


def test_a_norm_s_output_has_its_gradient(device):
    def call(block, x):
        h = block.norm(x)
        (gradient,) = torch.autograd.grad(block.mlp(h).square().sum(), h, retain_graph=True)
        return block.mlp(h) + gradient

    assert_alike(call)


class Same(torch.autograd.Function):
    """What an autograd function is given, and a module with backward hooks, it knows from autograd."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def reentrant(h):
    return torch.utils.checkpoint.checkpoint(lambda x: x.sin(), h, use_reentrant=True)


@pytest.mark.parametrize("write", [lambda h, x: h.mul_(3), lambda h, x: h.add_(x), lambda h, x: h.mul_(x)])
@pytest.mark.parametrize("read", [lambda h: h, Same.apply, reentrant])
def test_a_write_in_place_has_its_gradient(write, read, device):
    def call(block, x):
        h = block.norm(x)
        write(h, block.last(x))
        h.register_hook(lambda gradient: gradient.clamp(-1, 1))
        return block.mlp(read(h)) + read(h)

    assert_alike(call)


def test_what_can_be_made_no_more_is_an_error(device):
    block = Block(plain)
    foundry_fp8.apply_fp8(block, recipe="current", backend="native")
    x = torch.randn(32, 64)
    with torch.no_grad():
        first, second = block.norm(x), block.norm(x)
        read = first.clone()
        x.add_(1)
        assert torch.equal(first, read)
        with pytest.raises(RuntimeError, match="fuse: false"):
            block.mlp(second)
        third = block.norm(x)
        block.norm.weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            third.sum()


def test_a_gate_that_was_demoted_records_nothing(device):
    states = []
    for fuse in ("auto", False):

        def change(block):
            block.mlp.gate.set_recipe(parse_recipe("current"))
            states.append(FP8State.of(block))

        found(plain, change, fuse, recipe="delayed", steps=4)
    ours, theirs = (state.state_dict()["modules"] for state in states)
    for name in ("mlp.gate", "mlp.up"):
        for key in ("scale", "amax_history"):
            torch.testing.assert_close(ours[name][key][..., 0], theirs[name][key][..., 0])
    assert not ours["mlp.gate"]["amax_history"].any()
