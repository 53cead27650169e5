"""The functional form: keep what chosen modules save for backward in 8 or 4 bits."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from foundry_fp8.activations.packing import FORMATS, FormatName, PackFormat
from foundry_fp8.activations.saved import Compressor, SavedBytes, compresses_inside
from foundry_fp8.activations.wrapping import clean_name
from foundry_fp8.algorithms.activation_compression.fp8 import FP8Saved
from foundry_fp8.algorithms.activation_compression.matching import fuse_mlp, fuse_norm, unfuse
from foundry_fp8.config import ConfigError, check_choice, check_integer, check_patterns, from_mapping, nearest
from foundry_fp8.modules.linear import FP8Linear
from foundry_fp8.selection import check_patterns_match, transformer_blocks

__all__ = [
    "KINDS",
    "ActivationCompressionConfig",
    "CompressionReport",
    "Kind",
    "apply_activation_compression",
]

KEY = "algorithms.activation_compression"

Kind = Literal["norm", "activation", "boundary", "other"]
KINDS: tuple[Kind, ...] = ("norm", "activation", "boundary", "other")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationCompressionConfig:
    """What ``algorithms.activation_compression`` takes."""

    format: FormatName = "int8"
    """``int8`` (most accurate at 8 bits), ``e4m3``, or ``int4`` (twice as small, ten times the error)."""
    block_size: int | None = None
    """Elements that share a scale; ``null`` for 128 (int4: 32)."""
    targets: Sequence[str] = ("*",)
    """Patterns on the names of the blocks and of what they hold; of nested matches the outermost is taken."""
    include_checkpoint_boundaries: bool = True
    """Pack the inputs of activation checkpoints too."""
    overrides: Mapping[Kind, str] = dataclasses.field(default_factory=dict)
    """Another format for one kind: ``norm`` and ``activation`` (inputs of fused norms and activation functions),
    ``boundary`` (inputs of checkpointed blocks), ``other``. ``none`` leaves the kind as it is."""
    min_numel: int = 4096
    """Tensors with fewer elements are left alone."""

    def __post_init__(self) -> None:
        check_choice(f"{KEY}.format", self.format, FORMATS)
        check_patterns(f"{KEY}.targets", self.targets)
        if not self.targets:
            raise ConfigError(
                f"{KEY}.targets: an empty list compresses nothing. Remove the algorithm instead."
            )
        check_integer(f"{KEY}.min_numel", self.min_numel)
        if not isinstance(self.include_checkpoint_boundaries, bool):
            raise ConfigError(
                f"{KEY}.include_checkpoint_boundaries: {self.include_checkpoint_boundaries!r} is not true or false."
            )
        if self.block_size is not None:
            check_integer(f"{KEY}.block_size", self.block_size, minimum=16)
        for kind, name in self.overrides.items():
            if kind not in KINDS:
                raise ConfigError(
                    f"{KEY}.overrides.{kind}: unknown kind. It takes {', '.join(KINDS)}.{nearest(kind, KINDS)}"
                )
            check_choice(f"{KEY}.overrides.{kind}", name, (*FORMATS, "none"))
        for kind in KINDS:
            self.pack_format(kind)

    def pack_format(self, kind: Kind) -> PackFormat | None:
        """The format of one kind; ``None`` where it is not packed."""
        name = self.overrides.get(kind, self.format)
        if name == "none":
            return None
        block = self.block_size if self.block_size is not None and name == self.format else 0
        try:
            return PackFormat(name=name, block=block)  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(f"{KEY}.{error}") from error


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """What was attached where.

    Attributes:
        rows: ``(module name, "hooks" | "boundary" | "fused norm" | "fused mlp" | "fp8" | "left", reason)``.
        compressors: One a target, in the order of the model.
        undo: Takes everything off again.
    """

    rows: tuple[tuple[str, str, str], ...]
    compressors: tuple[Compressor, ...]
    undo: Callable[[], None]

    def __str__(self) -> str:
        count: dict[str, int] = {}
        for _, action, _ in self.rows:
            count[action] = count.get(action, 0) + 1
        return "activation compression: " + ", ".join(f"{n} x {action}" for action, n in count.items())

    @property
    def saved(self) -> SavedBytes:
        """The bytes that the hooks packed and passed since the report was made (fused forms keep theirs apart)."""
        total = SavedBytes()
        for compressor in self.compressors:
            total.original += compressor.saved.original
            total.packed += compressor.saved.packed
            total.passed += compressor.saved.passed
        return total


def apply_activation_compression(model: nn.Module, **options: Any) -> CompressionReport:
    """Keep what the chosen modules save for backward packed. The forward stays exact; gradients get the rounding.

    Apply it after :func:`~foundry_fp8.algorithms.activation_checkpointing.apply_activation_checkpointing`, before or after
    wrapping in DDP or FSDP. Double backward and torch.compile are not supported.

    Args:
        model: Changed in place; parameters, names and ``state_dict`` stay.
        **options: The fields of :class:`ActivationCompressionConfig`.

    Raises:
        ConfigError: Bad options, a pattern that matches nothing, a target inside a checkpoint, or applied twice.
    """
    config = from_mapping(ActivationCompressionConfig, options, KEY)
    if compresses_inside(model) is not None:
        raise ConfigError(f"{KEY}: the model compresses its activations already. Apply it once.")
    rows: list[tuple[str, str, str]] = []
    compressors: list[Compressor] = []
    fp8 = FP8Saved()
    for name, module in _targets(model, config):
        checkpointed = isinstance(module, CheckpointWrapper)
        fmt = config.pack_format("boundary" if checkpointed else "other")
        if checkpointed and not config.include_checkpoint_boundaries:
            rows.append((name, "left", "a checkpoint, and include_checkpoint_boundaries is false"))
            continue
        compressor = Compressor(fmt, min_numel=config.min_numel)
        compressor.attach(module)
        compressors.append(compressor)
        rows.append((name, "boundary" if checkpointed else "hooks", str(fmt and fmt.name)))
        if not checkpointed:
            rows += _inside(name, module, config, fp8, compressors)

    def undo() -> None:
        for compressor in (*compressors, fp8):
            compressor.detach(model)
        for module in model.modules():
            unfuse(module)

    return CompressionReport(tuple(rows), tuple(compressors), undo)


def _targets(model: nn.Module, config: ActivationCompressionConfig) -> list[tuple[str, nn.Module]]:
    """The outermost modules that the patterns name, checkpoint wrappers in place of what they wrap."""
    found: dict[str, tuple[nn.Module, bool]] = {}
    for block_name, block in transformer_blocks(model):
        for sub, module in block.named_modules(prefix=block_name):
            name = clean_name(sub)
            if name in found and isinstance(found[name][0], CheckpointWrapper):
                continue
            inside = any(
                isinstance(model.get_submodule(sub[:end]), CheckpointWrapper)
                for end in (i for i, c in enumerate(sub) if c == ".")
            )
            found[name] = (module, inside)
    if not found:
        raise ConfigError(f"{KEY}: {type(model).__name__} has no list of transformer blocks.")
    check_patterns_match(config.targets, list(found), f"{KEY}.targets", "modules inside blocks")
    chosen: list[tuple[str, nn.Module]] = []
    for name, (module, inside) in found.items():
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in config.targets):
            continue
        if any(name.startswith(f"{outer}.") for outer, _ in chosen):
            continue
        if inside:
            raise ConfigError(
                f"{KEY}.targets: {name} lies inside an activation checkpoint. Hooks there would switch the checkpoint "
                "off; name the checkpointed module instead, to pack its inputs."
            )
        chosen.append((name, module))
    return chosen


def _inside(
    target: str,
    module: nn.Module,
    config: ActivationCompressionConfig,
    fp8: FP8Saved,
    compressors: list[Compressor],
) -> list[tuple[str, str, str]]:
    """What lies inside a target and is not left to its hooks: fused forms, FP8 linears, checkpoints."""
    rows: list[tuple[str, str, str]] = []
    norm, activation = config.pack_format("norm"), config.pack_format("activation")
    checkpoints: list[str] = []
    for sub, child in module.named_modules(prefix=target):
        if any(sub.startswith(f"{checkpoint}.") for checkpoint in checkpoints):
            continue
        name = clean_name(sub)
        if isinstance(child, CheckpointWrapper):
            checkpoints.append(sub)
            if not config.include_checkpoint_boundaries:
                keep = Compressor(None)
                keep.attach(child)
                compressors.append(keep)
                rows.append((name, "left", "a checkpoint, and include_checkpoint_boundaries is false"))
        elif isinstance(child, FP8Linear):
            fp8.attach(child)
            rows.append((name, "fp8", "its input is kept in FP8 already"))
        elif norm is not None and fuse_norm(child, norm):
            rows.append((name, "fused norm", norm.name))
        elif activation is not None and fuse_mlp(child, activation):
            rows.append((name, "fused mlp", activation.name))
    return rows
