"""Native HSDP of FSDP2 on a CPU: torch's CPU stream stand-in records no event.

Cause: ``torch.cpu.Stream.record_event`` returns ``None`` (torch 2.7), and ``FSDPParamGroup.post_backward`` asserts that
the event after its all-reduce exists. Effect: every HSDP backward on a CPU ends in a bare AssertionError, which makes
HSDP untestable without GPUs. Scope: the stand-in class only; nothing on a GPU changes. Remove it when
:func:`needed` is false on every supported torch.
"""

from __future__ import annotations

import torch

__all__ = ["apply", "needed"]


def needed() -> bool:
    """Whether this torch's CPU stream returns no event."""
    return torch.cpu.Stream().record_event() is None  # type: ignore[func-returns-value]


def apply() -> None:
    """Let ``torch.cpu.Stream.record_event`` return a ``torch.cpu.Event``, which is always complete. Twice is once."""
    if not needed():
        return

    def record_event(self: torch.cpu.Stream, event: torch.cpu.Event | None = None) -> torch.cpu.Event:
        return torch.cpu.Event() if event is None else event

    torch.cpu.Stream.record_event = record_event  # type: ignore[assignment, method-assign]
