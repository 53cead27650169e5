"""The wire format: what a tensor looks like between two ranks, one uint8 buffer of codes followed by scales.

A row is what one rank sends to one other. It is padded with zeros to whole blocks of ``block_size`` elements and laid
out as ``codes ++ float32 scales``, so that one collective moves all of it; every number format travels
as uint8 because neither gloo nor NCCL moves or reduces float8.

    scale = max|x_block| / limit        code = round(x / scale)        x' = code * scale

A block that holds a NaN or an Inf gets the scale NaN and decodes to NaN: gradient clipping and loss scaling on the
receiving side still see it. A block of zeros decodes to zeros.

Source: block quantisation before an all-to-all as in ZeRO++ (arXiv 2306.10209, qgZ); the Hadamard rotation of order 32
before the 4-bit code as in SDP4Bit (arXiv 2410.15526, section 3.2). The non-finite rule is ours.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Literal, get_args

import torch
from torch import Tensor

from foundry_fp8.config import Config, power_of_two
from foundry_fp8.numerics.formats import E4M3

__all__ = ["FORMATS", "HADAMARD_ORDER", "LEAST_AMAX", "WireFormat", "hadamard_matrix"]

FormatName = Literal["fp32", "bf16", "int8", "e4m3", "int4"]
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
LIMITS = {"int8": 127.0, "e4m3": E4M3.max, "int4": 7.0}
HADAMARD_ORDER = 32
"""Elements that one rotation mixes."""
LEAST_AMAX = 1e-30
"""Blocks whose largest element is below this are coded with its scale: their reciprocal scale stays finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireFormat(Config):
    """How the elements of one message are coded."""

    name: FormatName
    """``fp32`` is lossless; ``bf16`` rounds; the others are codes with one float32 scale a block."""
    block_size: Annotated[int, power_of_two(32, 65536)] = 128
    """Elements that share a scale."""

    @property
    def quantized(self) -> bool:
        """Whether elements are codes with block scales."""
        return self.name in LIMITS

    @property
    def limit(self) -> float:
        """The largest code."""
        return LIMITS[self.name]

    def blocks(self, numel: int) -> int:
        """Blocks that ``numel`` elements take."""
        return -(-numel // self.block_size)

    def payload_bytes(self, numel: int) -> int:
        """Bytes of the codes of a row of ``numel`` elements."""
        if self.name == "fp32":
            return 4 * numel
        if self.name == "bf16":
            return 2 * numel + (-2 * numel) % 4
        elements = self.blocks(numel) * self.block_size
        return elements // 2 if self.name == "int4" else elements

    def row_bytes(self, numel: int) -> int:
        """Bytes on the wire of a row of ``numel`` elements. A multiple of 4; 0 for an empty row."""
        if numel == 0:
            return 0
        scales = 4 * self.blocks(numel) if self.quantized else 0
        return self.payload_bytes(numel) + scales


@functools.cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """The symmetric orthonormal Hadamard matrix of order 32 (Sylvester's construction), float32."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while matrix.shape[0] < HADAMARD_ORDER:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    normalised: Tensor = matrix / HADAMARD_ORDER**0.5
    return normalised.to(device)
