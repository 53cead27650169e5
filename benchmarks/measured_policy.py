"""``recipe: measured`` beside single recipes and a list of rules: the held-out loss, and the share of FLOPs in FP8.

    python benchmarks/measured_policy.py            results/measured_policy.json, and a table (an hour of one core)
    python benchmarks/measured_policy.py --plot     table and docs/images/measured_policy.png from that file

Three models of 4 blocks (an MPT, a FOG, an MPT with four experts a block, two of them a token) on bytes of this Python's standard
library, FP8 emulated. Losses are means over held-out sequences and seeds, beside those of high precision from the same seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "unit_scaling"))
from common import RESULTS, environment
from transfer import Corpus, loss_of

from foundry_fp8.layers.state import FP8State
from foundry_fp8.models.fog import FogConfig, FogForCausalLM
from foundry_fp8.models.schedule import wsd_multiplier
from foundry_fp8.observe.measured_policy import measure_policy
from foundry_fp8.surgery.apply import apply_fp8

FILE = RESULTS / "measured_policy.json"
IMAGE = Path(__file__).parents[1] / "docs" / "images" / "measured_policy.png"
SEEDS, STEPS, WARMUP, BATCH, LR, ERROR = (17, 18, 19), 200, 20, 8, 2e-3, 0.2
WIDTH, BLOCKS, HEADS, CONTEXT = 96, 4, 4, 128
POLICIES: dict[str, Any] = {
    "high precision": None,
    "delayed": "delayed",
    "current": "current",
    "last block kept": [{"blocks": "last-1", "recipe": "high_precision"}, {"recipe": "current"}],
    "measured": {"name": "measured", "error": ERROR, "warmup": WARMUP},
}


def build(kind: str) -> nn.Module:
    if kind == "fog":
        return FogForCausalLM(
            FogConfig(variant="fog-max", hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=HEADS, vocab_size=256, max_position_embeddings=CONTEXT)
        )  # fmt: skip
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    experts = {
        "ffn_type": "torch_dmoe", "mlp_type": "glu", "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": None,
        "moe_normalize_expert_weights": 1, "uniform_expert_assignment": False,
    }  # fmt: skip
    ffn = {"ffn_config": experts} if kind == "experts" else {}
    attention = {"attn_impl": "torch"}
    return MPTForCausalLM(
        MPTConfig(d_model=WIDTH, n_heads=HEADS, n_layers=BLOCKS, vocab_size=256, max_seq_len=CONTEXT, attn_config=attention, **ffn)
    )  # fmt: skip


def run(kind: str, policy: Any, seed: int, corpus: Corpus) -> dict[str, float]:
    """Train one model; its held-out loss, and the share of its linears' FLOPs that ran in FP8 after the warm-up."""
    torch.manual_seed(seed)
    model = build(kind).train()
    share = 1.0  # of the layers that could be converted
    if policy is not None:
        report = apply_fp8(model, recipe=policy, backend="emulated")
        left = sum(row.elements for row in report.rows if "leaves it in high precision" in row.reason)
        taken = sum(row.elements for row in report.rows if row.action == "converted")
        share = taken / (taken + left)
    state = FP8State.of(model)
    if state is not None and state.awaits_choice:
        state.reconsider()  # high precision until then
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    generator, flops = torch.Generator().manual_seed(seed), Counter[str]()
    for step in range(STEPS):
        batch = corpus.batch(corpus.train, BATCH, generator)
        if state is not None and state.awaits_choice and step == WARMUP:
            state.choose(measure_policy(model, loss_of, batch[:1], error=ERROR).recipes)
        for group in optimizer.param_groups:
            group["lr"] = LR * wsd_multiplier(step, WARMUP, STEPS // 4, STEPS, 0.0, "linear")
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if state is not None:
            state.update()
        if step == WARMUP:
            flops = Counter[str]()
        for module in () if state is None else state.modules.values():
            for (_, precision), count in module.ledger.flops.items():
                flops[precision] += count
            module.ledger.flops.clear()
    model.eval()
    generator.manual_seed(1)
    with torch.no_grad():
        losses = [loss_of(model, corpus.batch(corpus.held_out, 32, generator)).item() for _ in range(8)]
    return {
        "loss": statistics.fmean(losses),
        "in_fp8": share * flops["fp8"] / flops.total() if flops else 0.0,
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str, float, float]]:
    """Model, policy, mean loss relative to high precision's of the same seeds, share of FLOPs in FP8."""
    made = []
    for kind in ("mpt", "fog", "experts"):
        own = [found["runs"][f"{kind}/high precision/{seed}"]["loss"] for seed in SEEDS]
        for policy in POLICIES:
            runs = [found["runs"][f"{kind}/{policy}/{seed}"] for seed in SEEDS]
            apart = statistics.fmean(r["loss"] / high - 1 for r, high in zip(runs, own, strict=True))
            made.append((kind, policy, apart, statistics.fmean(r["in_fp8"] for r in runs)))
    return made


def plot(found: dict[str, Any]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for kind, marker in (("mpt", "o"), ("fog", "s"), ("experts", "^")):
        for number, (_, policy, apart, share) in enumerate(row for row in rows(found) if row[0] == kind):
            label = policy if kind == "mpt" else None
            axes.plot(share, 100 * apart, marker, color=f"C{number}", label=label, ms=8)
    axes.axhspan(-0.3, 0.3, color="0.92", zorder=0)
    axes.set(xlabel="share of the linears' FLOPs in FP8", ylabel="held-out loss above high precision, %")
    axes.set_title("circle: MPT; square: FOG; triangle: experts. Mean of 3 seeds", fontsize=9)
    axes.legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(IMAGE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    corpus = Corpus()
    for seed in () if args.plot else SEEDS:
        for kind in ("mpt", "fog", "experts"):
            for policy, recipe in POLICIES.items():
                key = f"{kind}/{policy}/{seed}"
                if key not in found["runs"]:
                    found["runs"][key] = run(kind, recipe, seed, corpus)
                    found["environment"] = environment()
                    FILE.write_text(json.dumps(found, indent=1) + "\n")
                    print(key, found["runs"][key], flush=True)
    for kind, policy, apart, share in rows(found):
        print(f"{kind:8} {policy:16} {apart:+.2%} {share:.0%}")
    plot(found)


if __name__ == "__main__":
    main()
