"""The same models under FSDP2 and DDP, for workers: what every rank has of the gradients, beside the unsharded model's mean of all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.model_structure.blocks import transformer_blocks
from tests.combinations.hosts import FEATURES, errors, gradients, made
from tests.combinations.wrapping import with_amaxes_of_all_ranks


def sharded(
    hosts: list[str], recipe: str, dtype: torch.dtype
) -> dict[tuple[str, str], tuple[float, float] | str]:
    """By host and feature, or ``DDP``: how far the gradients are apart (:func:`errors`), or the first line of what was raised."""
    dist.init_process_group("gloo")
    found: dict[tuple[str, str], tuple[float, float] | str] = {}
    for host in hosts:
        model, batch = made(host, recipe, "none")
        shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        with_amaxes_of_all_ranks(model)  # as sharded ones have them
        wanted = mean_of_ranks(gradients(model, batch, dtype, dist.get_rank()), shapes)
        for number, feature in enumerate(FEATURES):
            try:
                model, batch = made(host, recipe, "none")
                if number % 2:
                    FEATURES[feature](model)
                shard(model)
                if not number % 2:
                    FEATURES[feature](model)
                got = gradients(model, batch, dtype, dist.get_rank())
            except (RuntimeError, ValueError) as error:
                found[host, feature] = f"{type(error).__name__}: {error}".splitlines()[0]
            else:
                found[host, feature] = errors(whole(got, shapes), wanted)
        model, batch = made(host, recipe, "none")
        # Which experts get no token is each rank's own.
        got = gradients(
            DistributedDataParallel(model, find_unused_parameters=True), batch, dtype, dist.get_rank()
        )
        found[host, "DDP"] = errors(
            whole({n.removeprefix("module."): g for n, g in got.items()}, shapes), wanted
        )
    dist.barrier()  # and no destroy_process_group: tests/multiprocess/ranks.py says why
    return found


def shard(model: nn.Module) -> None:
    """Each block is a unit, as far as it shares no parameter with another one (of which torch knows nothing), and so is the rest."""
    blocks = list(dict.fromkeys(block for _, block in transformer_blocks(model)))
    holders = Counter(parameter for block in blocks for parameter in set(block.parameters()))
    for block in blocks:
        if all(holders[parameter] == 1 for parameter in block.parameters()):
            fully_shard(block)
    fully_shard(model)
    average_on_gloo(model)


def whole(shards: dict[str, Any], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """Every parameter's gradient; an expert without a token has none."""
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in shards.items()}
    assert full.keys() <= shapes.keys()
    return {name: full.get(name, torch.zeros(shape)) for name, shape in shapes.items()}


def mean_of_ranks(gradients: dict[str, Tensor], shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    found = whole(gradients, shapes)
    for gradient in found.values():
        dist.all_reduce(gradient)
        gradient.div_(dist.get_world_size())
    return found
