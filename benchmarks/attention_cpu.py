"""Emulated FP8 attention on a CPU, forward and backward, beside torch's float32 ``scaled_dot_product_attention``.

    python benchmarks/attention_cpu.py [--sequences 1024,2048,4096] [--heads 8] [--kv-heads 4] [--head-dim 64]
                                       [--repeats 9] [--save NAME]

Causal, one sequence a batch. The cases of one length run in turn; the figure is the median of the ratios to sdpa within one
round. Peak memory: ``benchmarks/attention_memory.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from common import environment, interleaved, median_ratio, save

from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling
from foundry_fp8.surgery.attention import FP8AttentionState

LIMIT = 3.0


def cases(sequence: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, Callable[[], None]]:
    """Forward and backward by name."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, h, sequence, head_dim) for h in (heads, kv_heads, kv_heads, heads))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scale = head_dim**-0.5

    def sdpa() -> None:
        F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True, scale=scale).backward(do)

    found: dict[str, Callable[[], None]] = {"sdpa float32": sdpa}
    for recipe in (DelayedScaling(), CurrentScaling()):
        attention = FP8DotProductAttention(fqn="attn", recipe=recipe, backend=EmulatedAttention())
        FP8AttentionState(torch.nn.Linear(1, 1), {"attn": attention}, recipe)

        def emulated(attention: FP8DotProductAttention = attention) -> None:
            attention(*leaves, mask=AttentionMask(causal=True), softmax_scale=scale).backward(do)

        found[recipe.name] = emulated
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", default="1024,2048,4096")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--save", default=None, metavar="NAME", help="write results/NAME.json")
    args = parser.parse_args()

    rows = []
    for sequence in map(int, args.sequences.split(",")):
        steps = cases(sequence, args.heads, args.kv_heads, args.head_dim)
        seconds = interleaved(steps, args.repeats, 1)
        for name in steps:
            rows.append(
                {
                    "sequence": sequence,
                    "case": name,
                    "median_ms": round(sorted(seconds[name])[args.repeats // 2] * 1e3, 1),
                    "of_sdpa": round(median_ratio(seconds[name], seconds["sdpa float32"]), 2),
                }
            )
    print(f"{'sequence':>8}  {'case':14}{'median ms':>10}{'/ sdpa':>8}{'limit':>7}")
    for row in rows:
        print(f"{row['sequence']:>8}  {row['case']:14}{row['median_ms']:>10}{row['of_sdpa']:>8}{LIMIT:>7.1f}")
    if args.save:
        shape = {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
        save(
            args.save,
            {"benchmark": "attention_cpu", "shape": shape, "environment": environment(), "rows": rows},
        )


if __name__ == "__main__":
    main()
