"""Attended pairs against a mask that is written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foundry_fp8.numerics.recipes import CurrentScaling
from foundry_fp8.observe.flops.attention import attended_pairs, attention_shapes, packed_pairs
from foundry_fp8.observe.flops.meter import FlopMeter, Tokens
from tests import model_zoo
from tests.surgery.conversion import convert_attention


def dense_mask(documents, real, window, causal):
    """[B, S, S], true where the query (row) sees the key (column)."""
    s = documents.shape[1]
    q, k = torch.arange(s)[:, None], torch.arange(s)[None, :]
    seen = (documents[:, :, None] == documents[:, None, :]) & real[:, :, None] & real[:, None, :]
    if causal:
        seen &= k <= q
        if window is not None:
            seen &= q - k < window
    return seen


@given(length=st.integers(1, 40), window=st.none() | st.integers(1, 45), causal=st.booleans())
def test_closed_forms_count_the_mask(length, window, causal):
    window = window if causal else None
    one = torch.zeros(1, length, dtype=torch.long)
    expected = dense_mask(one, one == 0, window, causal).sum()
    assert attended_pairs(length, window, causal) == expected


@settings(max_examples=60)
@given(data=st.data(), window=st.none() | st.integers(1, 9), causal=st.booleans())
def test_packed_pairs_count_the_mask(data, window, causal):
    window = window if causal else None
    length = data.draw(st.integers(1, 20))
    rows = []
    for _ in range(2):
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=4)))
        rows.append([sum(position >= cut for cut in cuts) for position in range(length)])
    documents = torch.tensor(rows)
    padding = data.draw(st.integers(0, length))
    left = data.draw(st.booleans())
    real = torch.ones(2, length, dtype=torch.bool)
    if padding:
        real[1, :padding] = False if left else real[1, :padding]
        if not left:
            real[1, length - padding :] = False
    expected = dense_mask(documents, real, window, causal).sum()
    assert packed_pairs(window, documents=documents, mask=real, causal=causal) == expected


def test_a_model_without_blocks_or_with_unknown_attention_is_an_error():
    with pytest.raises(ValueError, match="no list of transformer blocks"):
        attention_shapes(nn.Linear(4, 4))

    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 4)

    blocks = nn.Sequential()
    blocks.layers = nn.ModuleList([nn.Sequential(OddAttention()) for _ in range(2)])
    with pytest.raises(ValueError, match="does not say how many heads"):
        attention_shapes(blocks)


def test_gradients_of_the_logits_in_bfloat16_count_as_bfloat16():
    """Of six products of FP8 attention dQ's and dK's are bfloat16's then."""
    found = {}
    for kind in ("fp8", "bfloat16"):
        model = model_zoo.hugging_face("Llama")
        convert_attention(model, recipe=CurrentScaling(), grad_scores=kind)
        meter, tokens = FlopMeter(model), Tokens()
        meter.take_batch({"input_ids": torch.zeros(2, 16, dtype=torch.long)}, tokens)
        flops = meter.static_flops(tokens)
        found[kind] = flops.model["fp8"], flops.model["bf16"], flops.attention
    every = found["fp8"][2]
    assert found == {"fp8": (every, 0, every), "bfloat16": (every * 4 / 6, every * 2 / 6, every)}
