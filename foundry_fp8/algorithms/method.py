"""What the algorithms share: the options of a YAML, checked when one is made, and a warning where the model has nothing for one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from composer.algorithms.warnings import NoEffectWarning
from composer.core import Algorithm

from foundry_fp8.config import Config, NoEffect, from_mapping

__all__ = ["Method", "warns_without_effect"]


class Method(Algorithm):
    """An algorithm with options.

    Args:
        **options: The fields of ``config_class``.
    """

    config_class: ClassVar[type[Config]]

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.config: Any = from_mapping(self.config_class, options, self.config_class.key)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"
        )


@contextmanager
def warns_without_effect() -> Iterator[None]:
    """As Composer's algorithms do, warn of a model that has nothing for this one, in place of the error."""
    try:
        yield
    except NoEffect as error:
        warnings.warn(NoEffectWarning(str(error)), stacklevel=4)
