"""Worker of test_monitors.py, two ranks.

The four callbacks from a YAML under DDP and FSDP2; an outlier on rank 1 alone, on which both ranks have to act alike; and a
guard that breaks on rank 1 alone, which must not leave rank 0 waiting.
"""

import json
import math
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from composer.core import Callback
from composer.loggers import InMemoryLogger
from llmfoundry.registry import callbacks

from foundry_fp8.callbacks.divergence_guard import DivergenceGuard
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.layers.linear import FP8Linear
from tests.integration.foundry_runs import config, train
from tests.multiprocess.run_fp8_training import FSDP

ALL = {
    "mfu_monitor": {
        "interval": 2,
        "peak_flops": {"fp32": 1.0e12, "bf16": 1.0e12, "fp8": 2.0e12},
        "details": True,
    },
    "kurtosis_monitor": {
        "interval": 2,
        "details": True,
        "tensors": {"mine": ["model.transformer.blocks.0.ffn"]},
    },
    "fp8_monitor": {"interval": 2, "details": True},
    "divergence_guard": {"interval": 1, "actions": ["warn"], "details": True},
}
QUICK = {"interval": 1}


class OutlierOnRank1(Callback):
    """From batch 10 on, one channel that block 0's down projection reads grows a hundredfold a batch, on rank 1."""

    def __init__(self):
        self.size = 1.0

    def fit_start(self, state, logger):
        for name, module in state.model.named_modules():
            if name.endswith("blocks.0.ffn.down_proj"):
                module.register_forward_pre_hook(self.bump)

    def bump(self, module, args):
        factor = torch.ones(args[0].shape[-1])
        factor[3] = self.size
        return (args[0] * factor,)

    def batch_start(self, state, logger):
        late = max(0, state.timestamp.batch.value - 9)
        self.size = 100.0**late if dist.get_rank() == 1 else 1.0


class BreaksOnRank1(DivergenceGuard):
    """A pass of its third measurement fails on rank 1: ``before`` or ``after`` the forward."""

    def __init__(self, when, **options):
        super().__init__(**options)
        self.when = when

    def fit_start(self, state, logger):
        super().fit_start(state, logger)
        probe, whole = self.guard.probe, self.guard.probe.loss_of

        def loss_of(model, batch):
            fails = dist.get_rank() == 1 and probe.passes == 3
            if fails and self.when == "before":
                raise RuntimeError("broken on purpose")
            loss = whole(model, batch)
            if fails:
                raise RuntimeError("broken on purpose")
            return loss

        probe.loss_of = loss_of


class AveragesOnGloo(Callback):
    """With torch 2.7 FSDP2's gradients on gloo are sums otherwise."""

    def after_load(self, state, logger):
        average_on_gloo(state.model)


callbacks.register("averages_on_gloo", func=AveragesOnGloo)
callbacks.register("outlier_on_rank_1", func=OutlierOnRank1)
callbacks.register("breaks_on_rank_1", func=BreaksOnRank1)


def run(root, wrapper, wanted, **changes):
    os.environ["FSDP_VERSION"] = "2"
    extra = FSDP if wrapper == "fsdp2" else {}
    wanted = {**wanted, "averages_on_gloo": {}} if wrapper == "fsdp2" else wanted
    base = {"callbacks": wanted, "loggers": {"inmemory": {}}, "global_train_batch_size": 16, **extra}
    return train(config(root, **{**base, **changes}))


def metrics(trainer):
    logger = next(d for d in trainer.logger.destinations if isinstance(d, InMemoryLogger))
    return {key: [float(value) for _, value in found] for key, found in logger.data.items()}


def monitor(trainer, kind):
    return next(c for c in trainer.state.callbacks if isinstance(c, kind))


def all_four(root, wrapper):
    trainer = run(root, wrapper, ALL)
    found = metrics(trainer)
    failed = {c.key: c.failed for c in trainer.state.callbacks if hasattr(c, "failed")}
    result = {
        "failed": {key: why for key, why in failed.items() if why is not None},
        "names": sorted(failed),
        "finite": all(
            math.isfinite(found[key][-1])
            for key in (
                "mfu/mfu",
                "kurtosis_token/residual/mean",
                "kurtosis_token/mine/layer_000",
                "fp8/sqnr_db/x/mean",
                "fp8_error/gradient/worst",
            )
        ),
        "fp8_share": found["mfu/fp8_flop_fraction"][-1],
        "gradient_error": found["fp8_error/gradient/worst"],
    }
    if wrapper == "ddp":
        plain = metrics(run(root, wrapper, {}))
        result["loss_is_that_of_an_unwatched_run"] = found["loss/train/total"] == plain["loss/train/total"]
    return result


def outlier(root, wrapper):
    trainer = run(root, wrapper, {"outlier_on_rank_1": {}, "divergence_guard": QUICK}, max_duration="13ba")
    guard = monitor(trainer, DivergenceGuard)
    running = {
        name.split("blocks.")[-1]: "high_precision" if m.recipe is None else m.recipe.name
        for name, m in trainer.state.model.named_modules()
        if isinstance(m, FP8Linear)
    }
    return {"failed": guard.failed, "events": str(guard.guard.events), "running": running}


def broken(root, when):
    trainer = run(root, "ddp", {"breaks_on_rank_1": {"when": when, "interval": 1}})
    return {
        "failed": monitor(trainer, DivergenceGuard).guard.failed,
        "batches": int(trainer.state.timestamp.batch),
    }


def main():
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    cases = {
        "all-ddp": lambda: all_four(root, "ddp"),
        "all-fsdp2": lambda: all_four(root, "fsdp2"),
        "outlier-fsdp2": lambda: outlier(root, "fsdp2"),
        **{f"broken-{when}": lambda when=when: broken(root, when) for when in ("before", "after")},
    }
    results = {}
    for name, case in cases.items():
        try:
            results[name] = case()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
