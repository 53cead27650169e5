"""Seconds that are counted: FLOPs and bytes of FP8 layers against sums that are written out here."""

import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import foundry_fp8
from foundry_fp8.backends import choose_backend
from foundry_fp8.numerics.recipes import RECIPES
from foundry_fp8.planning.memory.cost_model import CostModel
from tests.callbacks.conftest import build_llama

M, K, N = 512, 1024, 2048


def seconds_of(step, **model):
    """Of the second step: what a first one prepares is not counted."""
    step()
    with CostModel(**model).counting() as counted:
        step()
    return counted()


def linear(recipe):
    layer = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.bfloat16))
    if recipe is not None:
        foundry_fp8.apply_fp8(layer, recipe=recipe)
    x = torch.zeros(M, K, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(M, N, dtype=torch.bfloat16)

    def step():
        layer.zero_grad()
        x.grad = None
        layer(x).backward(dy)

    return step


@pytest.mark.parametrize("recipe", [None, "current", "delayed", "block", "mxfp8"])
def test_three_products_of_a_linear_take_half_the_time_in_fp8(recipe):
    with FakeTensorMode():
        took = seconds_of(linear(recipe), flops_per_second=1.0, bytes_per_second=math.inf)
    assert took == 3 * 2 * M * K * N * (1.0 if recipe is None else 0.5)


def test_the_bytes_of_a_linear_are_those_of_the_native_kernels():
    x, w, y = M * K, K * N, M * N
    # Each is read for its amax, and to be cast; dy and x are written in two layouts, the weight twice in one.
    amaxes = 2 * (x + w + y)
    casts = (2 + 2) * x + 2 * (2 + 1) * w + (2 + 2) * y
    products = (x + w + 2 * y) + (y + w + 2 * x) + (y + x + 2 * w)
    with FakeTensorMode():
        took = seconds_of(linear("current"), flops_per_second=math.inf, bytes_per_second=1.0)
    assert took == pytest.approx(amaxes + casts + products, rel=0.01)


def test_products_of_attention():
    """Forward S and PV; backward S, dP, dQ, dK and dV."""

    shape = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "attn_implementation": "sdpa",
    }

    def took(attention):
        with FakeTensorMode():
            model = build_llama(layers=1, **shape)
            foundry_fp8.apply_fp8(model, recipe="delayed", attention=attention)
            tokens = torch.zeros(1, 512, dtype=torch.long)
            return seconds_of(
                lambda: model(tokens).logits.sum().backward(), flops_per_second=1.0, bytes_per_second=math.inf
            )

    product = 2 * 512 * 512 * 256
    of_torch = 7 * product  # flash attention's: S and PV; S again, dP, dQ, dK, dV
    assert took(True) - took(False) == 0.5 * (2 + 5) * product - of_torch


def test_a_dry_run_plans_the_kernels_of_a_gpu(monkeypatch):
    from foundry_fp8.backends.native import backend as native

    device = torch.device("cpu")
    assert choose_backend("auto", RECIPES["current"](), device)[0].name == "emulated"
    with FakeTensorMode():
        assert choose_backend("auto", RECIPES["current"](), device)[0].name == "native"
        monkeypatch.setattr(native, "triton_missing", lambda: "Triton is not installed")
        backend, why = choose_backend("auto", RECIPES["current"](), device)
    assert backend.name == "emulated" and "Triton is not installed" in why
