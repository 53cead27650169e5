"""Worker of test_low_bit_adamw.py, two ranks: runs that stop, resume and end alike, or are refused."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.integration.foundry_runs import config, train

torch.cuda.current_device = lambda: torch.device("cpu")  # which FSDP1 asks for
torch.compiler.set_stance("force_eager")


def local(trainer):
    return [getattr(p, "_local_tensor", p).detach().clone() for p in trainer.state.model.parameters()]


def case(root, out, name, wrapper):
    os.environ["FSDP_VERSION"] = "2" if wrapper == "fsdp2" else "1"
    base = {
        "optimizer": {"name": name, "lr": 3.0e-3},
        "global_train_batch_size": 16,
        "algorithms": {"fp8": {"recipe": "delayed"}},
        "dist_timeout": 300,
    }
    if wrapper != "ddp":
        base["fsdp_config"] = {"sharding_strategy": "FULL_SHARD", "mixed_precision": "DEFAULT", "state_dict_type": "sharded"}  # fmt: skip
    folder = str(out / f"{name}-{wrapper}")
    whole = train(config(root, **base, save_folder=folder, save_interval="2ba"))
    path = "ep0-ba2/" if wrapper != "ddp" else "ep0-ba2-rank0.pt"
    resumed = train(config(root, **base, load_path=f"{folder}/{path}"))
    (optimizer,) = resumed.state.optimizers
    states = optimizer.state.values()
    moments = [getattr(state["exp_avg"], "_local_tensor", state["exp_avg"]) for state in states]
    sizes = [p.numel() for p in local(resumed)]
    return {
        "bit_exact": all(torch.equal(a, b) for a, b in zip(local(whole), local(resumed), strict=True)),
        "in 8 bits": sum(m.numel() for m in moments if hasattr(m, "codes")),
        "could be": sum(n for n in sizes if n >= 4096 and n % optimizer.block_size == 0),
        "in all": sum(sizes),
    }


def main():
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = {}
    for name in ("adamw_8bit", "adamw_fp8"):
        for wrapper in ("ddp", "fsdp2"):
            found[f"{name} {wrapper}"] = case(root, out, name, wrapper)
    try:
        case(root, out, "adamw_8bit", "fsdp1")
    except RuntimeError as error:
        found["fsdp1"] = str(error)
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
