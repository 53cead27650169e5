"""TensorBoard event files, through TensorBoard's own library."""

from __future__ import annotations

from pathlib import Path

from foundry_fp8.report.run import Run
from foundry_fp8.report.sources.tracked import LOSS, run_of

__all__ = ["read"]


def read(folder: Path) -> Run:
    """Read one run. Raises ``ImportError`` without TensorBoard, ``ValueError`` where there is no training in it."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ImportError(
            f"{folder} holds TensorBoard's event files, and reading them needs `pip install tensorboard`. Found: {error}."
        ) from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    points: dict[str, dict[int, float]] = {}
    clock: dict[int, float] = {}
    for key in events.Tags()["scalars"]:
        found = events.Scalars(key)
        points[key] = {event.step: event.value for event in found}
        clock |= {event.step: event.wall_time for event in found if key == LOSS}
    name = folder.name if folder.name != "tensorboard" else folder.parent.name
    return run_of(name, folder, points, {}, clock=clock)
