"""FP8 training for MosaicML Composer and LLM Foundry.

``import foundry_fp8`` needs torch alone and loads nothing else: public names are imported when they are first used, with
torch alone but for ``apply_unit_scaling``, whose models are transformers'. Composer and LLM Foundry are imported only by what
plugs into them (``foundry_fp8.algorithms``, ``.callbacks``, ``.models``, ``.data``, ``.cli``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
    from foundry_fp8.activations.compression.apply import apply_activation_compression
    from foundry_fp8.activations.fused_head.apply import apply_fused_head
    from foundry_fp8.config import ConfigError
    from foundry_fp8.distributed.compression.apply import apply_compressed_communication
    from foundry_fp8.distributed.hybrid_sharding.apply import hybrid_degrees, hybrid_mesh
    from foundry_fp8.export.apply import export_fp8
    from foundry_fp8.export.load import load_fp8
    from foundry_fp8.export.rollout import rollout_mismatch, served_weights
    from foundry_fp8.layers.state import FP8State
    from foundry_fp8.models.mus.apply import apply_unit_scaling
    from foundry_fp8.numerics.recipes import (
        BlockScaling,
        CurrentScaling,
        DelayedScaling,
        MXFP8Scaling,
        NVFP4Scaling,
        UnitScaling,
    )
    from foundry_fp8.observe.guard.guard import DivergenceGuard
    from foundry_fp8.observe.precision_probe import PrecisionGap, precision_gap
    from foundry_fp8.planning.memory.planner import apply_plan, plan_memory
    from foundry_fp8.run.fp8_run import FP8Run
    from foundry_fp8.run.training_state import training_state
    from foundry_fp8.surgery.apply import apply_fp8
    from foundry_fp8.surgery.report import SurgeryReport

__version__ = "0.2.0.dev0"

_HOMES = {
    "BlockScaling": "numerics.recipes",
    "ConfigError": "config",
    "CurrentScaling": "numerics.recipes",
    "DelayedScaling": "numerics.recipes",
    "DivergenceGuard": "observe.guard.guard",
    "FP8Run": "run.fp8_run",
    "FP8State": "layers.state",
    "MXFP8Scaling": "numerics.recipes",
    "NVFP4Scaling": "numerics.recipes",
    "PrecisionGap": "observe.precision_probe",
    "SurgeryReport": "surgery.report",
    "UnitScaling": "numerics.recipes",
    "apply_activation_checkpointing": "activations.checkpointing.apply",
    "apply_activation_compression": "activations.compression.apply",
    "apply_compressed_communication": "distributed.compression.apply",
    "apply_fp8": "surgery.apply",
    "apply_fused_head": "activations.fused_head.apply",
    "apply_plan": "planning.memory.planner",
    "apply_unit_scaling": "models.mus.apply",
    "export_fp8": "export.apply",
    "hybrid_degrees": "distributed.hybrid_sharding.apply",
    "hybrid_mesh": "distributed.hybrid_sharding.apply",
    "load_fp8": "export.load",
    "plan_memory": "planning.memory.planner",
    "precision_gap": "observe.precision_probe",
    "rollout_mismatch": "export.rollout",
    "served_weights": "export.rollout",
    "training_state": "run.training_state",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"foundry_fp8.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
