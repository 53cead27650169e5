"""torchtitan 0.2's protocol of a model converter. torchtitan is in neither stack: nothing here runs its trainer."""

from types import SimpleNamespace

import pytest
import torch

from foundry_fp8.config import ConfigError
from foundry_fp8.integrations.torchtitan import fp8_converter
from foundry_fp8.layers.state import FP8State
from tests.callbacks.conftest import build_llama
from tests.observe.test_precision_probe import loss_of, tokens

FSDP_ALONE = SimpleNamespace(tp_enabled=False)


def test_it_converts_on_the_meta_device_and_finishes_the_pass_after_a_step():
    converter = fp8_converter(recipe="delayed", backend="emulated")(None, FSDP_ALONE)
    with torch.device("meta"):
        model = build_llama().train()
    converter.convert(model)
    assert len(converter.reports[0].converted) == 14
    source = build_llama()
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    model.model.rotary_emb = source.model.rotary_emb
    loss_of(model, tokens()).backward()
    delayed = FP8State.of(model).delayed
    before = delayed.scale.clone()
    converter.post_optimizer_hook([model])
    assert not torch.equal(delayed.scale, before)


def test_it_is_a_converter_of_torchtitan(monkeypatch):
    protocol = pytest.importorskip(
        "torchtitan.protocols.model_converter", reason="torchtitan is in neither stack"
    )
    protocol.register_model_converter(fp8_converter(recipe="current"), "foundry_fp8")
    job = SimpleNamespace(model=SimpleNamespace(converters=["foundry_fp8"], print_after_conversion=False))
    container = protocol.build_model_converters(job, FSDP_ALONE)
    model = build_llama()
    container.convert(model)
    assert FP8State.of(model) is not None
    container.post_optimizer_hook(model)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="tensor parallelism"):
        fp8_converter(recipe="current")(None, SimpleNamespace(tp_enabled=True))
    with pytest.raises(ConfigError, match="recipe"):
        fp8_converter(recipe="currant")
