"""FOG and its baselines at small scale: high precision against FP8 against FP8 with attention (FP8DPA).

    python benchmarks/fog_stability.py                    the default study (5M parameters, about two hours of a small machine)
    python benchmarks/fog_stability.py --study minimal    the one in docs/fog.md
    python benchmarks/fog_stability.py --study others     the other three variants at the large learning rate (half an hour)
    python benchmarks/fog_stability.py --study full       5M to 30M parameters, 3 seeds (a day)
    python benchmarks/fog_stability.py --plot             draw what results/fog_stability_STUDY.json holds

Two tasks: bytes of this Python's standard library, and associative recall (pairs of a key and a value, then the keys
again in another order: the loss is on the values). Three settings: a usual learning rate, one ten times larger, and a
provoked outlier (one output channel of the first block's MLP is multiplied by 30 after a third of the steps).

Measured every tenth step in high precision on one fixed batch: kurtosis E[x^4]/E[x^2]^2 of the residual stream after each
block, by token and over the flattened sample, and the largest attention logit of each layer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, environment, save
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from foundry_fp8.models.fog import FogConfig, FogForCausalLM
from foundry_fp8.models.fog.attention import eager_attention
from foundry_fp8.models.schedule import wsd_multiplier
from foundry_fp8.surgery.apply import apply_fp8

MEASURE_EVERY = 10
IMAGES = Path(__file__).parents[1] / "docs" / "images"
SETTINGS = {
    "usual": {"lr": 1.0, "outlier": False},
    "large lr": {"lr": 10.0, "outlier": False},
    "outlier": {"lr": 1.0, "outlier": True},
}
OUTLIER = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """What to run: the product of variants, precisions, tasks, settings and seeds."""

    variants: tuple[str, ...]
    precisions: tuple[str, ...] = ("fp32", "fp8", "fp8dpa")
    tasks: tuple[str, ...] = ("source", "recall")
    settings: tuple[str, ...] = ("usual", "large lr", "outlier")
    seeds: tuple[int, ...] = (0,)
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    steps: int = 300
    batch: int = 8
    sequence: int = 128
    lr: float = 2e-3


ALL = ("fog-max", "fog-opt", "fog-flash", "llama3", "olmo2", "op1", "llama3-smooth-swiglu")
DEFAULT = Study(
    variants=("fog-max", "fog-flash", "llama3", "op1"),
    settings=("usual", "large lr"),
    hidden=256,
    layers=5,
    steps=200,
)
STUDIES = {
    "smoke": Study(
        variants=("fog-max", "llama3"), tasks=("recall",), settings=("outlier",), steps=20, hidden=64
    ),
    "minimal": Study(
        variants=("fog-max", "fog-flash", "llama3"),
        tasks=("source",),
        settings=("large lr", "outlier", "usual"),
        hidden=64,
        layers=3,
        steps=80,
        sequence=64,
    ),
    "default": DEFAULT,
    # The variants that the default study leaves out, in its harder setting.
    "others": dataclasses.replace(
        DEFAULT,
        variants=("fog-opt", "olmo2", "llama3-smooth-swiglu"),
        tasks=("source",),
        settings=("large lr",),
    ),
    "full": Study(
        variants=ALL, seeds=(0, 1, 2), hidden=384, layers=8, heads=6, steps=5000, batch=16, sequence=256
    ),
}


def source_bytes() -> Tensor:
    """Bytes of the standard library's Python files, in a fixed order, uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in files)), dtype=torch.uint8)


class Task:
    """Batches of (ids, labels), the same for every run with one seed."""

    vocabulary = 256

    def __init__(self, name: str, study: Study, seed: int) -> None:
        self.name, self.study = name, study
        self.generator = torch.Generator().manual_seed(seed)
        self.corpus = source_bytes() if name == "source" else None

    def batch(self) -> tuple[Tensor, Tensor]:
        b, s = self.study.batch, self.study.sequence
        if self.corpus is not None:
            starts = torch.randint(len(self.corpus) - s, (b,), generator=self.generator)
            ids = torch.stack([self.corpus[i : i + s] for i in starts.tolist()]).long()
            return ids, ids
        pairs = s // 4
        keys = torch.stack([torch.randperm(127, generator=self.generator)[:pairs] for _ in range(b)])
        values = torch.randint(128, 256, (b, pairs), generator=self.generator)
        order = torch.stack([torch.randperm(pairs, generator=self.generator) for _ in range(b)])
        asked = torch.stack((keys.gather(1, order), values.gather(1, order)), -1).flatten(1)
        ids = torch.cat((torch.stack((keys, values), -1).flatten(1), asked), 1)
        labels = torch.full_like(ids, -100)
        labels[:, 2 * pairs + 1 :: 2] = ids[:, 2 * pairs + 1 :: 2]
        return ids, labels


