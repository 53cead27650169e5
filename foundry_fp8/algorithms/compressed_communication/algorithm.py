"""The Composer algorithm ``compressed_communication``."""

from __future__ import annotations

import logging
from typing import Any

from composer.core import Event, State
from composer.loggers import Logger

from foundry_fp8.algorithms.method import Method
from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.apply import apply_compressed_communication, wrapper_of
from foundry_fp8.distributed.compression.config import KEY, CompressionConfig
from foundry_fp8.distributed.compression.runtime import Compression
from foundry_fp8.distributed.mesh import alone
from foundry_fp8.distributed.replicas import check_replicas

__all__ = ["CompressedCommunication"]

log = logging.getLogger(__name__)


class CompressedCommunication(Method):
    """Compresses what DDP and FSDP send.

    Composer wraps with FSDP before ``Event.BEFORE_LOAD`` and with DDP after ``Event.AFTER_LOAD``, so this attaches to
    FSDP on ``AFTER_LOAD`` and to DDP on ``FIT_START``, once, also if ``fit`` runs again. ``BATCH_START`` ends the
    warm-up, ``AFTER_TRAIN_BATCH`` checks once that gradients really came through, before the first optimizer step, and
    ``BATCH_END`` logs, the first also compares replicas. With one rank it warns and does nothing.

    Its state is what ``adapt`` decided. A checkpoint makes it forget what quantising lost, in the run that goes on as in the one that
    resumes, so that both are the same run, with any number of ranks
    (:meth:`~foundry_fp8.distributed.compression.runtime.Compression.forget`).

    Logs, every batch: ``comm/wire_bytes`` and ``comm/uncompressed_bytes`` (this rank, this batch),
    ``comm/compression_ratio``, ``comm/collectives``, ``comm/quantize_seconds``, ``comm/collective_seconds``, and on
    sampled batches ``comm/quantization_error`` (relative, L2).

    Args:
        **options: The fields of :class:`~foundry_fp8.distributed.compression.config.CompressionConfig`.

    Attributes:
        compression: What is attached.
    """

    config_class = CompressionConfig

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.compression = Compression(self.config)
        self._attached = False
        self._first = True
        self._last: dict[str, float] = {}

    def match(self, event: Event, state: State) -> bool:
        """Run where the docstring of the class says."""
        return event in (
            Event.AFTER_LOAD,
            Event.FIT_START,
            Event.BATCH_START,
            Event.AFTER_TRAIN_BATCH,
            Event.BATCH_END,
        )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Attach, switch, check or log."""
        if event in (Event.AFTER_LOAD, Event.FIT_START):
            self._attach(event, state)
        elif alone():
            return
        elif event == Event.BATCH_START:
            self.compression.start_batch(int(state.timestamp.batch))
        elif event == Event.AFTER_TRAIN_BATCH:
            if self._first and self.config.gradients != "none" and not self.compression.switch.reductions:
                raise ConfigError(
                    f"{KEY}: the first batch sent no gradient through the hook. Composer's ddp_sync_strategy: forced_sync "
                    "reduces outside of DDP; use single_auto_sync or multi_auto_sync."
                )
        else:
            if self._first and self.config.check_replicas:
                check_replicas(state.model, KEY)
            self._first = False
            self._log(logger)

    def _attach(self, event: Event, state: State) -> None:
        if self._attached or (event == Event.AFTER_LOAD and wrapper_of(state.model) is None):
            return
        self.compression = apply_compressed_communication(state.model, compression=self.compression)
        self._attached = True
        log.info("%s", self.compression.summary())

    def _log(self, logger: Logger) -> None:
        traffic = self.compression.traffic
        traffic.settle()
        now = {
            "wire_bytes": float(traffic.wire_bytes),
            "uncompressed_bytes": float(traffic.logical),
            "collectives": float(sum(traffic.calls.values())),
            "quantize_seconds": traffic.seconds["quantize"],
            "collective_seconds": traffic.seconds["collective"],
        }
        step = {key: value - self._last.get(key, 0.0) for key, value in now.items()}
        self._last = now
        metrics = {f"comm/{key}": value for key, value in step.items()}
        if step["wire_bytes"]:
            metrics["comm/compression_ratio"] = step["uncompressed_bytes"] / step["wire_bytes"]
        if traffic.squared_norm:
            metrics["comm/quantization_error"] = (traffic.squared_error / traffic.squared_norm) ** 0.5
            traffic.squared_error = traffic.squared_norm = 0.0
        logger.log_metrics(metrics)

    def state_dict(self) -> dict[str, Any]:
        """Composer's own entry, and how gradients travel; forgets what quantising lost, since a checkpoint is being taken."""
        self.compression.forget()
        return {**super().state_dict(), "way": self.compression.way}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """How gradients travel; a checkpoint of version 0.1.0 with residuals is named."""
        if state.get("residuals"):
            log.warning(
                "%s: the error-feedback residuals of this checkpoint are not used; they start at zero.", KEY
            )
        self.compression.resume(state.get("way"))
