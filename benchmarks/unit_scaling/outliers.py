"""A massive activation under constant scales and under measured ones: one channel before each down projection grows 15 % a step.

    python benchmarks/unit_scaling/outliers.py --seeds 17,18,19    results/unit_scaling_outliers.json, and the table

Models, corpus and schedule of transfer.py, width 64. The channel's weights are zero and stay so: in high precision its product is
zero at any size, so that what the loss shows is what the outlier does to the other channels' numbers. From step 50 it is 1, and
at step 150 a million. The same cause as the guard's (benchmarks/guard.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import RESULTS, environment
from guard import activations, grows
from transfer import BATCH, SEQ, Corpus, groups, loss_of, model_of

from foundry_fp8.numerics.recipes import UnitScaling
from foundry_fp8.surgery.apply import apply_fp8

FILE = RESULTS / "unit_scaling_outliers.json"
WIDTH, STEPS, ONSET = 64, 150, 50
ARMS = {"mus_norm": ("float32", "unit"), "sp": ("float32", "current", "delayed")}
RATES = {"mus_norm": 2.0**-4, "sp": 2.0**-8}  # near the best of transfer.py at this width


def train(kind: str, recipe: str, outlier: bool, seed: int, corpus: Corpus) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = model_of(kind, WIDTH).train()
    set_size = activations("*.down_proj", grows(ONSET, 1.15) if outlier else lambda step: 0.0)(model)
    if recipe != "float32":
        options: dict[str, Any] = {"name": recipe}
        if recipe == "unit":
            options["gradient_scale"] = UnitScaling.gradient_scale_for(BATCH * SEQ, WIDTH)
        elif recipe == "delayed":
            options["amax_history_len"] = 16
        apply_fp8(model, recipe=options)
    optimizer = torch.optim.AdamW(
        groups(kind, model, WIDTH, RATES[kind]), betas=(0.9, 0.95), weight_decay=0.0
    )
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group.setdefault("top", group["lr"])
            group["lr"] = group["top"] * min(1.0, (step + 1) / 15)
        set_size(step)
        loss = loss_of(model, corpus.batch(corpus.train, BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(round(loss.item(), 5))
    return {"kind": kind, "recipe": recipe, "outlier": outlier, "seed": seed, "losses": losses}


def table(result: dict[str, Any]) -> None:
    print("| run | seeds | mean loss of the last 20 steps | % above the same run without the outlier |")
    print("|---|---|---|---|")
    for kind, recipes in ARMS.items():
        for recipe in recipes:
            mine = [r for r in result["runs"] if (r["kind"], r["recipe"]) == (kind, recipe)]
            shown = recipe != "float32"  # whose run with the outlier is the same
            final = {(r["outlier"], r["seed"]): statistics.fmean(r["losses"][-20:]) for r in mine}
            seeds = sorted({r["seed"] for r in mine})
            above = ", ".join(f"{100 * (final[shown, s] / final[False, s] - 1):+.2f}" for s in seeds)
            mean = statistics.fmean(final[shown, s] for s in seeds)
            print(f"| {kind}, {recipe} | {len(seeds)} | {mean:.3f} | {above} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="17,18,19")
    args = parser.parse_args()
    result: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"runs": []}
    corpus = Corpus()
    done = {(r["kind"], r["recipe"], r["outlier"], r["seed"]) for r in result["runs"]}
    for seed in map(int, args.seeds.split(",")):
        for kind, recipes in ARMS.items():
            keys = [(kind, recipe, outlier, seed) for recipe in recipes for outlier in (False, True)]
            for key in keys:
                if key not in done and key[1:3] != ("float32", True):
                    result["runs"].append(train(*key, corpus))
                    result["environment"] = environment()
                    FILE.write_text(json.dumps(result) + "\n")
                    print(*key, result["runs"][-1]["losses"][-1], flush=True)
    table(result)


if __name__ == "__main__":
    main()
