"""Quantised collectives: reduce-scatter, all-reduce and all-gather that send codes instead of floats.

    reduce_scatter   out_j = mean_r decode(Q(x_r[j]))                   one all-to-all, one quantisation
    all_reduce       the above, then all-gather of Q'(out_j)            two shots, two quantisations
    all_gather       out[j] = decode(Q(x_j))                            one all-gather

Sums are taken in float32 on the receiving side, so the error does not grow with the number of ranks as it does where
each hop of a ring rounds again. Every rank decodes the same bytes, its own shard included, so replicas stay bitwise
equal. Error feedback keeps what quantising lost and adds it to the next step: ``x' = x + e``, send ``Q(x')``,
``e = x' - decode(Q(x'))`` (arXiv 1901.09847). Each function blocks the caller (on a GPU: the current stream); :class:`foundry_fp8.distributed.lanes.Lane`
runs it in the background.

Source: two-shot quantised all-reduce as in EQuARX (arXiv 2506.17615) and ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.distributed.traffic import CountingGroup, Traffic
from foundry_fp8.distributed.wire import WireFormat, decode, decode_mean, encode

__all__ = ["all_gather", "all_reduce", "reduce_scatter", "shard_sizes"]


def reduce_scatter(
    input: Tensor,
    group: dist.ProcessGroup,
    wire: WireFormat,
    *,
    splits: Sequence[int] | None = None,
    mean: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    """Reduce ``input`` over the group; each rank keeps its part.

    Args:
        input: 1-D, floating. Not modified.
        group: Counted if it is a :class:`CountingGroup`.
        wire: What travels.
        splits: Elements that each rank receives, summing to ``input.numel()``; equal parts where ``None``.
        mean: Divide by the group's size.
        residual: float32, like ``input``: added before quantising, and replaced with what quantising lost.

    Returns:
        float32 ``[splits[rank]]``.
    """
    world, rank = group.size(), group.rank()
    splits = _check_splits(input, world, splits, "reduce_scatter")
    traffic = _traffic(group)
    if residual is not None:
        input = input.float() + residual
    with traffic.timed("quantize", input.device):
        message, sizes = _encode_parts(input, splits, wire)
    if residual is not None or traffic.sample:
        _keep_error(input, message, splits, sizes, wire, residual, traffic)
    own, numel = sizes[rank], splits[rank]
    received = torch.empty(world * own, dtype=torch.uint8, device=input.device)
    with traffic.timed("collective", input.device):
        even = len(set(sizes)) == 1
        group.alltoall_base(received, message, [] if even else [own] * world, [] if even else sizes).wait()
    with traffic.timed("quantize", input.device):
        return decode_mean(received.view(world, own), wire, numel, world if mean else 1)


def all_gather(
    input: Tensor, group: dist.ProcessGroup, wire: WireFormat, *, splits: Sequence[int] | None = None
) -> Tensor:
    """Gather the 1-D tensors of all ranks.

    Args:
        input: 1-D, floating, ``[splits[rank]]``.
        group: Counted if it is a :class:`CountingGroup`.
        wire: What travels.
        splits: Elements that each rank has; all alike where ``None``. Shorter shards are padded to the longest.

    Returns:
        float32 ``[sum(splits)]``. The same bits on every rank, and for this rank's own part too.
    """
    world = group.size()
    splits = [input.numel()] * world if splits is None else list(splits)
    longest = max(splits)
    traffic = _traffic(group)
    with traffic.timed("quantize", input.device):
        padded = torch.nn.functional.pad(input, (0, longest - input.numel()))
        message = encode(padded.unsqueeze(0), wire).view(-1)
    received = torch.empty(world * message.numel(), dtype=torch.uint8, device=input.device)
    with traffic.timed("collective", input.device):
        if message.numel():
            group._allgather_base(received, message).wait()
    with traffic.timed("quantize", input.device):
        rows = decode(received.view(world, -1), wire, longest)
    if len(set(splits)) == 1:
        return rows.view(-1)
    return torch.cat([row[:n] for row, n in zip(rows, splits, strict=True)])


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    wire: WireFormat,
    *,
    second_leg: WireFormat | None = None,
    splits: Sequence[int] | None = None,
    mean: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    """Reduce ``tensor`` over the group, in place, on every rank to the same bits.

    Args:
        tensor: 1-D contiguous, floating; overwritten with the result in its own dtype.
        group: Counted if it is a :class:`CountingGroup`.
        wire: What travels in the first shot (the reduce-scatter).
        second_leg: What travels in the second (the all-gather); ``wire`` where ``None``.
        splits: Elements that each rank sums; :func:`shard_sizes` where ``None``.
        mean: Divide by the group's size.
        residual: Error feedback, float32, like ``tensor``; updated. The error of the second shot, which only the owner of
            a part knows, is added to the owner's residual times the number of ranks, so that the next mean carries it:
            one buffer serves both shots and does not depend on how the tensor is cut.

    Returns:
        ``tensor``.
    """
    world, rank = group.size(), group.rank()
    splits = shard_sizes(tensor.numel(), world, wire.block_size) if splits is None else list(splits)
    second_leg = wire if second_leg is None else second_leg
    part = reduce_scatter(tensor, group, wire, splits=splits, mean=mean, residual=residual)
    if residual is not None and splits[rank]:
        sent = decode(encode(part.unsqueeze(0), second_leg), second_leg, part.numel()).view(-1)
        own = residual.narrow(0, sum(splits[:rank]), splits[rank])
        own.add_(torch.sub(part, sent), alpha=world if mean else 1)
        drop_non_finite(own)
    tensor.copy_(all_gather(part, group, second_leg, splits=splits))
    return tensor


def shard_sizes(numel: int, world: int, block_size: int) -> list[int]:
    """Elements of each rank's part of ``numel``: whole blocks, as even as they go; the last parts may be empty."""
    part = -(-numel // world)
    part += -part % block_size
    return [max(0, min(part, numel - part * rank)) for rank in range(world)]


def drop_non_finite(residual: Tensor) -> None:
    """Zero the NaN and Inf of a residual: an overflowed step is skipped, and must not poison the steps after it."""
    residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _encode_parts(input: Tensor, splits: Sequence[int], wire: WireFormat) -> tuple[Tensor, list[int]]:
    """The messages to all ranks in one buffer, and the bytes of each."""
    sizes = [wire.row_bytes(n) for n in splits]
    if len(set(splits)) == 1:
        return encode(input.view(len(splits), -1), wire).view(-1), sizes
    # A run of equal parts (all but the last, as a rule) is one batch of rows.
    pieces, start = [], 0
    for numel, run in itertools.groupby(splits):
        rows = len(list(run))
        pieces.append(encode(input[start : start + rows * numel].view(rows, numel), wire).view(-1))
        start += rows * numel
    return torch.cat(pieces), sizes


def _keep_error(
    input: Tensor,
    message: Tensor,
    splits: Sequence[int],
    sizes: Sequence[int],
    wire: WireFormat,
    residual: Tensor | None,
    traffic: Traffic,
) -> None:
    """Decode what this rank sends; record its error, and leave it in ``residual``."""
    parts = [
        decode(piece.view(1, -1), wire, numel).view(-1)
        for piece, numel in zip(message.split(list(sizes)), splits, strict=True)
        if numel
    ]
    sent = torch.cat(parts) if parts else torch.empty(0, device=input.device)
    if traffic.sample:
        traffic.add_error(sent, input)
    if residual is not None:
        torch.sub(input, sent, out=residual)
        drop_non_finite(residual)


def _check_splits(input: Tensor, world: int, splits: Sequence[int] | None, what: str) -> list[int]:
    if input.dim() != 1 or not input.is_floating_point() or not input.is_contiguous():
        raise ValueError(
            f"{what} takes a contiguous 1-D floating tensor, not {input.dtype} of shape {tuple(input.shape)}."
        )
    if splits is None:
        if input.numel() % world:
            raise ValueError(
                f"{what}: {input.numel()} elements do not divide over {world} ranks. Give splits, or pad."
            )
        return [input.numel() // world] * world
    if len(splits) != world or sum(splits) != input.numel():
        raise ValueError(
            f"{what}: splits {list(splits)} do not cover {input.numel()} elements on {world} ranks."
        )
    return list(splits)


def _traffic(group: dist.ProcessGroup) -> Traffic:
    return group.traffic if isinstance(group, CountingGroup) else Traffic()
