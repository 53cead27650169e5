"""A weight that does not train, kept in FP8 alone: one byte an element in place of two or four.

It is what its recipe would make of the weight in every forward, once and for all, or what a checkpoint published. With scales that are powers of
two FP8 values are quantised to themselves, so that an FP8 layer computes with it, bit for bit, what it computes with the weight itself.
Everything else (evaluation in high precision, adapters that are merged, checkpoints) sees the rounded weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.wrapper_tensor import WrapperTensor, shard_of, sharded_like, without_memory
from foundry_fp8.layers.dtensor import whole
from foundry_fp8.numerics.formats import E4M3, cast
from foundry_fp8.numerics.quantize import amax_of, block_amax
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, MXFP8Scaling, Recipe
from foundry_fp8.numerics.scalings import Blocks, MXBlocks, OneScale, Rows, Scaling

__all__ = [
    "FrozenFP8Weight", "exact_for", "gathered", "in_dtype", "in_high_precision", "keep_in_fp8", "quantized_weight",
    "recipe_of", "row_scales", "scaling_of",
]  # fmt: skip


def exact_for(recipe: Recipe) -> bool:
    """Whether what ``recipe`` makes of a weight is quantised to itself: its scales are powers of two, of the weight alone."""
    return recipe.scaling("w", 1).keeps_codes and not recipe.uses_history


def keep_in_fp8(weight: nn.Parameter, recipe: Recipe) -> nn.Parameter:
    """Make the frozen ``weight`` (``[out_features, in_features]``, hp) a :class:`FrozenFP8Weight`; it stays the same object.

    Returns:
        What it was, with the memory that is freed with it.

    Raises:
        RuntimeError: Something holds on to its memory (torch's ``swap_tensors``), so that none would be saved.
    """
    if not exact_for(recipe):
        raise TypeError(f"the recipe {recipe.name} has no scales of a weight alone that are powers of two")
    before = nn.Parameter(quantized_weight(weight, recipe.scaling("w", 1)), requires_grad=False)
    torch.utils.swap_tensors(weight, before)
    return before


def quantized_weight(weight: Tensor, scaling: Scaling) -> FrozenFP8Weight:
    """The codes and scales of ``weight``, ``[out_features, in_features]``, hp."""
    found = scaling.quantize(weight.detach(), E4M3)
    return FrozenFP8Weight(found.data, found.gemm_scale, found.block, scaling, weight.dtype)


def scaling_of(scale: Tensor, block: tuple[int, int] | None, columns: int) -> Scaling:
    """How the elements of a published weight share ``scale``.

    Args:
        scale: One, or one a block; any dtype.
        block: Rows and columns that share one; ``None`` for one scale.
        columns: Of the weight.
    """
    power_2 = bool((torch.frexp(scale.float()).mantissa == 0.5).all())
    if block is None:
        return OneScale(power_2)
    if block == (1, columns):
        return Rows(1, power_2)
    return MXBlocks(block) if power_2 and block == (1, MXFP8Scaling.block_size) else Blocks(block, power_2)


def row_scales(scale: Tensor, block: tuple[int, int] | None, rows: int) -> Tensor:
    """Those of each row, ``[rows, blocks of columns]``, in the dtype of ``scale``: one (``block`` is ``None``), one a row or one a block."""
    plain = scale.view(torch.uint8) if scale.element_size() == 1 else scale  # not every torch copies E8M0
    if block is None:
        return plain.reshape(-1, 1).expand(rows, 1).view(scale.dtype)
    return plain.repeat_interleave(block[0], 0)[:rows].view(scale.dtype)


def recipe_of(scaling: Scaling) -> Recipe | None:
    """The recipe that multiplies a weight with ``scaling`` by its own codes in fprop, and but for ``by_row`` in dgrad, if there is one."""
    kinds: list[Recipe] = [MXFP8Scaling()]
    for power_2 in (True, False):
        kinds += [BlockScaling(power_2_scales=power_2), CurrentScaling(power_2_scales=power_2)]
        kinds.append(CurrentScaling(power_2_scales=power_2, granularity="row"))
    return next((recipe for recipe in kinds if recipe.scaling("w", 1) == scaling), None)


def in_high_precision(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight`` in ``dtype``, a plain tensor whatever it is kept in; the same one where it is that already."""
    if isinstance(weight, WrapperTensor):
        return weight.unpacked(dtype)
    return weight if weight.dtype == dtype else weight.to(dtype)


PIECES = 4
"""In which float32 values of a large weight are made, to be rounded."""


class FrozenFP8Weight(WrapperTensor):
    """Looks like a weight in high precision, which it is again in whatever reads it; what is written to it is quantised.

    Attributes:
        codes: ``[out_features, in_features]``, or ``[experts, out_features, in_features]``, FP8.
        scale: float32 or as published, 0-d or one a block: what ``codes`` are multiplied with; NaN where a block held an Inf.
        block: Rows and columns that share a scale; ``None`` for one scale.
        scaling: By which what is written is quantised.
    """

    parts: tuple[str, ...] = ("codes", "scale")
    way_out = (
        "this weight is kept in FP8 alone. To train it, keep it in high precision (frozen_weights: high_precision; load_fp8 into a model "
        "whose parameters require gradients); to save it, use the model's state_dict(), which holds plain tensors; to move or cast it, "
        "use the model's .to()."
    )
    codes: Tensor
    scale: Tensor
    block: tuple[int, int] | None
    scaling: Scaling

    def __new__(
        cls, codes: Tensor, scale: Tensor, block: tuple[int, int] | None, scaling: Scaling, dtype: torch.dtype
    ) -> FrozenFP8Weight:
        """An hp tensor of ``dtype`` to who looks."""
        made: FrozenFP8Weight = without_memory(cls, codes, dtype=dtype)
        made.codes, made.scale, made.block, made.scaling = codes, scale, block, scaling
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FrozenFP8Weight(shape={tuple(self.shape)}, dtype={self.dtype}, scaling={self.scaling})"

    def meta(self) -> tuple[tuple[int, int] | None, Scaling]:
        """Block and scaling."""
        return self.block, self.scaling

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The values: exact in float32, and where scales are powers of two in bfloat16, which has room for a code and an exponent.

        Those that are rounded are made a few rows at a time: float32 values of the whole never lie beside them.
        """
        within = torch.bfloat16 if dtype == torch.bfloat16 and self.scaling.keeps_codes else torch.float32
        if within == dtype:
            return self._piece(slice(None), within)
        rows, size = self.codes.shape[-2], 1 if self.block is None else self.block[0]
        pieces = min(PIECES, 1 + self.codes.numel() // 2**20)
        step = max(1, -(-rows // (pieces * size))) * size
        out = torch.empty_like(self.codes, dtype=dtype)
        for first in range(0, rows, step):
            out[..., first : first + step, :] = self._piece(slice(first, first + step), within)
        return out

    def _piece(self, piece: slice, dtype: torch.dtype) -> Tensor:
        """The values of the rows ``piece``, which begins with a block."""
        values, scale = self.codes[..., piece, :].to(dtype), self.scale.to(dtype)
        if self.block is None:
            return values.mul_(scale)
        rows, columns = values.shape[-2:]
        size, first = self.block[0], (piece.start or 0) // self.block[0]
        whole = rows // size
        scale = scale[..., first : first - (-rows // size), :]
        scale = scale.repeat_interleave(self.block[1], -1)[..., :columns]
        if whole:
            values[..., : whole * size, :].unflatten(-2, (whole, size)).mul_(scale[..., :whole, None, :])
        values[..., whole * size :, :].mul_(scale[..., whole:, :])
        return values

    def write(self, value: Tensor) -> None:
        """Quantise ``value``, hp, in place of what is there.

        A block in which nothing changes keeps its codes and its scale. One whose scale is no power of two keeps its scale as long as
        the values fit it: adapters are merged and taken out many times, and with a scale of its own each sum would be a little larger.
        """
        if value.dim() == 3:
            for i, one in enumerate(value):
                self._expert(i).write(one)
            return
        found = self.scaling.quantize(value, E4M3)
        changed = self._largest(value != self.unpacked(value.dtype)) > 0
        data, scale, old = found.data, found.gemm_scale, self.scale.to(found.gemm_scale.dtype)
        if not getattr(self.scaling, "power_2", True):
            wide, each = value.float(), found.expanded(old)
            on_old = cast(wide / each, E4M3)
            off = self._largest((on_old.float() * each - wide).abs())
            fits = off.isfinite() & (off <= 2 * self._largest((found.dequantize() - wide).abs()))
            data = torch.where(found.expanded(fits), on_old.view(torch.uint8), data.view(torch.uint8))
            scale = torch.where(fits, old, scale)
        codes = self.codes.view(torch.uint8)
        codes.copy_(torch.where(found.expanded(changed), data.view(torch.uint8), codes))
        self.scale.copy_(torch.where(changed, scale, old))

    def _largest(self, x: Tensor) -> Tensor:
        """Of each block; NaN is larger than all."""
        x = x.float().nan_to_num(nan=torch.inf, posinf=torch.inf)
        return amax_of(x) if self.block is None else block_amax(x, self.block)

    def own(self, func: Any, args: Any) -> Any:
        """See :meth:`WrapperTensor.own`: one expert; for FSDP2 an empty shard, and what it gathered as a whole."""
        if self.dim() == 3 and func is torch.ops.aten.select.int and args[0] == 0:
            return self._expert(args[1])
        if func is torch.ops.aten.as_strided.default and (*args,) == ([*self.shape], [*self.stride()], 0):
            return FrozenFP8Weight(self.codes, self.scale, *self.meta(), self.dtype)
        if func is torch.ops.aten.new_zeros.default and [*args[0][1:]] == [*self.shape[1:]]:
            first = torch.zeros((), dtype=torch.int64, device=self.device)
            return FrozenFP8Shard(self.codes.new_zeros(args[0]), self.scale, first, *self.meta(), self.dtype)
        return None

    def _expert(self, i: int) -> FrozenFP8Weight:
        return FrozenFP8Weight(self.codes[i], self.scale[i], *self.meta(), self.dtype)


class FrozenFP8Shard(FrozenFP8Weight):
    """A rank's rows, or experts, of a weight that FSDP2 shards: its all-gather carries codes, and makes a whole one of them again.

    Each rank keeps all scales, 4 bytes for 16384 codes in blocks and one for 32 in mx, so that shards may end within a block.

    Attributes:
        first: Number of the first row in the whole weight, int64, 0-d; 0 before FSDP2 copies rows to it.
    """

    parts = ("codes", "scale", "first")
    way_out = (
        "this weight is kept in FP8 alone and sharded by FSDP2. Load and convert before fully_shard (load_fp8, apply_fp8), save by "
        "state_dict(), offload with CPUOffloadPolicy(pin_memory=False), or leave it out by ignored_params."
    )
    first: Tensor

    def __new__(cls, codes: Tensor, scale: Tensor, first: Tensor, *meta: Any) -> Any:
        """An hp tensor to who looks; ``meta`` as of the whole one."""
        made: Any = super().__new__(cls, codes, scale, *meta)
        made.first = first
        return made

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """See :meth:`FrozenFP8Weight.unpacked`."""
        scale, block, rows = self.scale, self.block, slice(int(self.first), int(self.first) + len(self.codes))
        if self.dim() == 3:
            scale = scale[rows]
        elif block is not None:
            scale, block = row_scales(scale, block, rows.stop)[rows], (1, block[1])
        return FrozenFP8Weight(self.codes, scale, block, self.scaling, dtype).unpacked(dtype)

    def write(self, value: Tensor) -> None:
        """Nothing for the values that it has; others would need scales that other ranks share."""
        if not torch.allclose(value, self.unpacked(value.dtype), rtol=0.0, atol=0.0, equal_nan=True):
            self.refuse("other values cannot be written to it")

    def own(self, func: Any, args: Any) -> Any:
        """See :meth:`WrapperTensor.own`: rows copied from the weight, or shard, that it was made from; the first rows, without padding."""
        if func is torch.ops.aten.slice.Tensor and args[:2] == (0, 0) and len(args) == 3:
            return FrozenFP8Shard(self.codes[: args[2]], self.scale, self.first, *self.meta(), self.dtype)
        of: Any = getattr(args[0], "whole", args[0]) if func is torch.ops.aten.copy_.default else None
        if getattr(of, "scale", None) is not self.scale:
            return super().own(func, args) if func is torch.ops.aten.new_zeros.default else None
        codes = of.codes if of is args[0] else args[0].of(of.codes)
        before = (codes.storage_offset() - of.codes.storage_offset()) // codes.stride(0)
        self.codes.copy_(codes)
        self.first.fill_(before + getattr(of, "first", 0))
        return self

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, mp_policy: Any) -> Any:
        """For FSDP2's all-gather: this rank's codes, padded like the first rank's, and what else reading them takes."""
        codes = self.codes.view(torch.uint8)
        padding = codes.new_zeros(-(-size[0] // mesh.size()) - len(codes), *size[1:])
        return (torch.cat([codes, padding]) if len(padding) else codes,), (size[0], self.scale)

    def fsdp_post_all_gather(self, outputs: Any, known: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        """What FSDP2 gathered: the whole weight. ``out`` is the first one, whose codes are where they are gathered to."""
        rows, scale = known
        found = FrozenFP8Weight(outputs[0][:rows].view(self.codes.dtype), scale, *self.meta(), dtype)
        return (found, ()) if out is None else None


def gathered(weight: Tensor) -> Tensor:
    """``weight``, whole: one that is sharded in a collective, as codes where it is kept in FP8."""
    local = shard_of(weight)
    if not isinstance(local, FrozenFP8Shard):
        return whole(weight)
    codes = whole(sharded_like(weight, local.codes.view(torch.uint8))).view(local.codes.dtype)
    return FrozenFP8Weight(codes, local.scale, *local.meta(), local.dtype)


_PLAIN = (Tensor, nn.Parameter)


def in_dtype(out: Tensor, dtype: torch.dtype) -> Tensor:
    """``out.to(dtype)``, which costs the host something where it changes nothing too; a weight kept in FP8 as a plain tensor."""
    if out.dtype == dtype and type(out) in _PLAIN:  # no call of Python
        return out
    return in_high_precision(out, dtype)
