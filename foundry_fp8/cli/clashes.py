"""Settings of a training YAML that do not go together: the table that ``doctor`` checks and the site's page of limits shows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CLASHES", "Clash", "clashes_of"]

Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Clash:
    """Two settings that do not go together, or one that is missing."""

    settings: str
    """The keys, as the page of limits names them."""
    text: str
    """What is wrong and what to do."""
    when: Callable[[Settings], bool]
    error: bool = True


def clashes_of(config: Settings) -> list[Clash]:
    """The clashes that ``config``, a training YAML, has."""
    return [clash for clash in CLASHES if clash.when(config)]


def _algorithms(config: Settings) -> Settings:
    return config.get("algorithms") or {}


def _fsdp(config: Settings) -> Settings:
    return config.get("fsdp_config") or {}


def _te_layers(config: Settings) -> bool:
    model = config["model"]
    layer = model.get("fc_type")
    name = layer.get("name") if isinstance(layer, Mapping) else layer
    return name == "te" or (model.get("ffn_config") or {}).get("ffn_type") == "te_ln_mlp"


def _tensor_parallel(config: Settings) -> bool:
    tensor = config.get("tp_config") or (config.get("parallelism_config") or {}).get("tp")
    return tensor is not None and "fp8" in _algorithms(config)


def _mpt_fused_loss(config: Settings) -> bool:
    model = config["model"]
    fused = model.get("loss_fn", "fused_crossentropy") == "fused_crossentropy"
    return model.get("name") == "mpt_causal_lm" and fused


CLASHES = (
    Clash(
        "no `algorithms.fp8`",
        "no algorithms.fp8: the run stays in high precision. `foundry-fp8 init` adds it",
        lambda c: "fp8" not in _algorithms(c),
        error=False,
    ),
    Clash(
        "`precision: amp_fp8`",
        "precision: amp_fp8 is Composer's own FP8; write amp_bf16",
        lambda c: c.get("precision") == "amp_fp8",
    ),
    Clash(
        "`precision: fp32`, `algorithms.fp8`",
        "precision: fp32, so what stays out of FP8 runs in float32; amp_bf16 is usual",
        lambda c: c.get("precision", "amp_bf16") == "fp32" and "fp8" in _algorithms(c),
        error=False,
    ),
    Clash(
        "`model.fc_type: te`, `ffn_type: te_ln_mlp`",
        "the model's config asks for Transformer Engine's layers; this package converts plain linears",
        _te_layers,
    ),
    Clash(
        "`tp_config`, `algorithms.fp8`",
        "FP8 layers do not run under tensor parallelism",
        _tensor_parallel,
    ),
    Clash(
        "`fsdp_config`, `fp8.frozen_weights: fp8`",
        "algorithms.fp8.frozen_weights: fp8 does not run under FSDP; remove fsdp_config, or the option",
        lambda c: bool(_fsdp(c)) and (_algorithms(c).get("fp8") or {}).get("frozen_weights") == "fp8",
    ),
    Clash(
        "`compile_config`, `activation_compression`",
        "activation_compression does not run under torch.compile",
        lambda c: c.get("compile_config") is not None and "activation_compression" in _algorithms(c),
    ),
    Clash(
        "`fused_head`, `model.use_train_metrics`",
        "fused_head: train metrics read logits, which it does not make; set model.use_train_metrics: false",
        lambda c: "fused_head" in _algorithms(c) and c["model"].get("use_train_metrics", True) is not False,
    ),
    Clash(
        "`fused_head`, `loss_fn: fused_crossentropy`",
        "fused_head takes the place of model.loss_fn: fused_crossentropy; set torch_crossentropy",
        lambda c: "fused_head" in _algorithms(c) and _mpt_fused_loss(c),
    ),
    Clash(
        "`fsdp_config.activation_checkpointing`, `algorithms.activation_checkpointing`",
        "fsdp_config.activation_checkpointing and algorithms.activation_checkpointing: the algorithm says what is wrapped",
        lambda c: bool(_fsdp(c).get("activation_checkpointing")) and "activation_checkpointing" in _algorithms(c),
        error=False,
    ),
    Clash(
        "no `run_name`",
        "run_name is blank: RUN_NAME has to be in the environment, or the name is random",
        lambda c: not c.get("run_name") and not os.environ.get("RUN_NAME"),
        error=False,
    ),
)  # fmt: skip
