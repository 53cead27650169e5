"""Quantised collectives: reduce-scatter, all-reduce and all-gather that send codes instead of floats.

    reduce_scatter   out_j = mean_r decode(Q(x_r[j]))                   one all-to-all, one quantisation
    all_reduce       the above, then all-gather of Q'(out_j)            two shots, two quantisations
    all_gather       out[j] = decode(Q(x_j))                            one all-gather

Sums are taken in float32 on the receiving side, so the error does not grow with the number of ranks as it does where
each hop of a ring rounds again. Every rank decodes the same bytes, its own shard included, so replicas stay bitwise
equal. Error feedback keeps what quantising lost and adds it to the next step: ``x' = x + e``, send ``Q(x')``,
``e = x' - decode(Q(x'))`` (arXiv 1901.09847). Each function blocks the caller (on a GPU: the current stream);
:class:`foundry_fp8.distributed.background_collectives.CollectiveQueue` runs it in the background.

Each rank's part of a tensor is a :class:`~foundry_fp8.distributed.rows.Row`: which of its elements travel as codes, and which exactly.

On a CPU a tensor travels in pieces: the next piece is coded while the last one is on the wire, and gloo sends and
receives at the same time only while messages are small (two hosts, 1 Gbit/s, 8 MB each way: 111 ms as one all-to-all,
67 ms in pieces of 512 kB; benchmarks/slow_network.py has the set-up). On a GPU it travels whole.

Source: two-shot quantised all-reduce as in EQuARX (arXiv 2506.17615) and ZeRO++ (arXiv 2306.10209).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from foundry_fp8.distributed.rows import Row, share
from foundry_fp8.distributed.traffic import CountingGroup, Traffic
from foundry_fp8.distributed.wire import Noise
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["all_gather", "all_reduce", "reduce_scatter"]

PIECE_ON_CPU = 1 << 19
"""Elements of one rank's part that travel together on a CPU. A multiple of every block size, so codes do not depend on it."""


def reduce_scatter(
    input: Tensor,
    group: dist.ProcessGroup,
    wire: WireFormat,
    *,
    rows: Sequence[Row] | None = None,
    mean: bool = True,
    noise: Noise | None = None,
) -> Tensor:
    """Reduce ``input`` over the group; each rank keeps its part.

    Args:
        input: 1-D, floating. Not modified.
        group: Counted if it is a :class:`CountingGroup`.
        wire: What travels.
        rows: What each rank receives, ``input.numel()`` elements in all; equal parts of codes where ``None``.
        mean: Divide by the group's size.
        noise: Round at random without a bias.

    Returns:
        float32 ``[rows[rank].numel]``.
    """
    rows = _check_rows(input, group.size(), rows, "reduce_scatter")
    out = torch.empty(rows[group.rank()].numel, dtype=torch.float32, device=input.device)
    scattered = [_scatter(input, piece, group, wire, noise=noise) for piece in _pieces(rows, input.device)]
    for piece in scattered:
        piece.reduce(out, mean)
    return out


def all_gather(
    input: Tensor, group: dist.ProcessGroup, wire: WireFormat, *, rows: Sequence[Row] | None = None
) -> Tensor:
    """Gather the 1-D tensors of all ranks.

    Args:
        input: 1-D, floating, ``[rows[rank].numel]``.
        group: Counted if it is a :class:`CountingGroup`.
        wire: What travels.
        rows: What each rank has; all alike, and codes, where ``None``. Shorter messages are padded to the longest.

    Returns:
        float32, of all rows in order. The same bits on every rank, and for this rank's own part too.
    """
    rows = [Row.of(input.numel())] * group.size() if rows is None else list(rows)
    out = torch.empty(sum(row.numel for row in rows), dtype=torch.float32, device=input.device)
    gathered = [_gather(input, piece, group, wire) for piece in _pieces(rows, input.device)]
    for piece in gathered:
        piece.decode(out)
    return out