def build(variant: str, study: Study, seed: int) -> FogForCausalLM:
    torch.manual_seed(seed)
    return FogForCausalLM(
        FogConfig(
            variant=variant,
            vocab_size=Task.vocabulary,
            hidden_size=study.hidden,
            num_hidden_layers=study.layers,
            num_attention_heads=study.heads,
            num_key_value_heads=study.heads // 2,
            max_position_embeddings=study.sequence,
        )
    )


def kurtosis(x: Tensor, dims: tuple[int, ...]) -> float:
    x = x.double()
    return float((x.pow(4).mean(dims) / x.square().mean(dims).square()).mean())


@torch.no_grad()
def measure(model: FogForCausalLM, ids: Tensor) -> dict[str, list[float]]:
    """Kurtosis after each block and the largest logit of each layer, in eval mode (high precision)."""
    found: dict[str, list[float]] = {"kurtosis_token": [], "kurtosis_sample": [], "logit": []}

    def probe(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, **kwargs: Any
    ) -> Any:
        logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * scaling
        found["logit"].append(float(logits.masked_fill(mask < 0, 0).abs().max()))
        return eager_attention(module, q, k, v, mask, scaling=scaling)

    def after_block(_: nn.Module, args: Any, output: Any) -> None:
        found["kurtosis_token"].append(kurtosis(output[0], (-1,)))
        found["kurtosis_sample"].append(kurtosis(output[0], (-2, -1)))

    ALL_ATTENTION_FUNCTIONS["fog_stability_probe"] = probe
    handles = [block.register_forward_hook(after_block) for block in model.model.layers]
    before, model.config._attn_implementation = model.config._attn_implementation, "fog_stability_probe"
    model.eval()
    model(ids, use_cache=False)
    model.train()
    model.config._attn_implementation = before
    for handle in handles:
        handle.remove()
    return found


def train(
    study: Study, variant: str, precision: str, task_name: str, setting: str, seed: int
) -> dict[str, Any]:
    model = build(variant, study, seed).train()
    if precision != "fp32":
        apply_fp8(model, recipe={"name": "delayed", "amax_history_len": 16}, attention=precision == "fp8dpa")
    lr = study.lr * SETTINGS[setting]["lr"]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95))
    task, held_out = Task(task_name, study, seed), Task(task_name, study, 10_000)
    fixed = held_out.batch()
    losses: list[float] = []
    measured: list[dict[str, Any]] = []
    started = time.perf_counter()
    for step in range(study.steps):
        if SETTINGS[setting]["outlier"] and step == study.steps // 3:
            with torch.no_grad():
                model.model.layers[0].mlp.down_proj.weight[7] *= OUTLIER
        if step % MEASURE_EVERY == 0:
            measured.append({"step": step, **measure(model, fixed[0])})
        multiplier = wsd_multiplier(
            step + 1, max(1, study.steps // 10), study.steps / 5, study.steps, 0.0, "1-sqrt"
        )
        for group in optimizer.param_groups:
            group["lr"] = lr * multiplier
        ids, labels = task.batch()
        loss = model(ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm):  # a non-finite gradient is counted, not taken
            optimizer.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]):
            break
    measured.append({"step": len(losses), **measure(model, fixed[0])})
    model.eval()
    with torch.no_grad():
        batches = [fixed, *(held_out.batch() for _ in range(7))]
        final = sum(float(model(i, labels=y, use_cache=False).loss) for i, y in batches) / len(batches)
    return {
        "variant": variant,
        "precision": precision,
        "task": task_name,
        "setting": setting,
        "seed": seed,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": [round(x, 4) for x in losses],
        "held_out": final,
        "logit_bound": logit_bound(model.config),
        "measured": measured,
        "seconds": round(time.perf_counter() - started, 1),
    }


def label(run: dict[str, Any]) -> str:
    return f"{run['variant']} {run['precision']} {run['task']} {run['setting']} seed {run['seed']}"


def table(runs: list[dict[str, Any]], precisions: tuple[str, ...]) -> str:
    """Markdown: a row a variant, task and setting; held-out loss by precision (mean over seeds), kurtosis and logits."""
    lines = [
        "| task | setting | variant | "
        + " | ".join(precisions)
        + " | kurtosis at the end | largest logit (bound) |",
        "|---|---|---|" + "---|" * (len(precisions) + 2),
    ]
    cases = dict.fromkeys((r["task"], r["setting"], r["variant"]) for r in runs)
    for case in cases:
        mine = [r for r in runs if (r["task"], r["setting"], r["variant"]) == case]
        cells = []
        for precision in precisions:
            values = [r["held_out"] for r in mine if r["precision"] == precision]
            mean = sum(values) / len(values) if values else math.nan
            cells.append("" if not values else f"{mean:.3f}" if mean < 1000 else f"{mean:.1e}")
        first = [r for r in mine if r["precision"] == precisions[0]] or mine
        top = max(max(r["measured"][-1]["kurtosis_sample"]) for r in first)
        logit = max(max(m["logit"]) for r in first for m in r["measured"])
        bound = first[0]["logit_bound"]
        shown = f"{logit:.1f} ({bound:.1f})" if bound is not None else f"{logit:.1f} (none)"
        lines.append(f"| {' | '.join(case)} | {' | '.join(cells)} | {top:.1f} | {shown} |")
    return "\n".join(lines)


