"""Worker of test_fp8_training.py, two ranks.

Trains the same small MPT under DDP and FSDP2, whole and resumed, and writes what each case found to ``OUT/rank{r}.json``.
Gradients, not losses: gloo's reduce-scatter sums where it should average, which AdamW would hide.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from foundry_fp8.layers.state import FP8State
from tests.integration.foundry_runs import config, train

FSDP = {
    "fsdp_config": {
        "sharding_strategy": "FULL_SHARD",
        "mixed_precision": "PURE",
        "activation_checkpointing": False,
        "state_dict_type": "sharded",
    }
}


def full_weights(trainer):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in trainer.state.model.named_parameters()
    }


def equal(a, b):
    return sorted(a) == sorted(b) and all(torch.equal(a[name], b[name]) for name in a)


def amax_state_is_the_same_on_every_rank(trainer):
    state = FP8State.of(trainer.state.model)
    if state.delayed is None:
        return True
    mine = torch.cat([state.delayed.scale, state.delayed.amax_history.flatten()])
    both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mine)
    return bool(torch.equal(both[0], both[1]) and (mine != 0).any())


def case(root, out, recipe, wrapper):
    extra = FSDP if wrapper == "fsdp2" else {}
    os.environ["FSDP_VERSION"] = "2"
    folder = out / f"{wrapper}-{recipe}"
    algorithms = {"fp8": {"recipe": recipe}}
    cfg = {"algorithms": algorithms, "global_train_batch_size": 16, **extra}
    whole = train(config(root, **cfg, save_folder=str(folder), save_interval="2ba", save_overwrite=True))
    expected = full_weights(whole)
    path = str(folder / ("ep0-ba2" if wrapper == "fsdp2" else "ep0-ba2-rank0.pt"))
    resumed = train(config(root, **cfg, load_path=path))
    result = {
        "resume_is_bit_exact": equal(full_weights(resumed), expected),
        "scales_agree": amax_state_is_the_same_on_every_rank(resumed),
        "ran_fp8": all(
            m.ledger.flops["wgrad", "fp4" if recipe == "nvfp4" else "fp8"] > 0
            for m in FP8State.of(whole.state.model).modules.values()
        ),
        "wrapped": wrapper,
    }
    high_precision = {**cfg, "algorithms": None}
    back = train(config(root, **high_precision, load_path=path, max_duration="3ba"))
    result["loads_into_high_precision"] = int(back.state.timestamp.batch) == 3
    if recipe == "delayed":
        folder = out / f"{wrapper}-high_precision"
        train(
            config(root, **high_precision, save_folder=str(folder), save_interval="2ba", max_duration="2ba")
        )
        path = str(folder / Path(path).name)
        into_fp8 = train(config(root, **cfg, load_path=path, max_duration="3ba"))
        result["high_precision_loads_into_fp8"] = int(into_fp8.state.timestamp.batch) == 3
    return result


def main():
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    wrapper, recipe = sys.argv[3].split("-")
    try:
        found = case(root, out, recipe, wrapper)
    except Exception:
        found = {"error": traceback.format_exc()}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
