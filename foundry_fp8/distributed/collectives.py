"""Quantised collectives: reduce-scatter, all-reduce and all-gather that send codes instead of floats.

    reduce_scatter   out_j = mean_r decode(Q(x_r[j]))                   one all-to-all, one quantisation
    all_reduce       the above, then all-gather of Q'(out_j)            two shots, two quantisations
    all_gather       out[j] = decode(Q(x_j))                            one all-gather

Sums are taken in float32 on the receiving side, so the error does not grow with the number of ranks as it does where
each hop of a ring rounds again. Every rank decodes the same bytes, its own shard included, so replicas stay bitwise
equal. Error feedback keeps what quantising lost and adds it to the next step: ``x' = x + e``, send ``Q(x')``,
``e = x' - decode(Q(x'))`` (arXiv 1901.09847). Each function blocks the caller (on a GPU: the current stream);
:class:`foundry_fp8.distributed.background_collectives.CollectiveQueue` runs it in the background.

On a CPU a tensor travels in pieces: the next piece is coded while the last one is on the wire, and gloo sends and
receives at the same time only while messages are small (two hosts, 1 Gbit/s, 8 MB each way: 111 ms as one all-to-all,
67 ms in pieces of 512 kB; benchmarks/slow_network.py has the set-up). On a GPU it travels whole.

Source: two-shot quantised all-reduce as in EQuARX (arXiv 2506.17615) and ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.distributed.traffic import CountingGroup, Traffic
from foundry_fp8.distributed.wire import decode, decode_mean, encode, encode_keeping_error
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["all_gather", "all_reduce", "reduce_scatter", "shard_sizes"]

PIECE_ON_CPU = 1 << 19
"""Elements of one rank's part that travel together on a CPU. A multiple of every block size, so codes do not depend on it."""


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
    splits = _check_splits(input, group.size(), splits, "reduce_scatter")
    out = torch.empty(splits[group.rank()], dtype=torch.float32, device=input.device)
    scattered = [
        _scatter(input, piece, splits, group, wire, residual) for piece in _pieces(splits, input.device)
    ]
    for piece in scattered:
        piece.reduce(out, mean)
    return out


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
    splits = [input.numel()] * group.size() if splits is None else list(splits)
    out = torch.empty(sum(splits), dtype=torch.float32, device=input.device)
    gathered = [_gather(input, piece, splits, group, wire) for piece in _pieces(splits, input.device)]
    for piece in gathered:
        piece.decode(out)
    return out


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
    splits = _check_splits(tensor, world, splits, "all_reduce")
    second_leg = wire if second_leg is None else second_leg
    part = torch.empty(splits[rank], dtype=torch.float32, device=tensor.device)
    own_residual = None if residual is None else residual.narrow(0, sum(splits[:rank]), splits[rank])
    pieces = _pieces(splits, tensor.device)
    scattered = [_scatter(tensor, piece, splits, group, wire, residual) for piece in pieces]
    gathered = []
    for piece, sent in zip(pieces, scattered, strict=True):
        sent.reduce(part, mean)
        weight = world if mean else 1
        gathered.append(_gather(part, piece, splits, group, second_leg, own_residual, weight))
    for received in gathered:
        received.decode(tensor)
    return tensor


