"""The processes of a stage on this node: started, watched, ended, and asked where they were."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

__all__ = ["Ended", "run_processes"]

GRACE_S = 10.0
"""After one rank fails: the time in which its peers may say why themselves."""
DUMP_S = 3.0
POLL_S = 0.1
OWN = ("TORCHELASTIC_", "GROUP_", "ROLE_")
"""Of a launcher's environment, what would tie a stage's process group to the launcher's."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How one process ended.

    Attributes:
        code: Its exit status; ``None`` if it was ended here.
        output: What it printed.
        errors: What it printed to stderr, without its stack.
        where: The innermost lines of its main thread, if it was ended here.
    """

    code: int | None
    output: str
    errors: str
    where: str = ""


def run_processes(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    log: Path,
    *,
    limit_s: float,
    stop: Callable[[bool], bool] = lambda failed: failed,
) -> list[Ended]:
    """Run ``command`` once for each of ``environments``, to the end.

    Args:
        command: Program and arguments.
        environments: What each process has beside this one's environment.
        log: Where output goes, with the process's number and ``.out`` or ``.err``.
        limit_s: Seconds for all of them.
        stop: Asked again and again with whether one of these has failed; returns whether a process of the stage, on any node, has.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OWN)} | {"PYTHONFAULTHANDLER": "1"}
    paths = [log.with_name(f"{log.name}-{i}") for i in range(len(environments))]
    processes = []
    for own, path in zip(environments, paths, strict=True):
        with path.with_suffix(".out").open("wb") as out, path.with_suffix(".err").open("wb") as err:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**kept, **own},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,  # so that its own children end with it
                )
            )
    deadline = time.monotonic() + limit_s
    try:
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if stop(any(p.returncode for p in processes)):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(POLL_S)
        stop(any(p.returncode for p in processes))
        late = [p for p in processes if p.poll() is None]
        for process in late:
            _signal(process, signal.SIGABRT)  # faulthandler writes the stacks
        until = time.monotonic() + DUMP_S
        while any(p.poll() is None for p in late) and time.monotonic() < until:
            time.sleep(POLL_S)
    finally:
        for process in processes:
            _signal(process, signal.SIGKILL)
            process.wait()
    found = []
    for process, path in zip(processes, paths, strict=True):
        output, errors = (path.with_suffix(s).read_text(errors="replace") for s in (".out", ".err"))
        ended_here = process in late
        where = _where(errors) if ended_here else ""
        found.append(Ended(None if ended_here else process.returncode, output, errors, where))
    return found


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _where(errors: str) -> str:
    """Of the stack that faulthandler wrote last, which is the main thread's: this package's innermost line and the very innermost."""
    blocks = re.split(r"^(?:Current thread|Thread) 0x.*$", errors, flags=re.MULTILINE)
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', blocks[-1]) if len(blocks) > 1 else []
    lines = [f"{'/'.join(Path(file).parts[-2:])}:{line} {name}" for file, line, name in frames]
    own = next((line for line, frame in zip(lines, frames, strict=True) if "foundry_fp8" in frame[0]), None)
    return ", called by ".join(dict.fromkeys(line for line in (*lines[:1], own) if line))
