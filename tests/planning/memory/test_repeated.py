"""Dry runs leave out blocks that are equal to others; plans are those of whole runs."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from foundry_fp8.planning.memory import planner
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.dry_runs import EqualShares, left_out, repeated
from foundry_fp8.planning.memory.planner import measure
from foundry_fp8.surgery.apply import apply_fp8
from tests.planned_options import plan_only

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def llama():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    apply_fp8(
        model, recipe="current", backend="emulated", keep_first_blocks=1, include=["*.q_proj", "*.down_proj"]
    )
    return model


def frozen():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for module in (model.model.embed_tokens, *model.model.layers[:3]):
        module.requires_grad_(False)
    return model


def mixtral():
    """Its blocks return a router's logits beside the hidden states."""
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.0)
    )


def test_the_first_and_the_last_of_each_kind_run():
    assert repeated([0, 1, 1, 1, 1, 2]) == {2, 3}
    assert repeated("aabbab") == {1, 3}
    assert repeated([0, 0]) == frozenset()


@pytest.mark.parametrize(
    "build",
    [llama, pytest.param(frozen, marks=pytest.mark.full), pytest.param(mixtral, marks=pytest.mark.full)],
)
def test_measurements_are_those_of_whole_runs(build, monkeypatch):
    """Of two options: what each costs is measured on a block that runs alone, whichever others are left out."""
    plan_only(monkeypatch)

    def measured():
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build().train()
            tokens = torch.zeros(2, 32, dtype=torch.long)
            with EqualShares(model):
                return measure(
                    model,
                    lambda: torch.nn.functional.cross_entropy(
                        model(input_ids=tokens).logits.flatten(0, 1), tokens.flatten()
                    ),
                    cost_model=CostModel(),
                    compression="none",
                )

    short = measured()
    monkeypatch.setattr(planner, "repeated", lambda kinds: frozenset())
    whole = measured()
    assert len(repeated(short.kind)) > 0
    assert short == whole


def test_blocks_are_as_they_were_afterwards():
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    tokens = torch.arange(16)[None]
    expected = model(tokens).logits
    with left_out(model.model.layers, [0] * 4, repeated([0] * 4)):
        assert not torch.equal(model(tokens).logits, expected)
    assert torch.equal(model(tokens).logits, expected)
    assert not any("forward" in vars(block) for block in model.model.layers)
