"""The verdict of a self-test: kept on this machine, packed for an issue, and read by ``foundry-fp8 doctor run.yaml``."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import platform
import re
import socket
import tarfile
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry_fp8.config.files import write_file

if TYPE_CHECKING:
    from foundry_fp8.run.settings import Run

__all__ = ["archive", "keep", "latest", "warnings_for"]

SHOWN_BYTES = 60_000
"""Of the end of each log in the archive."""
_ADDRESSES = (
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b",
    r"\b(?:[0-9a-f]{1,4}:){3,7}[0-9a-f]{1,4}\b",
    r"\bGPU-[0-9a-f-]{30,}",
)


def _kept() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "foundry_fp8" / "selftest.json"


def keep(found: Mapping[str, Any]) -> None:
    """Remember ``found``, what ``selftest.json`` holds, as the latest verdict of this machine."""
    write_file(_kept(), json.dumps(found) + "\n", "selftest")


def latest() -> dict[str, Any] | None:
    """The latest verdict of this machine, or ``None``."""
    try:
        found: dict[str, Any] = json.loads(_kept().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found.get("claims"), list) else None


def warnings_for(run: Run) -> list[str]:
    """What the latest verdict refuted and a run uses, with what to do."""
    found = latest()
    if found is None:
        return []
    return [
        f"{claim['claim']}: refuted on this machine on {found['date'][:10]} ({claim['figures']}). {claim['next']}"
        for claim in found["claims"]
        if claim["verdict"] == "refuted" and any(_uses(run, key) for key in claim.get("keys", ()))
    ]


def _uses(run: Any, key: str) -> bool:
    """Whether a run has the algorithm that the YAML names ``key``."""
    name = key.removeprefix("algorithms.")
    return bool(getattr(run, "converts" if name == "fp8" else name, None))


def archive(folder: Path) -> Path:
    """Pack ``selftest.json`` and the logs of ``folder`` for an issue, without names of hosts and users.

    Returns:
        ``folder / "selftest.tar.gz"``: the end of each log only, so that it is small.
    """
    path = folder / "selftest.tar.gz"
    private = [(str(folder), "OUTPUT"), *_private()]
    whole = BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as packed:
        for file in (folder / "selftest.json", *sorted((folder / "logs").glob("*"))):
            text = file.read_text(errors="replace")
            text = text[-SHOWN_BYTES:] if file.parent.name == "logs" else text
            data = _scrubbed(text, private).encode()
            entry = tarfile.TarInfo(f"selftest/{file.relative_to(folder)}")
            entry.size = len(data)
            packed.addfile(entry, BytesIO(data))
    write_file(path, whole.getvalue(), "--output")
    return path


def _private() -> list[tuple[str, str]]:
    """What must not leave this machine, and what stands in its place; the longest first."""
    words = {name: "HOST" for name in (socket.gethostname(), platform.node(), socket.getfqdn(), *_nodes())}
    words |= {str(Path.home()): "HOME", str(Path.cwd()): "FOLDER"}
    with contextlib.suppress(KeyError, OSError):  # a container's user without a name
        words[getpass.getuser()] = "USER"
    return sorted(((w, to) for w, to in words.items() if len(w) > 2), key=lambda pair: -len(pair[0]))


def _nodes() -> Iterable[str]:
    """Names of the other nodes that a launcher's environment holds."""
    for key in (
        "MASTER_ADDR",
        "SLURMD_NODENAME",
        "SLURM_LAUNCH_NODE_IPADDR",
        "SLURM_NODELIST",
        "SLURM_JOB_NODELIST",
    ):
        if os.environ.get(key):
            yield os.environ[key]


def _scrubbed(text: str, private: list[tuple[str, str]]) -> str:
    for word, to in private:
        text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", to, text)
    for pattern in _ADDRESSES:
        text = re.sub(pattern, "ADDRESS", text)
    return text
