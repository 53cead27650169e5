#!/usr/bin/env bash
# torch's consolidation of sharded Hugging Face checkpoints writes every 0-d tensor as zero: per-tensor FP8 scales among them.
#
# One would guess: HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True), which saves what each rank has and joins it
# into the files that from_pretrained reads, joins all tensors.
# What happens: a tensor without dimensions keeps its name, dtype and shape in the joined file, and its value becomes 0. The file of the
# rank has the right one; so has a checkpoint saved whole, and a tensor of shape [1] survives. No exception, no warning.
# Why it matters: that is the shape in which per-tensor scales of published FP8 checkpoints are stored (ModelOpt's `weight_scale` and
# `input_scale`), and that of a learned temperature. All weights of such a layer are zero to whoever multiplies codes by scales, and who
# checks names, shapes and dtypes finds nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "torch==2.14.1" "safetensors==0.8.0" numpy
cat > save.py <<'END'
import glob
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

warnings.filterwarnings("ignore")
state = {
    "linear.weight": torch.linspace(-4, 4, 64).view(4, 16).to(torch.float8_e4m3fn),
    "linear.weight_scale": torch.tensor(0.0125),
    "linear.input_scale": torch.tensor([0.5]),
    "temperature": torch.tensor(7.0, dtype=torch.bfloat16),
}


def saved(folder, **options):
    writer = dcp.HuggingFaceStorageWriter(path=folder, **options)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)
    return {pattern: load_file(found[0]) for pattern in ("", "sharded/") if (found := glob.glob(f"{folder}/{pattern}*.safetensors"))}


def same(name, found):
    one = state[name]
    return found[name].dtype == one.dtype and found[name].shape == one.shape and torch.equal(found[name].float(), one.float())


whole = saved("whole")[""]
parts = saved("parts", save_distributed=True, enable_consolidation=True)
joined, of_rank = parts[""], parts["sharded/"]
print("torch", torch.__version__)
for name, one in state.items():
    print(f"{name}, {list(one.shape)}: saved whole {same(name, whole)}, file of the rank {same(name, of_rank)}, joined {same(name, joined)}")
kept = all(same(name, whole) and same(name, of_rank) for name in state)
others = same("linear.weight", joined) and same("linear.input_scale", joined)
zero = all(joined[name].shape == () and joined[name].item() == 0 for name in ("linear.weight_scale", "temperature"))
print("0-d tensors of the joined file are zero:", zero)
sys.exit(not (kept and others and zero))
END
venv/bin/python save.py
