#!/usr/bin/env bash
# torch's reader of quantised Hugging Face checkpoints loads compressed-tensors' FP8 weights as their bare codes, thousands of times too large.
#
# One would guess: torch.distributed.checkpoint's QuantizedHuggingFaceStorageReader, which exists to dequantise while it reads, dequantises
# a common FP8 layout of published models (compressed-tensors: float8 `weight` and float32 `weight_scale`, one a row), or says that it
# does not know it.
# What happens: it looks for names that end in `.weight_scale_inv` (DeepSeek's blocks) and in `_scales` (MXFP4's) alone. Any other float8
# tensor is taken for one of plain values: codes are cast and handed over, the scales beside them are never opened. No exception, no warning.
# The same weights as DeepSeek's blocks come back exact.
# Why it matters: a run that starts from such a checkpoint through DCP starts from weights that are too large by 448 over each row's largest
# element, and nothing says so. Who checks names and shapes alone finds all of them there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "torch==2.14.1" "compressed-tensors==0.20.0" "transformers==5.24.0" "safetensors==0.8.0" numpy
cat > read.py <<'END'
import json
import os
import sys
import warnings

import compressed_tensors
import torch
import torch.distributed.checkpoint as dcp
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

warnings.filterwarnings("ignore", message=".*single process.*")
NAME, FILE = "model.layers.0.mlp.up_proj", "model-00001-of-00001.safetensors"


def written(folder, weight, scale_name, scale):
    """A checkpoint of one linear, with the index that the reader asks for."""
    os.mkdir(folder)
    tensors = {f"{NAME}.weight": weight.contiguous(), f"{NAME}.{scale_name}": scale.contiguous()}
    save_file(tensors, os.path.join(folder, FILE))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {}, "weight_map": dict.fromkeys(tensors, FILE)}, file)


def read(folder):
    out = {f"{NAME}.weight": torch.zeros(256, 256)}
    dcp.load(out, storage_reader=QuantizedHuggingFaceStorageReader(path=folder), no_dist=True)
    return out[f"{NAME}.weight"]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 256, bias=False))
plain = model[0].weight.detach().clone()

config = QuantizationConfig(config_groups={"group_0": preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])})
apply_quantization_config(model, config)
model[0].weight_scale.data.copy_(plain.abs().amax(1, keepdim=True) / 448)
ModelCompressor(quantization_config=config).compress_model(model)
state = model.state_dict()
written("channels", state["0.weight"], "weight_scale", state["0.weight_scale"])
values = state["0.weight"].float() * state["0.weight_scale"]

blocks = plain.unflatten(0, (2, 128)).unflatten(2, (2, 128))
scale = blocks.abs().amax((1, 3)) / 448
codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
written("blocks", codes.flatten(2, 3).flatten(0, 1), "weight_scale_inv", scale)
of_blocks = (codes.float() * scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)

print("torch", torch.__version__, "compressed-tensors", compressed_tensors.__version__)
exact = torch.equal(read("blocks"), of_blocks)
print("DeepSeek's blocks come back exact:", exact)
found = read("channels")
bare = torch.equal(found, state["0.weight"].float())
times = (found.norm() / values.norm()).item()
print(f"compressed-tensors' rows come back as bare codes: {bare}, {times:.0f} times as large")
sys.exit(not (exact and bare and times > 1000))
END
venv/bin/python read.py
