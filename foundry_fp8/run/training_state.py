"""What a resumed run needs beside the model, the optimizer and the data: one form in every trainer's checkpoints."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.apply import compression_of
from foundry_fp8.distributed.compression.runtime import Compression
from foundry_fp8.layers.delayed_scaling import slots_of, states_of
from foundry_fp8.layers.model_state import ModelState
from foundry_fp8.layers.module_scales import FRESH_STATE
from foundry_fp8.layers.state import FP8State
from foundry_fp8.model_structure.wrappers import without_ddp
from foundry_fp8.observe.guard.guard import DivergenceGuard
from foundry_fp8.planning.memory.planner import plan_of
from foundry_fp8.surgery.attention import FP8AttentionState

__all__ = ["FP8Parts", "TrainingState", "from_text", "parts_of", "to_text", "training_state"]

log = logging.getLogger(__name__)

PARTS = {
    "fp8": "the FP8 state: amax histories begin empty",
    "attention": "FP8 attention's state: amax histories begin empty",
    "guard": "the guard: its counters begin at zero, and layers that it had demoted run FP8",
}
"""What a state consists of, and what is so where a checkpoint has no such part."""
KINDS: Mapping[str, type[ModelState]] = {"fp8": FP8State, "attention": FP8AttentionState}
"""Of these one for each part of the model that was converted by itself."""


def parts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a saved state by name; none for what a run with ``enabled: false`` saved.

    Raises:
        RuntimeError: It is no such state.
    """
    if not isinstance(state, Mapping):
        raise RuntimeError(f"this is no state of foundry_fp8.training_state but a {type(state).__name__}")
    if "modules" in state:  # as Composer's algorithm saved it until 0.2
        attention = {"attention": state["attention"]} if "attention" in state else {}
        return {"fp8": {k: v for k, v in state.items() if k != "attention"}, **attention}
    if set(state) <= {"repr"}:
        return {}
    try:
        (saved,) = state["state"]
        return dict(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError("this is no state of foundry_fp8.training_state") from error


class FP8Parts:
    """The state of FP8 itself: what delayed scaling, FP8 attention and the guard remember."""

    def __init__(self, model: nn.Module, guard: DivergenceGuard | None = None) -> None:
        self.model = model
        self.guard = guard
        self._converted: dict[str, Any] = {}
        for kind, of in KINDS.items():
            found = dict(of.each(without_ddp(model)))
            self._converted |= {f"{kind} of {n}" if len(found) > 1 else kind: one for n, one in found.items()}
        if not self._converted:
            raise ConfigError(
                "training_state: the model is not converted, so it has no FP8 state. Call apply_fp8 first."
            )
        self.fp8: FP8State = next(iter(self._converted.values()))
        self._parts()  # refuses
        for state in states_of(model):
            state.group.follow(model)

    def finish_pass(self) -> None:
        """Finish the running pass of delayed scaling: a collective. Twice is as good as once."""
        for state in self._converted.values():
            state.update()

    def collected(self) -> dict[str, Any]:
        """The state, by the one rank that writes it, after :meth:`finish_pass` on all: ``{"state": (parts,)}``."""
        return {"state": ({name: part.state_dict() for name, part in self._parts().items()},)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`collected` gave. What the checkpoint lacks starts afresh, with a warning that names it.

        Raises:
            RuntimeError: It is of another recipe or of other layers, or no such state.
        """
        saved, parts = parts_of(state), self._parts()
        self.starts_afresh({name for name in parts if name not in saved})
        if "guard" in saved and self.guard is None:
            log.warning(
                "The checkpoint holds a guard's state and this run has no guard: layers that it had demoted run FP8 again."
            )
        lost = [name for name in saved if " of " in name and name not in parts]
        if lost:
            raise RuntimeError(
                f"the checkpoint has FP8 state of other parts ({', '.join(lost)}), this model of {', '.join(parts)}. {FRESH_STATE}"
            )
        for name, part in parts.items():  # the guard last: it sets what layers run
            if name in saved:
                part.load_state_dict(saved[name])

    def starts_afresh(self, missing: set[str] | None = None) -> None:
        """Say what a resumed run begins without: ``missing`` of its parts, by default all."""
        for name in self._parts() if missing is None else sorted(missing):
            kind, _, part = name.partition(" of ")
            log.warning(
                "The checkpoint has no state of foundry_fp8 for %s.", PARTS[kind] + (part and f" ({part})")
            )
            if kind == "fp8":
                self._converted[name].answered = True

    def _parts(self) -> dict[str, Any]:
        known = [id(layer.slots) for state in self._converted.values() for layer in state.modules.values()]
        copied = [name for name, slots in slots_of(self.model).items() if id(slots) not in known]
        if copied:
            raise ConfigError(
                f"training_state: {len(copied)} layers ({', '.join(copied[:3])}, ...) were copied after the conversion (PEFT's modules_to_save, "
                "a repeated block), and no FP8 state has their amax histories. Copy first and convert then; or use recipe: current, block or mxfp8."
            )
        return self._converted | ({} if self.guard is None else {"guard": self.guard})


class TrainingState(FP8Parts):
    """:class:`FP8Parts` with what no algorithm of the trainer saves: the memory plan, and how gradients travel.

    ``state_dict`` and ``load_state_dict`` are ``torch.distributed.checkpoint``'s ``Stateful``.
    """

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

    def collected(self) -> dict[str, Any]:
        """:meth:`state_dict` without what every rank does."""
        (parts,) = super().collected()["state"]
        ways = [compression.way for compression in self._compressions()]
        return {"state": ({**parts, "plan": plan_of(self.model), "ways": ways},)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave, or Composer's algorithm saved (see :meth:`FP8Parts.load_state_dict`)."""
        super().load_state_dict(state)
        saved = parts_of(state)
        for compression, way in zip(self._compressions(), saved.get("ways") or [], strict=False):
            compression.resume(way)
        plan = plan_of(self.model)
        if saved.get("plan") != plan:
            log.warning(
                "The checkpoint's memory plan is %s, this run's %s: gradients may differ in the order of their sums.",
                saved.get("plan"),
                plan,
            )

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


def to_text(state: Mapping[str, Any]) -> str:
    """A state for a checkpoint that holds text alone (Trainer's ``trainer_state.json``)."""
    file = io.BytesIO()
    torch.save(dict(state), file)
    return base64.b64encode(file.getvalue()).decode()


def from_text(text: str) -> dict[str, Any]:
    """What :func:`to_text` was given."""
    found: dict[str, Any] = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    return found
