"""What is as it was afterwards: a model after surgery that failed, random generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["as_it_was_if_it_fails", "random_state"]


@contextmanager
def as_it_was_if_it_fails(model: nn.Module) -> Iterator[list[Callable[[], Any]]]:
    """Where what is inside raises, every module of ``model`` gets back its class, its children, its parameters, its hooks, its attributes.

    Yields:
        To add to: what undoes other changes.
    """
    undo: list[Callable[[], Any]] = []
    held = [
        (module, type(module), dict(vars(module)), [(v, v.copy()) for v in vars(module).values() if isinstance(v, dict | list | set)])
        for module in model.modules()
    ]  # fmt: skip
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            step()
        for module, cls, attributes, contents in held:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            for there, content in contents:
                there.clear()
                there.extend(content) if isinstance(there, list) else there.update(content)
        raise


def random_state(device: torch.device) -> Callable[[], None]:
    """Puts the default generators of the CPU and of ``device`` back to where they are now."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore
