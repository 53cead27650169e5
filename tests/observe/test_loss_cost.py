"""What rounding costs of the loss: against the loss itself, in float64, and as probes measure it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.observe.divergence.shadow import LinearShadow
from foundry_fp8.observe.loss_cost import Error, attention_cost, loss_cost
from foundry_fp8.observe.operand_health import HealthProbe, Products
from foundry_fp8.observe.operand_stats import sample_rows
from foundry_fp8.surgery.apply import apply_fp8


def cost_of(error, dy):
    """In units of the loss."""
    total, tokens = loss_cost(Error(error.float(), sample_rows(error), sample_rows(error.t())), dy).tolist()
    return total * tokens


def test_it_is_what_noise_adds_to_the_loss():
    """Of labels that the model itself draws, whose loss has Fisher's information for its Hessian on average."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(4096, 32, generator=generator, dtype=torch.float64)
    head = torch.randn(32, 16, generator=generator, dtype=torch.float64) / 4
    labels = torch.multinomial((y @ head).softmax(-1), 1, generator=generator).flatten()
    y.requires_grad_()
    loss = F.cross_entropy(y @ head, labels)
    (dy,) = torch.autograd.grad(loss, y)
    for size in (0.01, 0.2):
        noise = [size * torch.randn(y.shape, generator=generator, dtype=torch.float64) for _ in range(64)]
        y = y.detach()
        # Each noise and its opposite: what has no mean cancels.
        more = [
            F.cross_entropy((y + e) @ head, labels) + F.cross_entropy((y - e) @ head, labels) for e in noise
        ]
        added = torch.stack(more).mean() / 2 - loss
        whole = [0.5 * len(y) * (dy * e).square().sum() for e in noise]
        assert float(torch.stack(whole).mean()) == pytest.approx(float(added), rel=0.1)


def test_of_attention_it_is_what_errors_of_probabilities_and_values_add():
    """Of labels that the model draws, again. Errors of one probability are in all features of an output."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    p, head = normal(256, 4, 16, 24).softmax(-1), normal(32, 16) / 4
    v = normal(256, 4, 24, 1) * head.view(4, 1, 8, 16)[..., 0]  # whose features the loss feels together

    def loss_of(o):
        return F.cross_entropy(o.transpose(1, 2).reshape(-1, 32) @ head, labels)

    o = p @ v
    labels = torch.multinomial(
        (o.transpose(1, 2).reshape(-1, 32) @ head).softmax(-1), 1, generator=generator
    ).flatten()
    loss = loss_of(o.requires_grad_())
    (do,) = torch.autograd.grad(loss, o)
    o = o.detach()
    added, found = [], []
    for _ in range(32):
        e = (0.2 * p * normal(*p.shape)) @ v + p @ (0.05 * v * normal(256, 4, 24, 1))
        added.append((loss_of(o + e) + loss_of(o - e)) / 2 - loss)
        total, tokens = attention_cost(
            e.flatten(0, 1).float(), do.flatten(0, 1), o[..., 0].numel(), 256 * 16
        ).tolist()
        found.append(total * tokens)
    assert sum(found) == pytest.approx(float(sum(added)), rel=0.1)


@pytest.mark.parametrize("shape", [(100, 40), (700, 300)])
def test_a_sample_stands_for_the_whole(shape):
    generator = torch.Generator().manual_seed(1)
    error, dy = torch.randn(2, *shape, generator=generator)
    rows, columns = sample_rows(error), sample_rows(error.t())
    part = error if rows.rows is None else error[rows.rows][:, columns.rows]
    total, tokens = loss_cost(Error(part, rows, columns), dy * 1e-20).tolist()
    assert tokens == len(dy)
    assert total == pytest.approx(
        0.5e-40 * float((error * dy).double().square().sum()), rel=0.1 if len(dy) > 128 else 1e-6
    )


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_a_probe_and_a_shadow_measure_what_the_layer_does(recipe):
    """The error is that of what the layer puts out, and the gradient the one that it gets."""
    torch.manual_seed(0)
    x, dy = torch.randn(96, 64), torch.randn(96, 128) / 96
    model = torch.nn.Sequential(torch.nn.Linear(64, 128)).train()
    exact = F.linear(x, model[0].weight, model[0].bias)
    apply_fp8(model, recipe=recipe, backend="emulated")
    linear: FP8Linear = model[0]
    products = Products()
    probe = HealthProbe(model, lambda hook: hook, products=products)

    def found():
        for _ in range(3):  # delayed scaling knows the amaxes then
            probe.attach()
            products.costs(), products.tensors()
            y = model(x.clone().requires_grad_())
            y.backward(dy)
            probe.detach()
        return y.detach()

    error = (found() - exact) * dy
    wanted = 0.5 * 96 * float(error.double().square().sum())
    total, tokens = products.costs()["0"].tolist()
    assert total * tokens == pytest.approx(wanted, rel=1e-3) and not products.costs()

    shadow = LinearShadow(lambda hook: hook)
    above = linear.recipe
    linear.set_recipe(None)
    shadow.follow({"0": (linear, above)})
    shadow.measures = True
    model(x.clone().requires_grad_()).backward(dy)
    total, tokens = shadow.products.costs()["0"].tolist()
    assert total * tokens == pytest.approx(wanted, rel=1e-3)
    shadow.follow({})


def test_what_is_taken_off_behind_the_layer_costs_what_is_lost_of_it():
    """As many directions as a layer may have, so that no error relative to its product tells: the loss does."""
    torch.manual_seed(0)
    x, w = torch.randn(8192, 64), torch.randn(48, 64) / 8
    labels = torch.multinomial((x @ w.t()).softmax(-1), 1).flatten()
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False)).train()
    model[0].weight.data = w
    apply_fp8(model, recipe="current", backend="emulated")
    for size in (3.0, 12.0):
        dark = size * torch.randn(8192, 64)
        products = Products()
        probe = HealthProbe(model, lambda hook: hook, products=products)
        probe.attach()
        logits = model((x + dark).requires_grad_()) - dark @ w.t()
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        probe.detach()
        total, tokens = products.costs()["0"].tolist()
        added = loss.item() - F.cross_entropy(x @ w.t(), labels).item()
        assert total * tokens == pytest.approx(added, rel=0.4), size
