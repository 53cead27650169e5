"""What an FP8 linear refuses, whoever runs it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import RECIPES
from foundry_fp8.surgery.apply import apply_fp8


def model(recipe="current", **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
    apply_fp8(net, recipe=recipe, backend="emulated", **options)
    return net


@pytest.mark.parametrize("recipe", RECIPES)
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
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_tensor_parallelism_is_refused_by_name(mesh):
    net = model()
    parallelize_module(net, mesh, {"2": ColwiseParallel()})
    with pytest.raises(RuntimeError, match=r"^2: its input is a DTensor.*tensor parallelism.*exclude"):
        net(torch.randn(8, 64))
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
    with pytest.raises(ConfigError, match="sharded before the conversion"):
        apply_fp8(nn.Sequential(net[2]), recipe="current", backend="emulated")