def all_reduce(
    tensor: Tensor,
    group: dist.ProcessGroup,
    wire: WireFormat,
    *,
    second_leg: WireFormat | None = None,
    rows: Sequence[Row] | None = None,
    mean: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    """Reduce ``tensor`` over the group, in place, on every rank to the same bits.

    Args:
        tensor: 1-D contiguous, floating; overwritten with the result in its own dtype.
        group: Counted if it is a :class:`CountingGroup`.
        wire: What travels in the first shot (the reduce-scatter).
        second_leg: What travels in the second (the all-gather); ``wire`` where ``None``.
        rows: What each rank sums; codes alone, shared out evenly, where ``None``.
        mean: Divide by the group's size.
        residual: Error feedback, float32, like ``tensor``; updated. The error of the second shot, which only the owner of
            a part knows, is added to the owner's residual times the number of ranks, so that the next mean carries it:
            one buffer serves both shots and does not depend on how the tensor is cut.

    Returns:
        ``tensor``.
    """
    world, rank = group.size(), group.rank()
    rows = share(Row.of(tensor.numel()), world, wire.block_size) if rows is None else rows
    rows = _check_rows(tensor, world, rows, "all_reduce")
    second_leg = wire if second_leg is None else second_leg
    own = rows[rank].numel
    part = torch.empty(own, dtype=torch.float32, device=tensor.device)
    own_residual = None
    if residual is not None:
        own_residual = residual.narrow(0, sum(row.numel for row in rows[:rank]), own)
    pieces = _pieces(rows, tensor.device)
    scattered = [_scatter(tensor, piece, group, wire, residual) for piece in pieces]
    gathered = []
    for piece, sent in zip(pieces, scattered, strict=True):
        sent.reduce(part, mean)
        weight = world if mean else 1
        gathered.append(_gather(part, piece, group, second_leg, own_residual, weight))
    for received in gathered:
        received.decode(tensor)
    return tensor


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of every rank's row."""

    rows: list[Row]
    starts: list[int]
    """By rank, the first element of its part in its row."""
    parts: list[Row]

    def runs(self) -> Iterator[tuple[int, int]]:
        """``(first rank, ranks)`` of runs of ranks alike in row and part: each run is one batch. Empty ones are left out."""
        alike = zip((row.numel for row in self.rows), self.starts, self.parts, strict=True)
        first = 0
        for (_, _, part), run in itertools.groupby(alike):
            count = len(list(run))
            if part.sections:
                yield first, count
            first += count

    def batch(self, flat: Tensor, first: int, count: int) -> Tensor:
        """The parts of a run, ``[count, n]``, a view of ``flat``, the concatenation of all rows."""
        stride = self.rows[first].numel
        begin = sum(row.numel for row in self.rows[:first])
        whole = flat.narrow(0, begin, count * stride).view(count, stride)
        return whole.narrow(1, self.starts[first], self.parts[first].numel)

    def own(self, flat: Tensor, rank: int) -> Tensor:
        """The part of ``rank``, ``[1, n]``, a view of ``flat``, its row."""
        return flat.narrow(0, self.starts[rank], self.parts[rank].numel).view(1, -1)


def _pieces(rows: list[Row], device: torch.device) -> list[_Piece]:
    if device.type != "cpu":
        return [_Piece(rows, [0] * len(rows), rows)]
    empty = (0, Row(()))
    cut = itertools.zip_longest(*(row.pieces(PIECE_ON_CPU) for row in rows), fillvalue=empty)
    return [_Piece(rows, [start for start, _ in piece], [part for _, part in piece]) for piece in cut]


@dataclasses.dataclass(frozen=True)
class _UnderWay:
    """A collective of one piece that has begun."""

    piece: _Piece
    group: dist.ProcessGroup
    wire: WireFormat
    message: Tensor  # kept until it has been sent
    received: Tensor
    work: Any

    def reduce(self, out: Tensor, mean: bool) -> None:
        """Wait for an all-to-all, and write the reduced piece into ``out``, this rank's part."""
        traffic, rank, world = _traffic(self.group), self.group.rank(), self.group.size()
        with traffic.timed("collective", out.device):
            self.work.wait()
        with traffic.timed("quantize", out.device):
            received, own = self.received.view(world, -1), self.piece.own(out, rank)
            self.piece.parts[rank].decode_mean(received, self.wire, world if mean else 1, own)

    def decode(self, out: Tensor) -> None:
        """Wait for an all-gather, and write the pieces of all ranks into ``out``, the concatenation of their rows."""
        if not self.message.numel():
            return
        traffic = _traffic(self.group)
        with traffic.timed("collective", out.device):
            self.work.wait()
        received = self.received.view(self.group.size(), -1)
        with traffic.timed("quantize", out.device):
            for first, count in self.piece.runs():
                part = self.piece.parts[first]
                coded = received.narrow(0, first, count).narrow(1, 0, part.nbytes(self.wire))
                part.decode(coded, self.wire, self.piece.batch(out, first, count))


def _scatter(
    input: Tensor,
    piece: _Piece,
    group: dist.ProcessGroup,
    wire: WireFormat,
    residual: Tensor | None = None,
    noise: Noise | None = None,
) -> _UnderWay:
    """Code a piece of ``input`` (plus ``residual``, which is replaced with what coding lost) and send it."""
    traffic = _traffic(group)
    sizes = [part.nbytes(wire) for part in piece.parts]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=input.device)
    for first, count in piece.runs():
        part, size = piece.parts[first], sizes[first]
        coded = message.narrow(0, sum(sizes[:first]), count * size).view(count, size)
        values = piece.batch(input, first, count)
        with traffic.timed("quantize", input.device):
            if residual is None:
                part.encode(values, wire, coded, noise)
            else:
                error = piece.batch(residual, first, count)
                values = error.add_(values)
                if traffic.sample:
                    values = values.clone()
                part.encode_keeping_error(error, wire, coded)
            if traffic.sample:
                sent = torch.empty(values.shape, dtype=torch.float32, device=values.device)
                traffic.add_error(part.decode(coded, wire, sent), values)
    own, even = sizes[group.rank()], len(set(sizes)) == 1
    received = torch.empty(group.size() * own, dtype=torch.uint8, device=input.device)
    with traffic.timed("collective", input.device):
        work = group.alltoall_base(
            received, message, [] if even else [own] * group.size(), [] if even else sizes
        )
    return _UnderWay(piece, group, wire, message, received, work)


