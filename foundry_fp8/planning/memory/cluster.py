"""From what one device holds to what a rank of a cluster holds: the measurements of an unsharded model, sharded by arithmetic.

The measurements are those of the model with its parameters in the type that is gathered (bfloat16 under FSDP's mixed precision), so that
what autocast would cast and a block's own gradients have their sizes already. With ``n`` parameters of ``m`` bytes each in the shards,
``g`` bytes where they are gathered and ``r`` where they are reduced, over ``s`` ranks that share a copy, a rank holds beside activations::

    all the time       (m n + optimizer) / s, buffers, and with several microbatches m n / s of gradients
    from the first     g of what is in no block: embeddings, head, last norm (FSDP's root unit)
    SHARD_GRAD_OP      g of every block, from its forward to its backward
    FULL_SHARD
      forward          g of two blocks' size: FSDP2 gathers into one buffer and copies out of it (``foreach_all_gather_copy_out``), which it
                       frees when the next block has its own; FSDP1 gathers one block ahead (``limit_all_gathers``)
      backward         g of the block that runs and of the one before it, which is fetched meanwhile (``_backward_prefetch``, ``BACKWARD_PRE``);
                       of one for the first block, and of the last block while the head runs
    gradients
      of a block       FSDP2 copies them in g to a buffer in r, which it holds until the next block's are done (``reduce_scatter_state``).
                       FSDP1 joins the gradients of a block's parameters to one (autograd of ``split``, g beside g), casts that to r where r
                       differs, and lets go of neither until they are reduced: on a GPU, where that runs beside the next block's backward
                       (``record_stream``), the next block is done by then
      of the root      the same at the end of backward

The last block's backward has no other block's gradients beside it, and all activations. Without sharding (DDP) a rank holds everything, and
buckets of the size of the gradients beside them. Source of the order of events: torch.distributed.fsdp (``_runtime_utils.py``,
``_flat_param.py``, ``_fsdp_param_group.py``, ``_fsdp_collectives.py``) of torch 2.7; ``DistributedDataParallel``'s reducer with
``gradient_as_bucket_view=False``, as Composer makes it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.sharding import Sharding
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.planning.memory.plan import Measurements
from foundry_fp8.planning.memory.solver import Frame

__all__ = ["SHARDINGS", "Cluster", "elements", "on_cluster", "static_bytes"]

SHARDINGS: tuple[Sharding, ...] = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
MASTER = 4
"""Bytes of an element of a shard: LLM Foundry trains from float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """How a run is spread.

    Attributes:
        world_size: Ranks of the whole run.
        sharding: FSDP's strategy, or ``NO_SHARD`` for DDP.
        shard: Ranks that share one copy: all, or fewer under HSDP.
        gathered: Bytes of an element of gathered parameters and of gradients as backward makes them.
        reduced: Bytes of an element of gradients on their way.
        residual: Bytes that error feedback keeps of each element of the gradients that this rank sends.
        fsdp: Which FSDP shards.
        overlaps: Whether collectives run beside the computation, as on a GPU; gloo's on a CPU do not, which FSDP1's memory shows.
    """

    world_size: int
    sharding: Sharding
    shard: int
    gathered: int = 4
    reduced: int = 4
    residual: float = 0.0
    fsdp: Literal[1, 2] = 1
    overlaps: bool = True

    def __post_init__(self) -> None:
        if self.shard < 1 or self.world_size % self.shard:
            raise ConfigError(f"shard: {self.shard} does not divide {self.world_size} ranks.")


@dataclasses.dataclass(frozen=True)
class _Counts:
    """Elements of each block, and of those what is trained; the same of what is in no block."""

    total: list[int]
    trained: list[int]
    root: int
    root_trained: int


def on_cluster(
    measured: Measurements, model: nn.Module, cluster: Cluster, *, optimizer_bytes: int, accumulates: bool
) -> Measurements:
    """What a rank of ``cluster`` holds.

    ``measured`` is of ``model`` on one device, ``cluster.gathered`` bytes an element, a step of one microbatch, without optimizer states.
    """
    blocks = [block for _, block in transformer_blocks(model)]
    total, trained = (
        [elements(block) for block in blocks],
        [elements(block, trained=True) for block in blocks],
    )
    everything, learnt = elements(model), elements(model, trained=True)
    buffers = max(measured.frame.static - cluster.gathered * everything, 0)
    held = static_bytes(
        model, cluster, buffers=buffers, optimizer_bytes=optimizer_bytes, accumulates=accumulates
    )
    counts = _Counts(total, trained, everything - sum(total), learnt - sum(trained))
    where = f"; {cluster.sharding} over {cluster.shard} of {cluster.world_size} ranks by arithmetic"
    on_rank = _unsharded if cluster.sharding == "NO_SHARD" else _sharded
    frames: dict[str, Any] = {
        name: on_rank(frame, counts, held, cluster, accumulates)
        for name in ("frame", "lean", "fused")
        if (frame := getattr(measured, name)) is not None
    }
    return dataclasses.replace(measured, **frames, source=measured.source + where)


