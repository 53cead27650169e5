"""A row: what one rank sends to one other, in sections that travel as codes and sections that travel exactly.

Gradients of many parameters are sent together. A section is a run of neighbouring elements of one kind. Every coded section
starts a block, so that no scale is shared across the border of two parameters whose gradients may differ by orders of
magnitude; an exact section travels as float32. ZeRO++ leaves one-dimensional parameters out of its quantised gathers in the same
way (arXiv 2306.10209).

    message of a row = message of its first section ++ message of its second ++ ...

each as in :mod:`foundry_fp8.distributed.wire`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

from torch import Tensor

from foundry_fp8.distributed.wire import Noise, decode, decode_mean, encode, encode_keeping_error
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["Row", "share"]


@dataclasses.dataclass(frozen=True)
class Row:
    """The sections of one row: ``(elements, exact)`` each. Make one with :meth:`of` or :meth:`join`."""

    sections: tuple[tuple[int, bool], ...]

    @classmethod
    def of(cls, numel: int, *, exact: bool = False) -> Row:
        """A row of one section of ``numel`` elements."""
        return cls(((numel, exact),) if numel else ())

    @classmethod
    def join(cls, sections: Iterable[tuple[int, bool]], block_size: int) -> Row:
        """Sections one after another; neighbours become one section where that changes no block."""
        joined: list[tuple[int, bool]] = []
        for numel, exact in sections:
            if not numel:
                continue
            if joined and joined[-1][1] == exact and (exact or joined[-1][0] % block_size == 0):
                joined[-1] = (joined[-1][0] + numel, exact)
            else:
                joined.append((numel, exact))
        return cls(tuple(joined))

    @property
    def numel(self) -> int:
        """Elements of all sections."""
        return sum(numel for numel, _ in self.sections)

    @property
    def coded(self) -> int:
        """Elements that travel as codes."""
        return sum(numel for numel, exact in self.sections if not exact)

    def nbytes(self, wire: WireFormat) -> int:
        """Bytes on the wire. A multiple of 4."""
        return sum(section.row_bytes(numel) for numel, section in self._formats(wire))

    def cut(self, start: int, stop: int) -> tuple[tuple[int, bool], ...]:
        """The sections of the elements from ``start`` up to ``stop``; neither has to be a section's border."""
        parts, at = [], 0
        for numel, exact in self.sections:
            first, last = max(start, at), min(stop, at + numel)
            if first < last:
                parts.append((last - first, exact))
            at += numel
        return tuple(parts)

    def pieces(self, step: int) -> list[tuple[int, Row]]:
        """``(first element, row)`` of pieces of at most ``step`` elements, with the blocks of the whole row.

        Args:
            step: A multiple of the block size.
        """
        pieces: list[tuple[int, Row]] = []
        at = 0
        for numel, exact in self.sections:
            for start in range(0, numel, step):
                part = (min(step, numel - start), exact)
                if pieces and pieces[-1][1].numel + part[0] <= step:
                    pieces[-1] = (pieces[-1][0], Row((*pieces[-1][1].sections, part)))
                else:
                    pieces.append((at + start, Row((part,))))
            at += numel
        return pieces

    def encode(self, x: Tensor, wire: WireFormat, out: Tensor, noise: Noise | None = None) -> None:
        """Code the rows of ``x``.

        Args:
            x: ``[R, numel]``, floating, contiguous rows.
            wire: What coded sections travel as.
            out: uint8 ``[R, nbytes(wire)]``, written in place.
            noise: Rounds up or down at random, without a bias; to the nearest where ``None``.
        """
        for values, message, section in self._spans(x, out, wire):
            encode(values, section, message, seed=noise.seed() if noise and section.quantized else None)

    def encode_keeping_error(self, x: Tensor, wire: WireFormat, out: Tensor) -> None:
        """As :meth:`encode`; leaves in ``x`` (float32) what coding lost, which is nothing in exact sections."""
        for values, message, section in self._spans(x, out, wire):
            encode_keeping_error(values, section, message)

    def decode(self, message: Tensor, wire: WireFormat, out: Tensor) -> Tensor:
        """Write the elements of the rows of ``message`` into ``out``, ``[R, numel]``, floating."""
        for values, coded, section in self._spans(out, message, wire):
            decode(coded, section, values.shape[1], values)
        return out

    def decode_mean(self, message: Tensor, wire: WireFormat, divisor: float, out: Tensor) -> None:
        """Write the float32 sum over the rows of ``message``, over ``divisor``, into ``out``, ``[numel]``."""
        for values, coded, section in self._spans(out.view(1, -1), message, wire):
            decode_mean(coded, section, values.shape[1], divisor, values.view(-1))

    def _formats(self, wire: WireFormat) -> Iterator[tuple[int, WireFormat]]:
        exact = dataclasses.replace(wire, name="fp32")
        for numel, is_exact in self.sections:
            yield numel, exact if is_exact else wire

    def _spans(
        self, elements: Tensor, message: Tensor, wire: WireFormat
    ) -> Iterator[tuple[Tensor, Tensor, WireFormat]]:
        """``(elements, bytes, format)`` of each section: columns of ``elements`` and of ``message``."""
        element = byte = 0
        for numel, section in self._formats(wire):
            size = section.row_bytes(numel)
            yield elements.narrow(1, element, numel), message.narrow(1, byte, size), section
            element, byte = element + numel, byte + size


@functools.lru_cache(maxsize=4096)
def share(row: Row, parts: int, block_size: int) -> tuple[Row, ...]:
    """``row`` cut into ``parts`` rows of whole blocks, as even as they go; the last may be empty."""
    blocks = sum(-(-numel // block_size) for numel, _ in row.sections)
    each, room = -(-blocks // parts), 0
    shares: list[list[tuple[int, bool]]] = []
    for numel, exact in row.sections:
        while numel:
            if not room:
                shares.append([])
                room = each
            taken = min(numel, room * block_size)
            shares[-1].append((taken, exact))
            room -= -(-taken // block_size)
            numel -= taken
    empty = Row(())
    return (*(Row.join(sections, block_size) for sections in shares), *[empty] * (parts - len(shares)))
