"""Run logs as ``run_log`` writes them, made up: what the tests of reading and drawing start from."""

import json
import math
from pathlib import Path

import numpy as np

from foundry_fp8.report.comparison import compare
from foundry_fp8.report.runs import read_runs
from foundry_fp8.report.write import write_report


def report_runs(paths: list[Path], output: Path, **options) -> Path:
    return write_report(compare(read_runs(paths)), output, **options)


def write_log(path: Path, lines: list[dict], tail: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def header(name="run", recipe=None, world_size=1, nodes=1, config=None, step=0, backend="native", **more):
    hyperparameters = dict(config or {})
    if recipe is not None:
        rows = [
            {
                "name": "blocks.0.up",
                "action": "converted",
                "reason": recipe,
                "shape": [16, 8],
            },
            {
                "name": "lm_head",
                "action": "skipped",
                "reason": "output heads stay",
                "shape": [4, 8],
            },
        ]
        hyperparameters["fp8"] = {
            "recipe": {"name": recipe},
            "backend": backend,
            "chosen": f"auto chose {backend}",
            "converted_share": 0.8,
            "rows": rows,
        }
    return {
        "kind": "header",
        "run_name": name,
        "step": step,
        "precision": "amp_bf16",
        "world_size": world_size,
        "nodes": nodes,
        "parameters": 1000,
        "versions": {"torch": "2.7.0"},
        "hyperparameters": hyperparameters,
        **more,
    }


def batches(losses, tokens_per_second=100.0, tokens_per_step=50, start=0, metrics=lambda step: {}):
    return [
        {
            "kind": "batch",
            "step": start + i + 1,
            "tokens": (start + i + 1) * tokens_per_step,
            "seconds": (start + i + 1) * tokens_per_step / tokens_per_second,
            "loss": loss if isinstance(loss, str) or math.isfinite(loss) else str(loss),
            "host_peak_bytes": 2_000_000_000,
            "metrics": metrics(start + i + 1),
        }
        for i, loss in enumerate(losses)
    ]


END = {"kind": "end", "status": "finished"}


def curve(steps=100, seed=0, offset=0.0):
    rng = np.random.default_rng(seed)
    return list(3 + 5 * np.exp(-np.arange(steps) / 30) + rng.normal(0, 0.05, steps) + offset)


def monitored(step):
    """What the monitors log, every tenth step."""
    if step % 10:
        return {"memory/peak_reserved_mem": 3.5}
    found = {"mfu/mfu": 0.4, "mfu/effective_peak": 1500.0, "memory/peak_reserved_mem": 3.6}
    for layer in range(4):
        for role in ("residual", "qkv_input"):
            found[f"kurtosis_token/{role}/layer_{layer:03d}"] = 3 + layer * step / 20
    for operand in ("x", "w", "dy"):
        found[f"fp8/saturated/{operand}/worst"] = 1e-3 * step
        found[f"fp8/sqnr_db/{operand}/worst"] = 30 - step / 20
    found |= {f"fp8_error/gradient/layer_{layer:03d}": 0.1 * 1.5**layer for layer in range(4)}
    if step == 50:
        found |= {"guard/alarms": 1.0, "guard/demoted_layers": 1.0}
    if step == 60:
        found |= {"guard/demoted_layers": 0.0}
    return found
