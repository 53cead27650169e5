"""Worker of test_mus_training.py, two ranks: both forms of a µnit-scaled model in FP8 under DDP, FSDP1 and FSDP2.

From the CPU only: Composer materialises meta tensors on CUDA, and FSDP1 needs its CUDA device faked.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.foundry_runs import config, train
from tests.models.mus.test_training import ALGORITHMS, LION, MODELS

torch.cuda.current_device = lambda: torch.device("cpu")


def case(root, out, kind, wrapper):
    os.environ["FSDP_VERSION"] = "2" if wrapper == "fsdp2" else "1"
    base = {
        "model": MODELS[kind],
        "algorithms": ALGORITHMS,
        "optimizer": LION,
        "global_train_batch_size": 16,
        "max_duration": "4ba",
        "dist_timeout": 300,
    }
    if wrapper != "ddp":
        base["fsdp_config"] = {"sharding_strategy": "FULL_SHARD", "mixed_precision": "DEFAULT", "state_dict_type": "sharded"}  # fmt: skip
    folder = str(out / f"{kind}-{wrapper}")
    whole = train(config(root, **base, save_folder=folder, save_interval="2ba"))
    groups = whole.state.optimizers[0].param_groups
    rates = {g["unit_scaling"]: g["lr"] for g in groups}
    numbers = {g["unit_scaling"]: len(g["params"]) for g in groups}
    path = "ep0-ba2/" if wrapper != "ddp" else "ep0-ba2-rank0.pt"
    resumed = train(config(root, **base, load_path=f"{folder}/{path}"))

    def local(trainer):
        return [getattr(p, "_local_tensor", p).detach().clone() for p in trainer.state.model.parameters()]

    return {
        "loss": float(whole.state.total_loss_dict["loss/train/total"]),
        "rates": rates,
        "numbers": numbers,
        "bit_exact": all(torch.equal(a, b) for a, b in zip(local(whole), local(resumed), strict=True)),
        "converted": len(whole.state.algorithms[0].report.converted),
    }


def main():
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = {}
    for kind, wrapper in (
        ("mpt", "fsdp2"),
        ("mpt", "fsdp1"),
        ("mus_causal_lm", "ddp"),
        ("mus_causal_lm", "fsdp2"),
    ):
        try:
            found[f"{kind}-{wrapper}"] = case(root, out, kind, wrapper)
        except Exception:
            found[f"{kind}-{wrapper}"] = {"error": traceback.format_exc()}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
