"""The stand-in computes causal attention, and keeps what flash attention keeps."""

from __future__ import annotations

import pytest
import torch
import transformers

from foundry_fp8.planning.memory.flash_bytes import hold_flash_bytes
from tests.kept_bytes import activation_bytes

BATCH, LENGTH, HEADS, GROUPS, WIDTH = 2, 96, 4, 2, 16


class Attention(torch.nn.Module):
    attn_impl = "torch"

    def __init__(self):
        super().__init__()
        self.attn_fn = lambda *_: None


def test_it_is_causal_attention_with_grouped_queries_and_keeps_no_scores():
    module = Attention()
    assert hold_flash_bytes(torch.nn.Sequential(module, torch.nn.Linear(2, 2))) == 1
    torch.manual_seed(0)
    sizes = (HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH)
    inputs = [torch.randn(BATCH, LENGTH, size, dtype=torch.float64, requires_grad=True) for size in sizes]

    def run():
        return module.attn_fn(*inputs, HEADS, GROUPS, is_causal=True)[0]

    q, k, v = (x.unflatten(-1, (-1, WIDTH)).transpose(1, 2) for x in inputs)
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) / WIDTH**0.5
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf"))
    wanted = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    dy = torch.randn_like(wanted)
    assert torch.allclose(run(), wanted, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(run(), inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-12)
    kept = activation_bytes(run, torch.device("cpu"))
    lse = BATCH * HEADS * LENGTH * 4
    output = BATCH * LENGTH * HEADS * WIDTH * 8
    assert (
        lse <= kept <= lse + output
    )  # its inputs are the caller's, its output may be a copy of what it kept
    assert kept < BATCH * HEADS * LENGTH * LENGTH * 8 / 4


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Llama", {}), ("Mixtral", {"num_local_experts": 2, "sliding_window": None})],
)
def test_a_hugging_face_model_computes_what_it_did_and_keeps_no_scores(kind, more):
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, use_cache=False, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="eager")
    tokens = torch.randint(0, 64, (2, LENGTH))
    wanted = model(tokens, labels=tokens).loss
    scores = activation_bytes(lambda: model(tokens, labels=tokens).loss, torch.device("cpu"))
    expected = torch.autograd.grad(wanted, list(model.parameters()))
    assert hold_flash_bytes(model) == 2
    loss = model(tokens, labels=tokens).loss
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), expected, strict=True):
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm() + 1e-8
    kept = activation_bytes(lambda: model(tokens, labels=tokens).loss, torch.device("cpu"))
    assert scores - kept > 2 * 2 * 4 * LENGTH * LENGTH * 4  # at least the probabilities of both layers


@pytest.mark.parametrize("shape", [(1, 8), (2, 5)])
def test_any_length(shape):
    module = Attention()
    hold_flash_bytes(module)
    x = torch.randn(*shape, HEADS * WIDTH)
    assert module.attn_fn(x, x, x, HEADS, HEADS)[0].shape == x.shape
