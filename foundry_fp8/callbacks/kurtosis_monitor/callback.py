"""The Composer callback ``kurtosis_monitor``."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from composer.core import State
from composer.loggers import Logger
from torch import Tensor, nn

from foundry_fp8.callbacks.base import Monitor, model_of
from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.config import Config, ConfigError, Names, Positive, Text, not_empty, one_of
from foundry_fp8.model_structure.blocks import block_label
from foundry_fp8.observe import kurtosis
from foundry_fp8.observe.kurtosis_taps import PRESETS, ROLES, Tap, find_taps

__all__ = ["KurtosisMonitor", "KurtosisMonitorConfig"]

log = logging.getLogger(__name__)

KEY = "callbacks.kurtosis_monitor"

Where = tuple[str, int | None]
"""Role and layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KurtosisMonitorConfig(Config):
    """The YAML under ``callbacks.kurtosis_monitor``."""

    key = KEY

    interval: Positive = 10
    """Batches between two measurements. The model has no hooks in the batches between."""
    preset: Annotated[str, one_of("auto", *PRESETS, "none")] = "auto"
    """Where the tensors are: ``mpt``, ``llama``, ``fog``, ``auto`` (whichever fits), or ``none``."""
    roles: Sequence[Annotated[str, one_of(*ROLES)]] = ROLES
    """Which tensors of the preset to watch."""
    tensors: Mapping[Text, Annotated[Names, not_empty]] = dataclasses.field(default_factory=dict)
    """More tensors, by a name of yours: globs on module names, with ``@input`` behind a glob for the module's input."""
    gradients: bool = False
    """Also the gradients of the tensors that are module outputs, under ``<role>_grad``."""
    details: bool = False
    """Send to every logger what only the run log holds otherwise: means, every layer, and the variant per sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, nothing in (("preset", "none"), ("roles", ())):
            if getattr(self, option) == nothing and not self.tensors:
                raise ConfigError(f"{KEY}.{option}: {nothing!r} without `tensors` watches nothing.")


class KurtosisMonitor(Monitor):
    """Measures kurtosis every ``interval`` batches, in float32, on this rank's part of the batch.

    Hooks are put in for one batch and taken away after it. All results of a batch come to the host in one copy.

    Args:
        **options: The fields of :class:`KurtosisMonitorConfig`.
    """

    key = "kurtosis_monitor"

    def __init__(self, **options: Any) -> None:
        super().__init__(KurtosisMonitorConfig, options)
        self._handles: list[Any] = []
        self._taps: list[Tap] = []
        self._pending: dict[Where, list[tuple[kurtosis.Tokens | None, tuple[Tensor, Tensor, int]]]] = {}
        self._members: Counter[Where] = Counter()
        self._results: dict[tuple[str, str, int | None], list[Tensor]] = defaultdict(list)
        self._said = False

    def find(self, model: nn.Module) -> list[Tap]:
        """The taps that the config asks for. Raises :class:`ConfigError` where it asks for what is not there."""
        config = self.config
        taps = find_taps(model, preset=config.preset, tensors=config.tensors, key=KEY)
        wanted = {*config.roles, *config.tensors}
        return [tap for tap in taps if tap.role in wanted]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def init(self, state: State, logger: Logger) -> None:
        """Check the patterns before anything is spent."""
        self.find(model_of(state))

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the modules as they are now: algorithms may have replaced some since."""
        self._taps = self.find(model_of(state))
        self._members = Counter((tap.role, tap.layer) for tap in self._taps if tap.grouped)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Put the hooks in if this batch is due."""
        if (state.timestamp.batch.value + 1) % self.config.interval == 0:
            self.detach()
            for tap in self._taps:
                self._attach(tap)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Take the hooks away and log."""
        if not self._handles:
            return
        self.detach()
        results, self._results = self._results, defaultdict(list)
        self._pending.clear()
        if not results:
            if not self._said:
                log.warning("%s: no tensor was seen. torch.compile leaves out hooks that come later.", KEY)
                self._said = True
            return
        values = torch.stack([torch.stack(microbatches).mean() for microbatches in results.values()]).tolist()
        self.log(logger, *self._metrics(dict(zip(results, values, strict=True))))

    def _metrics(
        self, values: dict[tuple[str, str, int | None], float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        details: dict[str, float] = {}
        by_role: dict[tuple[str, str], list[float]] = defaultdict(list)
        for (variant, role, layer), value in values.items():
            name = block_label(layer)
            by_role[variant, role].append(value)
            details[f"kurtosis_{variant}/{role}/{name}"] = value
        details |= {
            f"kurtosis_{v}/{role}/mean": sum(found) / len(found) for (v, role), found in by_role.items()
        }
        metrics = {
            f"kurtosis_token/{role}/worst": math.nan if any(map(math.isnan, found)) else max(found)
            for (variant, role), found in by_role.items()
            if variant == "token"
        }
        return metrics, details

    def _attach(self, tap: Tap) -> None:
        def forward(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if inside_backward():  # activation checkpointing runs the same forward again
                return
            tensor = tap.take((*args, *kwargs.values()) if tap.side == "input" else output)
            if tensor is None:
                return
            self._see(tap, tap.role, tensor)
            if self.config.gradients and tap.side == "output" and tensor.requires_grad:
                tensor.register_hook(self.guarded(lambda grad: self._see(tap, f"{tap.role}_grad", grad)))

        self._handles.append(tap.module.register_forward_hook(self.guarded(forward), with_kwargs=True))

    @torch.no_grad()
    def _see(self, tap: Tap, role: str, tensor: Tensor) -> None:
        leading = 1 if tensor.dim() == 2 else 2
        if tensor.numel() == 0:  # an expert that no token chose
            return
        pending = self._pending.setdefault((role, tap.layer), [])
        # Features that are one tensor are of the same tokens: those of the first.
        tokens = pending[0][0] if pending else kurtosis.sample_tokens(tensor, leading)
        pending.append((tokens, kurtosis.row_sums(tensor, leading, tokens)))
        if tap.grouped and len(pending) < self._members[tap.role, tap.layer]:
            return
        del self._pending[role, tap.layer]
        s2, s4, features = (sum(parts) for parts in zip(*(sums for _, sums in pending), strict=True))
        weight = None if tokens is None else tokens.weight
        per_token = kurtosis.kurtosis_per_token(s2, s4, features, weight)  # type: ignore[arg-type]
        self._results["token", role, tap.layer].append(per_token)
        if leading == 2:
            per_sample = kurtosis.kurtosis_per_sample(s2, s4, features, weight)  # type: ignore[arg-type]
            self._results["sample", role, tap.layer].append(per_sample)
