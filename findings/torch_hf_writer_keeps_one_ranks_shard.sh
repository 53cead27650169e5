#!/usr/bin/env bash
# torch's Hugging Face checkpoint writer, as it is by default, saves one rank's shard of a sharded model, and loads it back without a word.
#
# One would guess: dcp.save with HuggingFaceStorageWriter(path) on a model that fully_shard has sharded writes whole tensors, or refuses
# DTensors.
# What happens: with save_distributed=False, the default, all ranks write a file of the same name and the last to finish stays: a DTensor of
# [8, 4] on two ranks is a tensor of [4, 4] there, beside an index that says that all is well. The docstring says that the default "assumes"
# whole tensors on rank 0; nothing looks. If the file is the last rank's, HuggingFaceStorageReader loads it into the same model without a
# word: the other ranks' parameters keep what they had. If it is another's, the load raises a size mismatch. What is replicated is right.
# With save_distributed=True the same model comes back exact.
# Why it matters: it is the shortest call, a run of days can save this way at every interval, and half of its weights (on 64 ranks all but
# a 64th) are nowhere.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "torch==2.14.1" "safetensors==0.8.0" numpy
cat > save.py <<'END'
import copy
import glob
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

warnings.filterwarnings("ignore")


def values(model):
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.clone() for n, p in model.state_dict().items()}


def sharded(model):
    return fully_shard(copy.deepcopy(model), mesh=dist.init_device_mesh("cpu", (2,)))


def went_through(model, empty, folder, **options):
    """Of each parameter its shape in the file, and whether it came back."""
    dcp.save(model.state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(path=folder, **options))
    loaded = sharded(empty)
    state = loaded.state_dict()
    try:
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(path=folder))
    except dcp.api.CheckpointException as error:
        print("the load says:", [str(one[0]) for one in error.failures.values()])
    loaded.load_state_dict(state)
    wanted, found, written = values(model), values(loaded), {}
    for file in glob.glob(f"{folder}/*.safetensors"):
        written |= load_file(file)
    return {n: (tuple(written[n].shape), torch.equal(found[n], wanted[n])) for n in wanted}


def rank(number, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    torch.manual_seed(0)
    model, empty = (nn.Sequential(nn.Linear(4, 8)) for _ in range(2))
    trained = sharded(model)
    default = went_through(trained, empty, f"{folder}/default")
    distributed = went_through(trained, empty, f"{folder}/distributed", save_distributed=True)
    if number == 0:
        print("torch", torch.__version__)
        print("by default (shape in the file, came back):", default)
        print("save_distributed=True:", {n: came_back for n, (_, came_back) in distributed.items()})
    half = default["0.weight"] == ((4, 4), False)
    torch.save(half and all(came_back for _, came_back in distributed.values()), f"{folder}/said{number}")
    dist.barrier()


if __name__ == "__main__":
    torch.multiprocessing.spawn(rank, (sys.argv[1],), nprocs=2)
    sys.exit(not all(torch.load(f"{sys.argv[1]}/said{number}") for number in range(2)))
END
mkdir out
venv/bin/python save.py "$folder/out" 2> err || { tail -20 err >&2; exit 1; }
