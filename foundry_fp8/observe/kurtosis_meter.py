"""Kurtosis of a run's activations, step by step, in any loop."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.config import Config, ConfigError, Names, Positive, Text, from_mapping, not_empty, one_of
from foundry_fp8.layers.dtensor import whole
from foundry_fp8.model_structure.blocks import block_label
from foundry_fp8.observe import kurtosis
from foundry_fp8.observe.kurtosis_taps import ROLES, Tap, find_taps

__all__ = ["KurtosisConfig", "KurtosisMeter"]

log = logging.getLogger(__name__)

KEY = "callbacks.kurtosis_monitor"

Where = tuple[str, int | None]
"""Role and layer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KurtosisConfig(Config):
    """The options of the meter in every trainer."""

    key = KEY
    deprecated: ClassVar = {"preset": lambda name: {"roles": ()} if name == "none" else {}}

    interval: Positive = 10
    """Batches between two measurements. The model has no hooks in the batches between."""
    roles: Sequence[Annotated[str, one_of(*ROLES)]] = ROLES
    """Which tensors to watch, where MPT's, Llama's or FOG's names say where they are; of other models outputs of blocks and inputs of
    linears."""
    tensors: Mapping[Text, Annotated[Names, not_empty]] = dataclasses.field(default_factory=dict)
    """More tensors, by a name of yours: globs on module names, with ``@input`` behind a glob for the module's input."""
    gradients: bool = False
    """Also the gradients of the tensors that are module outputs, under ``<role>_grad``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.roles and not self.tensors:
            raise ConfigError(f"{KEY}.roles: () without `tensors` watches nothing.")


class KurtosisMeter:
    """Measures kurtosis every ``interval`` steps, in float32, on this rank's part of the batch.

    Call :meth:`begin` before a step's first forward and :meth:`end` after it. Hooks are put in for one step and taken away after
    it. All results of a step come to the host in one copy.

    Args:
        model: As it is trained, wrapped or not.
        guarded: Wraps each hook (:meth:`foundry_fp8.callbacks.base.Monitor.guarded`).
        **options: The fields of :class:`KurtosisConfig`.

    Raises:
        ConfigError: The options ask for what is not there.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        guarded: Callable[[Callable[..., None]], Callable[..., None]] = lambda hook: hook,
        **options: Any,
    ) -> None:
        self.config: KurtosisConfig = from_mapping(KurtosisConfig, options, KEY)
        self._guarded = guarded
        taps = find_taps(model, tensors=self.config.tensors, key=KEY)
        wanted = {*self.config.roles, *self.config.tensors}
        others = tuple(self.config.roles) == ROLES  # of a model of no preset
        self._taps = [tap for tap in taps if tap.role in wanted or (others and tap.role not in ROLES)]
        self._members = Counter((tap.role, tap.layer) for tap in self._taps if tap.grouped)
        self._handles: list[Any] = []
        self._pending: dict[Where, list[tuple[kurtosis.Tokens | None, tuple[Tensor, Tensor, int]]]] = {}
        self._results: dict[tuple[str, str, int | None], list[Tensor]] = defaultdict(list)
        self._said = False
        self._model = model
        self._mask: Tensor | None = None

    def begin(self, finished: int) -> None:
        """Put the hooks in if this step is due; ``finished``: the steps before it."""
        if (finished + 1) % self.config.interval == 0:
            self.detach()
            hook = self._model.register_forward_pre_hook(self._guarded(self._take_mask), with_kwargs=True)
            self._handles.append(hook)
            for tap in self._taps:
                self._attach(tap)

    def end(self) -> tuple[dict[str, float], dict[str, float]]:
        """Take the hooks away; what to log, and its details. Empty if nothing was measured."""
        if not self._handles:
            return {}, {}
        self.detach()
        results, self._results = self._results, defaultdict(list)
        self._pending.clear()
        if not results:
            if not self._said:
                log.warning("%s: no tensor was seen. torch.compile leaves out hooks that come later.", KEY)
                self._said = True
            return {}, {}
        values = torch.stack([torch.stack(microbatches).mean() for microbatches in results.values()]).tolist()
        return self._metrics(dict(zip(results, values, strict=True)))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _metrics(
        self, values: dict[tuple[str, str, int | None], float]
    ) -> tuple[dict[str, float], dict[str, float]]:
        details: dict[str, float] = {}
        by_role: dict[tuple[str, str], list[float]] = defaultdict(list)
        for (variant, role, layer), value in values.items():
            by_role[variant, role].append(value)
            details[f"kurtosis_{variant}/{role}/{block_label(layer)}"] = value
        details |= {
            f"kurtosis_{v}/{role}/mean": sum(found) / len(found) for (v, role), found in by_role.items()
        }
        metrics = {
            f"kurtosis_token/{role}/worst": math.nan if any(map(math.isnan, found)) else max(found)
            for (variant, role), found in by_role.items()
            if variant == "token"
        }
        return metrics, details

    def _take_mask(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask = (args[0] if args and isinstance(args[0], Mapping) else kwargs).get("attention_mask")
        self._mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _attach(self, tap: Tap) -> None:
        def forward(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if inside_backward():  # activation checkpointing runs the same forward again
                return
            tensor = tap.take((*args, *kwargs.values()) if tap.side == "input" else output)
            if tensor is None:
                return
            self._see(tap, tap.role, tensor)
            if self.config.gradients and tap.side == "output" and tensor.requires_grad:
                tensor.register_hook(self._guarded(lambda grad: self._see(tap, f"{tap.role}_grad", grad)))

        self._handles.append(tap.module.register_forward_hook(self._guarded(forward), with_kwargs=True))

    @torch.no_grad()
    def _see(self, tap: Tap, role: str, tensor: Tensor) -> None:
        tensor = whole(tensor)
        leading = 1 if tensor.dim() == 2 else 2
        if self._mask is not None and leading == 2 and tensor.shape[:2] == self._mask.shape:
            tensor = tensor.clone()  # tokens of zeros are left out
            tensor[~self._mask] = 0
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
