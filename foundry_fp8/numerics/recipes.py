"""The FP8 recipes: number format, granularity and timing of the scales.

======== ============================ =============================== ============================
recipe   scale of ``x`` and ``dy``    scale of ``w``                  amax taken from
======== ============================ =============================== ============================
delayed  one per tensor               one per tensor                  the last forward passes
current  one per tensor               one per tensor                  this tensor
 rows    one per row along K          one per row along K             this row
block    one per 1 x 128 along K      one per 128 x 128               this block
mxfp8    one per 1 x 32 along K, E8M0 one per 1 x 32 along K, E8M0    this block
nvfp4    one per 1 x 16 along K, E4M3 one per 16 x 16, E4M3           this block, and this tensor
unit     1; a constant for ``dy``     1                               nothing
======== ============================ =============================== ============================

"Along K" means along the dimension that the GEMM contracts, so that ``x`` and ``dy`` (and ``w`` in mxfp8) are quantised
once by rows and once by columns; so is ``current`` with ``granularity: row``. The semantics are those of Transformer Engine's ``DelayedScaling``,
``Float8CurrentScaling``, ``Float8BlockScaling``, ``MXFP8BlockScaling`` and ``NVFP4BlockScaling``; see ``docs/numerics.md``. ``unit`` is µnit Scaling's, for models of that
architecture alone; see ``docs/unit_scaling.md``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from foundry_fp8.config import (
    Config,
    ConfigError,
    Natural,
    Positive,
    at_most,
    from_mapping,
    nearest,
    power_of_two,
)
from foundry_fp8.numerics.formats import E4M3, E5M2, Float8Format
from foundry_fp8.numerics.nvfp4 import BLOCK, E2M1, NVFP4Blocks
from foundry_fp8.numerics.scalings import Blocks, Constant, MXBlocks, OneScale, Rows, Scaling

__all__ = [
    "FOR_ANY_MODEL", "RECIPES", "BlockScaling", "CurrentScaling", "DelayedScaling", "Gemm", "MXFP8Scaling",
    "NVFP4Scaling", "Operand", "Recipe", "TensorwiseRecipe", "UnitScaling", "most_common_recipes", "parse_recipe",
    "recipe_name",
]  # fmt: skip

Operand = Literal["x", "w", "dy"]
"""The three tensors of a linear that are quantised: input, weight, gradient of the output."""

Gemm = Literal["fprop", "dgrad", "wgrad"]
GemmPrecision = Literal["fp8", "dequantized", "high_precision"]
"""What a GEMM of an FP8 layer runs in; ``dequantized`` multiplies the quantised operands in the compute dtype, which each is rounded to."""
"""The three products of a linear: ``Y = X W^T``, ``dX = dY W``, ``dW = dY^T X``."""

GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe(Config):
    """What every recipe has."""

    key: ClassVar[str] = "recipe"
    name: ClassVar[str]
    shape_multiple: ClassVar[int] = 16
    """in_features and out_features must be multiples of this (cuBLASLt's rule; a block size where blocks may not be ragged)."""
    token_multiple: ClassVar[int] = 16
    """tokens (batch x sequence) a GPU must be a multiple of this, because wgrad contracts over them."""
    for_any_model: ClassVar[bool] = True
    """Whether it takes ordinary linears; otherwise only those with µnit Scaling's output multiplier."""
    block_size: ClassVar[int] = 1
    """Elements in a row that share a scale, where blocks do."""
    uses_history: ClassVar[bool] = False
    """Whether scales come from the amaxes of earlier passes, which are state of each layer."""
    runs_on_hopper: ClassVar[bool] = True
    """Whether Hopper GPUs multiply its operands."""
    element_bits: ClassVar[int] = 8
    """Of an element, its scale left out."""
    rounds_at_random = False
    """Whether an operand is rounded at random, by the number of the layer's pass, which is state."""

    fp8_format: Literal["hybrid", "e4m3"] = "hybrid"
    """``hybrid``: E4M3 for ``x`` and ``w``, E5M2 for ``dy``. ``e4m3``: E4M3 for all."""

    def format(self, operand: Operand) -> Float8Format:
        """The number format of one operand."""
        return E5M2 if operand == "dy" and self.fp8_format == "hybrid" else E4M3

    def scaling(self, operand: Operand, along: int) -> Scaling:
        """How one operand's elements share scales, where a GEMM contracts dimension ``along`` (1: along rows)."""
        raise NotImplementedError(f"{type(self).__name__} does not say how its operands are scaled")

    @property
    def kind(self) -> str:
        """The scaling's, by which a backend finds what it has for it. Recipes with kernels spell it out: Dynamo reads it."""
        return self.scaling("x", 1).kind

    @property
    def measures_first(self) -> bool:
        """Whether a tensor is read once for its amax before it is read again for the cast."""
        return self.kind == "tensor" and not self.uses_history

    @property
    def powers_of_two(self) -> bool:
        """Whether every scale is a power of two."""
        return getattr(self, "power_2_scales", False)

    def accumulates_fast(self, gemm: Gemm) -> bool:
        """Whether Hopper and Ada GPUs may add up all of this product in the tensor cores' own short accumulator."""
        return False

    @property
    def by_row(self) -> bool:
        """Whether all that a GEMM adds up for an element of its result has one scale from each side, which multiplies the sum."""
        return self.kind == "row"

    @property
    def by_direction(self) -> bool:
        """Whether a tensor has other scales in each dimension that a GEMM contracts, so that it is quantised once for each."""
        return self.by_row

    @property
    def history(self) -> DelayedScaling | None:
        """What says how amaxes of earlier passes set the scale, where they do."""
        return None

    @property
    def scales_known(self) -> bool:
        """Whether a tensor's scale is known before the tensor."""
        return self.uses_history

    @property
    def finer(self) -> Recipe | None:
        """What a layer runs that this one does not suffice for, before high precision; ``None`` if there is nothing between."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """``{"name": ..., field: value}``: what :func:`parse_recipe` reads back, and what the logs show."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorwiseRecipe(Recipe):
    """One scale a tensor, so that a GEMM is one product, which Hopper and Ada GPUs can add up in two ways.

    Block scales are applied to sums of 128, outside of the tensor core, and mxfp8 runs on GPUs whose accumulator is longer:
    there is no choice to make.
    """

    fast_accumulation: Sequence[Gemm] = ("fprop",)
    """The GEMMs that Hopper and Ada GPUs add up in the tensor cores' own accumulator (13 bits of mantissa) from the first
    product to the last; the others are promoted to float32 on the way. ``[]`` is the most accurate and slower."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "fast_accumulation", tuple(gemm for gemm in GEMMS if gemm in self.fast_accumulation)
        )

    def accumulates_fast(self, gemm: Gemm) -> bool:
        """See :meth:`Recipe.accumulates_fast`."""
        return gemm in self.fast_accumulation


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(TensorwiseRecipe):
    """One scale per tensor, from the amax history of earlier forward passes. Fastest; scales lag one step behind."""

    name: ClassVar[str] = "delayed"
    uses_history: ClassVar[bool] = True
    kind: ClassVar[str] = "tensor"

    margin: Annotated[Natural, at_most(16)] = 0
    """The scale is divided by ``2 ** margin``: head room for an amax that grows. At 16 an amax is among E4M3's subnormals."""
    amax_history_len: Annotated[Positive, at_most(2**20)] = 1024
    """Forward passes (microbatches, not optimizer steps) that the history holds."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """The amax that sets the scale: the largest of the history, or that of the last pass."""
    amax_group: Literal["model", "world", "none"] = "model"
    """Whose amaxes: of the ranks that hold the model (found from DDP, FSDP and its mesh), of all of the job, or of each rank alone."""

    def scaling(self, operand: Operand, along: int) -> Scaling:
        """See :meth:`Recipe.scaling`; the scale is given."""
        return OneScale(given=True)

    @property
    def history(self) -> DelayedScaling:
        """See :attr:`Recipe.history`."""
        return self

    @property
    def finer(self) -> Recipe:
        """See :attr:`Recipe.finer`."""
        return CurrentScaling(fp8_format=self.fp8_format)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(TensorwiseRecipe):
    """One scale per tensor, from the tensor itself. No state; costs one more pass over the tensor."""

    name: ClassVar[str] = "current"

    granularity: Literal["tensor", "row"] = "tensor"
    """``row``: a scale for each row of a GEMM's left operand and each column of its right one, along what it contracts, in place of one
    for the tensor (torchao's ``rowwise``)."""
    power_2_scales: bool = False
    """Round each scale down to a power of two."""

    def scaling(self, operand: Operand, along: int) -> Scaling:
        """See :meth:`Recipe.scaling`."""
        return Rows(along, self.power_2_scales) if self.by_row else OneScale(self.power_2_scales)

    @property
    def finer(self) -> Recipe:
        """See :attr:`Recipe.finer`."""
        return BlockScaling()

    @property
    def kind(self) -> str:
        """See :attr:`Recipe.kind`."""
        return self.granularity


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScaling(Recipe):
    """One scale per 1 x 128 of activations and gradients and per 128 x 128 of weights (DeepSeek-V3's scheme)."""

    name: ClassVar[str] = "block"
    block_size: ClassVar[int] = 128

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"
    power_2_scales: bool = True
    """Round each scale down to a power of two. ``false`` keeps float32 scales, which only Hopper GPUs can run."""

    kind: ClassVar[str] = "block"
    by_direction = True

    def scaling(self, operand: Operand, along: int) -> Scaling:
        """See :meth:`Recipe.scaling`: squares for weights."""
        size = self.block_size
        block = (size, size) if operand == "w" else (1, size) if along == 1 else (size, 1)
        return Blocks(block, self.power_2_scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8Scaling(Recipe):
    """One E8M0 scale per 32 elements (the OCP microscaling format): what Blackwell GPUs run natively."""

    name: ClassVar[str] = "mxfp8"
    block_size: ClassVar[int] = 32
    shape_multiple: ClassVar[int] = 32
    token_multiple: ClassVar[int] = 32
    runs_on_hopper: ClassVar[bool] = False
    kind: ClassVar[str] = "mx"
    powers_of_two = by_direction = True

    fp8_format: Literal["hybrid", "e4m3"] = "e4m3"

    def scaling(self, operand: Operand, along: int) -> Scaling:
        """See :meth:`Recipe.scaling`."""
        return MXBlocks((1, self.block_size) if along == 1 else (self.block_size, 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4Scaling(Recipe):
    """Four bits an element: E2M1 in blocks of 16 with E4M3 scales, and a float32 scale a tensor, for Blackwell GPUs.

    Leave the last blocks of a model in high precision (arXiv 2509.25149): ``[{blocks: last-15%, recipe: high_precision}, {recipe: nvfp4}]``.
    """

    name: ClassVar[str] = "nvfp4"
    element_bits: ClassVar[int] = 4
    block_size: ClassVar[int] = BLOCK
    shape_multiple: ClassVar[int] = 32  # cuBLASLt's for rows of 4 bits; some GEMM contracts each dimension
    token_multiple: ClassVar[int] = 32
    runs_on_hopper: ClassVar[bool] = False
    kind: ClassVar[str] = "nvfp4"
    by_direction = True

    fp8_format: Literal["e4m3"] = "e4m3"
    """The scales'; elements are E2M1."""
    hadamard: bool = True
    """Mix 16 tokens at a time in both operands of wgrad (a Hadamard transform with fixed signs), which spreads outliers."""
    stochastic_rounding: bool = True
    """Round ``dy`` at random, without bias."""
    square_weights: bool = True
    """Squares of 16 x 16 of a weight share a scale, so that fprop and dgrad multiply by the same numbers; otherwise 16 along each."""

    def format(self, operand: Operand) -> Float8Format:
        """See :meth:`Recipe.format`."""
        return E2M1

    def scaling(self, operand: Operand, along: int) -> Scaling:
        """See :meth:`Recipe.scaling`."""
        size, weight = self.block_size, operand == "w"
        block = (size, size) if weight and self.square_weights else (1, size) if along == 1 else (size, 1)
        mixes = self.hadamard and along == 0 and not weight
        return NVFP4Blocks(block, mixes, self.stochastic_rounding and operand == "dy")

    @property
    def rounds_at_random(self) -> bool:  # type: ignore[override]
        """See :attr:`Recipe.rounds_at_random`."""
        return self.stochastic_rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitScaling(TensorwiseRecipe):
    """Constant scales: clip and cast. No amax, no history, no state, no collective.

    The layer's output multiplier alpha = 1/sqrt(in_features) is given to all three GEMMs as their scale, so that x, w and,
    through ``gradient_scale``, dy are near unit variance by construction. Inf becomes NaN in the cast, because nothing else
    would show it.

    Source:
        Narayan et al., "µnit Scaling: Simple and Scalable FP8 LLM Training" (arXiv 2502.05967); ``gradient_scale`` is this
        package's, see ``docs/unit_scaling.md``.
    """

    name: ClassVar[str] = "unit"
    for_any_model: ClassVar[bool] = False
    kind: ClassVar[str] = "constant"
    powers_of_two = scales_known = True

    gradient_scale: Annotated[int, power_of_two(1, 2**60)] | Literal["auto"] = "auto"
    """What dy is multiplied by before the cast, and dgrad's and wgrad's results divided by, exactly: a power of two. ``auto``
    is :meth:`gradient_scale_for` the tokens of the first batch, which the algorithm ``fp8`` sets."""

    def scaling(self, operand: Operand, along: int) -> Scaling:
        """See :meth:`Recipe.scaling`."""
        return Constant(self.scale(operand))

    def scale(self, operand: Operand) -> float:
        """The constant that one operand is multiplied by before the cast.

        Raises:
            RuntimeError: dy's, where it is still ``auto``.
        """
        if operand != "dy":
            return 1.0
        if self.gradient_scale == "auto":
            raise RuntimeError(
                "recipe.gradient_scale: auto is set from the first batch by the algorithm fp8. Without a trainer, set a power "
                "of two near tokens x width (UnitScaling.gradient_scale_for), as in {name: unit, gradient_scale: 1048576}."
            )
        return float(self.gradient_scale)

    @staticmethod
    def gradient_scale_for(tokens: int, width: int) -> int:
        """The power of two nearest to ``tokens * width``.

        A loss that is the mean over ``tokens`` sends ``(p - y) / tokens`` into the logits, and a head with the output
        multiplier ``1 / width`` and unit weights sends ``|p - y| / (tokens * width)`` into each element of the residual
        stream: times this scale, about 1, in the middle of E5M2's range.

        Args:
            tokens: That the loss of one backward's accumulation on one rank is a mean over.
            width: The head's fan-in, d_model.
        """
        return int(2 ** min(60, max(0, round(math.log2(max(1, tokens * width))))))


RECIPES: dict[str, type[Recipe]] = {
    cls.name: cls
    for cls in (DelayedScaling, CurrentScaling, BlockScaling, MXFP8Scaling, NVFP4Scaling, UnitScaling)
}

FOR_ANY_MODEL = tuple(n for n, cls in RECIPES.items() if cls.for_any_model and cls.element_bits == 8)
"""The recipes of eight bits that take models of any architecture: what ``measured`` chooses from."""


def parse_recipe(value: str | Mapping[str, Any] | Recipe, key: str = "recipe") -> Recipe:
    """Read a recipe as a YAML gives it.

    Args:
        value: A name (``"current"``), a mapping (``{"name": "delayed", "margin": 1}``), or a recipe, returned as it is.
        key: The YAML key, for messages.

    Raises:
        ConfigError: Unknown recipe or field, wrong type or value.
    """
    if isinstance(value, Recipe):
        return value
    place = f"{key}.name" if isinstance(value, Mapping) else key
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{key}: {value!r} is neither a recipe's name ({', '.join(RECIPES)}) nor a mapping with its fields."
        )
    fields = dict(value)
    name = fields.pop("name", None)
    if not isinstance(name, str) or name not in RECIPES:
        said = "no name given" if name is None else f"{name!r} is not a recipe"
        raise ConfigError(f"{place}: {said}. Recipes: {', '.join(RECIPES)}.{nearest(name, RECIPES)}")
    return from_mapping(RECIPES[name], fields, key, owner=f"Recipe {name}")


def recipe_name(recipe: Recipe | None) -> str:
    """What a YAML calls it; ``None`` is high precision."""
    return "high_precision" if recipe is None else recipe.name


def most_common_recipes(recipes: Iterable[Recipe | None]) -> tuple[Recipe, ...]:
    """Each of ``recipes`` once, the most frequent first; ``None`` is left out."""
    counted = Counter(recipe for recipe in recipes if recipe is not None)
    return tuple(recipe for recipe, _ in counted.most_common())
