"""Attended pairs of local, chunked, packed and hybrid attention: as many as the model's own weights have, or the documents say."""

from __future__ import annotations

import pytest
import torch
import transformers

from foundry_fp8.observe.flops.attention import attention_shapes
from foundry_fp8.observe.flops.meter import FlopMeter, Tokens
from tests.callbacks.conftest import build_llama

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


def gpt_neo():
    own = {
        "num_layers": 4,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": 8,
        "vocab_size": 64,
    }
    config = transformers.GPTNeoConfig(
        hidden_size=32, max_position_embeddings=64, attn_implementation="eager", **own
    )
    return transformers.GPTNeoForCausalLM(config)


def llama4(chunk):
    own = {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 32,
        "intermediate_size_mlp": 32,
        "num_local_experts": 2,
    }
    config = transformers.Llama4TextConfig(
        **SMALL, **own, attention_chunk_size=chunk, attn_implementation="eager", pad_token_id=0
    )
    model = transformers.Llama4ForCausalLM(config)
    for parameter in model.parameters():  # experts are left as they are allocated
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def pairs(model, batch):
    meter, tokens = FlopMeter(model), Tokens()
    meter.take_batch(batch, tokens)
    return [int(tokens.pairs[shape.mask]) for shape in meter.attention]


@pytest.mark.parametrize("build", [gpt_neo, lambda: llama4(5), lambda: llama4(8), lambda: llama4(64)])
@pytest.mark.parametrize("padded", [False, True])
def test_pairs_are_the_attention_weights_that_are_not_zero(build, padded):
    torch.manual_seed(0)
    model, mask = build().eval(), torch.ones(2, 24, dtype=torch.long)
    if padded:
        mask[0, 19:] = 0
    batch = {"input_ids": torch.randint(3, 64, (2, 24)), "attention_mask": mask}
    found = model(**batch, output_attentions=True, use_cache=False).attentions
    seen = [int(((one[:, 0] > 0) * mask[:, :, None] * mask[:, None]).sum()) for one in found]
    assert pairs(model, batch) == seen
    if not padded:
        assert pairs(model, {"input_ids": batch["input_ids"]}) == seen


LENGTHS = [5, 1, 10, 8]
PACKED = {
    "position_ids": {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]},
    "cu_seq_lens_q": {"cu_seq_lens_q": torch.tensor([0, 5, 6, 16, 24], dtype=torch.int32)},
    "cu_seqlens": {"cu_seqlens": torch.tensor([[0, 5, 6, 16, 24]])},
    "both": {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None], "cu_seq_lens_q": torch.tensor([0, 5, 6, 16, 24])},
    "sequence_id": {"sequence_id": torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None]},
}  # fmt: skip


@pytest.mark.parametrize("said", PACKED)
def test_packed_documents_are_those_of_the_batch(said):
    model, batch = build_llama(), {"input_ids": torch.zeros(1, 24, dtype=torch.long), **PACKED[said]}
    model.config._attn_implementation = "flash_attention_2"
    assert pairs(model, batch) == [sum(n * (n + 1) // 2 for n in LENGTHS)] * 2
    one = (
        {**batch, "position_ids": torch.arange(24)[None]}
        if said == "position_ids"
        else {"input_ids": batch["input_ids"]}
    )
    assert pairs(model, one) == [24 * 25 // 2] * 2


def test_two_rows_of_positions_are_two_rows_of_documents():
    model = build_llama()
    model.config._attn_implementation = "flash_attention_2"
    rows = torch.stack([torch.arange(12), torch.cat([torch.arange(4), torch.arange(8)])])
    assert (
        pairs(model, {"input_ids": torch.zeros(2, 12, dtype=torch.long), "position_ids": rows})
        == [78 + 10 + 36] * 2
    )


@pytest.mark.parametrize("kind", ["jamba", "recurrent"])
def test_a_block_without_attention_in_a_hybrid_model_has_none_to_count(kind):
    if kind == "jamba":
        own = {
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        }
        model = transformers.JambaForCausalLM(
            transformers.JambaConfig(**SMALL, **own, use_mamba_kernels=False)
        )
    else:
        own = {
            "intermediate_size": 64,
            "attention_window_size": 8,
            "block_types": ["recurrent", "attention"],
            "lru_width": 32,
        }
        model = transformers.RecurrentGemmaForCausalLM(transformers.RecurrentGemmaConfig(**SMALL, **own))
    assert len(attention_shapes(model)) == 2


@pytest.mark.parametrize("frozen", ["lm_head", "model.layers.0.mlp", "model"])
def test_what_is_frozen_in_mid_run_is_not_trained_any_more(frozen):
    model = build_llama()
    meter, tokens = FlopMeter(model), Tokens()
    meter.take_batch({"input_ids": torch.zeros(2, 16, dtype=torch.long)}, tokens)
    before = sum(meter.static_flops(tokens).model.values())
    part = model.get_submodule(frozen)
    part.requires_grad_(False)
    linears = {n: m for n, m in part.named_modules() if isinstance(m, torch.nn.Linear)}
    less = sum(2 * 32 * m.weight.numel() for m in linears.values())
    assert sum(meter.static_flops(tokens).model.values()) == before - less
    part.requires_grad_(True)
    assert sum(meter.static_flops(tokens).model.values()) == before
