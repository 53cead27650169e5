"""One LLM Foundry run in a process of its own, watched through its run log."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["Progress", "TrainingProcess", "train_command"]

_GRACE_SECONDS = 10


def train_command(yaml: Path, overrides: Mapping[str, object]) -> list[str]:
    """The command line that trains ``yaml`` with ``overrides`` (dotted key to value) through LLM Foundry's entry."""
    return [
        sys.executable,
        "-m",
        "llmfoundry.cli.cli",
        "train",
        str(yaml),
        *(f"{key}={value}" for key, value in overrides.items()),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int = 0
    """Batches done; 0 until training has started."""
    loss: float | None = None
    """Of the last batch."""
    tokens_per_second: float | None = None
    """Over the last batches."""


class TrainingProcess:
    """A training run as a child process in a process group of its own.

    A group of its own, so that Ctrl-C in the terminal reaches only the parent, which then stops the child in order, and so that
    the child's own children end with it. ``train.log`` (its output) goes into ``folder``, and ``run_log.jsonl`` is expected
    there.
    """

    def __init__(self, command: Sequence[str], folder: Path, threads: int) -> None:
        self.command = list(command)
        self.run_log = folder / "run_log.jsonl"
        self.output = folder / "train.log"
        self._position = 0
        self._progress = Progress()
        self._recent: list[tuple[float, int]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.run_log.unlink(missing_ok=True)
        self._sink: IO[bytes] = self.output.open("wb")
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore",
        }
        self._process = subprocess.Popen(
            self.command,
            stdout=self._sink,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    @property
    def returncode(self) -> int | None:
        """The exit status, ``None`` while the process runs."""
        return self._process.poll()

    def progress(self) -> Progress:
        """Read what the run log says that it has not said before."""
        if not self.run_log.exists():
            return self._progress
        with self.run_log.open(encoding="utf-8") as lines:
            lines.seek(self._position)
            while text := lines.readline():
                if not text.endswith("\n"):
                    break  # being written: next time
                self._position = lines.tell()
                line = json.loads(text)
                if line["kind"] == "batch":
                    self._take(line)
        return self._progress

    def _take(self, line: dict) -> None:
        self._recent = [*self._recent[-8:], (line["seconds"], line["tokens"])]
        elapsed = self._recent[-1][0] - self._recent[0][0]
        tokens = self._recent[-1][1] - self._recent[0][1]
        self._progress = Progress(
            step=line["step"],
            loss=None if line["loss"] is None else float(line["loss"]),
            tokens_per_second=tokens / elapsed if elapsed > 0 else None,
        )

    def stop(self) -> None:
        """End the process and its children, first politely; returns when they are gone."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._sink.close()

    def tail(self, lines: int = 25) -> str:
        """The last lines of the child's output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:])
