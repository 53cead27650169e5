"""What FP8 attention costs in accuracy: against the sequence's length, a sink's strength, and outliers in q and k, with and without QK norm.

    python benchmarks/attention_error.py [--longest 16384] [--save NAME]      measure; goes on with what results/NAME.json holds
    python benchmarks/attention_error.py --plot NAME                          draw results/NAME.json to docs/images/NAME.png

Relative distance (norm) of output and gradients from exact attention in float64, one causal head of 64. Cases: the emulation, with the gradient of the
logits in E5M2 and in bfloat16; current scaling, and for what has a delayed scale that of the step before.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from common import RESULTS, environment, save
from torch import Tensor

from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.layers.attention import FP8DotProductAttention, GradScores
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.recipes import CurrentScaling
from foundry_fp8.surgery.attention import FP8AttentionState

D, ROWS = 64, 512
NAMES = ("o", "dq", "dk", "dv")
GRADIENTS: tuple[GradScores, ...] = ("fp8", "bfloat16")


def blocks(sequence: int) -> Iterator[tuple[int, int, Tensor]]:
    """Queries from, to, and which keys before the end they see."""
    for start in range(0, sequence, ROWS):
        stop = min(start + ROWS, sequence)
        yield start, stop, torch.ones(stop - start, stop).tril(start).bool()


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float) -> list[Tensor]:
    """Output and gradients, float64; all [sequence, D]."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    o, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    for start, stop, seen in blocks(len(q)):
        rows = slice(start, stop)
        s = (q[rows] @ k[:stop].t() * scale).masked_fill(~seen, -math.inf).softmax(-1)
        o[rows] = s @ v[:stop]
        dp = s * (do[rows] @ v[:stop].t() - (do[rows] * o[rows]).sum(-1, keepdim=True)) * scale
        dq[rows] = dp @ k[:stop]
        dk[:stop] += dp.t() @ q[rows]
        dv[:stop] += s.t() @ do[rows]
    return [o, dq, dk, dv]


def emulated(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, scale: float, grad_scores: GradScores
) -> list[Tensor]:
    """After the emulation of Transformer Engine's definition."""
    recipe = CurrentScaling()
    attention = FP8DotProductAttention(
        fqn="attn", recipe=recipe, backend=EmulatedAttention(), grad_scores=grad_scores
    )
    state = FP8AttentionState(torch.nn.Linear(1, 1), {"attn": attention}, recipe)
    for _ in range(2):
        state.update()
        leaves = [x[None, None].clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask=AttentionMask(causal=True), softmax_scale=scale)
        out.backward(do[None, None])
    return [out[0, 0].detach(), *(leaf.grad[0, 0] for leaf in leaves)]  # type: ignore[index]


def errors(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, dict[str, float]]:
    """Case -> what -> distance."""
    scale = D**-0.5
    reference = exact(q, k, v, do, scale)
    found = {}
    for grad_scores in GRADIENTS:
        ours = emulated(q, k, v, do, scale, grad_scores)
        found[f"Transformer Engine's, {grad_scores}"] = {
            what: float(f"{float((a.double() - b).norm() / b.norm()):.4g}")
            for what, a, b in zip(NAMES, ours, reference, strict=True)
        }
    return found


def drawn(sequence: int) -> Given:
    generator = torch.Generator().manual_seed(sequence)
    q, k, v, do = (torch.randn(sequence, D, generator=generator) * size for size in (1.0, 1.0, 1.0, 1e-3))
    return q, k, v, do


Given = tuple[Tensor, Tensor, Tensor, Tensor]
"""Q, K, V and dO, [sequence, D]."""


def by_length(longest: int) -> Iterator[tuple[str, Given]]:
    sequence = 256
    while sequence <= longest:
        yield str(sequence), drawn(sequence)
        sequence *= 2


def by_sink() -> Iterator[tuple[str, Given]]:
    """The first key's logit stands so far above the others' (in nats), and its value is small, as in trained models."""
    for strength in (0, 4, 8, 12, 16):
        q, k, v, do = drawn(2048)
        direction = torch.zeros(D)
        direction[0] = math.sqrt(D)
        q = q - q[:, :1] * direction / math.sqrt(D) + direction / 8 * 2
        k[:, 0] = 0.0
        k[0] = direction * strength / 2  # q . k / sqrt(D) = strength
        v[0] *= 0.01
        yield str(strength), (q, k, v, do)


def by_outliers() -> Iterator[tuple[str, Given]]:
    """Some tokens' q and k so many times as long, as they are and after an RMS norm of each head's q and k."""
    for factor in (1, 8, 64):
        for normed in (False, True):
            q, k, v, do = drawn(2048)
            q[100::97] *= factor
            k[50::97] *= factor
            if normed:
                q, k = (torch.nn.functional.rms_norm(x, (D,)) for x in (q, k))
            yield f"{factor} x{', QK norm' if normed else ''}", (q, k, v, do)


def plot(name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = json.loads((RESULTS / f"{name}.json").read_text())
    panels = {
        "length": "tokens",
        "sink": "logit of the sink above the others' (nats)",
        "outliers": "outliers",
    }
    figure, axes = plt.subplots(1, 3, figsize=(15, 4), sharey=True)
    for axis, (kind, label) in zip(axes, panels.items(), strict=True):
        points = result[kind]
        for case in next(iter(points.values())):
            grad_scores = case.partition(", ")[2]
            for what, style in (("o", "-"), ("dq", "--")):
                if what == "o" and grad_scores != "fp8":
                    continue
                said = what if what == "o" else f"dq, {grad_scores} logits' gradients"
                axis.plot(
                    list(points),
                    [point[case][what] for point in points.values()],
                    style if grad_scores == "fp8" else ":",
                    color="tab:orange",
                    label=said,
                )
        axis.set_xlabel(label)
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
        axis.tick_params(axis="x", rotation=30 if kind == "outliers" else 0)
    axes[0].set_ylabel("distance from exact attention, relative")
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(RESULTS.parents[1] / "docs" / "images" / f"{name}.png", dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--longest", type=int, default=16384)
    parser.add_argument("--save", default=None, metavar="NAME", help="write results/NAME.json")
    parser.add_argument("--plot", default=None, metavar="NAME")
    args = parser.parse_args()
    if args.plot:
        plot(args.plot)
        return
    found: dict[str, Any] = {}
    if args.save and (RESULTS / f"{args.save}.json").exists():
        before = json.loads((RESULTS / f"{args.save}.json").read_text())
        found = {kind: before[kind] for kind in ("sink", "outliers", "length") if kind in before}
    for kind, points in (
        ("sink", by_sink()),
        ("outliers", by_outliers()),
        ("length", by_length(args.longest)),
    ):
        measured = found.setdefault(kind, {})
        for point, given in points:
            if point in measured:
                continue
            measured[point] = errors(*given)
            print(kind, point, json.dumps(measured[point]), flush=True)
            if args.save:  # what there is, should it be cut short
                save(
                    args.save,
                    {"benchmark": "attention_error", "head_dim": D, "environment": environment(), **found},
                )


if __name__ == "__main__":
    main()
