"""What a server computes from an exported folder, in emulation: written from the layout's description, not from the exporter."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from foundry_fp8.backends.emulated.gemm import scaled_mm
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import parse_recipe


def stored(folder):
    """Config and tensors as they lie on disk."""
    config = json.loads((Path(folder) / "config.json").read_text())
    tensors = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    return config, tensors


class Served(nn.Module):
    """vLLM's FP8 linear: x is multiplied by the reciprocal of its scale, clipped and rounded. Scales are static or dynamic, by tensor or,
    where the weight has one for each row, by token."""

    def __init__(self, weight, weight_scale, input_scale, bias):
        super().__init__()
        self.data, self.weight_scale, self.bias = weight.detach(), weight_scale.detach(), bias
        self.input_scale = None if input_scale is None else input_scale.detach()

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        if self.weight_scale.dim() == 2:
            scale = flat.abs().amax(1, keepdim=True).float() / E4M3.max
            codes = (flat.float() * scale.reciprocal()).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
            y = (codes.float() @ self.data.float().t()) * self.weight_scale.t() * scale
            y = y if self.bias is None else y + self.bias
            return y.to(x.dtype).unflatten(0, x.shape[:-1])
        scale = flat.abs().amax().float() / E4M3.max if self.input_scale is None else self.input_scale[0]
        cast = (flat.float() * scale.reciprocal()).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
        a = Quantized(cast, scale, None, E4M3, torch.zeros(()))
        b = Quantized(self.data, self.weight_scale[0], None, E4M3, torch.zeros(()))
        return scaled_mm(a, b, out_dtype=x.dtype, bias=self.bias, power_2=False).unflatten(0, x.shape[:-1])


def load(folder, model_class=AutoModelForCausalLM):
    """The library's own reader (transformers with compressed-tensors), not decompressed.

    In float32, because it gives scales the model's dtype; vLLM keeps them in float32 always.
    """
    return model_class.from_pretrained(folder, torch_dtype=torch.float32).eval()


def emulated(model):
    """``model`` with every compressed linear that the reader made replaced by what a server multiplies."""
    found = [(n, m) for n, m in model.named_modules() if getattr(m, "weight_scale", None) is not None]
    for name, module in found:
        assert module.weight.dtype == torch.float8_e4m3fn, name
        owner = model.get_submodule(name.rpartition(".")[0])
        scale = getattr(module, "input_scale", None)
        setattr(
            owner, name.rpartition(".")[2], Served(module.weight, module.weight_scale, scale, module.bias)
        )
    return model, [name for name, _ in found]


def save_checkpoint(path):
    """What Composer's trainer would save of a small Llama that the recipe current trained: the parts that an export reads."""
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=96
    )
    model = LlamaForCausalLM(config)
    state = {
        "model": {f"model.{name}": value for name, value in model.state_dict().items()},
        "algorithms": [
            (
                "FP8",
                {
                    "repr": "FP8(recipe='current', exclude=['*.up_proj', '*.gate_proj'])",
                    "version": 1,
                    "recipe": parse_recipe("current").to_dict(),
                    "backend": "native",
                    "modules": {},
                },
            )
        ],
        "integrations": {"huggingface": {"model": {"config": {"content": config.to_dict()}}}},
        "metadata": {"precision": "amp_bf16"},
    }
    torch.save({"state": state}, path)
    return model
