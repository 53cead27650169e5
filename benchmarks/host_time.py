"""What a linear's forward and backward cost the host in eager mode: `nn.Linear`, the native backend, torchao's float8 linear.

    python benchmarks/host_time.py [--block] [--recipes current delayed block] [--repeats 40] [--save NAME]

`--block`: a whole block of Hugging Face's Llama instead, what it launches, and what it moves outside of GEMMs and attention (MiB; an
eighth of Llama-3 8B's block in each direction, 1024 tokens).

No GPU is needed: tensors are tiny ones of the CPU, and Triton's driver is one that launches nothing (`tests/kernels/fake_driver.py`), so
that what is timed is Python and torch's dispatcher; the delayed update is the one launch that it is on a GPU. Left out on our side: what the CUDA driver takes for a launch. Left in on the others'
side: what a CPU takes to compute with 32 x 32 elements. "least" is what none in Python goes below: an autograd function that does nothing
but allocate what `current` keeps and call its five kernels and three products (:class:`Least`). Cases run in turn; the figures are medians of the process's CPU time, and of
ratios within one round. Counts of launches and of what passes torch's dispatcher are the machine-independent side of it
(`tests/kernels/test_launches.py`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is decorated
sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch
from common import environment, interleaved, median_ratio, save
from torch import nn

import foundry_fp8
from foundry_fp8.kernels.delayed import update_delayed_
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from tests.kernels.fake_driver import TorchLaunches, fake_driver
from tests.kernels.llama_block import LlamaBlock, eighth, moved

SIZE, LINEARS, STEPS = 32, 8, 10
PEERS = ("tensorwise", "rowwise")
FP8, ONE, LAUNCHES = torch.float8_e4m3fn, torch.ones(()), Counter[str]()


def plain(block: bool) -> nn.Module:
    """Linears in a row or a block, bfloat16."""
    row = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LINEARS)))
    return (LlamaBlock(SIZE) if block else row).to(torch.bfloat16).train()


def ours(recipe: str, block: bool) -> nn.Module:
    """The same, converted."""
    model = plain(block)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
    return model


class Least(torch.autograd.Function):
    """The calls that `current` cannot do without, with nothing around them: no scales' views, no padding, no state, no ledger."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """An amax of both; casts of both in both layouts; fprop."""
        _launched(x, weight)
        x_fp8, x_t, w_fp8, w_t = (
            torch.empty(s, dtype=FP8) for one in (x, weight) for s in (one.shape, one.shape[::-1])
        )
        _launched(x, x_fp8)
        _launched(weight, w_fp8)
        ctx.save_for_backward(weight, x_t, w_t)
        return torch._scaled_mm(x_fp8, w_fp8.t(), scale_a=ONE, scale_b=ONE, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """An amax of dy; a cast of dy in both layouts; dgrad, wgrad."""
        weight, x_t, w_t = ctx.saved_tensors
        _launched(dy, dy)
        dy_fp8, dy_t = (torch.empty(shape, dtype=FP8) for shape in (dy.shape, dy.shape[::-1]))
        _launched(dy, dy_fp8)
        dx = torch._scaled_mm(dy_fp8, w_t.t(), scale_a=ONE, scale_b=ONE, out_dtype=dy.dtype)
        return dx, torch._scaled_mm(dy_t, x_t.t(), scale_a=ONE, scale_b=ONE, out_dtype=weight.dtype)


def _launched(x: torch.Tensor, out: torch.Tensor) -> None:
    """A kernel's call: as many arguments as `_quantize_kernel` takes."""
    LAUNCHES["least"] += 1  # as the driver that launches nothing counts ours
    _nothing(x, SIZE, None, 0, None, None, None, None, None, None, None, ONE, ONE, out, out, None, 16, 16, 16, 16,
             None, None, 0, 448.0, False, 1.0, 4, 64, 128)  # fmt: skip


def _nothing(*values: Any) -> None:
    pass


class LeastLinear(nn.Linear):
    """`nn.Linear` through :class:`Least`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: ``[1, M, K]``."""
        y: torch.Tensor = Least.apply(x.reshape(-1, self.in_features), self.weight)
        return y.view(*x.shape[:-1], -1)


def least(block: bool) -> nn.Module:
    """:func:`plain` through :class:`Least`."""
    model = plain(block)
    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        linear.__class__ = LeastLinear
    return model


def torchao(recipe: str, block: bool) -> nn.Module | None:
    """The same through torchao, ``None`` where it is not installed."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    config = Float8LinearConfig.from_recipe_name(recipe)
    found: nn.Module = convert_to_float8_training(plain(block), config=config)
    return found


def roll(state: DelayedScalingState) -> None:
    """The delayed update of a GPU: one launch for the whole model."""
    update_delayed_(state.scale, state.amax_history, state.scaled_max, use_max=state.use_max)


def step_of(model: nn.Module) -> Callable[[], None]:
    """A function that runs forward and backward :data:`STEPS` times."""
    x = torch.zeros(1, SIZE, SIZE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.zeros(1, SIZE, SIZE, dtype=torch.bfloat16)
    leaves = [x, *model.parameters()]

    def steps() -> None:
        for _ in range(STEPS):
            model(x).backward(dy)
            for leaf in leaves:
                leaf.grad = None

    return steps


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block", action="store_true", help="a block of Llama instead of linears")
    parser.add_argument("--recipes", nargs="*", default=["current", "delayed", "block"])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--save", metavar="NAME", help="write results/NAME.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.setattr(DelayedScalingState, "roll", roll)
    with fake_driver(patch) as seen:
        seen.checks = False
        models = {
            "nn.Linear": plain(options.block),
            "least": least(options.block),
            **{f"native {recipe}": ours(recipe, options.block) for recipe in options.recipes},
        }
        peers = {f"torchao {recipe}": torchao(recipe, options.block) for recipe in PEERS}
        models |= {name: model for name, model in peers.items() if model is not None}
        steps = {name: step_of(model) for name, model in models.items()}
        seconds = interleaved(steps, options.repeats, clock=time.process_time)
        launches = {}
        for name, step in steps.items():
            seen.launches.clear()
            with TorchLaunches(seen):
                step()
            # A GEMM is an operator and a launch of the driver's.
            launches[name] = sum(seen.launches.values()) - seen.launches["_scaled_mm"]
        eighths = {"nn.Linear": None, **{f"native {r}": r for r in options.recipes}} if options.block else {}
        mib = {name: round(moved(eighth(recipe), seen) / 2**20, 1) for name, recipe in eighths.items()}
    rows, per = [], STEPS * (1 if options.block else LINEARS)
    for name, times in seconds.items():
        microseconds = round(statistics.median(times) / per * 1e6, 1)
        row = {"case": name, "microseconds": microseconds, "launches": round(launches[name] / per, 1)}
        row |= {"MiB moved": mib[name]} if name in mib else {}
        for other in ("nn.Linear", "torchao tensorwise"):
            if other in seconds:
                row[f"of {other}"] = round(median_ratio(times, seconds[other]), 2)
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if options.save:
        what = "a block's" if options.block else "a linear's"
        save(options.save, {"machine": environment(), f"{what} forward and backward": rows})


if __name__ == "__main__":
    main()
