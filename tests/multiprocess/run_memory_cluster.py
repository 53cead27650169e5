"""Worker of test_memory.py: what a rank holds in a step under DDP, FSDP1 and FSDP2, and what the planner says of it from one device."""

from __future__ import annotations

import json
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.planning.memory.cluster import Cluster, on_cluster
from foundry_fp8.planning.memory.optimizer_state import optimizer_bytes
from foundry_fp8.planning.memory.planner import measure
from tests.multiprocess.run_memory import build

TOKENS = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))


class Bytes(TorchDispatchMode):
    """All storages that ops made since it was entered, by their size now: FSDP empties and fills them again."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, torch.Tensor) and not hasattr(x, "__tensor_flatten__"):
                storage = x.untyped_storage()
                self.known.setdefault(storage._cdata, weakref.ref(storage))
        alive = {key: found for key, ref in self.known.items() if (found := ref()) is not None}
        self.known = {key: self.known[key] for key in alive}
        self.peak = max(self.peak, sum(found.nbytes() for found in alive.values()))
        return out


def wrap(kind: str, model: torch.nn.Module) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind.startswith("fsdp1"):
        strategy = ShardingStrategy.SHARD_GRAD_OP if "grad" in kind else ShardingStrategy.FULL_SHARD
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device("cpu"), use_orig_params=True,
            sharding_strategy=strategy,
        )  # fmt: skip
    options: dict[str, Any] = {"reshard_after_forward": "grad" not in kind}
    if "mixed" in kind:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, microbatches: int) -> None:
    optimizer.zero_grad(set_to_none=True)
    for _ in range(microbatches):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()


def held(kind: str, checkpointed: bool, microbatches: int) -> int:
    """The peak of the second step, optimizer states and all; what the optimizer's own update holds left out."""
    with Bytes() as meter:
        model = build(width=256)
        if checkpointed:
            apply_activation_checkpointing(model, targets={"LlamaDecoderLayer": 4})
        model = wrap(kind, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        step(model, optimizer, microbatches)
        optimizer.zero_grad(set_to_none=True)
        meter.peak = 0
        for _ in range(microbatches):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        return meter.peak


def main() -> None:
    world, results = dist.get_world_size(), {}
    for kind in ("ddp", "fsdp1", "fsdp1 grad"):
        plain = build(width=256)
        state = optimizer_bytes([torch.optim.AdamW(plain.parameters())])
        mixed = "mixed" in kind
        if mixed:
            plain.to(torch.bfloat16)
        measured = measure(
            plain,
            lambda model=plain: model(input_ids=TOKENS, labels=TOKENS).loss,
            compression="none",
            rounds=1,
        )
        sharding = "NO_SHARD" if kind == "ddp" else "SHARD_GRAD_OP" if "grad" in kind else "FULL_SHARD"
        cluster = Cluster(
            world_size=world,
            sharding=sharding,
            shard=1 if kind == "ddp" else world,
            gathered=2 if mixed else 4,
            reduced=4,
        )
        for microbatches in (1, 3):
            there = on_cluster(measured, plain, cluster, optimizer_bytes=state, accumulates=microbatches > 1)
            for option in ("none", "block"):
                real = held(kind, option == "block", microbatches)
                results[f"{kind}, {option}, {microbatches}"] = (there.peak(option), real)
    if dist.get_rank() == 0:
        with open(os.environ["RESULT_FILE"], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
