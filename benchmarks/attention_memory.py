"""Peak memory and time of emulated FP8 attention, forward and backward, against its unfused definition.

    python benchmarks/attention_memory.py [--sequence 4096] [--heads 4] [--head-dim 64]

Each case runs in a process of its own; memory is the growth of its peak resident set.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common import environment, save

from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.quantize import quantize_tensor
from foundry_fp8.numerics.recipes import DelayedScaling
from foundry_fp8.surgery.attention import FP8AttentionState
from tests.backends.attention_definition import attention_reference

CASES = ("blockwise", "unfused")


def run(case: str, sequence: int, heads: int, head_dim: int) -> dict[str, float]:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, h, sequence, head_dim) for h in (heads, heads // 2, heads // 2, heads))
    mask, scale, recipe = AttentionMask(causal=True), head_dim**-0.5, DelayedScaling()
    attention = FP8DotProductAttention(fqn="attn", recipe=recipe, backend=EmulatedAttention())
    FP8AttentionState(torch.nn.Linear(1, 1), {"attn": attention}, recipe)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if case == "blockwise":
        leaves = [x.requires_grad_() for x in (q, k, v)]
        attention(*leaves, mask=mask, softmax_scale=scale).backward(do)
    else:
        from foundry_fp8.numerics.formats import E4M3, E5M2

        def quantize(name: str, x: torch.Tensor):
            return quantize_tensor(x, torch.ones(()), E5M2 if name.startswith("d") else E4M3)

        attention_reference(q, k, v, do, quantize=quantize, mask=mask, softmax_scale=scale)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"peak_mib": round(grown / 1024, 1), "cpu_seconds": round(time.process_time() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--case", choices=CASES)
    arguments = parser.parse_args()
    shape = (arguments.sequence, arguments.heads, arguments.head_dim)
    if arguments.case:
        print(json.dumps(run(arguments.case, *shape)))
        return
    found = {}
    for case in CASES:
        command = [sys.executable, __file__, "--case", case, "--sequence", str(shape[0])]
        command += ["--heads", str(shape[1]), "--head-dim", str(shape[2])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found[case] = json.loads(done.stdout.splitlines()[-1])
    print("| case | peak MiB | CPU seconds |\n|---|---|---|")
    for case, values in found.items():
        print(f"| {case} | {values['peak_mib']} | {values['cpu_seconds']} |")
    save("attention_memory", {"environment": environment(), "shape": shape, "cases": found})


if __name__ == "__main__":
    main()
