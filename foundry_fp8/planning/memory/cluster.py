"""From what one device holds to what a rank of a cluster holds: the measurements of an unsharded model, sharded by arithmetic.

The measurements are those of the model with its parameters in the type that is gathered (bfloat16 under FSDP's mixed precision), so that
what autocast would cast and a block's own gradients have their sizes already. With ``n`` parameters of ``m`` bytes each in the shards,
``g`` bytes where they are gathered and ``r`` where they are reduced, over ``s`` ranks that share a copy, a rank holds beside activations::

    all the time       (m n + optimizer) / s, buffers, and with several microbatches m n / s of gradients
    from the first     g of what is in no block: embeddings, head, last norm (FSDP's root unit)
    FULL_SHARD         g of two blocks: the one that runs and the one that is fetched ahead
    SHARD_GRAD_OP      g of every block, from its forward to its backward
    in backward        gradients of two blocks in g, where r differs in r too: one that is made, one that is reduced
    after a block      m of its gradients / s

Without sharding (DDP) a rank holds everything, and buckets of the size of the gradients beside them. Source of the order of events:
torch.distributed.fsdp (``_runtime_utils.py``, ``_fsdp_param_group.py``) of torch 2.7; ``DistributedDataParallel``'s reducer with
``gradient_as_bucket_view=False``, as Composer makes it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.planning.memory.plan import Measurements
from foundry_fp8.planning.memory.solver import Cost, Frame

__all__ = ["SHARDINGS", "Cluster", "on_cluster"]

Sharding = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
SHARDINGS: tuple[Sharding, ...] = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
MASTER = 4
"""Bytes of an element of a shard: LLM Foundry trains from float32."""
IN_FLIGHT = 2
"""Blocks gathered at a time: FSDP2's prefetch, and FSDP1's with ``limit_all_gathers`` (its default)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """How a run is spread.

    Attributes:
        world_size: Ranks.
        sharding: FSDP's strategy, or ``NO_SHARD`` for DDP.
        shard: Ranks that share one copy: all, or fewer under HSDP.
        gathered: Bytes of an element of gathered parameters and of gradients as backward makes them.
        reduced: Bytes of an element of gradients on their way.
        residual: Bytes that error feedback keeps of each element of the gradients that this rank sends.
    """

    world_size: int
    sharding: Sharding
    shard: int
    gathered: int = 4
    reduced: int = 4
    residual: int = 0

    def __post_init__(self) -> None:
        if self.shard < 1 or self.world_size % self.shard:
            raise ConfigError(f"shard: {self.shard} does not divide {self.world_size} ranks.")


@dataclasses.dataclass(frozen=True)
class _Counts:
    total: list[int]
    trained: list[int]


def on_cluster(
    measured: Measurements, model: nn.Module, cluster: Cluster, *, optimizer_bytes: int, accumulates: bool
) -> Measurements:
    """What a rank of ``cluster`` holds.

    Args:
        measured: Of ``model`` on one device in ``cluster.gathered`` bytes an element, a step of one microbatch, without
            optimizer states.
        model: Not sharded.
        cluster: How it will be.
        optimizer_bytes: Of the whole model.
        accumulates: Whether a step has several microbatches.
    """
    blocks = [block for _, block in transformer_blocks(model)]
    total = [sum(p.numel() for p in block.parameters()) for block in blocks]
    trained = [sum(p.numel() for p in block.parameters() if p.requires_grad) for block in blocks]
    everything = sum(p.numel() for p in model.parameters())
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad)
    buffers = measured.frame.static - cluster.gathered * everything
    held = -(-(MASTER * everything + optimizer_bytes) // cluster.shard) + max(buffers, 0)
    gradients = -(-MASTER * learnt // cluster.shard)
    counts = _Counts(total, trained)
    if cluster.sharding == "NO_SHARD":
        held += MASTER * learnt * (cluster.world_size > 1) + cluster.residual * learnt
        frames = [
            _unsharded(f, counts, learnt, held, accumulates) if f else None
            for f in (measured.frame, measured.lean, measured.fused)
        ]
        costs = measured.costs
    else:
        held += -(-cluster.residual * learnt // cluster.shard) + gradients * accumulates
        root = everything - sum(total)
        frames = [
            _sharded(frame, counts, root, learnt - sum(trained), held, cluster, accumulates)
            if frame
            else None
            for frame in (measured.frame, measured.lean, measured.fused)
        ]
        largest, in_flight = max(total), max(trained)
        costs = tuple(
            {name: _beside(cost, largest, in_flight, cluster) for name, cost in of_kind.items()}
            for of_kind in measured.costs
        )
    assert frames[0] is not None
    where = f"; {cluster.sharding} over {cluster.shard} of {cluster.world_size} ranks by arithmetic"
    return dataclasses.replace(
        measured,
        frame=frames[0],
        lean=frames[1],
        fused=frames[2],
        costs=costs,
        source=measured.source + where,
    )


def _beside(cost: Cost, block: int, trained: int, cluster: Cluster) -> Cost:
    """A block's cost with what FSDP holds while it runs."""
    around = IN_FLIGHT * cluster.gathered * block if cluster.sharding == "FULL_SHARD" else 0
    reducing = trained * (cluster.gathered + (cluster.reduced if cluster.reduced != cluster.gathered else 0))
    return dataclasses.replace(
        cost, forward_peak=cost.forward_peak + around, backward_peak=cost.backward_peak + around + reducing
    )


def _sharded(
    frame: Frame,
    counts: _Counts,
    root: int,
    root_trained: int,
    held: int,
    cluster: Cluster,
    accumulates: bool,
) -> Frame:
    g = cluster.gathered
    full = cluster.sharding == "FULL_SHARD"
    gathered = g * (root if full else root + sum(counts.total))
    # The block that backward begins with is fetched while the head runs.
    ahead = g * counts.total[-1] if full else 0
    left = [0 if accumulates else -(-MASTER * count // cluster.shard) for count in counts.trained]
    extra = cluster.reduced * root_trained if cluster.reduced != g else 0
    end = (
        frame.end_peak - g * sum(counts.trained) + sum(left) + gathered + (g * counts.total[0] if full else 0)
        + g * counts.trained[0] + extra
    )  # fmt: skip
    return Frame(
        static=held,
        before=frame.before + gathered,
        head_peak=frame.head_peak + ahead,
        head_backward_peak=frame.head_backward_peak + ahead,
        after_head=frame.after_head,
        left=tuple(left),
        end_peak=max(end, 0),
    )


def _unsharded(frame: Frame, counts: _Counts, learnt: int, held: int, accumulates: bool) -> Frame:
    """With gradients that are there from the start, a backward's own are added to them and freed, one after the other."""
    if not accumulates:
        return dataclasses.replace(frame, static=held)
    return dataclasses.replace(
        frame,
        static=held + MASTER * learnt,
        left=tuple(max(left - MASTER * own, 0) for left, own in zip(frame.left, counts.trained, strict=True)),
        end_peak=max(frame.end_peak - MASTER * sum(counts.trained), 0),
    )
