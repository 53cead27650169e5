"""A training YAML as the run that LLM Foundry would start: the configurations that training builds, and what it is beside them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from foundry_fp8.cli.hardware import PER_NODE
from foundry_fp8.cli.hf_folder import FOLDER_MODEL, PUBLISHED_MODEL
from foundry_fp8.config import ConfigError, Positive, accept, check_choice, first_line

if TYPE_CHECKING:
    from foundry_fp8.run.settings import Run

__all__ = ["fsdp_version", "has_te_layers", "precision_of", "run_of"]


def run_of(config: Mapping[str, Any], ranks: int = PER_NODE, sharding: str | None = None) -> Run:
    """The run of a YAML on so many ranks, before its model is built: copies of it are not counted yet.

    Args:
        config: The YAML, resolved.
        ranks: Of the whole run.
        sharding: Replaces ``fsdp_config.sharding_strategy``; ``NO_SHARD`` is DDP.

    Raises:
        ConfigError: An option that is unknown or has a value that it cannot have.
    """
    from foundry_fp8.run.settings import Run, parse_algorithms  # slow to import: transformers
    from foundry_fp8.surgery.timing import length_of

    if sharding is not None:
        asked = {**(config.get("fsdp_config") or {}), "sharding_strategy": sharding}
        if fsdp_version() == 2:
            asked["reshard_after_forward"] = sharding == "FULL_SHARD"
        config = {**config, "fsdp_config": None if sharding == "NO_SHARD" else asked}
    model = config.get("model") or {}
    loss = model.get("loss_fn", "fused_crossentropy")
    degree = (config.get("tp_config") or {}).get("tensor_parallel_degree", 1)
    accept(Positive, degree, "tp_config.tensor_parallel_degree")
    return Run(
        name=config.get("run_name") or os.environ.get("RUN_NAME"),
        precision=precision_of(config),
        ranks=ranks,
        length=length_of(config.get("max_duration")),
        fsdp=_fsdp(config, ranks),
        tensor_parallel=degree if degree != 1 else 0,
        compiled=config.get("compile_config") is not None,
        train_metrics=model.get("use_train_metrics", True) is not False,
        flash_loss=model.get("name") == "mpt_causal_lm" and loss == "fused_crossentropy",
        te_layers=has_te_layers(config),
        keeps_codes=model.get("name") == PUBLISHED_MODEL and model.get("peft_config") is not None,
        **parse_algorithms(config.get("algorithms")),
    )


def precision_of(config: Mapping[str, Any]) -> str:
    """In Composer's words."""
    return str(config.get("precision", "amp_bf16")).lower()


def has_te_layers(config: Mapping[str, Any]) -> bool:
    """Whether the model's configuration names Transformer Engine's layers."""
    model = config.get("model") or {}
    layer = model.get("fc_type")
    layer = layer.get("name") if isinstance(layer, Mapping) else layer
    return layer == "te" or (model.get("ffn_config") or {}).get("ffn_type") == "te_ln_mlp"


def fsdp_version() -> Literal[1, 2]:
    """Which FSDP Composer makes of an ``fsdp_config``."""
    return 2 if os.environ.get("FSDP_VERSION", "1") == "2" else 1


def _fsdp(config: Mapping[str, Any], ranks: int) -> Any:
    section = config.get("fsdp_config")
    if section is None or ranks == 1:  # LLM Foundry takes it off on one device
        return None
    model = config.get("model") or {}
    if model.get("name") == FOLDER_MODEL:  # as accelerate has it: gradients travel in the parameters' type
        degrees = {"data_parallel_replicate_degree": None, "data_parallel_shard_degree": -1}
        return SimpleNamespace(**section, **degrees, mixed_precision="PURE", load_monolith_rank0_only=False)
    from composer.utils.parallelism import FSDP2Config, FSDPConfig

    from foundry_fp8.distributed.sharding import FSDP1_STRATEGIES

    mixed = model.get("init_device") == "mixed"  # rank 0 alone loads, says LLM Foundry
    given = {"load_monolith_rank0_only": mixed, **section}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if fsdp_version() == 2:
                return FSDP2Config.from_compatible_attrs(given)
            made = FSDPConfig(**given)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"fsdp_config: {first_line(error)}.") from error
    check_choice(
        "fsdp_config.sharding_strategy", str(made.sharding_strategy).upper(), tuple(FSDP1_STRATEGIES)
    )
    return made
