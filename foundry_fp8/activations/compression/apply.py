"""The functional form: keep what chosen modules save for backward packed, or only what the rest can be made from."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from torch import nn

from foundry_fp8.activations.compression.fused_loss import fuse_losses
from foundry_fp8.activations.compression.matching import fuse_mlp, fuse_norm
from foundry_fp8.activations.compression.saved import Compressor, SavedBytes, compresses_inside
from foundry_fp8.compat.checkpoint_wrapper import CheckpointWrapper, keywords_of
from foundry_fp8.config import (
    Config,
    ConfigError,
    Names,
    Natural,
    NoEffect,
    Text,
    check_choice,
    from_mapping,
    not_empty,
)
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.applied import applied, forget, remember
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.model_structure.experts import router_modules
from foundry_fp8.model_structure.fused_classes import unfuse
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.model_structure.selection import check_patterns_match
from foundry_fp8.model_structure.wrappers import checkpoint_wrappers, has_forward
from foundry_fp8.numerics.packed import PackedBlock, PackFormat

__all__ = [
    "EXACT", "LOSSY", "ActivationCompressionConfig", "CompressionReport", "Kind", "apply_activation_compression",
]  # fmt: skip

KEY = "algorithms.activation_compression"

Kind = Literal["norm", "activation", "boundary", "other", "loss"]
Format = Literal["int8", "e4m3", "int4", "exact"]
EXACT: Format = "exact"
"""The format that packs nothing: fused forms keep their inputs as they are and recompute the rest."""
LOSSY = frozenset(get_args(Format)) - {EXACT}
_FUSED: tuple[tuple[Kind, Callable[..., bool], str], ...] = (
    ("norm", fuse_norm, "fused norm"),
    ("activation", fuse_mlp, "fused mlp"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationCompressionConfig(Config):
    """What ``algorithms.activation_compression`` takes."""

    key = KEY
    deprecated: ClassVar = {
        "include_checkpoint_boundaries": lambda packs: {} if packs else {"overrides": {"boundary": EXACT}}
    }

    format: Format = "int8"
    """``int8`` (most accurate at 8 bits), ``e4m3``, ``int4`` (twice as small, ten times the error), or ``exact``:
    nothing is rounded; fused norms and MLPs keep their inputs as they are and recompute the rest."""
    block_size: PackedBlock | None = None
    """Elements that share a scale; ``null`` for 128 (int4: 32)."""
    targets: Names | Annotated[Mapping[Text, Format], not_empty] = ("*",)
    """Patterns on the names of the blocks and of what they hold, or ``{pattern: format}``, where the first pattern that
    matches a name counts. Of nested matches of one format the outermost is taken; an empty list changes only the loss."""
    overrides: Mapping[Kind, Format | Literal["none"]] = dataclasses.field(default_factory=dict)
    """Another format for one kind: ``norm`` and ``activation`` (inputs of fused norms and activation functions),
    ``boundary`` (inputs of checkpointed blocks), ``other``. ``none`` leaves the kind as it is. ``loss`` (``exact`` or
    ``none``) is the cross-entropy, which keeps the logits and recomputes their softmax."""
    min_numel: Natural = 32768
    """Tensors with fewer elements are left alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"{KEY}.overrides.loss", self.overrides.get("loss", EXACT), (EXACT, "none"))
        if not self.targets and not self.fuses("loss"):
            raise ConfigError(
                f"{KEY}.targets: an empty list and overrides.loss: none change nothing. Remove the algorithm instead."
            )

    @property
    def formats(self) -> dict[str, str]:
        """``{pattern: format}``."""
        targets = self.targets
        return dict(targets) if isinstance(targets, Mapping) else dict.fromkeys(targets, self.format)

    def fuses(self, kind: Kind) -> bool:
        """Whether modules of a kind get their fused form."""
        return self.overrides.get(kind) != "none"

    def pack_format(self, kind: Kind, name: str) -> PackFormat | None:
        """How one kind is packed in a target of the format ``name``; ``None`` where it is not."""
        name = self.overrides.get(kind, name)
        if name in ("none", EXACT):
            return None
        block = self.block_size if self.block_size is not None and name == self.format else 0
        return PackFormat(name=name, block=block)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class CompressionReport:
    """What was attached where.

    Attributes:
        rows: ``(module name, "hooks" | "boundary" | "fused norm" | "fused mlp" | "fused loss" | "fp8" | "left", reason)``;
            the reason is the format, where there is one.
        compressors: One a target, in the order of the model.
        undo: Takes everything off again.
    """

    rows: tuple[tuple[str, str, str], ...]
    compressors: tuple[Compressor, ...]
    undo: Callable[[], None]

    def __reduce__(self) -> Any:  # of a copied model, which undo does not know
        return CompressionReport, (self.rows, self.compressors, _undo_on_the_original)

    def __str__(self) -> str:
        count = Counter(
            f"{action} {form}" if form in get_args(Format) else action for _, action, form in self.rows
        )
        rounded = f"rounded to {', '.join(self.lossy)}" if self.lossy else "nothing is rounded"
        what = ", ".join(f"{n} x {what}" for what, n in count.items())
        return f"activation compression ({rounded}): {what}"

    @property
    def lossy(self) -> tuple[str, ...]:
        """The formats that something is rounded to."""
        return tuple(sorted({form for _, _, form in self.rows} & LOSSY))

    @property
    def saved(self) -> SavedBytes:
        """The bytes that the hooks packed and passed since the report was made (fused forms keep theirs apart)."""
        return sum((compressor.saved for compressor in self.compressors), SavedBytes())


