"""A demoted layer's shadow is of the tensors that it would quantise."""

from __future__ import annotations

import pytest
import torch

from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.observe.divergence.shadow import LinearShadow
from foundry_fp8.observe.operand_health import HealthProbe, Products, summarise
from foundry_fp8.observe.product_noise import product_noise
from foundry_fp8.surgery.apply import apply_fp8


class Louder(torch.autograd.Function):
    """The gradient of one channel is much larger behind the layer than in front of its other hooks."""

    @staticmethod
    def forward(ctx, output):
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad[..., :1] + 1e7, grad[..., 1:]], -1)


def louder_still(module, args, output):
    """A hook on the tensor itself, later than any that the layer could put there."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * torch.linspace(1, 9, gradient.shape[-1]))


def build(recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128))
    apply_fp8(model, recipe=recipe, backend="emulated")
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * torch.linspace(0.01, 40, 32),))
    model[0].register_forward_hook(louder_still)
    model[0].register_forward_hook(lambda module, args, output: Louder.apply(output))
    return model.train()


def step(model, seed=1):
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    (model(x) * weight).sum().backward()


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "delayed"])
def test_a_shadow_sees_what_the_recipe_sees_whatever_hooks_the_layer_has(recipe):
    model = build(recipe)
    linear: FP8Linear = model[0]
    products = Products()
    probe = HealthProbe(model, lambda hook: hook, products=products)
    for _ in range(3):  # delayed scaling knows the amaxes then
        step(model)
    probe.attach()
    step(model)
    seen = {operand: summarise(row.tolist()) for (_, operand), row in probe.tensors().items()}
    multiplied = {which: product_noise(row.tolist()) for (_, which), row in products.tensors().items()}
    probe.detach()
    assert seen["dy"].peak > 10, "what is quantised is what sticks out"

    above, shadow = linear.recipe, LinearShadow(lambda hook: hook)
    linear.set_recipe(None)
    shadow.follow({"0": (linear, above)})
    if linear.slots:
        for slot in linear.slots.values():
            slot.amax_history.zero_()
        step(model)  # the histories are kept up while the layer runs something else
        step(model)
    shadow.measures = True
    step(model)
    would = {operand: summarise(row.tolist()) for (_, operand), row in shadow.tensors().items()}
    assert set(would) == {"x", "w", "dy"}
    for operand, health in would.items():
        assert health.noise == pytest.approx(seen[operand].noise, rel=1e-5), operand
        assert health.flushed == pytest.approx(seen[operand].flushed, abs=1e-6), operand
        assert health.scale == pytest.approx(seen[operand].scale, rel=1e-6), operand
    for (_, which), row in shadow.products.tensors().items():
        assert product_noise(row.tolist()) == pytest.approx(multiplied.pop(which), rel=1e-5), which
    assert not multiplied
    shadow.follow({})
    assert linear.look is None


def test_a_shadow_takes_the_gradient_of_the_layers_output_where_its_node_has_several():
    model = build("current")
    linear: FP8Linear = model[0]
    shadow = LinearShadow(lambda hook: hook)
    shadow.follow({"0": (linear, linear.configured_recipe)})
    shadow.measures = True
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    other, output = (
        torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(2)).requires_grad_().unbind()
    )
    linear.look(x, output)
    (other * 1e5 + output * 3).sum().backward()
    dy = summarise(shadow.tensors()["0", "dy"].tolist())
    assert dy.amax == 3.0


def test_between_due_batches_only_amaxes_are_recorded():
    model = build("delayed")
    linear: FP8Linear = model[0]
    step(model)
    linear.set_recipe(None)
    shadow = LinearShadow(lambda hook: hook)
    shadow.follow({"0": (linear, linear.configured_recipe)})
    linear.slots["x"].amax_history.zero_()
    step(model, seed=3)
    assert not shadow.tensors()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.01, 40, 32)
    assert float(linear.slots["x"].amax) == float(x.abs().max())
    linear.slots["x"].amax_history.zero_()
    model.eval()
    with torch.no_grad():
        model(x)
    assert float(linear.slots["x"].amax) == 0, "evaluation is no pass"
