#!/usr/bin/env bash
# safetensors' NumPy functions write FP8 arrays, and none of its NumPy readers reads the file back.
#
# One would guess: since safetensors 0.8.0 takes NumPy arrays of ml_dtypes' FP8 types (its error for other types lists them), what save and
# save_file write, load, load_file and safe_open(..., "np") give back; or the writer refuses what the readers do not know, as it refuses E2M1.
# What happens: with safetensors 0.8.0, numpy 2.4.6 and ml_dtypes 0.6.0 E4M3, E5M2, their FNUZ forms and E8M0 are written with the right names
# (F8_E4M3, ...) and bytes. Then load raises KeyError('F8_E4M3'), and load_file, safe_open and its slices AttributeError: they look for float8_e4m3fn
# in numpy itself, which has no such name with ml_dtypes imported either. bfloat16 lies between: load_file reads it, load does not.
# Why it matters: a JAX or NumPy job that quantises a checkpoint writes it without an error, and a test that only writes passes. The file is sound
# and torch reads it, but the job that wrote it cannot check it, and one FP8 tensor makes load and load_file fail for all the others in the file.
# Until the readers know the types: read the bytes by the header's offsets and view them as ml_dtypes' type, as below.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "safetensors==0.8.0" "numpy==2.4.6" "ml_dtypes==0.6.0"
cat > round_trip.py <<'END'
import json
from pathlib import Path

import ml_dtypes
import numpy
from safetensors import safe_open
from safetensors.numpy import load, load_file, save_file

READERS = {
    "load": lambda: load(Path("x.safetensors").read_bytes())["weight"],
    "load_file": lambda: load_file("x.safetensors")["weight"],
    "safe_open": lambda: safe_open("x.safetensors", "np").get_tensor("weight"),
    "slice": lambda: safe_open("x.safetensors", "np").get_slice("weight")[:],
}
found = {}
for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16"):
    dtype = getattr(ml_dtypes, name)
    weight = 2.0 ** numpy.arange(8, dtype=numpy.float32).reshape(2, 4)
    save_file({"weight": weight.astype(dtype)}, "x.safetensors")
    raw = Path("x.safetensors").read_bytes()
    header = int.from_bytes(raw[:8], "little")
    said = json.loads(raw[8 : 8 + header])["weight"]["dtype"]
    assert numpy.array_equal(numpy.frombuffer(raw[8 + header :], dtype).reshape(2, 4).astype(numpy.float32), weight)
    for reader, read in READERS.items():
        try:
            got = "reads it" if numpy.array_equal(read().astype(numpy.float32), weight) else "other values"
        except Exception as error:
            got = type(error).__name__
        found[name, reader] = got
        print(f"{name:16} written as {said:12} {reader:10} {got}")

for (name, reader), got in found.items():
    if reader == "load":
        assert got == "KeyError", (name, reader, got)
    else:
        assert got == ("reads it" if name == "bfloat16" else "AttributeError"), (name, reader, got)
END
venv/bin/python round_trip.py