def _undo_on_the_original() -> None:
    raise RuntimeError(f"{KEY}: this model is a copy; undo the compression before copying.")


def apply_activation_compression(model: nn.Module, **options: Any) -> CompressionReport:
    """Keep what the chosen modules save for backward packed, or only what the rest can be made from (``format="exact"``).

    The forward stays exact; gradients get the rounding of what is packed. Apply it after
    :func:`~foundry_fp8.activations.checkpointing.apply.apply_activation_checkpointing`, before or after wrapping in
    DDP or FSDP. Double backward and torch.compile are not supported.

    Args:
        model: Changed in place; parameters, names and ``state_dict`` stay.
        **options: The fields of :class:`ActivationCompressionConfig`.

    Raises:
        ConfigError: Bad options, a pattern that matches nothing, a target inside a checkpoint, transformers' own checkpoints, or
            applied before with other options.
    """
    config = from_mapping(ActivationCompressionConfig, options, KEY)
    if (report := applied(model, config, "compressed")) is not None:
        return report  # type: ignore[no-any-return]
    if compresses_inside(model) is not None:
        raise ConfigError(f"{KEY}: a part of the model compresses its activations already. Apply it once.")
    _check_checkpoints_of_transformers(model)
    targets = _targets(model, config)
    _check_routers(model, config)
    attached = _Attached(config)
    rows, compressors = attached.rows, attached.compressors
    for name, (module, form) in targets.items():
        if isinstance(module, CheckpointWrapper):
            attached.boundary(name, module, form)
        else:
            attached.target(name, module, form, set(targets) - {name})
    losses = list(fuse_losses(model)) if config.fuses("loss") else []
    rows += [(name, "fused loss", EXACT) for name, _ in losses]

    def undo() -> None:
        for compressor in compressors:
            compressor.detach(model)
        for module in model.modules():
            unfuse(module)
        for _, unfuse_loss in losses:
            unfuse_loss()
        forget(model, KEY)

    report = CompressionReport(tuple(rows), tuple(compressors), undo)
    remember(model, config, report)
    return report


def _targets(model: nn.Module, config: ActivationCompressionConfig) -> dict[str, tuple[nn.Module, str]]:
    """``{name: (module, format)}``: checkpoint wrappers in place of what they wrap, nothing nested in its own format."""
    found: dict[str, tuple[nn.Module, bool]] = {}
    for block_name, block in transformer_blocks(model):
        for sub, module in block.named_modules(prefix=block_name):
            name = clean_name(sub)
            if (name in found and isinstance(found[name][0], CheckpointWrapper)) or not has_forward(module):
                continue
            parents = (model.get_submodule(sub[:end]) for end, c in enumerate(sub) if c == ".")
            inside = any(isinstance(parent, CheckpointWrapper) for parent in parents)
            found[name] = (module, inside)
    if not found:
        raise NoEffect(f"{KEY}: {type(model).__name__} has no list of transformer blocks.")
    formats = config.formats
    check_patterns_match(list(formats), list(found), f"{KEY}.targets", "modules inside blocks")
    chosen: dict[str, tuple[nn.Module, str]] = {}
    for name, (module, inside) in found.items():
        form = next((f for pattern, f in formats.items() if fnmatch.fnmatchcase(name, pattern)), None)
        around = max((outer for outer in chosen if name.startswith(f"{outer}.")), key=len, default=None)
        if form is None or (around is not None and chosen[around][1] == form):
            continue
        if inside:
            raise ConfigError(
                f"{KEY}.targets: {name} lies inside an activation checkpoint. Hooks there would switch the checkpoint "
                "off; name the checkpointed module instead, to pack its inputs."
            )
        chosen[name] = (module, form)
    return chosen