def elements(module: nn.Module, *, trained: bool = False) -> int:
    """Of its parameters, or of those that are trained; without what is kept in FP8."""
    return sum(
        p.numel()
        for p in module.parameters()
        if not isinstance(p, FrozenFP8Weight) and (p.requires_grad or not trained)
    )


def static_bytes(
    model: nn.Module, cluster: Cluster, *, buffers: int, optimizer_bytes: int, accumulates: bool
) -> int:
    """What a rank of ``cluster`` holds all the time.

    Where it ``accumulates``, gradients are among it: with several microbatches a step they are there from the second on. ``buffers``: with
    weights that are kept in FP8, which DDP leaves to each rank.
    """
    everything, learnt = elements(model), elements(model, trained=True)
    held = -(-(MASTER * everything + optimizer_bytes) // cluster.shard) + buffers
    held += math.ceil(cluster.residual * learnt / cluster.shard)
    held += -(-MASTER * learnt // cluster.shard) * accumulates
    buckets = cluster.sharding == "NO_SHARD" and cluster.world_size > 1
    return held + MASTER * learnt * buckets


def _sharded(frame: Frame, counts: _Counts, held: int, cluster: Cluster, accumulates: bool) -> Frame:
    g, full, last = cluster.gathered, cluster.sharding == "FULL_SHARD", len(counts.total) - 1
    # Without resharding after forward, what is gathered counts from the first block on: less, before and after it is.
    gathered = g * (counts.root if full else counts.root + sum(counts.total))
    left = [0 if accumulates else -(-MASTER * count // cluster.shard) for count in counts.trained]
    in_forward, in_backward, reducing = [], [], []
    for i, total in enumerate(counts.total):
        before, behind = g * sum(counts.total[:i]), g * sum(counts.total[i + 1 :])
        ahead = g * counts.total[i - 1] if full and i > 0 else 0
        waiting = _waiting(counts.trained[i + 1], cluster) if i < last else 0
        second = 0
        if cluster.fsdp == 2:
            second = g * total
        elif cluster.overlaps and (full or i < last):
            second = g * counts.total[min(i + 1, last)]
        in_forward.append((g * total if full else -behind) + second)
        in_backward.append((g * total + ahead if full else -behind) + waiting)
        gone = ahead if full else before - g * sum(counts.total)
        own = _handed_over(total, counts.trained[i], cluster)
        reducing.append(gone + own + (waiting if cluster.fsdp == 1 else 0))
    waiting = _waiting(counts.trained[0], cluster)
    root = g * counts.root
    shards = sum(left)
    end = frame.end_peak - g * sum(counts.trained) + shards + root + waiting
    over = shards + _handed_over(counts.root, counts.root_trained, cluster)
    # FSDP2 has not let go of the last block's buffer while the head runs; then comes the block that backward begins with.
    block = g * counts.total[-1]
    return dataclasses.replace(
        frame,
        static=held,
        before=frame.before + gathered,
        head_peak=frame.head_peak + block * (cluster.fsdp == 2 or (full and cluster.overlaps)),
        head_backward_peak=frame.head_backward_peak + block * full,
        left=tuple(left),
        end_peak=max(end, over, 0),
        beside_forward=tuple(in_forward),
        beside_backward=tuple(in_backward),
        reducing=tuple(reducing),
    )


def _waiting(trained: int, cluster: Cluster) -> int:
    """What the gradients of the block behind hold during a block's backward."""
    if cluster.fsdp == 2:
        return cluster.reduced * trained
    cast = cluster.reduced if cluster.reduced != cluster.gathered else 0
    return (cluster.gathered + cast) * trained * cluster.overlaps


def _handed_over(total: int, trained: int, cluster: Cluster) -> int:
    """The most that a unit's gradients, and its parameters while they are there, hold after its backward."""
    g, r = cluster.gathered * trained, cluster.reduced * trained
    shard = -(-r // cluster.shard) + (
        -(-MASTER * trained // cluster.shard) if cluster.reduced != MASTER else 0
    )
    if cluster.fsdp == 2:
        return max(g + r, r + shard)
    cast = r if cluster.reduced != cluster.gathered else 0
    return max(cluster.gathered * total + 2 * g, g + cast + shard)


def _unsharded(frame: Frame, counts: _Counts, held: int, _: Cluster, accumulates: bool) -> Frame:
    """With gradients that are there from the start, a backward's own are added to them and freed, one after the other."""
    if not accumulates:
        return dataclasses.replace(frame, static=held)
    return dataclasses.replace(
        frame,
        static=held,
        left=tuple(max(left - MASTER * own, 0) for left, own in zip(frame.left, counts.trained, strict=True)),
        end_peak=max(frame.end_peak - MASTER * sum(counts.trained), 0),
    )
