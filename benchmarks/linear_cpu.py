"""Forward and backward of one linear on a CPU: float32, the emulated backend in each recipe, torchao's emulation; then one
whole step of the demo's model.

    python benchmarks/linear_cpu.py [--repeats 15] [--save NAME]

torchao is compared where it is installed (`pip install torchao==0.13.0`). Every case runs in turn, the figure is the median
of the ratios to float32 within one round. The table also shows what backward keeps of the input, counted from the tensors
that autograd saves (parameters left out).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import environment, interleaved, median_ratio, save
from torch import nn

import foundry_fp8

TOKENS, IN, OUT = 2048, 1024, 4096
LIMITS = {"delayed": 0.70, "current": 0.70, "block": 0.85, "mxfp8": 0.95}
"""The most of nn.Linear's float32 time that a recipe may take. `unit` is left out: it converts layers of µnit Scaling alone."""


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the distinct storages that autograd keeps for backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return sum(kept.values())


def cases() -> dict[str, nn.Module]:
    base = nn.Linear(IN, OUT, bias=False)

    def fresh() -> nn.Sequential:
        linear = nn.Linear(IN, OUT, bias=False)
        linear.weight = base.weight
        return nn.Sequential(linear)

    found: dict[str, nn.Module] = {"float32": fresh()}
    for recipe in LIMITS:
        model = fresh()
        foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated")
        found[recipe] = model
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        print("torchao is not installed: not compared")
    else:
        found["torchao emulate"] = convert_to_float8_training(
            fresh(), config=Float8LinearConfig(emulate=True)
        )
    return found


def demo_step(repeats: int) -> list[dict[str, object]]:
    """Forward and backward of the demo's MPT on one microbatch, in float32 and converted by each recipe."""
    from llmfoundry.utils.builders import build_composer_model
    from omegaconf import OmegaConf

    config = OmegaConf.load(Path(__file__).parents[1] / "yamls" / "demo" / "mpt-gqa.yaml")
    options = OmegaConf.to_container(config.model, resolve=True)
    name = options.pop("name")

    class Tokenizer:  # MPT reads no more of it than this
        eos_token_id = 0

        def __len__(self) -> int:
            return 1

    def build() -> nn.Module:
        torch.manual_seed(0)
        return build_composer_model(name=name, cfg=dict(options), tokenizer=Tokenizer())

    tokens = torch.randint(
        0, config.variables.vocab_size, (config.device_train_microbatch_size, config.max_seq_len)
    )
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    models = {"float32": build()}
    for recipe in LIMITS:
        models[recipe] = build()
        foundry_fp8.apply_fp8(models[recipe], recipe=recipe, backend="emulated")

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        model.loss(model(batch), batch).backward()

    seconds = interleaved({n: lambda m=m: step(m) for n, m in models.items()}, repeats, 2)
    return [
        {
            "case": case,
            "median_ms": round(sorted(seconds[case])[repeats // 2] * 1e3, 1),
            "of_float32": round(median_ratio(seconds[case], seconds["float32"]), 3),
        }
        for case in models
    ]


def table(repeats: int) -> list[dict[str, object]]:
    """Forward and backward of the linear, and what it keeps, by case."""
    x, dy = torch.randn(TOKENS, IN, requires_grad=True), torch.randn(TOKENS, OUT)
    models = cases()

    def step(model: nn.Module) -> None:
        x.grad = None
        model.zero_grad(set_to_none=True)
        model(x).backward(dy)

    seconds = interleaved({name: lambda m=model: step(m) for name, model in models.items()}, repeats, 2)
    full = saved_bytes(models["float32"], x)
    rows = []
    for name, model in models.items():
        rows.append(
            {
                "case": name,
                "median_ms": round(sorted(seconds[name])[repeats // 2] * 1e3, 1),
                "of_float32": round(median_ratio(seconds[name], seconds["float32"]), 3),
                "saved_of_float32": round(saved_bytes(model, x) / full, 3),
            }
        )
        if "torchao emulate" in models:
            rows[-1]["of_torchao"] = round(median_ratio(seconds[name], seconds["torchao emulate"]), 3)
    return rows


def above_limits(rows: list[dict]) -> list[str]:
    """A line for each recipe that takes more of float32's time than ``LIMITS`` allows."""
    return [
        f"{row['case']}: {row['of_float32']} of float32, limit {LIMITS[row['case']]}"
        for row in rows
        if row["case"] in LIMITS and not row["of_float32"] <= LIMITS[row["case"]]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--save", default=None, metavar="NAME", help="write results/NAME.json")
    args = parser.parse_args()

    rows = table(args.repeats)
    print(f"{TOKENS} x {IN} by {IN} x {OUT}, forward and backward, {args.repeats} interleaved repeats")
    print(f"{'case':18}{'median ms':>10}{'/ float32':>11}{'limit':>7}{'/ torchao':>11}{'saved':>8}")
    for row in rows:
        limit = f"{LIMITS[row['case']]:.2f}" if row["case"] in LIMITS else ""
        print(
            f"{row['case']:18}{row['median_ms']:>10}{row['of_float32']:>11}{limit:>7}"
            f"{row.get('of_torchao', ''):>11}{row['saved_of_float32']:>8}"
        )
    steps = demo_step(args.repeats)
    print("one step of the demo's model")
    for row in steps:
        print(f"{row['case']:18}{row['median_ms']:>10}{row['of_float32']:>11}")
    result = {
        "benchmark": "linear_cpu",
        "shape": [TOKENS, IN, OUT],
        "environment": environment(),
        "rows": rows,
        "demo_step": steps,
    }
    if args.save:
        save(args.save, result)
    if slow := above_limits(rows):
        raise SystemExit("\n".join(slow))


if __name__ == "__main__":
    main()
