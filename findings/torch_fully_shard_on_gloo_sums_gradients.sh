#!/usr/bin/env bash
# torch 2.7's fully_shard (FSDP2) over gloo: gradients are those of DDP times the number of ranks.
#
# One would guess: fully_shard averages gradients over the ranks that shard, as DDP and FSDP1 do, whatever backend carries them; a run on
# CPUs is how trainers test their FSDP2 code before it meets GPUs.
# What happens: gloo has no average, and torch 2.7.0 (which mosaicml 0.32 and llm-foundry 0.22 pin) sums without dividing: 2.0 times DDP's
# gradient on two ranks, 3.0 times on three. No error, no warning. torch 2.11.0 divides.
# Why it matters: Adam hides the factor but for its epsilon, weight decay coupled to it and gradient clipping, which then clips at 1/N of its
# threshold; a test on a CPU that compares losses with DDP's passes, one that compares gradients looks like a fault of one's own.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/gradients.py" <<'END'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def be(rank, ranks, port, expected):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain, sharded, replicated = (nn.Linear(8, 8) for _ in range(3))
    for model in (sharded, replicated):
        model.load_state_dict(plain.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (ranks,)))
    replicated = nn.parallel.DistributedDataParallel(replicated)
    batch = torch.ones(4, 8)  # the same on every rank: the mean over ranks is each rank's own gradient
    for model in (plain, sharded, replicated):
        model(batch).sum().backward()
    own = plain.weight.grad.norm()
    ddp = float(replicated.module.weight.grad.norm() / own)
    fsdp2 = float(sharded.weight.grad.full_tensor().norm() / own)
    if rank == 0:
        print("torch", torch.__version__, "on", ranks, "ranks: DDP", ddp, "fully_shard", fsdp2, flush=True)
    assert ddp == 1.0 and fsdp2 == (ranks if expected == "sum" else 1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (2, 3):
        mp.spawn(be, (ranks, 29650 + ranks, sys.argv[1]), nprocs=ranks)
END
for found in "2.7.0 sum" "2.11.0 mean"; do
  set -- $found
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "torch==$1" numpy
  "$folder/$1/bin/python" "$folder/gradients.py" "$2"
done
echo "as found: torch 2.7.0 sums over gloo, torch 2.11.0 averages"
