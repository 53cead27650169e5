"""Everything registered that a checkpoint meets: as it is saved, and as it is resumed with other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

Options = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a YAML would say."""

    model: str = "llama"
    """One of :data:`tests.combinations.models.MODELS`."""
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "adamw"})

    algorithms: Options = dataclasses.field(default_factory=dict)
    callbacks: Options = dataclasses.field(default_factory=dict)
    loggers: Options = dataclasses.field(default_factory=dict)

    @property
    def fp8(self) -> Mapping[str, Any] | None:
        return self.algorithms.get("fp8")

    def build(self, kind: str) -> list[Any]:
        """The objects of one kind (``algorithms``), in order."""
        found = []
        for name, options in getattr(self, kind).items():
            if name == "gradient_clipping":
                from composer.algorithms import GradientClipping

                found.append(GradientClipping(**options))
            else:
                (entry,) = {e.value: e for e in entry_points(group=f"llmfoundry_{kind}", name=name)}.values()
                found.append(entry.load()(**options))
        return found

    def optimizer_of(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The optimizer of ``model``'s parameters, by LLM Foundry's name for ours."""
        options = dict(self.optimizer)
        name = options.pop("name")
        if name == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=lr, **options)
        (entry,) = entry_points(group="llmfoundry_optimizers", name=name)
        return entry.load()(model.parameters(), lr=lr, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """How a resume ends that cannot be right."""

    says: str
    way: str | None = "load_ignore_keys"
    """What the message says to do; ``None``: torch ended it before our message, and the docs say what to do."""
    ignore: tuple[str, ...] = ("state/algorithms",)
    """The ``load_ignore_keys`` with which it begins afresh."""


def refused(
    how: str, says: str, *, sharded: str | None = None, **options: Any
) -> dict[tuple[str, str], Refusal]:
    """A refusal of both kinds of checkpoint; ``sharded``: torch's words, where it stops first."""
    ours = Refusal(says=says, **options)
    theirs = ours if sharded is None else dataclasses.replace(ours, says=sharded, way=None)
    return {(how, "monolithic"): ours, (how, "sharded"): theirs}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One thing with or without state, and what resuming it with other settings must be."""

    settings: Settings
    changed: Settings
    base: Settings = Settings()
    """Of the older checkpoint that it is added to."""
    refused: Mapping[tuple[str, str], Refusal] = dataclasses.field(default_factory=dict)
    """``changed`` or ``added``, and the kind of checkpoint: what ends such a resume."""
    moves: bool = True
    """Whether a change of its settings may move what is computed; otherwise such a run goes on exactly as it was."""
    lossy: float = 1e-4
    """How far a gradient may lie from the same numerics without what rounds on the way."""
    kinds: tuple[str, ...] = ("monolithic", "sharded")
    needs: str | None = None
    """A package that the modern stack lacks."""

    @property
    def missing(self) -> bool:
        return self.needs is not None and find_spec(self.needs) is None


def fp8(**options: Any) -> dict[str, dict[str, Any]]:
    return {"fp8": {"recipe": {"name": "delayed", "amax_history_len": 8}, **options}}


GUARD = {"interval": 1, "rows": 2}
WIRE = {"warmup": 0, "min_bytes": 0, "scope": "all", "block_size": 32}
INT8 = {"gradients": "int8", "second_leg": "int8", **WIRE}
CLIP = {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.05}}
MONITORS = {
    "mfu_monitor": {"interval": 2, "peak_flops": 1.0e12},
    "kurtosis_monitor": {"interval": 2},
    "fp8_monitor": {"interval": 2},
}
DELAYED = Settings(algorithms=fp8())
BLOCK_RULE = {"blocks": "first-1", "roles": ["mlp"], "recipe": "block"}
MEASURED = {"name": "measured", "error": 0.6, "warmup": 2, "recipes": ["current", "delayed"]}
DELAYED_RULE = {"recipe": {"name": "delayed", "amax_history_len": 8}}
UNIT = {"fp8": {"recipe": {"name": "unit", "gradient_scale": 1024}}}
SCHEDULE = ("state/optimizers", "state/schedulers")
OF_ITS_OWN = {"recipe": {"name": "delayed", "amax_history_len": 8}}


def numbers_of(value: Tensor) -> Tensor:
    """What the codes of a moment in 8 bits stand for."""
    return value.dequantize() if hasattr(value, "codes") else value


def low_bit(name: str) -> Part:
    """An optimizer whose moments are codes."""
    return Part(
        settings=Settings(model="wide", algorithms=fp8(), optimizer={"name": name}),
        changed=Settings(model="wide", algorithms=fp8(), optimizer={"name": name, "block_size": 128}),
        base=Settings(model="wide", algorithms=fp8()),
        refused={
            **refused("changed", "are in blocks of 256", sharded="block_size", ignore=SCHEDULE[:1]),
            ("added", "sharded"): Refusal(says="state.optimizers.AdamW", way=None, ignore=SCHEDULE[:1]),
        },
        needs="torchao",
    )


PARTS = {
    "fp8 delayed": Part(
        settings=DELAYED,
        changed=Settings(algorithms=fp8(recipe={"name": "delayed", "amax_history_len": 8, "margin": 1})),
        refused=refused("changed", "made by the recipe"),
    ),
    "fp8 policy": Part(
        settings=Settings(algorithms=fp8(recipe=[BLOCK_RULE, DELAYED_RULE])),
        changed=Settings(
            algorithms=fp8(recipe=[{**BLOCK_RULE, "gemms": {"wgrad": "high_precision"}}, DELAYED_RULE])
        ),
        refused=refused("changed", "made by another policy"),
    ),
    "fp8 measured": Part(
        settings=Settings(algorithms=fp8(recipe=MEASURED)),
        changed=Settings(algorithms=fp8(recipe={**MEASURED, "error": 0.9})),
        base=Settings(algorithms=fp8(recipe=MEASURED)),
    ),
    "fp8 current": Part(
        settings=Settings(algorithms=fp8(recipe="current")),
        changed=Settings(algorithms=fp8(recipe="current", exclude=["*.1.mlp.up_proj"])),
    ),
    "fp8 with attention": Part(settings=Settings(algorithms=fp8(attention=True)), changed=DELAYED),
    "attention added to fp8": Part(settings=DELAYED, changed=Settings(algorithms=fp8(attention=True))),
    "attention of its own recipe": Part(
        settings=Settings(algorithms=fp8(recipe="current", attention=OF_ITS_OWN)),
        changed=Settings(
            algorithms=fp8(recipe="current", attention={**OF_ITS_OWN, "grad_scores": "bfloat16"})
        ),
    ),
    "guard": Part(
        settings=Settings(algorithms=fp8(), callbacks={"divergence_guard": GUARD}),
        changed=Settings(algorithms=fp8(), callbacks={"divergence_guard": {**GUARD, "finer": False}}),
        base=DELAYED,
    ),
    "compressed communication": Part(
        settings=Settings(algorithms={"compressed_communication": INT8}),
        changed=Settings(
            algorithms={"compressed_communication": {**INT8, "gradients": "e4m3", "error_feedback": False}}
        ),
        lossy=0.1,
    ),
    "hybrid sharding": Part(
        settings=Settings(algorithms={"hybrid_sharding": {"shard": 1}}),
        changed=Settings(algorithms={"hybrid_sharding": {"shard": 2}}),
        kinds=("sharded",),
    ),
    "activation checkpointing": Part(
        settings=Settings(algorithms={**fp8(), "activation_checkpointing": {}}),
        changed=Settings(algorithms={**fp8(), "activation_checkpointing": {"policy": "selective"}}),
        moves=False,
    ),
    "activation compression": Part(
        settings=Settings(algorithms={"activation_compression": {"format": "int8", "min_numel": 256}}),
        changed=Settings(algorithms={"activation_compression": {"format": "e4m3", "min_numel": 256}}),
        lossy=0.3,
    ),
    "fused head": Part(
        settings=Settings(algorithms={**fp8(), "fused_head": {"chunk_tokens": 7}}),
        changed=Settings(algorithms={**fp8(), "fused_head": {}}),
        base=DELAYED,
    ),
    "monitors and run log": Part(
        settings=Settings(algorithms=fp8(), callbacks=MONITORS, loggers={"run_log": {}}),
        changed=Settings(
            algorithms=fp8(),
            callbacks={name: {**options, "interval": 1} for name, options in MONITORS.items()},
            loggers={"run_log": {}},
        ),
        base=DELAYED,
        moves=False,
    ),
    "unit scaling": Part(
        settings=Settings(model="mus", algorithms={**UNIT, "unit_scaling": {"base_width": 16}}),
        changed=Settings(model="mus", algorithms={**UNIT, "unit_scaling": {"base_width": 8}}),
        base=Settings(model="mus", algorithms=UNIT),
        refused={
            **refused(
                "changed",
                "trained with base_width 16",
                way="as it was",
                ignore=("state/algorithms", *SCHEDULE),
            ),
            **refused(
                "added", "saved without the algorithm", sharded="param_groups.0.unit_scaling", ignore=SCHEDULE
            ),
        },
    ),
    **{name: low_bit(name) for name in ("adamw_8bit", "adamw_fp8")},
    "clipping": Part(settings=Settings(algorithms={**fp8(), **CLIP}), changed=DELAYED, base=DELAYED),
    "everything": Part(
        settings=Settings(
            algorithms={
                **fp8(attention=True),
                "activation_checkpointing": {"targets": {"*.mlp": "first-1"}},
                "activation_compression": {"format": "exact", "min_numel": 256},
                "compressed_communication": {"gradients": "int8", **WIRE},
            },
            callbacks={**MONITORS, "divergence_guard": GUARD},
            loggers={"run_log": {}},
        ),
        changed=Settings(
            algorithms={**fp8(attention=True), "activation_compression": {"format": "exact"}},
            callbacks={"divergence_guard": {**GUARD, "finer": False}},
        ),
        lossy=0.2,
    ),
}
