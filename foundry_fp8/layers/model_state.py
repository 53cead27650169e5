"""What the states of converted models have in common: where they are found, and what they refuse to load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from torch import nn

from foundry_fp8.config import first_line
from foundry_fp8.layers.module_scales import FRESH_STATE
from foundry_fp8.layers.recipe_table import difference, scaling_of
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["ModelState", "readable"]

State = TypeVar("State", bound="ModelState")


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Say of a checkpoint's state that is of another form whose it is, where its parts are looked up."""
    try:
        yield
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        raise RuntimeError(f"the checkpoint's {what} is not readable ({said}). {FRESH_STATE}") from error


class ModelState:
    """A state that a conversion leaves on a model, by which :meth:`of` finds it again.

    Attributes:
        recipe: What the model was converted to, or most of it.
        table: What each layer was converted to, where they are not alike (:func:`~.recipe_table.table_of`).
    """

    NAME: ClassVar[str]
    """As messages call it."""
    VERSION: ClassVar[int] = 1
    """Of :meth:`header`'s form."""

    recipe: Recipe
    table: Mapping[str, Any] | None = None

    @classmethod
    def of(cls: type[State], model: nn.Module) -> State | None:
        """The state of a converted model (wrapped by DDP, ``torch.compile`` or not), or ``None``."""
        return next((state for _, state in cls.each(model)), None)

    @classmethod
    def each(cls: type[State], model: nn.Module) -> Iterator[tuple[str, State]]:
        """The states of the parts of ``model`` that were converted by themselves, with the parts' clean names."""
        for name, module in model.named_modules():
            if (found := module.__dict__.get(cls._attribute())) is not None:
                yield clean_name(name), found

    @classmethod
    def _attribute(cls) -> str:
        return "_foundry_" + cls.NAME.lower().replace(" ", "_")

    def leave_on(self, model: nn.Module) -> None:
        """Let :meth:`of` find it on ``model``."""
        setattr(model, self._attribute(), self)

    def header(self) -> dict[str, Any]:
        """What a checkpoint has to agree with."""
        return {"version": self.VERSION, "recipe": dict(self.table or self.recipe.to_dict())}

    def check_header(self, state: Mapping[str, Any]) -> None:
        """Refuse a checkpoint's state that is not of this model's kind.

        Raises:
            RuntimeError: ``state`` lacks a key of :meth:`header` or its ``modules``, or is of another version, recipe or form.
        """
        mine = self.header()
        missing = {*mine, "modules"} - set(state)
        if missing:
            raise RuntimeError(
                f"the checkpoint's {self.NAME} is not readable: it lacks {', '.join(sorted(missing))}. {FRESH_STATE}"
            )
        if scaling_of(state["recipe"]) != scaling_of(mine["recipe"]):
            raise RuntimeError(
                f"the checkpoint's {self.NAME} was made by {difference(state['recipe'], mine['recipe'])}. "
                f"Set algorithms.fp8.recipe to the former. {FRESH_STATE}"
            )
        for key in mine.keys() - {"recipe"}:
            if state[key] != mine[key]:
                raise RuntimeError(
                    f"the checkpoint's {self.NAME} has {key} {state[key]!r}, this run {mine[key]!r}. {FRESH_STATE}"
                )
