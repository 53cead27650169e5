"""Every kind of model that the package says it takes, at tiny size and with no download: ``MODELS[name]()``.

Each gives ``(model, batch)``: float32, no dropout, sizes in multiples of 32, so that every recipe takes its layers. Models of
transformers are named by their classes' common prefix.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

TRANSFORMERS_4 = importlib.metadata.version("transformers").startswith("4.")
VOCABULARY = 64
Case = tuple[nn.Module, dict[str, Any]]
MODELS: dict[str, Callable[[], Case]] = {}


def _tokens() -> Tensor:
    return torch.randint(1, VOCABULARY, (2, 16))


def text() -> dict[str, Any]:
    return {"input_ids": _tokens()}


def _labelled(**inputs: Tensor) -> dict[str, Any]:
    return {**inputs, "labels": torch.tensor([0, 1])}


def _classified_text() -> dict[str, Any]:
    return _labelled(input_ids=_tokens())


def _text_to_text() -> dict[str, Any]:
    tokens = _tokens()
    return {"input_ids": tokens, "labels": tokens}


DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA_STYLE = {
    **DECODER,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
NO_HIDDEN_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT_STYLE = {**DECODER, "intermediate_size": 96, **NO_HIDDEN_DROPOUT}
T5_STYLE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.0,
}
GPT2_STYLE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}


def hugging_face(
    name: str,
    *,
    cls: str = "ForCausalLM",
    config: str = "",
    style: dict[str, Any] = LLAMA_STYLE,
    **options: Any,
) -> nn.Module:
    """``{name}{cls}`` of transformers, by default of a Llama's dimensions."""
    import transformers

    configuration = getattr(transformers, f"{config or name}Config")(**style | options)
    model = getattr(transformers, name + cls)(configuration)
    for parameter in model.parameters():
        if parameter.dim() == 3:  # experts, some of which are left as torch.empty gave them
            nn.init.normal_(parameter, std=0.02)
    return model


def fog(**options: Any) -> nn.Module:
    """A FOG of the same dimensions."""
    from foundry_fp8.models.fog import FogConfig, FogForCausalLM

    return FogForCausalLM(FogConfig(**{**DECODER, "num_key_value_heads": 2, **options}))


