"""Models that no feature was written for: their gradients with a feature, beside those of the same FP8 model without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import foundry_fp8
from tests import model_zoo as zoo

Case = tuple[nn.Module, dict[str, Any]]
_TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_IMAGES = {**_TOWER, "image_size": 32, "patch_size": 8}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WORDS = {"vocab_size": zoo.VOCABULARY, "max_position_embeddings": 64}


def _labelled() -> dict[str, Any]:
    tokens = zoo.text()["input_ids"]
    return {"input_ids": tokens, "labels": tokens}


def _text_and_images() -> dict[str, Any]:
    return {**zoo.text(), "pixel_values": torch.randn(2, 3, 32, 32), "return_loss": True}


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.tensor([0, 1])}


def _sound() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 32, 64), "labels": zoo.text()["input_ids"]}


def _of(name: str, batch: Callable[[], dict[str, Any]] = _labelled, **options: Any) -> Callable[[], Case]:
    return lambda: (zoo.hugging_face(name, **options), batch())


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(64, 4, 2, 2, 96, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.transformer(x, x.flip(1)))


class Shared(nn.Module):
    """The same block at both ends."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
        first = nn.Sequential(*parts)
        self.blocks = nn.ModuleList([first, nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), first])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


HOSTS: dict[str, Callable[[], Case]] = {
    **zoo.MODELS,
    # position biases are added to the scores in place; input, output and both stacks share one embedding
    "T5, tied": _of("T5", cls="ForConditionalGeneration", style=zoo.T5_STYLE, feed_forward_proj="relu"),
    "Whisper": _of(
        "Whisper", _sound, cls="ForConditionalGeneration", style={**zoo.NO_DROPOUT, **_SPECIAL},
        vocab_size=zoo.VOCABULARY, num_mel_bins=32, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
        max_source_positions=32, max_target_positions=32, decoder_start_token_id=3,
    ),
    # masks are made inside of attention
    "ModernBert": _of(
        "ModernBert", cls="ForMaskedLM", style={**_TOWER, **_WORDS}, num_hidden_layers=3, local_attention=8,
        reference_compile=False, attn_implementation="sdpa", pad_token_id=0,
    ),
    "Gemma3": _of("Gemma3", config="Gemma3Text", head_dim=16),
    "GPTBigCode": _of("GPTBigCode", style=zoo.GPT2_STYLE, multi_query=True, n_inner=96),
    "CLIP": _of(
        "CLIP", _text_and_images, cls="Model", style={}, projection_dim=32, vision_config=_IMAGES,
        text_config={**_TOWER, **_SPECIAL, **_WORDS},
    ),
    "Siglip": _of("Siglip", _images, cls="ForImageClassification", style={}, vision_config=_IMAGES),
    # soft cap, norms of 1 + weight, a tied head
    "Gemma2, tied": _of("Gemma2", head_dim=16, attn_implementation="eager", tie_word_embeddings=True),
    "Qwen3Moe": _of("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
    "Mixtral, balanced": _of("Mixtral", num_local_experts=4, output_router_logits=True),
    "Cohere": _of("Cohere", logit_scale=0.5),
    "Bert, masked": _of("Bert", cls="ForMaskedLM", style=zoo.BERT_STYLE),
    "Bert, dropout": _of("Bert", cls="ForMaskedLM", style=zoo.BERT_STYLE, hidden_dropout_prob=0.2),
    "Rwkv": _of(
        "Rwkv", style={**_SPECIAL}, vocab_size=zoo.VOCABULARY, context_length=32, hidden_size=64,
        attention_hidden_size=64, num_hidden_layers=2, intermediate_size=96,
    ),
    # blocks of two classes, one of which holds the other; those of one class share a layer
    "Zamba2": _of(
        "Zamba2", style={**_TOWER, **_SPECIAL, **_WORDS}, num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid"] * 2, mamba_d_state=16, mamba_headdim=16, n_mamba_heads=8,
        mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, adapter_rank=8,
    ),
    "nn.Transformer": lambda: (Translator(), {"x": torch.randn(2, 16, 64)}),
    "shared block": lambda: (Shared(), {"x": torch.randn(2, 16, 64)}),
}  # fmt: skip

FEATURES: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: None,
    "full": lambda model: foundry_fp8.apply_activation_checkpointing(model),
    "selective": lambda model: foundry_fp8.apply_activation_checkpointing(model, policy="selective"),
    "exact": lambda model: foundry_fp8.apply_activation_compression(model, format="exact", min_numel=256),
    "int8": lambda model: foundry_fp8.apply_activation_compression(model, min_numel=256),
}


def made(host: str, recipe: str, feature: str) -> Case:
    """A host in FP8 with a feature, alike at every call."""
    torch.manual_seed(7)
    model, batch = HOSTS[host]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    foundry_fp8.apply_fp8(model.train(), recipe=recipe, backend="emulated")
    FEATURES[feature](model)
    return model, batch


def gradients(
    model: nn.Module, batch: dict[str, Any], dtype: torch.dtype, rank: int = 0
) -> dict[str, Tensor]:
    """By name, of two microbatches of a rank, after a pass that gives delayed scaling its scales."""
    for number in range(3):
        if number == 1:
            model.zero_grad()
        torch.manual_seed(number)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            output = model(**{name: _moved(x, number + 3 * rank) for name, x in batch.items()})
        _loss(output).backward()
    return {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def _moved(x: Any, number: int) -> Any:
    """Another microbatch."""
    if not isinstance(x, Tensor) or x.dim() < 2:
        return x
    return x.roll(number, 1) if not x.is_floating_point() else x * (1 + 0.3 * number)


def _loss(output: Any) -> Tensor:
    """Of every output, and what the model calls its loss."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    total = torch.zeros(())
    if found is not None:
        total = (
            (found.float() * torch.linspace(-1, 1, found[0].numel()).view(found.shape[1:])).square().mean()
        )
    own = getattr(output, "loss", None)
    return total if own is None else total + own


def errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, float]:
    """Of all gradients together, and of the worst one (beside a thousandth of all); relative."""
    assert got.keys() == wanted.keys()
    apart = {name: float((got[name].double() - g.double()).norm()) for name, g in wanted.items()}
    norms = {name: float(g.double().norm()) for name, g in wanted.items()}
    total = sum(n**2 for n in norms.values()) ** 0.5
    return (
        sum(e**2 for e in apart.values()) ** 0.5 / total,
        max(e / (norms[name] + 1e-3 * total) for name, e in apart.items()),
    )