def shard_sizes(numel: int, world: int, block_size: int) -> list[int]:
    """Elements of each rank's part of ``numel``: whole blocks, as even as they go; the last parts may be empty."""
    part = -(-numel // world)
    part += -part % block_size
    return [max(0, min(part, numel - part * rank)) for rank in range(world)]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """The elements from ``start`` on of every rank's part; ``sizes`` of them."""

    start: int
    sizes: list[int]

    def runs(self, splits: Sequence[int]) -> list[tuple[int, int]]:
        """``(first rank, ranks)`` of runs of ranks with equal parts: each run is one batch of rows."""
        counts = [len(list(run)) for _, run in itertools.groupby(splits)]
        return list(zip(itertools.accumulate(counts, initial=0), counts, strict=False))

    def rows(self, flat: Tensor, splits: Sequence[int], first: int, count: int) -> Tensor:
        """The pieces of ``count`` equal parts from rank ``first`` on, ``[count, n]``, a view."""
        stride = splits[first]
        rows = flat.narrow(0, sum(splits[:first]), count * stride).view(count, stride)
        return rows.narrow(1, self.start, self.sizes[first])


def _pieces(splits: Sequence[int], device: torch.device) -> list[_Piece]:
    longest = max(splits)
    step = PIECE_ON_CPU if device.type == "cpu" else max(longest, 1)
    return [
        _Piece(start, [min(max(n - start, 0), step) for n in splits])
        for start in range(0, max(longest, 1), step)
    ]


@dataclasses.dataclass(frozen=True)
class _Scattered:
    """An all-to-all under way."""

    piece: _Piece
    group: dist.ProcessGroup
    wire: WireFormat
    message: Tensor  # kept until it has been sent
    received: Tensor
    work: Any

    def reduce(self, out: Tensor, mean: bool) -> None:
        """Wait, and write the reduced piece into ``out``, this rank's part."""
        traffic, rank = _traffic(self.group), self.group.rank()
        with traffic.timed("collective", out.device):
            self.work.wait()
        numel = self.piece.sizes[rank]
        with traffic.timed("quantize", out.device):
            rows = self.received.view(self.group.size(), -1)
            target = out.narrow(0, self.piece.start if numel else 0, numel)
            decode_mean(rows, self.wire, numel, self.group.size() if mean else 1, target)


def _scatter(
    input: Tensor,
    piece: _Piece,
    splits: Sequence[int],
    group: dist.ProcessGroup,
    wire: WireFormat,
    residual: Tensor | None,
) -> _Scattered:
    """Code a piece of ``input`` (plus ``residual``, which is replaced with what coding lost) and send it."""
    traffic = _traffic(group)
    sizes = [wire.row_bytes(n) for n in piece.sizes]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=input.device)
    sent = 0
    for first, count in piece.runs(splits):
        if not (size := sizes[first]):
            continue
        coded = message.narrow(0, sent, count * size).view(count, size)
        sent += count * size
        rows = piece.rows(input, splits, first, count)
        with traffic.timed("quantize", input.device):
            if residual is None:
                encode(rows, wire, coded)
            else:
                error = piece.rows(residual, splits, first, count)
                rows = error.add_(rows)
                if traffic.sample:
                    rows = rows.clone()
                encode_keeping_error(error, wire, coded)
            if traffic.sample:
                traffic.add_error(decode(coded, wire, piece.sizes[first]), rows)
    own, even = sizes[group.rank()], len(set(sizes)) == 1
    received = torch.empty(group.size() * own, dtype=torch.uint8, device=input.device)
    with traffic.timed("collective", input.device):
        work = group.alltoall_base(
            received, message, [] if even else [own] * group.size(), [] if even else sizes
        )
    return _Scattered(piece, group, wire, message, received, work)


@dataclasses.dataclass(frozen=True)
class _Gathered:
    """An all-gather under way. Shorter pieces are padded to the longest, so that all messages have one size."""

    piece: _Piece
    splits: Sequence[int]
    group: dist.ProcessGroup
    wire: WireFormat
    message: Tensor
    received: Tensor
    work: Any

    def decode(self, out: Tensor) -> None:
        """Wait, and write the pieces of all ranks into ``out``, the concatenation of their parts."""
        if not self.message.numel():
            return
        traffic, longest = _traffic(self.group), max(self.piece.sizes)
        with traffic.timed("collective", out.device):
            self.work.wait()
        rows = self.received.view(self.group.size(), -1)
        with traffic.timed("quantize", out.device):
            for first, count in self.piece.runs(self.splits):
                numel, coded = self.piece.sizes[first], rows.narrow(0, first, count)
                target = self.piece.rows(out, self.splits, first, count) if numel else None
                if target is not None and numel == longest:
                    decode(coded, self.wire, numel, target)
                elif target is not None:
                    target.copy_(decode(coded, self.wire, longest)[:, :numel])


def _gather(
    part: Tensor,
    piece: _Piece,
    splits: Sequence[int],
    group: dist.ProcessGroup,
    wire: WireFormat,
    residual: Tensor | None = None,
    weight: float = 1,
) -> _Gathered:
    """Code a piece of this rank's ``part`` and send it to all.

    With a ``residual`` (of the part), what coding lost is added to it ``weight`` times, and ``part`` is overwritten.
    """
    traffic, numel = _traffic(group), piece.sizes[group.rank()]
    longest = max(piece.sizes)
    with traffic.timed("quantize", part.device):
        own = part.narrow(0, piece.start if numel else 0, numel)
        row = (own if numel == longest else torch.nn.functional.pad(own, (0, longest - numel))).view(1, -1)
        message = torch.empty(1, wire.row_bytes(longest), dtype=torch.uint8, device=part.device)
        if residual is None or not numel:
            encode(row, wire, message)
        else:
            encode_keeping_error(row, wire, message)
            residual.narrow(0, piece.start, numel).add_(row[0, :numel], alpha=weight)
        message = message.view(-1)
    received = torch.empty(group.size() * message.numel(), dtype=torch.uint8, device=part.device)
    work = None
    with traffic.timed("collective", part.device):
        if message.numel():
            work = group._allgather_base(received, message)
    return _Gathered(piece, splits, group, wire, message, received, work)


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