def _gather(
    row: Tensor,
    piece: _Piece,
    group: dist.ProcessGroup,
    wire: WireFormat,
    residual: Tensor | None = None,
    weight: float = 1,
) -> _UnderWay:
    """Code a piece of this rank's ``row`` and send it to all; shorter messages are padded to the longest, so that all have one size.

    With a ``residual`` (of the row), what coding lost is added to it ``weight`` times, and ``row`` is overwritten.
    """
    traffic, rank = _traffic(group), group.rank()
    part, values = piece.parts[rank], piece.own(row, rank)
    message = torch.empty(
        max(part.nbytes(wire) for part in piece.parts), dtype=torch.uint8, device=row.device
    )
    with traffic.timed("quantize", row.device):
        coded = message.narrow(0, 0, part.nbytes(wire)).view(1, -1)
        if residual is None:
            part.encode(values, wire, coded)
        else:
            part.encode_keeping_error(values, wire, coded)
            piece.own(residual, rank).add_(values, alpha=weight)
    received = torch.empty(group.size() * message.numel(), dtype=torch.uint8, device=row.device)
    work = None
    with traffic.timed("collective", row.device):
        if message.numel():
            work = group._allgather_base(received, message)
    return _UnderWay(piece, group, wire, message, received, work)


def _check_rows(input: Tensor, world: int, rows: Sequence[Row] | None, what: str) -> list[Row]:
    if input.dim() != 1 or not input.is_floating_point() or not input.is_contiguous():
        raise ValueError(
            f"{what} takes a contiguous 1-D floating tensor, not {input.dtype} of shape {tuple(input.shape)}."
        )
    if rows is None:
        if input.numel() % world:
            raise ValueError(
                f"{what}: {input.numel()} elements do not divide over {world} ranks. Give rows, or pad."
            )
        return [Row.of(input.numel() // world)] * world
    numels = [row.numel for row in rows]
    if len(numels) != world or sum(numels) != input.numel():
        raise ValueError(
            f"{what}: rows of {numels} elements do not cover {input.numel()} elements on {world} ranks."
        )
    return list(rows)


def _traffic(group: dist.ProcessGroup) -> Traffic:
    return group.traffic if isinstance(group, CountingGroup) else Traffic()
