"""Blocks of elements in 8 or 4 bits that share a scale: how activations are kept between forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import torch
from torch import Tensor

from foundry_fp8.config import Config, power_of_two

__all__ = ["FORMATS", "MIN_AMAX", "FormatName", "PackFormat", "Packed", "PackedBlock"]

FormatName = Literal["int8", "e4m3", "int4"]
FORMATS: tuple[FormatName, ...] = ("int8", "e4m3", "int4")
PackedBlock = Annotated[int, power_of_two(16, 1024)]
"""Elements that share a scale."""

MIN_AMAX = 1e-30
"""A block whose amax is below this packs to zeros; above it ``127 / amax`` is finite in float32."""

_DEFAULT_BLOCK = {"int8": 128, "e4m3": 128, "int4": 32}
_CODE_MAX = {"int8": 127.0, "e4m3": 448.0, "int4": 7.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackFormat(Config):
    """How a saved tensor is packed."""

    name: FormatName = "int8"
    """``int8``, ``e4m3`` or ``int4``."""
    block: Literal[0] | PackedBlock = 0
    """Elements that share a scale; 0 for the format's default (128, 128, 32)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block == 0:
            object.__setattr__(self, "block", _DEFAULT_BLOCK[self.name])

    @property
    def code_max(self) -> float:
        """What a block's amax is scaled to: 127, 448 or 7."""
        return _CODE_MAX[self.name]

    def within(self, row: int) -> PackFormat:
        """This format with its block halved until it divides rows of ``row`` elements; unchanged if no block from 32 on does.

        Tokens differ in magnitude, so a block should not span two; with blocks below 32 the scales take too much memory.
        """
        block = self.block
        while block > 32 and row % block:
            block //= 2
        return self if block == self.block or row % block else dataclasses.replace(self, block=block)

    @property
    def code_bytes(self) -> int:
        """Bytes of a block's codes."""
        return self.block // 2 if self.name == "int4" else self.block

    @property
    def scale_dtype(self) -> torch.dtype:
        """float32; bfloat16 for int4, whose blocks are small."""
        return torch.bfloat16 if self.name == "int4" else torch.float32


@dataclasses.dataclass(frozen=True)
class Packed:
    """A packed tensor.

    Attributes:
        codes: uint8 ``[n_blocks, block]`` (``[n_blocks, block // 2]`` for int4): the bytes of the codes.
        scale_inv: uint8: the bytes of one scale per block. Bytes, because saved-tensor hooks do not pack integers.
        fmt: The format.
        numel: Elements packed; the last block is padded with zeros.
        dtype: What unpacking returns.
    """

    codes: Tensor
    scale_inv: Tensor
    fmt: PackFormat
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory it holds."""
        return self.codes.numel() + self.scale_inv.numel()

    @property
    def scales(self) -> Tensor:
        """The scales that unpacking multiplies the codes by, float32 ``[n_blocks]``."""
        return self.scale_inv.view(self.fmt.scale_dtype).float()
