"""Everything registered that a checkpoint meets: as it is saved, and as it is resumed with other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

Options = Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a YAML would say."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One thing with or without state, and what resuming it with other settings must be."""

    settings: Settings
    changed: Settings
    base: Settings = Settings()
    """Of the older checkpoint that it is added to."""
    refused: str | None = None
    """The message that ends a resume with changed settings; it names the way to start afresh."""
    moves: bool = True
    """Whether a change of its settings may move what is computed; otherwise such a run goes on exactly as it was."""
    lossy: float = 1e-4
    """How far a gradient may lie from the same numerics without what rounds on the way."""
    kinds: tuple[str, ...] = ("monolithic", "sharded")


def fp8(**options: Any) -> dict[str, dict[str, Any]]:
    return {"fp8": {"recipe": {"name": "delayed", "amax_history_len": 8}, **options}}


GUARD = {"interval": 1}
WIRE = {"warmup": 0, "min_bytes": 0, "scope": "all", "block_size": 32}
INT8 = {"gradients": "int8", "second_leg": "int8", **WIRE}
CLIP = {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 0.05}}
MONITORS = {
    "mfu_monitor": {"interval": 2, "peak_flops": 1.0e12},
    "kurtosis_monitor": {"interval": 2},
    "fp8_monitor": {"interval": 2},
}
DELAYED = Settings(algorithms=fp8())
OF_ITS_OWN = {"recipe": {"name": "delayed", "amax_history_len": 8}}

PARTS = {
    "fp8 delayed": Part(
        settings=DELAYED,
        changed=Settings(algorithms=fp8(recipe={"name": "delayed", "amax_history_len": 8, "margin": 1})),
        refused="made by the recipe",
    ),
    "fp8 current": Part(
        settings=Settings(algorithms=fp8(recipe="current")),
        changed=Settings(algorithms=fp8(recipe="current", exclude=["*.1.mlp.up_proj"])),
    ),
    "fp8 with attention": Part(settings=Settings(algorithms=fp8(attention=True)), changed=DELAYED),
    "attention added to fp8": Part(
        settings=DELAYED, changed=Settings(algorithms=fp8(attention=True)), refused="FP8 attention"
    ),
    "attention of its own recipe": Part(
        settings=Settings(algorithms=fp8(recipe="current", attention=OF_ITS_OWN)),
        changed=Settings(
            algorithms=fp8(recipe="current", attention={**OF_ITS_OWN, "grad_scores": "bfloat16"})
        ),
    ),
    "guard": Part(
        settings=Settings(algorithms=fp8(), callbacks={"divergence_guard": GUARD}),
        changed=Settings(algorithms=fp8(), callbacks={"divergence_guard": {**GUARD, "finer": None}}),
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
            callbacks={"divergence_guard": {**GUARD, "finer": None}},
        ),
        lossy=0.2,
    ),
}
