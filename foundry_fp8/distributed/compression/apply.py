"""``apply_compressed_communication``: compress what a wrapped model sends. Needs torch alone."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.config import ConfigError, from_mapping
from foundry_fp8.distributed.attendance import agree
from foundry_fp8.distributed.compression.config import KEY, CompressionConfig
from foundry_fp8.distributed.compression.ddp import attach_ddp
from foundry_fp8.distributed.compression.fsdp1 import attach_fsdp1
from foundry_fp8.distributed.compression.fsdp2 import attach_fsdp2
from foundry_fp8.distributed.compression.runtime import Compression
from foundry_fp8.distributed.compression.sequence_shards import attach_sequence_shards
from foundry_fp8.distributed.mesh import alone
from foundry_fp8.distributed.replicas import check_replicas
from foundry_fp8.model_structure.applied import MARK, applied, remember

__all__ = ["apply_compressed_communication", "compression_of", "wrapper_of"]

log = logging.getLogger(__name__)


def wrapper_of(model: nn.Module) -> str | None:
    """``ddp``, ``fsdp1``, ``fsdp2``, or ``None`` for a model that nothing has wrapped (yet)."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    kinds = {
        "fsdp1" if isinstance(module, FullyShardedDataParallel) else "fsdp2"
        for module in model.modules()
        if isinstance(module, FullyShardedDataParallel | FSDPModule)
    }
    if len(kinds) > 1:
        raise ConfigError(f"{KEY}: the model mixes FSDP1 and FSDP2 modules, which is not supported.")
    return next(iter(kinds), None)


def compression_of(model: nn.Module) -> Compression | None:
    """What :func:`apply_compressed_communication` attached to ``model``, if it did."""
    return vars(model).get(MARK, {}).get(KEY, (None, None))[1]  # type: ignore[no-any-return]


def apply_compressed_communication(
    model: nn.Module, *, compression: Compression | None = None, **options: Any
) -> Compression:
    """Compress the gradients (and parameters) that ``model`` sends, from its next step on.

    Applying the same twice to one model changes nothing, and with one rank nothing is sent: a warning says so. Call
    :meth:`Compression.start_batch` before each batch if ``warmup`` or error sampling is wanted, and :meth:`Compression.forget` where a
    checkpoint is taken; the Algorithm does both.

    Args:
        model: Wrapped by DDP, FSDP1 or FSDP2 (1-D or 2-D mesh); modified in place. Parameters, their names and the
            model's state dict stay as they are.
        compression: What to attach, where it was made before.
        **options: The fields of :class:`CompressionConfig`.

    Returns:
        What is attached: report, traffic, residuals.

    Raises:
        ConfigError: Options that are not valid, that this wrapper cannot do, or other than those applied before.
        RuntimeError: Ranks that disagree, replicas that differ, or a backend without all-to-all.
    """
    if compression is None:
        compression = Compression(from_mapping(CompressionConfig, options, KEY))
    if (attached := applied(model, compression.config, "compressed")) is not None:
        return attached  # type: ignore[no-any-return]
    if alone():
        log.warning("%s: this job has one rank, so nothing is sent and nothing is compressed.", KEY)
        return compression
    config = compression.config
    kind = wrapper_of(model)
    agree(KEY, json.dumps({"wrapper": kind, **dataclasses.asdict(config)}, sort_keys=True))
    wraps = {config.gradients, config.parameters} != {"none"}
    if wraps and kind is None:
        raise ConfigError(
            f"{KEY}: the model is wrapped by neither DDP nor FSDP. Wrap it first (torch's composable replicate() and "
            "DeepSpeed engines are not supported), or set gradients: none for activations alone."
        )
    if config.activations != "none":
        attach_sequence_shards(model, compression)
    if wraps and isinstance(model, DistributedDataParallel):
        attach_ddp(model, compression)
    elif wraps:
        (attach_fsdp1 if kind == "fsdp1" else attach_fsdp2)(model, compression)
    compression.device = next(model.parameters()).device
    remember(model, config, compression)
    if config.check_replicas:
        check_replicas(model, KEY)
    return compression
