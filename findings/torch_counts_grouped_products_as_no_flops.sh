#!/usr/bin/env bash
# torch's FlopCounterMode: grouped products, and products of torch.nn.functional.scaled_mm, cost nothing.
#
# One would guess: FlopCounterMode, by which trainers report MFU, counts every matrix product that torch itself offers.
# What happens: aten._grouped_mm (what transformers 5 runs a mixture's experts with) and aten._scaled_mm_v2 (what
# torch.nn.functional.scaled_mm calls) have no formula and count as 0; aten._scaled_mm and aten.mm are counted. So a mixture of experts
# loses most of its FLOPs, and an FP8 layer loses all of them by moving from torch._scaled_mm to the public function.
# Why it matters: MFU of such a run reads low, with no hint that anything was left out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.14.1" numpy
cat > "$folder/count.py" <<'END'
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


m, k, n, groups = 64, 32, 48, 4
x, w = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(groups, k, n, dtype=torch.bfloat16)
ends = torch.arange(1, groups + 1, dtype=torch.int32) * (m // groups)
a, b, one = x.to(torch.float8_e4m3fn), torch.randn(n, k).to(torch.float8_e4m3fn).t(), torch.ones(())
kind = F.ScalingType.TensorWise
found = {
    "aten.mm": flops(lambda: x @ w[0]),
    "aten._grouped_mm": flops(lambda: F.grouped_mm(x, w, offs=ends)),
    "aten._scaled_mm": flops(lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)),
    "aten._scaled_mm_v2": flops(lambda: F.scaled_mm(a, b, one, kind, one, kind)),
}
print("torch", torch.__version__, found, "each of them computes", 2 * m * k * n)
assert found == {"aten.mm": 2 * m * k * n, "aten._grouped_mm": 0, "aten._scaled_mm": 2 * m * k * n, "aten._scaled_mm_v2": 0}
END
"$folder/venv/bin/python" "$folder/count.py"
echo "as found: two of four products of the same size count as nothing"
