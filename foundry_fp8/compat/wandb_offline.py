"""Records of a W&B run that was logged offline: ``wandb/offline-run-*/run-*.wandb``.

W&B reads such files only to send them to its server; the reader that it does that with (``wandb.sdk.internal.datastore``) has no
public name. Seen in wandb 0.18 to 0.23. A version that moved it is an error that names the way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["records"]


def records(path: Path) -> Iterator[Any]:
    """The records of one file, until its end or the first that is damaged.

    Raises:
        ImportError: W&B is not installed, or its reader is elsewhere.
    """
    try:
        from wandb.proto import wandb_internal_pb2
        from wandb.sdk.internal.datastore import DataStore
    except ImportError as error:
        raise ImportError(
            f"{path} is of W&B, and reading it needs `pip install wandb` (0.18 or later). Found: {error}."
        ) from error
    store = DataStore()
    try:
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            yield record
    except (AssertionError, OSError, ValueError):  # cut in the middle: what came before has been given
        return
