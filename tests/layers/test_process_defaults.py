"""Whatever the process's default dtype and device, FP8 layers compute what they compute without, and their state stays float32 with values."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.layers.state import FP8State

RECIPES = ["delayed", "current", {"name": "current", "granularity": "row"}, "block", "mxfp8", "nvfp4"]
FLOAT_MAKERS = {"empty", "zeros", "ones", "full", "rand", "randn", "eye", "linspace", "tensor", "empty_strided", "scalar_tensor"}  # fmt: skip
INTEGER_MAKERS = {"arange", "randint", "randperm"}
PARAMETERS_OF_MODELS = ("models/", "data/", "cli/")
"""Modules of ours are made in the default dtype, as torch's own; scripts have no caller with another."""


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made():
    torch.manual_seed(0)
    factory = {"dtype": torch.float32, "device": "cpu"}
    return nn.Sequential(nn.Linear(128, 128, **factory), nn.Linear(128, 128, bias=False, **factory))


def steps(recipe, compute=torch.float32):
    """Outputs and gradients of three training steps, and the state."""
    model = made().to(compute)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated", include=["*"])
    generator = torch.Generator("cpu").manual_seed(1)
    found = []
    for _ in range(3):
        x = torch.randn(128, 128, generator=generator, dtype=torch.float32, device="cpu").to(compute)
        y = model(x)
        y.backward(x.flip(0))
        found += [y.detach(), *(p.grad.clone() for p in model.parameters())]
    state = FP8State.of(model).state_dict() if recipe == "delayed" else {}
    return found, state


def tensors(state):
    if isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, torch.Tensor):
        yield state


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_nothing(recipe, dtype):
    expected, state = steps(recipe)
    with default_dtype(dtype):
        found, other = steps(recipe)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True))
    for ours, theirs in zip(tensors(other), tensors(state), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    # Nor is anything left behind for the next model.
    again, _ = steps(recipe)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_conversion_and_training_within_the_meta_device_keep_values(recipe):
    expected, state = steps(recipe)
    with torch.device("meta"):
        found, other = steps(recipe)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors(other), tensors(state), strict=True))


def test_state_outlives_parameters_that_are_moved_to_meta_and_back():
    """As offloading hooks do around a forward."""
    model = made()
    foundry_fp8.apply_fp8(model, recipe="delayed", backend="emulated", include=["*"])
    x = torch.randn(128, 128)
    model(x).sum().backward()
    model(x).sum().backward()
    before = FP8State.of(model).state_dict()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to("meta")
    model.eval()(torch.empty(128, 128, device="meta"))  # what a shape costs, say
    assert all(
        torch.equal(a, b)
        for a, b in zip(tensors(FP8State.of(model).state_dict()), tensors(before), strict=True)
    )
    FP8State.of(model).load_state_dict(before)
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    assert torch.isfinite(model.train()(x)).all()
    assert all(t.device.type == "cpu" for t in tensors(FP8State.of(model).state_dict()))


def test_every_tensor_that_the_package_makes_names_its_dtype_and_device():
    root = Path(foundry_fp8.__file__).parent
    unnamed = []
    for path in root.rglob("*.py"):
        relative = str(path.relative_to(root))
        if relative.startswith(PARAMETERS_OF_MODELS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner, maker = node.func.value, node.func.attr
            if not (isinstance(owner, ast.Name) and owner.id == "torch"):
                continue
            needed = (
                {"dtype", "device"}
                if maker in FLOAT_MAKERS
                else {"device"}
                if maker in INTEGER_MAKERS
                else set()
            )
            given = {keyword.arg for keyword in node.keywords}
            if None not in given and needed - given:
                unnamed.append(
                    f"{relative}:{node.lineno}: torch.{maker} without {', '.join(sorted(needed - given))}"
                )
    assert unnamed == []
