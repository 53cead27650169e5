"""Does the best learning rate stay where it is as the model grows wider? µnit Scaling against the standard parametrisation.

    python benchmarks/unit_scaling/transfer.py --widths 32,64,128 --seeds 17
    python benchmarks/unit_scaling/transfer.py --table         what results/unit_scaling_transfer.json holds

Bytes of the demo's corpus (the standard library's source), 4 layers, AdamW or Lion, cosine to 10 %. A run that
is in the results file already is not repeated. SP is a pre-norm decoder of the same parts (RoPE, GELU, 4x MLP, untied) with
weights of standard deviation 0.02 and one learning rate for everything. Arm sp/fp8 is SP in current scaling; mus_norm has the
LayerNorm after the last block, mus does not; mus_qk has norms of q and k too. --decay is fully decoupled and takes matrices
alone. Each loss is the mean over held-out sequences.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import RESULTS, environment

from foundry_fp8.data.corpus import split_documents, standard_library_documents
from foundry_fp8.models.fog import FogConfig, FogForCausalLM
from foundry_fp8.models.mus import MusConfig, MusForCausalLM
from foundry_fp8.models.mus.structure import unit_scaled
from foundry_fp8.numerics.recipes import UnitScaling
from foundry_fp8.surgery.apply import apply_fp8

FILE = RESULTS / "unit_scaling_transfer.json"
BASE, LAYERS, HEAD_DIM, BATCH, SEQ = 32, 4, 16, 8, 128
MUS_RATES = [2.0**-k for k in range(7, 0, -1)]
RATES = {
    "mus": MUS_RATES,
    "mus_norm": MUS_RATES,
    "mus_qk": MUS_RATES,
    "sp": [2.0**-k for k in range(11, 4, -1)],
}


def model_of(kind: str, width: int) -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": width // HEAD_DIM,
        "vocab_size": 256,
        "max_position_embeddings": SEQ,
        "rope_scaling": False,
        "rope_theta": 10000.0,
    }
    if kind != "sp":
        norms: dict[str, Any] = {
            "final_norm": kind != "mus",
            "qk_norm": "rms" if kind == "mus_qk" else "none",
        }
        return MusForCausalLM(MusConfig(**sizes, **norms))
    return FogForCausalLM(
        FogConfig(
            variant="custom", activation="gelu", intermediate_size=4 * width, initializer_range=0.02, **sizes
        )
    )


def groups(kind: str, model: nn.Module, width: int, lr: float) -> list[dict[str, Any]]:
    if kind == "sp":
        return [{"params": list(model.parameters()), "lr": lr}]
    names = unit_scaled(model).hidden  # converted to FP8 or not
    hidden = [model.get_parameter(name) for name in sorted(names)]
    inside = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [{"params": hidden, "lr": lr * math.sqrt(BASE / width)}, {"params": rest, "lr": lr}]


def fp8(kind: str, model: nn.Module, width: int) -> nn.Module:
    """The model with its hidden linears in FP8: ``unit``, or current scaling for the standard parametrisation."""
    unit = {"name": "unit", "gradient_scale": UnitScaling.gradient_scale_for(BATCH * SEQ, width)}
    apply_fp8(model, recipe="current" if kind == "sp" else unit, evaluate="fp8")
    return model


class Corpus:
    """The demo's corpus as bytes, and batches of it that depend on the seed alone."""

    def __init__(self) -> None:
        parts = split_documents(standard_library_documents())
        self.train, self.held_out = (
            torch.frombuffer(bytearray("\0".join(d.text for d in part).encode()), dtype=torch.uint8)
            for part in parts
        )

    def batch(self, text: Tensor, rows: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(text) - SEQ - 1, (rows,), generator=generator)
        return torch.stack([text[s : s + SEQ] for s in starts]).long()


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def optimizer_of(name: str, parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)
    from llmfoundry.optim import DecoupledLionW

    return DecoupledLionW(parameters, betas=(0.9, 0.99), weight_decay=0.0)


