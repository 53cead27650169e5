#!/usr/bin/env bash
# Triton 3.9: a bfloat16 factor loses its range on the way to a float16 result.
#
# One would guess: a kernel that loads a bfloat16 scale, widens it with .to(tl.float32), multiplies it by a small integer code in
# float32 and stores the product as float16 computes what it says: the product in float32, rounded once.
# What happens: the compiler shortens the arithmetic to the result's type. The scale is first rounded to float16 (cvt.rn.f16.f32) and
# multiplied there (mul.f16). float16 has more bits than bfloat16 and a far smaller range, so a scale of 1e5 is Inf and one of 1e-6 has
# few bits left. Triton 3.3 multiplies in float32. enable_fp_fusion=False does not prevent it.
# Why it matters: kernels that unpack block-quantised tensors with bfloat16 scales into float16 look right on random data around 1.
# A way out: widen by bits, (scale.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True).
# The kernel is compiled for compute capability 9.0 to PTX, which needs no GPU; the multiplications in the PTX are what is checked.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/kernel.py" <<'END'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def unpack(codes, scales, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    code = tl.load(codes + at).to(tl.int32) & 15
    scale = tl.load(scales + at // 32).to(tl.float32)
    tl.store(out + at, ((code.to(tl.float32) - 8.0) * scale).to(tl.float16))


pointers = {"codes": "*u8", "scales": "*bf16", "out": "*fp16", "BLOCK": "constexpr"}
source = ASTSource(fn=unpack, signature=pointers, constexprs={(3,): 128})
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False}).asm["ptx"]
found = sorted({line.split()[0] for line in ptx.splitlines() if re.match(r"\s+(mul|fma)[.\w]*f(16|32)", line)})
print(f"triton {triton.__version__}: the product is {', '.join(found)}")
print("\n".join(sorted({line.strip() for line in ptx.splitlines() if "cvt" in line and "f16" in line})))
END
for version in 3.3.0 3.9.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet --disable-pip-version-check "triton==$version" numpy "setuptools<81"
    TRITON_CACHE_DIR="$folder/cache-$version" "$folder/$version/bin/python" "$folder/kernel.py" | tee "$folder/$version.txt"
done
grep -q "the product is mul.rn.f32$" "$folder/3.3.0.txt"
grep -q "the product is mul.rn.f16$" "$folder/3.9.0.txt"
echo "as found: 3.3.0 multiplies in float32, 3.9.0 in float16"