def plot(name: str, result: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    IMAGES.mkdir(parents=True, exist_ok=True)
    runs = [r for r in result["runs"] if r["seed"] == result["study"]["seeds"][0]]
    variants = list(dict.fromkeys(r["variant"] for r in runs))
    precisions = list(dict.fromkeys(r["precision"] for r in runs))
    panels = list(dict.fromkeys((r["task"], r["setting"]) for r in runs))
    colours = dict(zip(precisions, ("black", "tab:blue", "tab:red"), strict=False))

    def smooth(values: list[float], window: int = 10) -> list[float]:
        return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]

    figure, axes = plt.subplots(
        len(panels),
        len(variants),
        figsize=(3.1 * len(variants), 2.5 * len(panels)),
        sharex=True,
        sharey="row",
        squeeze=False,
    )
    for axis_row, panel in zip(axes, panels, strict=True):
        for axis, variant in zip(axis_row, variants, strict=True):
            for r in runs:
                if (r["task"], r["setting"]) == panel and r["variant"] == variant:
                    axis.plot(smooth(r["losses"]), color=colours[r["precision"]], label=r["precision"], lw=1)
            axis.set_title(f"{variant}: {', '.join(panel)}", fontsize=8)
            axis.tick_params(labelsize=7)
        shown = [smooth(r["losses"]) for r in runs if (r["task"], r["setting"]) == panel]
        # What diverges leaves the picture.
        axis_row[0].set_ylim(0.95 * min(map(min, shown)), 1.05 * max(losses[0] for losses in shown))
        axis_row[0].set_ylabel("training loss", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("step", fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}_loss.png", dpi=110)

    figure, axes = plt.subplots(2, len(panels), figsize=(4 * len(panels), 5), sharex=True, squeeze=False)
    for column, panel in enumerate(panels):
        for variant in variants:
            for r in runs:
                if (r["task"], r["setting"], r["variant"]) != (*panel, variant) or r[
                    "precision"
                ] != precisions[0]:
                    continue
                steps = [m["step"] for m in r["measured"]]
                axes[0][column].plot(
                    steps, [max(m["kurtosis_sample"]) for m in r["measured"]], label=variant, lw=1
                )
                axes[1][column].plot(steps, [max(m["logit"]) for m in r["measured"]], label=variant, lw=1)
        axes[0][column].set_title(f"{', '.join(panel)} ({precisions[0]})", fontsize=8)
        axes[0][column].set_yscale("log")
        axes[1][column].set_yscale("log")
    axes[0][0].set_ylabel("kurtosis, largest layer", fontsize=8)
    axes[1][0].set_ylabel("largest attention logit", fontsize=8)
    axes[0][0].legend(fontsize=7)
    figure.supxlabel("step", fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGES / f"{name}_outliers.png", dpi=110)


def logit_bound(config: FogConfig) -> float | None:
    """The largest |logit| that QK regularisation allows: ``softmax_scale * head_dim``; ``None`` without one, or where a gain trains."""
    if config.qk_norm == "none" or (config.qk_norm == "rms" and config.qk_gain == "trainable"):
        return None
    return config.softmax_scale * config.head_dim


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", choices=STUDIES, default="default")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop starting runs after this long")
    parser.add_argument("--plot", action="store_true", help="only draw and tabulate saved results")
    arguments = parser.parse_args()
    study, name = STUDIES[arguments.study], f"fog_stability_{arguments.study}"
    if arguments.plot:
        result = json.loads((RESULTS / f"{name}.json").read_text())
        plot(name, result)
        print(table(result["runs"], study.precisions))
        return
    random.seed(0)
    started = time.perf_counter()
    result = {"study": dataclasses.asdict(study), "environment": environment(), "runs": [], "not_run": []}
    for task in study.tasks:
        for setting in study.settings:
            for seed in study.seeds:
                for variant in study.variants:
                    for precision in study.precisions:
                        if (time.perf_counter() - started) / 60 > arguments.minutes:
                            result["not_run"].append([task, setting, seed, variant, precision])
                            continue
                        run = train(study, variant, precision, task, setting, seed)
                        result["runs"].append(run)
                        RESULTS.mkdir(exist_ok=True)  # after every run, so that a stop loses none
                        (RESULTS / f"{name}.json").write_text(json.dumps(result) + "\n")
                        print(f"{label(run)}: held-out {run['held_out']:.3f}, {run['seconds']} s", flush=True)
    result["minutes"] = round((time.perf_counter() - started) / 60, 1)
    plot(name, result)
    print(table(result["runs"], study.precisions))
    save(name, result)


if __name__ == "__main__":
    main()
