"""A conversion that fails anywhere leaves the model as it was."""

import inspect
import sys

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.run.fp8_run import FP8Run
from foundry_fp8.surgery import apply


class Stopped(BaseException):
    pass


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=1, vocab_size=64, attn_implementation="sdpa")  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down_proj" not in name)
    return model


def facts(model):
    """All that a conversion may touch; of mutable values what is in them."""
    found = {}
    for name, module in model.named_modules():
        found[name] = (
            type(module),
            {k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()},
        )
    values = {n: (id(p), type(p), p.detach().clone()) for n, p in model.named_parameters()}
    return found, values


def same(before, after):
    assert before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    for name, (*identity, value) in before[1].items():
        assert identity == list(after[1][name][:2]) and torch.equal(value, after[1][name][2]), name


def stops_in(function, call):
    """A trace that raises when the ``call``-th call of a function in this package's surgery or layers begins."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        code = frame.f_code
        ours = "/surgery/" in code.co_filename or "/layers/" in code.co_filename
        if event == "call" and ours and not code.co_flags & inspect.CO_GENERATOR:
            count += 1
            if count == call:
                raise Stopped(code.co_qualname)
        return None

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return count


OPTIONS = {
    "delayed with attention": {"recipe": "delayed", "attention": True},
    "native, frozen weights": {"recipe": "block", "backend": "emulated", "frozen_weights": "fp8"},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_an_error_at_any_step_leaves_the_model_as_it_was(options):
    """Calls of a function all over it, and most of the last ones, which change the model."""
    given = {"backend": "emulated", **OPTIONS[options]}
    foundry_fp8.apply_fp8(llama(), **given)  # fills what is remembered of classes
    other, model = llama(), llama()
    calls = stops_in(lambda: foundry_fp8.apply_fp8(other, **given), -1)
    before = facts(model)
    for call in sorted({*range(1, calls, calls // 20), *range(max(1, calls - 60), calls + 1, 3)}):
        with pytest.raises(Stopped, match=r"\w+"):
            stops_in(lambda: foundry_fp8.apply_fp8(model, **given), call)
        same(before, facts(model))
    assert foundry_fp8.apply_fp8(model, **given).converted


def test_a_history_that_no_memory_holds_is_named_before_anything(monkeypatch):
    model = llama()
    before = facts(model)
    for length in (10**12, 2**20 + 1):
        recipe = {"name": "delayed", "amax_history_len": length}
        with pytest.raises(ConfigError, match="amax_history_len"):
            foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated")
        same(before, facts(model))


def test_a_state_that_cannot_be_allocated_leaves_the_model_as_it_was(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no memory for histories")

    monkeypatch.setattr(apply, "FP8State", full)
    model = llama()
    before = facts(model)
    with pytest.raises(torch.OutOfMemoryError):
        foundry_fp8.apply_fp8(model, recipe="delayed", backend="emulated")
    same(before, facts(model))


def test_a_run_that_refuses_what_it_converted_leaves_the_model_as_it_was(monkeypatch):
    def full(model):
        raise RuntimeError("a peer has gone")

    monkeypatch.setattr("foundry_fp8.run.fp8_run.send_frozen", full)
    model = llama()
    before = facts(model)
    with pytest.raises(RuntimeError, match="a peer has gone"):
        FP8Run(recipe="delayed", backend="emulated").convert(model)
    same(before, facts(model))


def test_a_weight_that_something_holds_leaves_those_before_it_as_they_were():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).requires_grad_(False)
    held = model[2].weight.view(-1)
    before = facts(model)
    with pytest.raises(ConfigError, match="the weight of 2 cannot be replaced"):
        foundry_fp8.apply_fp8(model, recipe="block", backend="emulated", include=["*"], frozen_weights="fp8")
    same(before, facts(model))
    assert held.numel() == 64 * 64
