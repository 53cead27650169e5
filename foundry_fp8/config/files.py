"""Files of ours are written beside their place, flushed and renamed: nobody reads a part, and what was there stays until then."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path

from foundry_fp8.config.errors import ConfigError

__all__ = ["TEMPORARY", "move_into", "refuse_files", "write_file"]

TEMPORARY = ".foundry-fp8-"
"""How the names of what is being written begin."""


def refuse_files(folder: Path, key: str, way_out: str, own: Collection[str] = (), kind: str = "") -> None:
    """Raise :class:`ConfigError` if ``folder`` holds others than ``own`` (globs; those of a ``kind``), or cannot be read."""
    with _said(f"{key} {folder} cannot be read"):
        names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if not any(fnmatch(name, one) for one in (*own, f"{TEMPORARY}*"))]
    if others:
        shown = f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
        others_of = f" that are not of {kind}" if kind else ""
        raise ConfigError(f"{key} {folder} holds files{others_of} ({shown}). {way_out}")


def write_file(file: Path, content: str | bytes, key: str) -> None:
    """Replace ``file`` whole: a link of this name is replaced, not followed; a file's mode stays.

    Raises:
        ConfigError: It cannot be written, and what was there still is.
    """
    beside = file.with_name(f"{TEMPORARY}{secrets.token_hex(6)}")
    try:
        with _said(f"{key}: {file} cannot be written"):
            file.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("xb") as out:
                out.write(content.encode() if isinstance(content, str) else content)
                out.flush()
                os.fsync(out.fileno())
            if file.is_file() and not file.is_symlink():
                shutil.copymode(file, beside)
            beside.replace(file)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def move_into(folder: Path, made: Path, marker: str, old: Collection[str], key: str) -> None:
    """Put the folder ``made`` in the place of ``folder``, or its files among those that are there.

    Those there lose ``old`` (globs) before; the ``marker``, without which the folder is not read, goes first and comes last.

    Raises:
        ConfigError: A folder stands in the place of a file; nothing is changed then.
    """
    places = {file: folder / file.relative_to(made) for file in made.rglob("*") if file.is_file()}
    gone = [folder / marker, *(path for glob in old for path in folder.glob(glob))]
    for place in (*gone, *places.values()):
        if place.is_dir() and not place.is_symlink():
            raise ConfigError(f"{key}: {place} is a folder, in the place of a file.")
    for file in places:
        with file.open("rb") as written:
            os.fsync(written.fileno())
    if not folder.exists() or not any(folder.iterdir()):
        made.replace(folder)
        return
    for path in gone:
        path.unlink(missing_ok=True)
    for file, place in sorted(places.items(), key=lambda item: item[1].name == marker):
        if place.parent.is_symlink() and place.parent != folder:
            place.parent.unlink()
        place.parent.mkdir(parents=True, exist_ok=True)
        file.replace(place)


@contextlib.contextmanager
def _said(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} ({error.strerror}).") from error
