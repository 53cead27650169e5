"""FP8 checkpoints as others publish them: written from the layouts' descriptions, with a quantiser of its own."""

import json

import torch
from safetensors.torch import save_file


def blocks_of(weight, block, e8m0):
    """Codes, and what to multiply them by: in float64, block by block."""
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // block[0]), -(-columns // block[1]), dtype=torch.float32)
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            amax = weight[at].double().abs().max().clamp(min=1e-12)
            scale = torch.exp2(torch.ceil(torch.log2(amax / 448))) if e8m0 else amax / 448
            grid[i, j] = scale
            codes[at] = (
                (weight[at].double() / grid[i, j].double()).clamp(-448, 448).float().to(torch.float8_e4m3fn)
            )
    return codes, grid.to(torch.float8_e8m0fnu) if e8m0 else grid


def dequantised(codes, grid, block):
    """float32, element by element."""
    rows, columns = codes.shape
    i = (torch.arange(rows) // block[0])[:, None]
    j = (torch.arange(columns) // block[1])[None]
    return codes.float() * grid.float()[i, j]


def split_experts(state):
    """Names of a checkpoint: of experts in one parameter (transformers 5) a weight of each."""
    found = {}
    for name, value in state.items():
        prefix, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for e, one in enumerate(value):
                found[f"{prefix}.{e}.gate_proj.weight"], found[f"{prefix}.{e}.up_proj.weight"] = one.chunk(2)
        elif leaf == "down_proj":
            found |= {f"{prefix}.{e}.down_proj.weight": one for e, one in enumerate(value)}
        else:
            found[name] = value
    return found


def publish(
    model,
    folder,
    *,
    block=(128, 128),
    e8m0=False,
    keep=("lm_head", "embed", "norm", "mlp.gate."),
    shards=2,
    layout="fp8",
):
    """``model`` as an FP8 checkpoint in ``folder``. Returns what each tensor in FP8 stands for, float32, by its name there."""
    folder.mkdir(exist_ok=True)
    stored, values = {}, {}
    state = split_experts({n: v.detach().float() for n, v in model.state_dict().items()})
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    for name, value in state.items():
        if value.dim() != 2 or not name.endswith(".weight") or any(part in name for part in keep):
            stored[name] = value.bfloat16() if value.dim() > 1 or "norm" in name else value
            continue
        size = {"channel": (1, value.shape[1]), "tensor": tuple(value.shape)}.get(block, block)
        codes, grid = blocks_of(value, size, e8m0)
        stored[name], values[name] = codes, dequantised(codes, grid, size)
        stored[name + "_scale_inv" if layout == "fp8" else name + "_scale"] = (
            grid.reshape(1) if block == "tensor" else grid
        )
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    if layout == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": list(block),
            "modules_to_not_convert": ["lm_head"],
            **({"scale_fmt": "ue8m0"} if e8m0 else {}),
        }
    else:
        weights = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "dynamic": False,
            "strategy": block if isinstance(block, str) else "block",
        }
        weights |= {} if isinstance(block, str) else {"block_structure": list(block)}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, default=str))
    names = sorted(stored)
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        return values
    weight_map = {}
    for i in range(shards):  # a weight and its scale may lie in different files
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file(
            {n: stored[n].contiguous() for n in names[i::shards]}, folder / file, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(names[i::shards], file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return values


def deepseek(ffn=192, **sizes):
    """Two layers of DeepSeek-V3's shape: latent attention whose sizes are no multiples of 128, a dense and a sparse block."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=160, hidden_size=256, intermediate_size=384, moe_intermediate_size=ffn, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=0, eos_token_id=1,
        **{"kv_lora_rank": 144, "q_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 48, "v_head_dim": 48} | sizes,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config)


def qwen3(tied=False, **sizes):
    """Two layers of Qwen3's shape."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=64,
        tie_word_embeddings=tied, pad_token_id=0, bos_token_id=0, eos_token_id=1, **{"vocab_size": 160, "hidden_size": 192, "intermediate_size": 320} | sizes,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


MODELS = {"deepseek": deepseek, "qwen3": qwen3}
KINDS = {
    "float": ({}, {"name": "block", "power_2_scales": False}),
    "ue8m0": ({"e8m0": True}, "block"),
    "tensor": ({"block": "tensor", "layout": "compressed-tensors", "shards": 1}, "current"),
}
"""Layouts: what :func:`publish` takes, and the recipe that reads the codes as they are."""
