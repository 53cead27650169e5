"""Operators that multiply: those of the table are kept by ``selective`` and priced; those that layers call are in the table."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import foundry_fp8
from foundry_fp8.activations.checkpointing.policy import SELECTIVE_OPS, context_fn_for
from foundry_fp8.compat.dispatch_mode import TorchDispatchMode
from foundry_fp8.layers.product_operators import ATTENTION, LINEAR, flop_formulas

M, K, N, GROUPS = 32, 48, 64, 2
E4M3 = torch.float8_e4m3fn


class Called(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def one():
    return torch.ones(())


def scaled_mm(a, b):
    if torch.__version__.startswith("2.7."):
        pytest.skip("torch 2.7 has no _scaled_mm on a CPU")
    return torch._scaled_mm(a, b.t(), one(), one(), out_dtype=torch.bfloat16)


def scaled_mm_v2(a, b):
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12):
        pytest.skip(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm on a CPU")
    kind = F.ScalingType.TensorWise
    return F.scaled_mm(a, b.t(), one(), kind, one(), kind, output_dtype=torch.bfloat16)


def tensorwise_gemm(a, b):
    pytest.importorskip("triton")
    from foundry_fp8.backends.native import ops

    return ops.tensorwise_gemm.definition(a, one(), b, one(), None, torch.bfloat16, False)


PRODUCTS = {
    "aten._scaled_mm": scaled_mm,
    "aten._scaled_mm_v2": scaled_mm_v2,
    "foundry_fp8.tensorwise_gemm": tensorwise_gemm,
}


class Product(torch.autograd.Function):
    """As a layer calls it: torch has no derivative of these."""

    @staticmethod
    def forward(ctx, x, b, name):
        return PRODUCTS[name](x.to(E4M3), b).float()

    @staticmethod
    def backward(ctx, dy):
        return dy.new_ones(M, K), None, None


def operands():
    return torch.randn(M, K).to(E4M3), torch.randn(N, K).to(E4M3)


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_fp8_is_kept_by_selective_and_priced_at_half_of_bfloat16(name):
    a, b = operands()
    PRODUCTS[name](a, b)  # its module is imported
    with FlopCounterMode(display=False, custom_mapping=flop_formulas()) as flops:
        PRODUCTS[name](a, b)
    assert flops.get_total_flops() == M * K * N  # multiply and add, at half of the cost

    def region(x):
        return Product.apply(x * 2, b, name).sin() * x.sum()

    x = torch.randn(M, K, requires_grad=True)
    with Called() as first:
        out = checkpoint(region, x, use_reentrant=False, context_fn=context_fn_for("selective"))
    assert first.names.count(name) == 1
    with Called() as again:
        out.sum().backward()
    assert name not in again.names and "aten.sin" in again.names


@pytest.mark.parametrize(
    ("a", "b", "flops"),
    [
        ((M, K), (GROUPS, K, N), 2 * M * K * N),  # rows of a are divided
        ((M, K), (K, N), 2 * M * K * N),  # K is divided
        ((GROUPS, M, K), (K, N), 2 * M * K * N),  # columns of b are divided
        ((GROUPS, M, K), (GROUPS, K, N), 2 * GROUPS * M * K * N),
    ],
)
def test_grouped_products_are_priced_by_their_shapes(a, b, flops):
    grouped = flop_formulas()[torch.ops.aten._grouped_mm] if hasattr(torch.ops.aten, "_grouped_mm") else None
    scaled = flop_formulas()[torch.ops.aten._scaled_grouped_mm]
    assert scaled(a, b, None) == flops // 2
    assert grouped is None or grouped(a, b, None) == flops


@pytest.mark.parametrize("recipe", ["current", "delayed", "block", "mxfp8"])
@pytest.mark.parametrize("backend", ["emulated", "native"])
def test_what_a_layer_multiplies_with_is_in_the_table(backend, recipe):
    """The native backend's operators as a plan sees them: on fake tensors."""
    if backend == "native":
        pytest.importorskip("triton")
    with FakeTensorMode() if backend == "native" else contextlib.nullcontext():
        layer = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        foundry_fp8.apply_fp8(layer, recipe=recipe, backend=backend, include=["*"])
        x = torch.randn(128, 128, requires_grad=True)
        with Called() as called, FlopCounterMode(display=False, custom_mapping=flop_formulas()) as flops:
            layer(x).square().sum().backward()
    assert flops.get_total_flops() > 0
    products = {name for name in called.names if "mm" in name.split(".")[-1]}
    assert products and products <= {*LINEAR, *ATTENTION}


def test_attention_and_experts_of_torch_are_known():
    assert set(SELECTIVE_OPS) >= {
        "aten._grouped_mm",
        "aten._scaled_grouped_mm",
        "foundry_fp8.attention_forward",
    }
    known = {str(packet) for packet in flop_formulas()}
    assert "aten._scaled_grouped_mm" in known
