"""The folder of a report: nobody else's files are in it, and each of its own is replaced whole."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["check_folder", "write_file"]

_TEMPORARY = ".foundry-fp8-"


def check_folder(folder: Path, own: Collection[str]) -> None:
    """Raise ``ValueError`` if files of other names than a report's ``own`` are in it, or if it cannot be read."""
    try:
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise ValueError(f"--output: {folder} cannot be read ({error.strerror}).") from error
    others = [name for name in names if name not in own and not name.startswith(_TEMPORARY)]
    if others:
        raise ValueError(
            f"--output {folder} holds files that are not of a report ({', '.join(others[:3])}"
            f"{', ...' if len(others) > 3 else ''}). Name another folder, or write into this one with --force."
        )


def write_file(file: Path, content: bytes) -> None:
    """Write beside its place and rename: no reader sees a part, and a link of this name is replaced, not followed.

    Raises:
        ValueError: It cannot be written.
    """
    beside = file.with_name(f"{_TEMPORARY}{os.getpid()}-{file.name}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        with beside.open("xb") as out:
            out.write(content)
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True) if beside.parent.is_dir() else None
        raise ValueError(f"--output: {file} cannot be written ({error.strerror}).") from error
