"""Worker of test_memory.py: what a rank holds in a step under DDP, FSDP1 and FSDP2, and what the planner says of it from one device."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from memory_cluster import Case, held, predicted

LLAMA = Case(model="llama, tied", wrapper="fsdp1", mixed=False, option="none", microbatches=1)
GPT2 = dataclasses.replace(LLAMA, model="gpt2, tied", mixed=True, microbatches=3)
CASES = [
    *(
        dataclasses.replace(case, wrapper=wrapper, option=option)
        for case, wrapper, option in itertools.product((LLAMA, GPT2), ("fsdp1", "fsdp2"), ("none", "block"))
    ),
    *(
        dataclasses.replace(LLAMA, wrapper=wrapper, option=option, sharding="SHARD_GRAD_OP")
        for wrapper, option in itertools.product(("fsdp1", "fsdp2"), ("none", "block"))
    ),
    *(
        dataclasses.replace(LLAMA, wrapper="ddp", option=option, microbatches=microbatches)
        for option, microbatches in itertools.product(("none", "block"), (1, 3))
    ),
]


def main() -> None:
    results = {str(case): (predicted(case, dist.get_world_size()), held(case)) for case in CASES}
    if dist.get_rank() == 0:
        with open(os.environ["RESULT_FILE"], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.barrier()  # and no destroy_process_group: ranks.py says why