def mpt(attn_config: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    """An MPT of the same width, with torch's attention."""
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": VOCABULARY, "max_seq_len": 32}
    attention = {"attn_impl": "torch", **(attn_config or {})}
    return MPTForCausalLM(MPTConfig(**{**sizes, "attn_config": attention, **options}))


def _add(
    name: str,
    cls: str = "ForCausalLM",
    *,
    named: str = "",
    batch: Callable[[], dict[str, Any]] = text,
    style: dict[str, Any] = LLAMA_STYLE,
    **options: Any,
) -> None:
    MODELS[named or name] = lambda: (hugging_face(name, cls=cls, style=style, **options), batch())


for _name in ("Llama", "Mistral", "Qwen2", "Olmo2", "GPTNeoX", "Phi3"):
    _add(_name)
_add("Qwen3", head_dim=16)
_add("Phi", resid_pdrop=0.0)
_add("Gemma", head_dim=16)
_add("Gemma2", head_dim=16, attn_implementation="eager")
_add("Mixtral", num_local_experts=4)
_add("Qwen2Moe", num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32)
_add("Olmoe", num_experts=32, num_experts_per_tok=2)
_add("GraniteMoe", num_local_experts=4)
_add("Llama", "ForSequenceClassification", named="LlamaClassifier", batch=_classified_text, num_labels=32)
_add("GPT2", "LMHeadModel", style=GPT2_STYLE)
_add("Falcon", style=DECODER, attention_dropout=0.0, hidden_dropout=0.0, bias=True)
_add("Bloom", style={"vocab_size": VOCABULARY}, hidden_size=64, n_layer=2, n_head=4)
_add(
    "OPT",
    style=DECODER | NO_DROPOUT,
    ffn_dim=96,
    word_embed_proj_dim=32,
    max_position_embeddings=64,
)
_add(
    "T5",
    "ForConditionalGeneration",
    batch=_text_to_text,
    style=T5_STYLE,
    feed_forward_proj="gated-gelu",
)
_add(
    "Bart",
    "ForConditionalGeneration",
    batch=_text_to_text,
    style={"vocab_size": VOCABULARY, "d_model": 64} | NO_DROPOUT,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_position_embeddings=64,
)
_add(
    "SwitchTransformers",
    "ForConditionalGeneration",
    batch=_text_to_text,
    style=T5_STYLE,
    num_experts=4,
    num_decoder_layers=2,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    router_jitter_noise=0.0,
)
_add(
    "Bert",
    "ForSequenceClassification",
    batch=_classified_text,
    style=BERT_STYLE,
    max_position_embeddings=64,
)
_add(
    "ViT",
    "ForImageClassification",
    batch=lambda: _labelled(pixel_values=torch.randn(2, 3, 32, 32)),
    style=BERT_STYLE,
    image_size=32,
    patch_size=8,
)
_add(
    "VideoMAE",
    "ForVideoClassification",
    batch=lambda: _labelled(pixel_values=torch.randn(2, 4, 3, 32, 32)),
    style=BERT_STYLE,
    image_size=32,
    patch_size=16,
    num_frames=4,
)
_add(
    "Dbrx",
    style={"vocab_size": VOCABULARY, "d_model": 64, "n_heads": 4, "n_layers": 2},
    max_seq_len=64,
    attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
)
_add(
    "Llama4",
    config="Llama4Text",
    intermediate_size_mlp=96,
    head_dim=16,
    num_local_experts=4,
    attention_chunk_size=32,
    use_cache=False,  # the cache it makes is bfloat16
)
_add(
    "JetMoe",
    style={"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    num_key_value_heads=2,
    kv_channels=16,
    num_local_experts=4,
    num_experts_per_tok=2,
)
if not TRANSFORMERS_4:
    _add("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
_add(
    "DeepseekV3",
    num_key_value_heads=4,
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=16,
)
_add(
    "Mamba",
    style={"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2},
    state_size=16,
    time_step_rank=32,
)
_add(
    "Jamba",
    num_hidden_layers=4,
    num_experts=4,
    num_experts_per_tok=2,
    attn_layer_period=4,
    attn_layer_offset=2,
    expert_layer_period=4,
    expert_layer_offset=1,
    use_mamba_kernels=False,
    mamba_dt_rank=32,
)


def dmoe(mlp_type: str) -> dict[str, Any]:
    return {
        "ffn_type": "torch_dmoe",
        "mlp_type": mlp_type,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_jitter_eps": None,
        "moe_normalize_expert_weights": 1,
        "uniform_expert_assignment": False,
    }


_MPT: dict[str, dict[str, Any]] = {
    "MPT": {},
    "MPT-glu": {"ffn_config": {"ffn_type": "mptglu"}, "tie_word_embeddings": False},
    "MPT-dmoe": {"ffn_config": dmoe("mlp")},
    "MPT-dmoe-glu": {"ffn_config": dmoe("glu"), "tie_word_embeddings": False},
}
MODELS["FOG"] = lambda: (fog(), text())
for _name, _options in _MPT.items():
    MODELS[_name] = lambda options=_options: (
        mpt(**options),
        {**text(), "attention_mask": torch.ones(2, 16).bool()},
    )


class TorchEncoder(nn.Module):
    """``nn.TransformerEncoder`` with a plain head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


def _lora(base: str, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        import peft

        model, batch = MODELS[base]()
        return peft.get_peft_model(model, peft.LoraConfig(r=32, task_type="CAUSAL_LM", **options)), batch

    return build


MODELS["torch"] = lambda: (TorchEncoder(), {"x": torch.randn(2, 16, 64)})
MODELS["Llama-LoRA"] = _lora("Llama", target_modules=["q_proj", "v_proj", "down_proj"])
MODELS["GPT2-LoRA"] = _lora("GPT2", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
