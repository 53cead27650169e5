"""The functional form: put checkpoints around chosen modules of any model."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from foundry_fp8.activations.checkpointing.budget import Budget
from foundry_fp8.activations.checkpointing.policy import CheckedPolicy, Policy, policy_name
from foundry_fp8.activations.checkpointing.recompute import recomputed
from foundry_fp8.activations.checkpointing.targets import Selection, Targets, select
from foundry_fp8.activations.compression.apply import CompressionReport
from foundry_fp8.activations.compression.saved import compresses_inside
from foundry_fp8.compat.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper, wrapped_module
from foundry_fp8.compat.selective_checkpoint import check_selective_checkpoint
from foundry_fp8.config import Config, ConfigError
from foundry_fp8.model_structure.applied import applied, forget, remember
from foundry_fp8.model_structure.wrappers import modules_by_clean_name, replace_everywhere

__all__ = [
    "ActivationCheckpointingConfig", "CheckpointingReport", "PlannedCompression", "apply_activation_checkpointing",
    "switch_off_cache", "unwrap", "wrap_selected",
]  # fmt: skip

log = logging.getLogger(__name__)

KEY = "algorithms.activation_checkpointing"
BUDGET_ALONE = (
    f"{KEY}.budget: the budget plans compression itself. Remove activation_compression from the algorithms."
)

PlannedCompression = Literal["none", "exact", "int8", "e4m3", "int4"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationCheckpointingConfig(Config):
    """What ``algorithms.activation_checkpointing`` takes."""

    key = KEY

    targets: Targets = None
    """Which modules: ``null`` for every block, a name, a list of names, a mapping of names to blocks, or a list of
    ``{target, blocks, policy}`` mappings. Names are LLM Foundry's, class names, or patterns on module names."""
    policy: CheckedPolicy = "full"
    """``full`` keeps nothing; ``selective`` keeps matmul and attention outputs; a list of ops keeps theirs; ``offload`` runs nothing
    again and keeps all of it in host memory."""
    budget: Budget | None = None
    """Plan the targets from peak memory instead: ``20GiB``, a fraction of what no checkpointing needs, or ``fit``."""
    offload: bool = False
    """Move the inputs of the checkpoints to (pinned) host memory between forward and backward, beside the computation."""
    compression: PlannedCompression = "exact"
    """What a budget may use beside checkpoints: ``none``, ``exact`` (rounds nothing), or a format of ``activation_compression``
    that rounds what is kept, and with it the gradients: ``int8``, ``e4m3``, ``int4``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget is None and self.compression != "exact":
            raise ConfigError(
                f"{KEY}.compression: it says what a budget may use, and there is none. Without a budget use "
                "algorithms.activation_compression."
            )
        if self.budget is not None and (self.targets is not None or self.policy != "full"):
            raise ConfigError(
                f"{KEY}.budget: the budget chooses targets and policies itself; leave targets and policy out, or "
                "remove budget."
            )


@dataclasses.dataclass(frozen=True)
class CheckpointingReport:
    """What was checkpointed, and what a plan compresses beside it."""

    selected: tuple[Selection, ...]
    offload: bool = False
    compression: CompressionReport | None = None

    def __str__(self) -> str:
        count = Counter(policy_name(selection.policy) for selection in self.selected)
        what = ", ".join(f"{n} x {policy}" for policy, n in count.items()) or "nothing"
        beside = "" if self.compression is None else f"; {self.compression}"
        return f"activation checkpointing: {what}{', boundaries offloaded' if self.offload else ''}{beside}"


def apply_activation_checkpointing(
    model: nn.Module, *, targets: Targets = None, policy: Policy = "full", offload: bool = False
) -> CheckpointingReport:
    """Recompute the chosen modules in backward instead of keeping what they save. Never reentrant.

    Names, ``state_dict`` keys and parameters stay as they are. The checkpoint goes around the innermost module of a
    name, hence inside its FSDP1 unit. Autocast and RNG state are restored for the recompute, so it repeats the forward
    bit for bit where the module itself does. Applying the same twice changes nothing. From a memory budget instead: plan with
    :func:`~foundry_fp8.planning.memory.planner.plan_memory` and apply the plan.

    Args:
        model: Changed in place. Plain, or wrapped in DDP, FSDP1 or FSDP2.
        targets: See :class:`ActivationCheckpointingConfig`.
        policy: See there.
        offload: See there.

    Raises:
        ConfigError: Bad targets or policy, or applied before with others.
    """
    config = ActivationCheckpointingConfig(targets=targets, policy=policy, offload=offload)
    applied(model, config, "checkpointed")
    selected = select(model, config.targets, config.policy, f"{KEY}.targets")
    report = wrap_selected(model, selected, offload=config.offload)
    remember(model, config, True)
    return report


def wrap_selected(
    model: nn.Module, selected: Iterable[Selection], *, offload: bool = False
) -> CheckpointingReport:
    """Wrap modules that :func:`~.targets.select` has chosen, by name.

    Raises:
        ConfigError: A module compresses its saved tensors itself: saved-tensor hooks inside a checkpoint would switch
            the checkpoint off without a word.
        RuntimeError: A policy keeps results, and this torch keeps them in a way that this package does not know.
    """
    done = []
    if any(selection.policy not in ("full", "offload") for selection in selected):
        check_selective_checkpoint()
    switch_off_cache(model)
    for selection in selected:
        name, module = modules_by_clean_name(model)[selection.name]
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, CheckpointWrapper):
            continue
        packer = compresses_inside(module)
        if packer is not None:
            inner = f"{selection.name}.{packer}" if packer else selection.name
            raise ConfigError(
                f"{KEY}: {inner} compresses what it saves and would lie inside the checkpoint around {selection.name}, "
                "which then recomputes nothing. Apply activation_checkpointing before activation_compression."
            )
        wrapper = checkpoint_wrapper(
            module, checkpoint_fn=recomputed, policy=selection.policy, offload=offload
        )
        replace_everywhere(model, module, wrapper)
        done.append(selection)
    return CheckpointingReport(tuple(done), offload)


def unwrap(model: nn.Module) -> None:
    """Take every checkpoint off ``model``."""
    for module in list(model.modules()):
        if isinstance(module, CheckpointWrapper):
            replace_everywhere(model, module, wrapped_module(module))
    forget(model, KEY)


def switch_off_cache(model: nn.Module) -> None:
    """Set Hugging Face's ``config.use_cache`` to false: a recompute would append keys to the cache a second time."""
    for module in model.modules():
        # Transformers' own models; layers may hold guarded configs.
        if not hasattr(module, "get_input_embeddings"):
            continue
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            log.info("%s: set config.use_cache of %s to false", KEY, type(module).__name__)
            config.use_cache = False
