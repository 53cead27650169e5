#!/usr/bin/env bash
# torch's Hugging Face checkpoint writer stores E8M0 scales and E2M1 codes that its own reader and consolidation refuse; integers fail too.
#
# One would guess: what HuggingFaceStorageWriter saves without a word, HuggingFaceStorageReader of the same torch loads, and its
# consolidation joins: safetensors' own load_file reads the very same file bit for bit.
# What happens: reader and consolidation name dtypes by a table inside of safetensors' Python package, older than the formats that its
# compiled part knows. float8_e8m0fnu ("F8_E8M0") and float4_e2m1fn_x2 ("F4") are a KeyError there. Consolidation also asks torch.finfo for
# the size of an element, so int8, uint8 and bool tensors end in a TypeError, after all ranks have written their shards.
# Why it matters: MX and NVFP4 checkpoints hold just these (E8M0 scales; packed uint8 codes beside E4M3 scales). The save succeeds, days
# later the load does not; with consolidation a run ends at its first save, because of one integer buffer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "torch==2.14.1" "safetensors==0.8.0" numpy
cat > read.py <<'END'
import glob
import sys
import traceback
import warnings

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

warnings.filterwarnings("ignore")
bits = torch.arange(1, 65, dtype=torch.uint8).view(4, 16)
cases = {
    "bfloat16": bits.view(torch.bfloat16),
    "float8_e4m3fn": bits.view(torch.float8_e4m3fn),
    "float8_e8m0fnu": bits.view(torch.float8_e8m0fnu),
    "float4_e2m1fn_x2": bits.view(torch.float4_e2m1fn_x2),
    "uint8": bits,
}


def attempt(function):
    """Whether it ran; otherwise what went wrong first."""
    try:
        function()
        return "ok"
    except BaseException as error:  # CheckpointException is no Exception
        text = "".join(traceback.format_exception(error))
        return next(name for name in ("KeyError", "TypeError", "F8_E8M0", "F4", "other") if name in text or name == "other")


def alike(a, b):
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


seen = {}
for name, tensor in cases.items():
    state = {"w": tensor}
    wrote = attempt(lambda: dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path=name), no_dist=True))
    by_safetensors = alike(load_file(glob.glob(f"{name}/*.safetensors")[0])["w"], tensor)
    out = {"w": torch.zeros_like(bits).view(tensor.dtype)}
    read = attempt(lambda: dcp.load(out, storage_reader=dcp.HuggingFaceStorageReader(path=name), no_dist=True))
    read = read if read != "ok" or alike(out["w"], tensor) else "other bits"
    joining = dcp.HuggingFaceStorageWriter(path=f"{name} joined", save_distributed=True, enable_consolidation=True)
    joined = attempt(lambda: dcp.save(state, storage_writer=joining, no_dist=True))
    seen[name] = wrote, by_safetensors, read, joined
    print(f"{name}: written {wrote}, safetensors reads it {by_safetensors}, torch reads it {read}, joined {joined}")
print("torch", torch.__version__)
fine = all(seen[name] == ("ok", True, "ok", "ok") for name in ("bfloat16", "float8_e4m3fn"))
scales = all(seen[name][:2] == ("ok", True) and "ok" not in seen[name][2:] for name in ("float8_e8m0fnu", "float4_e2m1fn_x2"))
integers = seen["uint8"] == ("ok", True, "ok", "TypeError")
sys.exit(not (fine and scales and integers))
END
venv/bin/python read.py 2> /dev/null
