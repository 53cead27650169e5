"""A conversion that cannot be done changes nothing."""

import copy

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends.emulated import EmulatedBackend
from foundry_fp8.config import ConfigError
from tests.model_zoo import MODELS, TRANSFORMERS_4


def everything_about(model):
    """Classes, hooks and attributes of all modules."""

    def plain(value):
        return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else type(value)

    return {
        name: (type(m), {k: (len(v) if isinstance(v, dict) else plain(v)) for k, v in m.__dict__.items()})
        for name, m in model.named_modules()
    } | {"config": copy.deepcopy(getattr(model, "config", None) and model.config.__dict__)}


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("Llama", {"attention": True, "recipe": "block"}),
        *([("T5", {"attention": True, "recipe": "delayed"})] if TRANSFORMERS_4 else []),
        ("Llama", {"attention": True, "recipe": "delayed", "backend": "transformer_engine"}),
        ("MPT", {"fuse": True}),
        ("MPT", {"cache_weights": True}),
        ("MPT", {"exclude": ["*.nothing"]}),
        ("MPT", {"keep_first_blocks": 2}),
    ],
    ids=str,
)
def test_a_refused_conversion_leaves_the_model_as_it_was(model, options):
    model, _ = MODELS[model]()
    before = everything_about(model)
    with pytest.raises((ConfigError, RuntimeError)):
        foundry_fp8.apply_fp8(model, **{"recipe": "current", **options})
    assert everything_about(model) == before


def test_a_layer_that_the_backend_cannot_make_leaves_the_model_as_it_was(monkeypatch):
    """Transformer Engine makes its module when a layer is converted, and may refuse there."""

    def attach(self, module):
        if module.fqn.endswith("layers.1.mlp.down_proj"):
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(EmulatedBackend, "attach", attach)
    model, _ = MODELS["Llama"]()
    before = everything_about(model)
    with pytest.raises(RuntimeError, match="no such kernel"):
        foundry_fp8.apply_fp8(model, recipe="current")
    assert everything_about(model) == before


def test_evaluation_in_fp8_runs_the_layers_of_torchs_own_encoder():
    """Without gradients it would hand their weights to a fused kernel in high precision."""
    ran = {}
    for evaluate in ("fp8", "high_precision"):
        model, batch = MODELS["torch"]()
        foundry_fp8.apply_fp8(model, recipe="current", evaluate=evaluate)
        model.eval()
        with torch.no_grad():
            model(**batch)
        ran[evaluate] = sum(m.ledger.calls["fprop", "fp8"] for m in model.modules() if hasattr(m, "ledger"))
    assert ran == {"fp8": 4, "high_precision": 0}


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(32, 32)


def test_a_model_of_one_layer_converts_if_it_is_not_the_root():
    model = Root()
    assert foundry_fp8.apply_fp8(model, recipe="current").converted == ["inner"]
