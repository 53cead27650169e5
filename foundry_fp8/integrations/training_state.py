"""``training_state``: all that a resumed run needs beside the model, the optimizer and the data, as one ``Stateful``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.apply import compression_of
from foundry_fp8.distributed.compression.runtime import Compression
from foundry_fp8.layers.state import FP8State
from foundry_fp8.observe.guard.guard import DivergenceGuard
from foundry_fp8.planning.memory.planner import plan_of
from foundry_fp8.surgery.attention import FP8AttentionState

__all__ = ["TrainingState", "training_state"]

log = logging.getLogger(__name__)

PARTS = {
    "fp8": "the FP8 state: amax histories begin empty",
    "attention": "FP8 attention's state: amax histories begin empty",
    "guard": "the guard: its counters begin at zero, and layers that it had demoted run FP8",
}
"""What a state consists of, and what is so where a checkpoint has no such part."""


class TrainingState:
    """What :func:`training_state` gives: ``state_dict`` and ``load_state_dict``, as ``torch.distributed.checkpoint``'s ``Stateful``.

    Args:
        model: Converted, wrapped or not.
        guard: The run's guard.
    """

    def __init__(self, model: nn.Module, guard: DivergenceGuard | None = None) -> None:
        self.model = model
        self.guard = guard
        if FP8State.of(model) is None:
            raise ConfigError(
                "training_state: the model is not converted, so it has no FP8 state. Call apply_fp8 first."
            )

    def state_dict(self) -> dict[str, Any]:
        """Tensors of fixed shape, numbers, strings and mappings: loads with ``weights_only=True``.

        Every rank calls it, where a checkpoint is taken: delayed scaling finishes its pass, and compressed communication forgets
        its error feedback, as a run that resumes here does.

        Returns:
            ``{"state": (parts,)}``. One value in a tuple, which ``torch.distributed.checkpoint`` writes and reads whole: a checkpoint
            that was saved with another recipe or guard can be read, and what does not fit is named.
        """
        for compression in self._compressions():
            compression.forget()
        self.finish_pass()
        return self.collected()

    def finish_pass(self) -> None:
        """Finish the running pass of delayed scaling: a collective. Twice is as good as once."""
        for part in self._parts().values():
            if isinstance(part, FP8State | FP8AttentionState):
                part.update()

    def collected(self) -> dict[str, Any]:
        """:meth:`state_dict` without what every rank does: for the one that writes, after :meth:`finish_pass` on all."""
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        ways = [compression.way for compression in self._compressions()]
        return {"state": ({**parts, "plan": plan_of(self.model), "ways": ways},)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave. What the checkpoint lacks starts afresh, with a warning that names it.

        Raises:
            RuntimeError: It is of another recipe or of other layers, or no such state.
        """
        try:
            (saved,) = state["state"]
        except (KeyError, TypeError, ValueError) as error:
            raise RuntimeError("this is no state of foundry_fp8.training_state") from error
        parts = self._parts()
        self.starts_afresh({name for name in parts if name not in saved})
        if "guard" in saved and self.guard is None:
            log.warning(
                "The checkpoint holds a guard's state and this run has no guard: layers that it had demoted run FP8 again."
            )
        for name, part in parts.items():  # the guard last: it sets what layers run
            if name in saved:
                part.load_state_dict(saved[name])
        for compression, way in zip(self._compressions(), saved.get("ways", []), strict=False):
            compression.resume(way)
        plan = plan_of(self.model)
        if saved.get("plan") != plan:
            log.warning(
                "The checkpoint's memory plan is %s, this run's %s: gradients may differ in the order of their sums.",
                saved.get("plan"),
                plan,
            )

    def starts_afresh(self, missing: set[str] | None = None) -> None:
        """Say what a resumed run begins without: ``missing`` of its parts, by default all."""
        for name in self._parts() if missing is None else sorted(missing):
            log.warning("The checkpoint has no state of foundry_fp8 for %s.", PARTS[name])
            if name == "fp8":
                found = FP8State.of(self.model)
                assert found is not None
                found.answered = True

    def _parts(self) -> dict[str, Any]:
        found = {
            "fp8": FP8State.of(self.model),
            "attention": FP8AttentionState.of(self.model),
            "guard": self.guard,
        }
        return {name: part for name, part in found.items() if part is not None}

    def _compressions(self) -> list[Compression]:
        found = (compression_of(module) for module in self.model.modules())
        return [compression for compression in found if compression is not None]


def training_state(model: nn.Module, *, guard: DivergenceGuard | None = None) -> TrainingState:
    """All that a resumed run needs beside the model, the optimizer and the data.

    Save it where the model is saved and load it where the model is loaded, on every rank; the run then goes on bit for bit.

    Args:
        model: Converted by :func:`~foundry_fp8.apply_fp8`; as it is trained (wrapped by DDP or FSDP).
        guard: The run's :class:`~foundry_fp8.DivergenceGuard`, whose demotions a resumed run keeps.

    Raises:
        ConfigError: The model is not converted.

    Example:
        >>> state = foundry_fp8.training_state(model, guard=guard)
        >>> torch.save({"model": model.state_dict(), "fp8": state.state_dict()}, path)
        >>> state.load_state_dict(torch.load(path, weights_only=True)["fp8"])
    """
    return TrainingState(model, guard)
