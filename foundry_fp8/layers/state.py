"""The FP8 state of a converted model: delayed-scaling scales and histories, kept apart from the model's own state."""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.layers.gemm_layer import OPERANDS, Choice, FP8GemmLayer, configured_recipes
from foundry_fp8.layers.model_state import ModelState, readable
from foundry_fp8.layers.module_scales import ModuleScales
from foundry_fp8.layers.recipe_table import MEASURED, choice_of, measured_table, table_of
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["FP8State"]

log = logging.getLogger(__name__)


class FP8State(ModelState):
    """What a converted model carries besides its parameters, and the hooks that keep it current.

    Made by the conversion, which leaves it on the model; :meth:`of` finds it again. It updates delayed scaling when a
    training forward of ``model`` begins, and wraps every forward in the backend's context.

    Args:
        model: The root that is called in training.
        modules: Its converted linears by name, experts among them.
        backend: Who runs them.
        measured: A measurement chooses what they run (:meth:`choose`); they were converted to delayed scaling until then.

    Attributes:
        recipe: What most of them were converted to.
        table: What each was converted to, as a checkpoint holds it; ``None`` where all run the same.
        held: The keys of the rules that hold; ``None`` while nobody has said.
        answered: Whether a checkpoint's state was loaded, or is known to be missing.
    """

    NAME = "FP8 state"

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, FP8GemmLayer],
        backend: Backend,
        *,
        measured: bool = False,
    ) -> None:
        self.modules = dict(modules)
        recipes = configured_recipes(self.modules.values())
        self.recipe = recipes[0]
        self.table = measured_table({}) if measured else table_of(self.modules)
        self.backend = backend
        self.answered = False
        self.held: Sequence[str] | None = None
        self._timed = any(module.turns for module in self.modules.values())
        self._scales: ModuleScales | None = None
        for history in filter(None, (recipe.history for recipe in recipes)):  # a policy has one at most
            delayed = {n: m for n, m in self.modules.items() if history in m.recipes}
            fp8_max = {operand: history.format(operand).max for operand in OPERANDS}
            self._scales = ModuleScales(history, list(delayed), fp8_max, self.NAME)
            for name, module in delayed.items():
                module.slots = self._scales.slots(name)
            self._scales.attach(model)
            _watch_first_step(model, self)
        self._contexts = ExitStack()
        self.leave_on(model)
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward, always_call=True)

    @property
    def delayed(self) -> DelayedScalingState | None:
        """The scales and histories of the delayed recipe; ``None`` for the others."""
        return None if self._scales is None else self._scales.state

    @property
    def awaits_choice(self) -> bool:
        """Whether ``recipe: measured`` has not chosen yet."""
        return self.table == measured_table({})

    def reconsider(self) -> None:
        """Await another choice, in high precision."""
        assert self._scales is not None
        self.table, self._scales.state.idle = measured_table({}), False
        for name, module in self.modules.items():
            module.recipe, module.configured_recipe = None, self._scales.state.recipe
            module.slots = self._scales.slots(name)

    def choose(self, choice: Mapping[str, Recipe | None]) -> None:
        """Run what a measurement chose, from the next forward on: by layer, ``None`` for high precision.

        The layers of other recipes than delayed lose their slots; a checkpoint holds their place, so that its form is always the same.
        """
        assert self._scales is not None
        self.table = measured_table(choice)
        self.answered = True  # histories begin here, whatever steps came before
        for name, module in self.modules.items():
            recipe = module.recipe = module.configured_recipe = choice[name]
            uses_history = recipe is not None and recipe.uses_history
            module.slots = self._scales.slots(name) if uses_history else None
        self._scales.state.idle = all(module.slots is None for module in self.modules.values())

    def hold(self, held: Sequence[str], device: torch.device) -> None:
        """Run what the rules ``held`` say on ``device``, between two steps; layers without turns go on as they are."""
        self.held = held
        for module in self.modules.values():
            if module.turns:
                module.take_turn(held, device)

    def turn_to(self, wanted: Callable[[Choice], bool], device: torch.device) -> Callable[[], None]:
        """Put layers that take turns in the first one of theirs that is ``wanted``, whatever the time, if there is one; what is returned undoes it."""
        before, held = {module: module.turn for module in self.modules.values() if module.turns}, self.held
        for module in before:
            turns = [*module.turns, Choice(None)] if module.turns[-1].when else module.turns
            module.take_turn([max(turns, key=wanted).rule], device)
        self.held = held or ()

        def undo() -> None:
            self.held = held
            for module, turn in before.items():
                module.take_turn([turn.rule], device)

        return undo

    def update(self) -> None:
        """Finish the running pass of delayed scaling: a collective, so every rank calls it. Twice is as good as once."""
        if self._scales is not None:
            self._scales.state.update()

    @contextmanager
    def within_forward(self, model: nn.Module) -> Iterator[None]:
        """What surrounds a forward of the whole ``model``, around a part of it that runs alone: what linears share, the backend's context."""
        self._before_forward(model, ())
        try:
            yield
        finally:
            self._after_forward(model, (), None)

    @torch.compiler.disable
    def _before_forward(self, model: nn.Module, args: Any) -> None:
        if self._timed and self.held is None and model.training and torch.is_grad_enabled():
            said = "rules have from or until, and nobody says how far the run is. Train with FP8Run, FP8Callback or Composer"
            raise RuntimeError(f"algorithms.fp8.recipe: {said}.")
        self.backend.before_forward(model)
        self.backend.inputs.begin_forward()
        if any(module.runs_fp8 for module in self.modules.values()):
            self._contexts.enter_context(self.backend.forward_context(self.recipe))

    @torch.compiler.disable
    def _after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        self.backend.inputs.end_forward()
        self._contexts.close()

    def state_dict(self) -> dict[str, Any]:
        """Fixed-shape float32 tensors by module name, numbers and strings: loads with ``weights_only=True``.

        Returns:
            ``recipe`` (its fields, or a policy's table), ``backend``, and for the delayed recipe ``modules``: name -> ``scale`` ``[3]`` and
            ``amax_history`` ``[L, 3]``, the operands in the order x, w, dy. Where a recipe rounds at random, ``passes``: name -> number.
        """
        random = {
            name: module.passes
            for name, module in self.modules.items()
            if any(recipe.rounds_at_random for recipe in module.recipes)
        }
        return {
            **self.header(),
            "backend": self.backend.name,
            "modules": {} if self._scales is None else self._scales.state_dict(),
            **({"passes": random} if random else {}),
            **({"held": list(self.held or ())} if self._timed else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave.

        Raises:
            RuntimeError: The state is of another recipe or another model, or damaged; nothing is changed then.
        """
        choice: dict[str, Recipe | None] = {}
        with readable(self.NAME):
            saved: Any = state.get("recipe", {})
            if self.table is not None and saved.get("name") == self.table["name"] == MEASURED:
                choice = choice_of(saved)
                state = {**state, "recipe": self.table}
            self.check_header(state)
            choice = choice and {name: choice[name] for name in self.modules}
            passes = {name: operator.index(state["passes"][name]) for name in state.get("passes", ())}
            held = [str(key) for key in state.get("held", ())]
            counted = [(self.modules[name], number) for name, number in passes.items()]
            if self._scales is not None:
                self._scales.load_state_dict(state["modules"])
        self.answered = True
        for module, number in counted:
            module.passes = number
        if choice:
            self.choose(choice)
        if self._timed:  # before the guard's state, which is of those recipes
            self.hold(held, torch.device("cpu"))


_watched: weakref.WeakKeyDictionary[nn.Module, weakref.ref[FP8State]] = weakref.WeakKeyDictionary()
"""Models that have not been stepped yet, with their states."""
_hooks: list[Any] = []
"""The hooks on all optimizers: torch takes none away while it runs."""
_stepped_before: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
"""Optimizers that are inside a step, and whether they had taken one before it."""


def _watch_first_step(model: nn.Module, state: FP8State) -> None:
    """Look at the first optimizer step after a training forward of ``model``; warn if it is not the optimizer's first.

    Args:
        model: The root that is called in training.
        state: Its FP8 state; nothing is said once it is ``answered``.
    """
    _watched[model] = weakref.ref(state)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


@torch.compiler.disable
def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _watched:
        _stepped_before[optimizer] = any(
            bool(state["step"] > 0) if "step" in state else bool(state) for state in optimizer.state.values()
        )
        _look(optimizer)


@torch.compiler.disable
def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # A step with a closure (Composer's) runs the forward inside of it.
    if _watched and optimizer in _stepped_before:
        _look(optimizer)


def _look(optimizer: Optimizer) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model, state_of in list(_watched.items()):
        state = state_of()
        if state is None or state.answered or state.delayed is None:
            del _watched[model]
            continue
        if not any(id(p) in stepped for p in model.parameters()):
            continue
        # A checkpoint library may step an optimizer on zeros, to make its states, before anything has run.
        if not bool(torch.any(state.delayed.amax_history)):
            continue
        del _watched[model]
        if _stepped_before[optimizer]:
            log.warning(
                "The optimizer has taken steps before, and no FP8 state was loaded: amax histories begin empty, so this run "
                "does not go on as the one that it resumes. Save and load foundry_fp8.training_state(model) beside the model. "
                "Where FP8 begins here, nothing is lost."
            )