def train(kind: str, precision: str, width: int, lr: float, seed: int, steps: int, corpus: Corpus, decay: float = 0.0, optimizer_name: str = "adamw", make: Callable[[str, int], nn.Module] = model_of) -> dict[str, Any]:  # fmt: skip
    torch.manual_seed(seed)
    model = make(kind, width).train()
    if precision == "fp8":
        fp8(kind, model, width)
    optimizer = optimizer_of(optimizer_name, groups(kind, model, width, lr))
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: (
            min(1.0, (s + 1) / warmup) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, s / steps))))
        ),
    )
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    for step in range(steps):
        loss = loss_of(model, corpus.batch(corpus.train, BATCH, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if decay:
            with torch.no_grad():
                for parameter in (p for p in model.parameters() if p.dim() == 2):
                    parameter.mul_(1 - decay * schedule.lr_lambdas[0](step))
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
    found: dict[str, Any] = {
        "kind": kind,
        "precision": precision,
        "width": width,
        "lr": lr,
        "seed": seed,
        "steps": steps,
        "train_loss": sum(losses[-10:]) / len(losses[-10:]),
    }
    if decay:
        found["decay"] = decay
    if optimizer_name != "adamw":
        found["optimizer"] = optimizer_name
    model.eval()
    generator.manual_seed(1)
    with torch.no_grad():
        held_out = [loss_of(model, corpus.batch(corpus.held_out, 32, generator)).item() for _ in range(4)]
    return {**found, "loss": sum(held_out) / len(held_out)}


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    """What a run is repeated for."""
    names = ("kind", "precision", "width", "lr", "seed", "steps")
    return (*(run[name] for name in names), run.get("decay", 0.0), run.get("optimizer", "adamw"))


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {"runs": []}


def table() -> None:
    """Each cell's runs at each rate: the mean over seeds, and the best rate."""
    cells: dict[tuple[Any, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in read()["runs"]:
        kind, precision, width, lr, _, steps, decay, optimizer = key_of(run)
        cells[optimizer, steps, decay, width, kind, precision][lr].append(run["loss"])
    print("| optimizer | steps | decay | width | run | best rate | loss there | rate: loss (seeds) |")
    print("|---|---|---|---|---|---|---|---|")
    for (optimizer, steps, decay, width, kind, precision), by_rate in sorted(cells.items()):
        means = {lr: statistics.fmean(losses) for lr, losses in sorted(by_rate.items())}
        best = min(means, key=lambda lr, means=means: means[lr])
        every = ", ".join(
            f"2^{math.log2(lr):.0f}: {mean:.4f} ({len(by_rate[lr])})" for lr, mean in means.items()
        )
        print(
            f"| {optimizer} | {steps} | {decay:g} | {width} | {kind}/{precision} | 2^{math.log2(best):.0f} | {means[best]:.4f} | {every} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--widths", default="32,64,128")
    parser.add_argument("--seeds", default="17")
    parser.add_argument("--arms", default="mus/fp32,sp/fp32,mus/fp8")
    parser.add_argument(
        "--exponents", help="learning rates as powers of 1/2: 4,3,2,1; by default each arm's seven"
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--decay", type=float, default=0.0, help="weight decay of a step, at the peak rate")
    parser.add_argument("--optimizer", choices=("adamw", "lion"), default="adamw")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        return table()
    corpus = Corpus()
    for seed in map(int, args.seeds.split(",")):
        for width in map(int, args.widths.split(",")):
            for arm in args.arms.split(","):
                kind, precision = arm.split("/")
                exponents = args.exponents and [2.0 ** -int(k) for k in args.exponents.split(",")]
                for lr in exponents or RATES[kind]:
                    key = (kind, precision, width, lr, seed, args.steps, args.decay, args.optimizer)
                    result = read()
                    if key in map(key_of, result["runs"]):
                        continue
                    run = train(
                        kind, precision, width, lr, seed, args.steps, corpus, args.decay, args.optimizer
                    )
                    result["runs"].append(run)
                    result["environment"] = environment()
                    FILE.write_text(json.dumps(result, indent=1) + "\n")
                    print(*key, round(run["loss"], 4), flush=True)


if __name__ == "__main__":
    main()
