"""A mixture of experts on fake tensors holds what a real one holds whose router gives every expert its share."""

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM

import foundry_fp8
from foundry_fp8.planning.memory.dry_runs import EqualShares
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from tests.model_zoo import TRANSFORMERS_4, dmoe, mpt

EXPERTS, CHOSEN, TOKENS = 8, 2, 256


def build():
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
        num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def peak(model, tokens):
    with LiveBytes() as meter:
        F.cross_entropy(model(tokens).logits.flatten(0, 1), tokens.flatten()).backward()
    return meter.peak


def balanced(logits):
    """Each token to the next two experts, whatever the router says."""
    places = (torch.arange(len(logits))[:, None] * CHOSEN + torch.arange(CHOSEN)) % EXPERTS
    return logits * 0 + F.one_hot(places, EXPERTS).sum(1).float()


@pytest.mark.skipif(not TRANSFORMERS_4, reason="transformers 5's router returns more than logits")
def test_the_peak_is_that_of_a_balanced_model():
    model = build()
    for layer in model.model.layers:
        layer.block_sparse_moe.gate.register_forward_hook(lambda module, args, out: balanced(out))
    real = peak(model, torch.randint(0, 128, (1, TOKENS)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = build()
        with EqualShares(fake):
            planned = peak(fake, torch.zeros(1, TOKENS, dtype=torch.long))
        with pytest.raises(DynamicOutputShapeException):
            peak(fake, torch.zeros(1, TOKENS, dtype=torch.long))
    assert planned == pytest.approx(real, rel=0.03)


def test_every_expert_is_asked_and_gets_its_share():
    model = build()
    with FakeTensorMode(allow_non_fake_inputs=True), EqualShares(model):
        rows, tokens = torch.where(torch.zeros(CHOSEN, TOKENS))
        assert len(rows) == len(tokens) == CHOSEN * TOKENS // EXPERTS
        assert torch.zeros(EXPERTS).nonzero().shape == (EXPERTS, 1)
    with EqualShares(model):  # values that are there are counted
        assert len(torch.where(torch.ones(CHOSEN, TOKENS))[0]) == CHOSEN * TOKENS


def test_experts_in_one_parameter_have_the_same_peak():
    balanced = {"moe_num_experts": EXPERTS, "moe_top_k": CHOSEN, "uniform_expert_assignment": True}
    ffn = {**dmoe("glu"), **balanced}

    def converted():
        model = mpt(ffn_config=ffn, max_seq_len=TOKENS)
        report = foundry_fp8.apply_fp8(model, recipe="current", backend="emulated")
        assert sum("experts" in name for name in report.converted) == 6
        return model

    real = peak(converted(), torch.randint(0, 32, (1, TOKENS)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = converted()
        with EqualShares(fake):
            planned = peak(fake, torch.zeros(1, TOKENS, dtype=torch.long))
    assert planned == pytest.approx(real, rel=0.03)
