"""torchtitan 0.2's protocol of a model converter. torchtitan is in neither stack: nothing here runs its trainer."""

from types import SimpleNamespace

import torch

from foundry_fp8.integrations.torchtitan import fp8_converter
from foundry_fp8.layers.state import FP8State
from tests.callbacks.conftest import build_llama
from tests.observe.test_precision_probe import loss_of, tokens


def test_it_converts_and_finishes_the_pass_after_a_step():
    kind, model = fp8_converter(recipe="delayed", backend="emulated"), build_llama().train()
    converter = kind(None, SimpleNamespace(tp_enabled=False))
    converter.convert(model)
    loss_of(model, tokens()).backward()
    before = FP8State.of(model).delayed.scale.clone()
    converter.post_optimizer_hook([model])
    assert not torch.equal(FP8State.of(model).delayed.scale, before)
