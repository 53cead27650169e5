"""How far µnit Scaling's FP8 is from float32 at width 256, and how far a run is from itself when its numbers change a little.

    python benchmarks/unit_scaling/rounding.py --seeds 17,18,19

``transfer.py``'s model with norms of queries and keys at its best rate, 2^-3, 600 steps. FP8 is written here in a few lines, not by
the package: x and W in E4M3, dy in E5M2 at the recipe's constant scale.

======== ===================================================================================================
twin     float32; weights begin a millionth away
fp8      FP8; weights begin a millionth away
amax     FP8 with dy at the scale of its largest element: another rounding, of the same relative error
======== ===================================================================================================

Each loss is the mean over held-out sequences, as in ``transfer.py``, which has the same runs as the package makes them; ``error``
is that of dy, |rounded - dy| / |dy|, over the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import RESULTS, environment
from transfer import BATCH, SEQ, Corpus, model_of, train

from foundry_fp8.layers.unit_linear import UnitLinear
from foundry_fp8.models.mus.structure import unit_scaled
from foundry_fp8.numerics.recipes import UnitScaling

FILE = RESULTS / "unit_scaling_rounding.json"
KIND, WIDTH, RATE, STEPS, DECAY = "mus_qk", 256, 2.0**-3, 600, 2.0**-9
VARIANTS = ("twin", "fp8", "amax")


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).to(x.dtype)


class Straight(torch.autograd.Function):
    """E4M3 forward, the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rounded(x, torch.float8_e4m3fn)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class RoundedGradient(torch.autograd.Function):
    """The value as it is, the gradient in E5M2; ``scale`` 0 is that of its largest element."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, scale: float, errors: list[float]) -> Tensor:
        ctx.scale, ctx.errors = scale, errors
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        scale = ctx.scale or torch.finfo(torch.float8_e5m2).max / dy.abs().amax()
        scaled = dy * scale
        found = rounded(scaled, torch.float8_e5m2)
        ctx.errors.append(float((found - scaled).norm() / scaled.norm()))
        return found / scale, None, None


class Rounded(UnitLinear):
    """Its class is given to a made one, with ``variant`` and ``errors``."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(Straight.apply(x), Straight.apply(self.weight)) * self.output_multiplier
        scale = 0.0 if self.variant == "amax" else UnitScaling.gradient_scale_for(BATCH * SEQ, WIDTH)
        return RoundedGradient.apply(y, scale, self.errors)


def run(variant: str, seed: int, corpus: Corpus) -> dict[str, Any]:
    errors: list[float] = []

    def make(kind: str, width: int) -> nn.Module:
        model = model_of(kind, width)
        if variant != "amax":
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + 1e-6 * torch.randn(p.shape, generator=generator))
        if variant != "twin":
            for name in unit_scaled(model).hidden:
                module = model.get_submodule(name.removesuffix(".weight"))
                module.__class__, module.variant, module.errors = Rounded, variant, errors
        return model

    found = train(KIND, "fp32", WIDTH, RATE, seed, STEPS, corpus, DECAY, make=make)
    error = {"error": round(statistics.mean(errors), 4)} if errors else {}
    return {"variant": variant, "seed": seed, "loss": found["loss"], **error}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="17")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    args = parser.parse_args()
    corpus = Corpus()
    runs = json.loads(FILE.read_text())["runs"] if FILE.exists() else []
    for seed in map(int, args.seeds.split(",")):
        for variant in args.variants.split(","):
            if not any((found["variant"], found["seed"]) == (variant, seed) for found in runs):
                runs.append(run(variant, seed, corpus))
                print(runs[-1], flush=True)
                runs.sort(key=lambda found: (found["seed"], VARIANTS.index(found["variant"])))
                FILE.write_text(json.dumps({"environment": environment(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
