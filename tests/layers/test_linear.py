"""What an FP8 linear owes its owner and what it refuses, whoever runs it."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL, DelayedScaling
from foundry_fp8.surgery.apply import apply_fp8
from tests.one_rank import one_rank


def model(recipe="current", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    apply_fp8(net, recipe=recipe, backend="emulated", **options)
    return net


@pytest.mark.parametrize("recipe", FOR_ANY_MODEL)
@pytest.mark.parametrize("tokens", [64, 50])
def test_a_second_derivative_is_refused(recipe, tokens):
    net, x = model(recipe), torch.randn(tokens, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"^2: FP8 layers have no second derivative.*create_graph"):
        torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    net[0].set_recipe(None), net[2].set_recipe(None)
    (gradient,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), x)[0].isfinite().all()


def test_float64_is_refused_in_fp8_and_taken_in_high_precision():
    net = model()
    with pytest.raises(
        TypeError, match=r"^0: the input is torch.float64; FP8 layers take float32, bfloat16 and float16"
    ):
        net(torch.randn(4, 64, dtype=torch.float64))
    net.double().eval()
    assert net(torch.randn(4, 64, dtype=torch.float64)).dtype == torch.float64


@pytest.fixture
def mesh():
    one_rank()
    return init_device_mesh("cpu", (1,))


def test_what_tensor_parallelism_half_knows_is_refused_by_name(mesh):
    """What it knows trains: tests/multiprocess/test_tensor_parallel.py."""
    net, x = model(), torch.randn(8, 64)
    with pytest.raises(RuntimeError, match=r"^2: its input is a DTensor and its weight is not.*exclude"):
        net[2](distribute_tensor(net[1](net[0](x)).detach(), mesh, [Replicate()]))
    net[2].weight = nn.Parameter(distribute_tensor(net[2].weight.detach(), mesh, [Replicate()]))
    with pytest.raises(RuntimeError, match=r"^2: its weight is a DTensor and its input is not"):
        net(x)
    net[2].bias = None
    with pytest.raises(RuntimeError, match=r"^2: FP8 layers run under .*Shard\(0\) \(ColwiseParallel\)"):
        net[2](distribute_tensor(net[1](net[0](x)).detach(), mesh, [Replicate()]))
    demoted = model()
    demoted[2].set_recipe(None)
    with implicit_replication():  # in high precision torch decides what goes together
        assert isinstance(demoted[2](distribute_tensor(torch.randn(8, 96), mesh, [Replicate()])), DTensor)
    in_high_precision = model(exclude=["2"])
    parallelize_module(in_high_precision, mesh, {"2": ColwiseParallel()})
    in_high_precision(torch.randn(8, 64)).sum().backward()
    assert isinstance(in_high_precision[2].weight.grad, DTensor)


def test_what_is_sharded_already_is_not_converted(mesh):
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    parallelize_module(net, mesh, {"2": ColwiseParallel()})
    report = apply_fp8(net, recipe="current", backend="emulated")
    assert report.converted == ["0"] and "conversion, which has to come first" in report.skipped["2"]
    assert isinstance(net[0], FP8Linear) and type(net[2]) is nn.Linear
    with pytest.raises(
        ConfigError,
        match=r"sharded before the conversion.*without tp_plan, convert it, then call parallelize_module",
    ):
        apply_fp8(nn.Sequential(net[2]), recipe="current", backend="emulated")


class AddsInPlace(nn.Module):
    """As transformers' Falcon: the sum of two branches is written into the result of a linear."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        y = self.a(x)
        y += self.b(x)
        return y.relu_()


@pytest.mark.parametrize("recipe", FOR_ANY_MODEL)
def test_a_result_may_be_changed_in_place(recipe):
    model = AddsInPlace()
    apply_fp8(model, recipe=recipe)
    apart = copy.deepcopy(model)
    x, dy = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    model(x).backward(dy)
    (apart.a(x) + apart.b(x)).relu().backward(dy)
    for ours, theirs in zip(model.parameters(), apart.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    for layer in (model.a, model.b):
        assert layer.ledger.calls["fprop", "fp8"] == layer.ledger.calls["wgrad", "fp8"] == 1


def test_high_precision_is_the_forward_of_the_class_it_was_made_from():
    class Rounded(nn.Linear):
        def forward(self, x):
            return (x @ self.weight.T).bfloat16().float() + self.bias

    layer = Rounded(32, 32)
    model = nn.Sequential(nn.Linear(32, 32))
    apply_fp8(model, recipe="current")
    converted = FP8Linear.from_linear(layer, fqn="x", backend=model[0].backend, recipe=model[0].recipe)
    x = torch.randn(4, 32)
    assert not torch.equal(converted(x), layer(x))
    assert torch.equal(converted.eval()(x), layer(x))


def test_delayed_scaling_runs_only_where_there_is_state_for_it():
    layer = model("current")[0]
    with pytest.raises(RuntimeError, match=r"^0: delayed scaling has state only where .* with current"):
        layer.set_recipe(DelayedScaling())
    assert layer.recipe.name == "current"


def test_a_printed_model_says_what_each_layer_runs():
    net = model("block", wgrad="high_precision")
    net[2].set_recipe(None)
    assert "in_features=64" in repr(net[0])
    assert "recipe=block, backend=emulated, wgrad=high_precision" in repr(net[0])
    assert "recipe=high_precision" in repr(net[2])
