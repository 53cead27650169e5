"""What a Llama layer of Llama-3 8B's proportions keeps for backward, of what it keeps in bfloat16."""

import functools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import foundry_fp8
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from tests.kept_bytes import activation_bytes
from tests.model_zoo import TRANSFORMERS_4

pytestmark = pytest.mark.skipif(
    not TRANSFORMERS_4, reason="shares of what transformers 4's blocks keep in bfloat16"
)


class Layers(nn.Module):
    """One decoder layer, with what the model around it would hand it."""

    def __init__(self, width):
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer

        super().__init__()
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 7 // 2,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=1,
            attn_implementation="sdpa",
        )
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.head_dim = width // 32

    def forward(self, x):
        angles = torch.zeros(1, x.shape[1], self.head_dim, dtype=x.dtype)
        y = self.layers[0](x, position_embeddings=(angles.cos(), angles.sin()))
        return y[0] if isinstance(y, tuple) else y


def in_bfloat16(make, *args):
    """Made so from the start: torch 2.11 converts no fake parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make(*args)
    finally:
        torch.set_default_dtype(before)


def kept(width, tokens, recipe=None, backend="emulated", exact=False):
    model = in_bfloat16(Layers, width)
    if recipe is not None:
        foundry_fp8.apply_fp8(model, recipe=recipe, backend=backend)
    if exact:
        foundry_fp8.apply_activation_compression(model, format="exact", min_numel=1)
    x = torch.zeros(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    model(x)  # the emulation makes its scratch memory
    return activation_bytes(lambda: model(x), torch.device("cpu"))


@functools.cache
def of_bfloat16(**case):
    return kept(512, 512, **case) / kept(512, 512)


@pytest.mark.parametrize(
    ("exact", "most"),
    [(False, 0.89), (True, 0.62)],
    ids=["FP8 linears", "and activation_compression: {format: exact}"],
)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_bytes_kept_for_backward(recipe, exact, most):
    """Query, key and value share their input, and so do gate and up; fused norms and MLPs keep their inputs alone."""
    assert of_bfloat16(recipe=recipe, exact=exact) <= most


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_the_native_backend_keeps_as_much(recipe):
    """At full size, on fake tensors."""
    with FakeTensorMode():
        base, ours = kept(4096, 8192), kept(4096, 8192, recipe, "native")
    assert ours / base == pytest.approx(of_bfloat16(recipe=recipe), abs=0.01)


def peak(width, tokens, recipe=None):
    """Live bytes at most in a forward and backward, gradients included, weights and optimizer left out."""
    with FakeTensorMode():
        model = in_bfloat16(Layers, width)
        if recipe is not None:
            foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
        x = torch.zeros(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.zeros(1, tokens, width, dtype=torch.bfloat16)
        with LiveBytes() as live:
            model(x).backward(dy)
    return live.peak


@pytest.mark.parametrize(("recipe", "most"), [("current", 0.97), ("delayed", 1.01), ("block", 0.97)])
def test_the_peak_of_a_block_of_llama_3_8b(recipe, most):
    """8192 tokens, on fake tensors."""
    assert peak(4096, 8192, recipe) <= most * peak(4096, 8192)
