"""FP8 attention under ``backend: auto``: who runs it, and that a change of hands is said and never in the middle of a recompute."""

import logging

import pytest
import torch
from foundry_fp8.backends.attention_choice import AttentionWithFallback
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.backends import attention_left_out, choose_attention_backend
from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.backends.native import NativeBackend
from foundry_fp8.layers.attention import FP8DotProductAttention, attention_format, attention_slots
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.backend import Availability
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling
from foundry_fp8.surgery.attention import plan_attention
from foundry_fp8.surgery.first_batch import ForwardTrace, as_run
from foundry_fp8.surgery.report import SurgeryReport
from tests.surgery.test_attention import Plain

CPU = torch.device("cpu")


class Picky(EmulatedAttention):
    """Runs like the emulation, and takes no documents, as cuDNN's kernel."""

    def __init__(self, name):
        self.name = name
        self.calls = 0

    def call_reason(self, module, q, k, v, mask, dropout_p):
        taken = self.name == "native" or mask.documents is None
        return Availability(taken, "" if taken else "no form for document masks")

    def attend(self, *args, **kwargs):
        self.calls += 1
        return super().attend(*args, **kwargs)


def pair():
    return Picky("transformer_engine"), Picky("native")


def attention_of(backend):
    recipe = DelayedScaling(amax_history_len=2)
    attention = FP8DotProductAttention(fqn="block.attn", recipe=recipe, backend=backend)
    names = attention_slots(recipe)
    state = DelayedScalingState(recipe, [attention_format(recipe, name).max for name in names])
    attention.slots = {name: state.slot(i) for i, name in enumerate(names)}
    return attention


PLAIN = AttentionMask(causal=True)
PACKED = AttentionMask(causal=True, documents=(torch.arange(8) // 3).expand(1, 8))


def run(attention, mask, function=None):
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = (function or attention)(q, q, q, mask=mask, softmax_scale=0.25)
    out.sum().backward()


def test_the_second_takes_over_at_the_first_refusal_and_keeps_it(caplog):
    first, second = pair()
    attention = attention_of(AttentionWithFallback(first, second))
    run(attention, PLAIN)
    assert (first.calls, second.calls, attention.backend.note) == (1, 0, "")
    with caplog.at_level(logging.WARNING):
        for mask in (PACKED, PLAIN, PACKED):
            run(attention, mask)
    assert (first.calls, second.calls) == (1, 3)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "through native, as transformer_engine refused: no form for document masks" in said
    assert "block.attn" in said


def test_a_recompute_runs_what_the_forward_ran():
    first, second = pair()
    backend = AttentionWithFallback(first, second)
    before, after = attention_of(backend), attention_of(backend)
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    out = checkpoint(before, q, q, q, mask=PLAIN, softmax_scale=0.25, use_reentrant=False)
    out = after(out, q, q, mask=PACKED, softmax_scale=0.25)
    assert (first.calls, second.calls) == (1, 1)
    out.sum().backward()
    assert (first.calls, second.calls) == (2, 1)


def test_what_only_the_second_takes_by_its_size_is_the_seconds():
    first, second = pair()
    first.module_reason = lambda recipe, head_dim: "head_dim is 16, and on Hopper it has to be 128"
    backend = AttentionWithFallback(first, second)
    plan = plan_attention(Plain(), recipe=DelayedScaling(), runner=backend)
    assert len(plan.converted) == 2 and all("has to be 128" in row.reason for row in plan.rows)


def test_the_report_of_what_ran_names_who_ran():
    first, second = pair()
    model = Plain()
    plan = plan_attention(model, recipe=DelayedScaling(), runner=AttentionWithFallback(first, second))
    plan.carry_out(model)
    trace = ForwardTrace(model)
    report = SurgeryReport(
        rows=(), attention=plan.rows, recipes=(DelayedScaling(),), backend="transformer_engine"
    )
    model(torch.randn(2, 8, 32))
    assert as_run(report, trace)[0].attention == plan.rows
    plan.converted["layers.0"].backend.turn("no form for document masks")
    again = as_run(as_run(report, trace)[0], trace)[0]  # said once
    (row, _) = again.attention
    assert row.reason == plan.rows[0].reason + ", " + (
        "through native, as transformer_engine refused: no form for document masks"
    )


@pytest.mark.parametrize(
    ("name", "recipe", "grad_scores", "native", "found"),
    [
        ("auto", DelayedScaling(), "fp8", True, "auto"),
        ("auto", CurrentScaling(), "fp8", True, "auto"),
        ("auto", DelayedScaling(), "bfloat16", True, "auto"),
        ("auto", DelayedScaling(), "fp8", False, "transformer_engine"),
        ("transformer_engine", DelayedScaling(), "fp8", True, "transformer_engine"),
    ],
)
def test_auto_alone_falls_back_and_only_where_native_runs(
    name, recipe, grad_scores, native, found, monkeypatch
):
    monkeypatch.setattr(NativeBackend, "availability", lambda *args: Availability(native, "no"))
    backend = choose_attention_backend(name, "transformer_engine", recipe, grad_scores, CPU)
    assert backend.name == found
    refused = recipe.name != "delayed" or grad_scores != "fp8"
    assert bool(backend.note) == (refused and found == "auto")


@pytest.mark.parametrize(
    ("name", "chosen", "recipe", "device", "left_out"),
    [
        ("auto", "native", DelayedScaling(), "cuda", True),
        ("auto", "transformer_engine", DelayedScaling(), "cuda", False),
        ("auto", "transformer_engine", CurrentScaling(), "cuda", True),
        ("native", "native", DelayedScaling(), "cuda", False),
        ("auto", "emulated", DelayedScaling(), "cpu", False),
    ],
)
def test_auto_leaves_attention_out_where_fp8_is_slower(name, chosen, recipe, device, left_out):
    reason = attention_left_out(name, chosen, recipe, "fp8", torch.device(device))
    assert (reason is not None) == left_out
    assert not left_out or "backend: native" in reason


def test_attention_that_is_left_out_is_said(monkeypatch):
    monkeypatch.setattr(
        "foundry_fp8.surgery.apply.attention_left_out", lambda *asked: "attention stays: slower"
    )
    model = Plain()
    report = foundry_fp8.apply_fp8(model, recipe="delayed", attention=True)
    assert report.attention == () and report.chosen.endswith("attention stays: slower")
    assert not any(isinstance(m, FP8DotProductAttention) for m in model.modules())
