#!/usr/bin/env bash
# One NaN or Inf in a block of 32 makes the whole block zeros in GGUF's MXFP4, where every other type of GGUF keeps it not finite.
#
# One would guess: a tensor with a NaN or an Inf, quantised to GGUF by the gguf package (what llama.cpp's conversion scripts use), either raises or
# comes back with something that is not finite. MXFP4's scale has a NaN of its own for that, the E8M0 code 255 (OCP's MX specification, 5.4.1).
# What happens: in gguf 0.19.0 (numpy 2.4.6) the scale of an MXFP4 block is floor(log2(amax)) as uint8, which is 0 for NaN and for Inf: the scale is
# 2^-127, the 31 healthy values of the block are rounded to 0 with the bad one, and the tensor comes back finite. No error; of NaN not even numpy's
# warning. Q8_0, Q4_0, Q5_1, TQ1_0 and BF16 give back NaN or Inf for the same input. The code 255 itself is read as 2^128, an Inf in float32, and of
# NVFP4's scales the NaN of E4M3 (0x7F) is read as 0: both NaNs that the two formats have for a block are no NaN in the reader.
# Why it matters: a run that diverged, or a bit that flipped on a disk, is caught by a server that prints NaN. A checkpoint quantised to MXFP4
# generates fluent text with some blocks missing, and no check of finiteness behind the conversion can find them: look before it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "gguf==0.19.0" "numpy==2.4.6"
cat > quantise.py <<'END'
import warnings

import numpy
from gguf import GGMLQuantizationType, quants

healthy = numpy.linspace(-1, 1, 256, dtype=numpy.float32).reshape(1, 256)
found = {}
for bad in (numpy.nan, numpy.inf):
    given = healthy.copy()
    given[0, 5] = bad
    for name in ("MXFP4", "Q8_0", "Q4_0", "Q5_1", "TQ1_0", "BF16"):
        kind = GGMLQuantizationType[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            back = quants.dequantize(quants.quantize(given, kind), kind)
        first = back[0, :32]
        found[name, str(bad)] = "zeros" if not first.any() else "finite" if numpy.isfinite(back).all() else "not finite"
        print(f"{name:6} {bad!s:4} the block that holds it: {found[name, str(bad)]}; blocks behind it: {back[0, 32:].any()}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quants.quantize(given, GGMLQuantizationType.MXFP4)
    found["warnings", str(bad)] = len(said)
    print(f"MXFP4  {bad!s:4} warnings: {len(said)}")

block = numpy.array([[255] + 16 * [0x22]], dtype=numpy.uint8)  # codes of 1
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scale = quants.dequantize(block, GGMLQuantizationType.MXFP4)[0, 0]
of_nan = quants.NVFP4.ue4m3_to_fp32(numpy.array([0x7F], dtype=numpy.uint8))[0]
print(f"MXFP4's scale of code 255: {scale}; NVFP4's of 0x7F: {of_nan}")

for (name, bad), what in found.items():
    if name == "MXFP4":
        assert what == "zeros", (name, bad, what)
    elif name != "warnings":
        assert what == "not finite", (name, bad, what)
assert found["warnings", "nan"] == 0
assert numpy.isinf(scale) and of_nan == 0
END
venv/bin/python quantise.py
