"""A stage of ``selftest``: one LLM Foundry run in BF16 and one in FP8, of a model that fits one GPU.

python -m foundry_fp8.cli.selftest.training FOLDER [--dry]
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import torch

import foundry_fp8
from foundry_fp8.cli.demo import demo
from foundry_fp8.cli.selftest.cluster.ranks import CANNOT_RUN

__all__ = ["main"]

# 0.4 B parameters in 8 blocks of width 2048: large enough that its GEMMs gain from FP8.
SIZES = {
    "max_seq_len": 2048,
    "model.d_model": 2048,
    "model.n_heads": 16,
    "model.n_layers": 8,
    "model.attn_config.kv_n_heads": 4,
    "optimizer.lr": 3.0e-4,
    "precision": "amp_bf16",
    "device_eval_batch_size": 4,
    "eval_interval": 0,
}


def main(folder: Path, dry: bool) -> int:
    """Train through the demo, and print a JSON object."""
    if importlib.util.find_spec("llmfoundry") is None:
        print("LLM Foundry is not installed", file=sys.stderr)
        return CANNOT_RUN
    from omegaconf import OmegaConf

    from foundry_fp8.report.comparison import compare
    from foundry_fp8.report.runs import read_runs

    config = OmegaConf.load(Path(foundry_fp8.__file__).parent / "yamls" / "demo" / "mpt-gqa.yaml")
    for key, value in {} if dry else SIZES.items():  # type: ignore[union-attr]
        OmegaConf.update(config, key, value)
    folder.mkdir(parents=True, exist_ok=True)
    yaml = folder / "training.yaml"
    OmegaConf.save(config, yaml)
    with contextlib.redirect_stdout(sys.stderr):  # the last line of stdout is the result
        demo(
            steps=4 if dry else 30,
            recipes="current",
            output=folder / "training",
            seed=17,
            model="mpt-gqa",
            yaml=yaml,
            corpus=Path(asyncio.__file__).parent
            if dry
            else Path(torch.nn.__file__).parent,  # prepared in seconds
        )
    rows = compare(read_runs([folder / "training" / "runs" / name for name in ("high-precision", "current")]))
    high, fp8 = (next(row for row in rows if row.run.name == name) for name in ("high-precision", "current"))
    apart = float(fp8.final_loss) / float(high.final_loss) - 1
    speed = float(fp8.tokens_per_second_per_device) / float(high.tokens_per_second_per_device)
    mfus = [row.run.metrics.get("mfu/mfu") for row in (high, fp8)]
    shown = " and ".join("none" if mfu is None else f"{float(mfu.values[-1]):.1%}" for mfu in mfus)
    ok = abs(apart) < 0.034 and (dry or fp8.run.backend != "emulated")
    figures = f"loss {apart:+.2%}, {speed:.2f} x the tokens per second, MFU {shown}, {fp8.run.backend}"
    print(json.dumps({"rows": [{"check": "current beside BF16", "ok": ok, "figures": figures}]}))
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "--dry" in sys.argv[2:]))