def _check_checkpoints_of_transformers(model: nn.Module) -> None:
    """Raise where transformers checkpoints the blocks from outside, which leaves no wrapper to be seen."""
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            where = clean_name(name) or type(module).__name__
            raise ConfigError(
                f"{KEY}: {where} runs under transformers' own gradient checkpointing, which compression inside it would switch off. "
                "Call gradient_checkpointing_disable() on the model, and use activation_checkpointing of foundry_fp8 instead."
            )


def _check_routers(model: nn.Module, config: ActivationCompressionConfig) -> None:
    """Raise where boundaries are to be rounded by name and a router would choose other experts from them."""
    form = config.overrides.get("boundary")
    if form not in LOSSY:
        return
    for name, checkpoint in checkpoint_wrappers(model):
        for router, _ in router_modules(checkpoint):
            raise ConfigError(
                f"{KEY}.overrides.boundary: the checkpoint {name} holds the router {clean_name(f'{name}.{router}')}, which "
                f"would choose other experts when it runs again on inputs rounded to {form}. Set it to exact."
            )


class _Attached:
    """The hooks and fused forms of one model, as they are put on."""

    def __init__(self, config: ActivationCompressionConfig) -> None:
        self.config = config
        self.rows: list[tuple[str, str, str]] = []
        self.compressors: list[Compressor] = []

    def target(self, target: str, module: nn.Module, form: str, others: set[str]) -> None:
        """Put hooks on a target, and do what is not left to them inside of it and in none of the ``others``: fused forms, checkpoints."""
        fmt = self.config.pack_format("other", form)
        self._hook(module, fmt)
        self.rows.append((target, "hooks", fmt.name if fmt else EXACT))
        skipped: list[str] = []
        for sub, child in module.named_modules(prefix=target):
            name = clean_name(sub)
            if any(sub.startswith(f"{around}.") for around in skipped):
                continue
            if name in others:
                skipped.append(sub)
            elif isinstance(child, CheckpointWrapper):
                skipped.append(sub)
                self.boundary(name, child, form)
            elif isinstance(child, FP8Linear):
                self.rows.append((name, "fp8", "its input is kept in FP8 already"))
            else:
                for kind, fuse, action in _FUSED:
                    fmt = self.config.pack_format(kind, form)
                    if self.config.fuses(kind) and fuse(child, fmt):
                        self.rows.append((name, action, fmt.name if fmt else EXACT))
                        break

    def boundary(self, name: str, checkpoint: CheckpointWrapper, form: str) -> None:
        """Pack what a checkpoint keeps, its inputs, or see to it that the hooks around it do not."""
        fmt = self.config.pack_format("boundary", form)
        left = None
        if fmt is not None and (router := next(router_modules(checkpoint), None)) is not None:
            left = f"its router {clean_name(f'{name}.{router[0]}')} has to choose the same experts again"
        # Of two pairs of hooks the inner ones, those of offloading, run, and only those.
        elif keywords_of(checkpoint).get("policy") == "offload":
            left = "what it saves goes to host memory, as it is"
        elif keywords_of(checkpoint).get("offload", False):
            left = "it offloads its inputs to host memory, as they are"
        self._hook(checkpoint, fmt if left is None else None, boundary=True)
        if left is not None:
            self.rows.append((name, "left", f"a checkpoint, and {left}"))
        else:
            self.rows.append((name, "boundary", fmt.name if fmt else EXACT))

    def _hook(self, module: nn.Module, fmt: PackFormat | None, *, boundary: bool = False) -> None:
        compressor = Compressor(fmt, min_numel=self.config.min_numel, boundary=boundary)
        compressor.attach(module)
        self.compressors.append(compressor)
