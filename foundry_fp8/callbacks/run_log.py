"""``run_log``: everything a run logged, as one JSONL file, for ``foundry-fp8 compare``.

One JSON object a line, distinguished by ``kind``; docs/reports.md has their fields. Non-finite numbers are the
strings ``"nan"``, ``"inf"`` and ``"-inf"``: JSON has no such numbers. Each line is flushed, so a crash loses at most the line being written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import math
import os
import platform
import resource
import sys
import time
import weakref
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist, format_name_with_dist

from foundry_fp8.callbacks.step_clock import StepClock
from foundry_fp8.config import ConfigError, check_arguments, printable, template
from foundry_fp8.config.versions import installed

__all__ = ["FORMAT_VERSION", "RunLog", "RunPath", "ensure_run_log", "log_details", "log_facts"]

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
FILE_NAME = "run_log.jsonl"
KEPT_LINES, RETRY = 50_000, 64
"""That could not be written yet, at most; after so many it is tried once in as many."""
LOSS_KEY = "loss/train/total"
"""Composer's key for the loss of a batch, averaged over ranks."""

RunPath = Annotated[
    str, printable, template("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
]
"""A path that may contain the name fields of Composer's ``format_name_with_dist``."""

_PACKAGES = ("foundry-fp8", "mosaicml", "llm-foundry", "mosaicml-streaming", "transformer-engine")


class RunLog(LoggerDestination):
    """Write everything that is logged to a JSONL file on rank 0 (format: docs/reports.md).

    In a Foundry YAML: ``loggers: {run_log: {}}``. It reads metrics that others computed and adds no computation or
    synchronisation of its own, except that a metric logged as a tensor on a GPU is copied to the CPU at BATCH_END.

    Args:
        path: The file. ``{run_name}`` and Composer's other name fields are filled in. If ``None``: ``run_log.jsonl``
            in ``runs/{run_name}``, under the folder that training is started in.
    """

    def __init__(self, path: RunPath | None = None) -> None:
        check_arguments(RunLog, {"path": path}, "loggers.run_log")
        self._path_format = path
        self.path: Path | None = None
        """The file, once training has started."""
        self._file: IO[str] | None = None
        self._unwritten: list[str] = []
        self._whole: int | None = None  # bytes of the file that are whole lines of this run or an earlier one
        self._hyperparameters: dict[str, Any] = {}
        self._asked = True  # the YAML asked for this log; ensure_run_log sets False
        self._waiting: list[dict[str, Any]] | None = []
        """Lines from before the header: tables, and an evaluation before training. ``None`` from ``FIT_START`` on."""
        self._parameters: int | None = None
        self._metrics: dict[str, Any] = {}
        self._clock = StepClock()
        self._started = time.time()

    # What others log

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Keep them for the header, or write them if it has been written."""
        if self._file is None:
            self._hyperparameters.update(hyperparameters)
        else:
            self._write({"kind": "hparams", "values": hyperparameters})

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Collect for the line of this batch, whatever ``step`` says: it has what was logged between two BATCH_ENDs. The last value of a key wins."""
        self._metrics.update(metrics)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Write the table, after the header."""
        self._write({"kind": "table", "name": name, "step": step, "columns": columns, "rows": rows})

    # Events

    def path_of(self, run_name: str) -> Path:
        """The file of a run of this name."""
        return Path(format_name_with_dist(self._path_format or f"runs/{{run_name}}/{FILE_NAME}", run_name))

    def init(self, state: State, logger: Logger) -> None:
        """Count the parameters, before a wrapper shards them."""
        self._parameters = sum(p.numel() for p in state.model.parameters())

    def fit_start(self, state: State, logger: Logger) -> None:
        """Open the file and write the header, now that the whole configuration is known; ``ConfigError`` if a requested file fails."""
        waiting, self._waiting = self._waiting, None
        if self._file is not None and int(state.timestamp.batch) == 0 and self._clock.seconds > 0:
            self._write({"kind": "end", "status": "finished; the run was begun again (reset_time)"})
            self._let_go()
            self._whole = None
        if dist.get_global_rank() != 0 or self._file is not None:
            return
        self.path = self.path_of(state.run_name)
        self._clock = StepClock(_seconds_before(self.path, int(state.timestamp.batch)))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._open(new=int(state.timestamp.batch) == 0)
        except OSError as error:
            if self._asked:
                raise ConfigError(f"loggers.run_log.path: {self.path} cannot be written: {error}.") from error
            log.warning("run_log: %s cannot be written (%s), so there is none.", self.path, error)
            return
        self._write(self._header(state))
        for line in waiting or ():
            self._write(line)

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """A step begins with waiting for its data."""
        self._clock.begin()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write one line. Loggers run after callbacks on this event, so every metric of the step is here."""
        self._clock.end()
        metrics, self._metrics = self._metrics, {}
        # ru_maxrss is in KiB on Linux and in bytes on macOS.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        self._write(
            {
                "kind": "batch",
                "step": int(state.timestamp.batch),
                "tokens": int(state.timestamp.token),
                "samples": int(state.timestamp.sample),
                "seconds": self._clock.seconds,
                "loss": metrics.pop(LOSS_KEY, None),
                "host_peak_bytes": peak,
                "metrics": metrics,
            }
        )

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write what callbacks logged at the end of training."""
        metrics, self._metrics = self._metrics, {}
        if metrics:
            self._write({"kind": "metrics", "step": int(state.timestamp.batch), "metrics": metrics})

    def eval_end(self, state: State, logger: Logger) -> None:
        """Write what the evaluation logged as a line of its own."""
        metrics, self._metrics = self._metrics, {}
        step, label = int(state.timestamp.batch), state.dataloader_label
        self._write({"kind": "eval", "step": step, "label": label, "metrics": metrics})

    def close(self, state: State, logger: Logger) -> None:
        """Write how the run ended, and close the file."""
        if self._file is None and not self._unwritten:
            return
        # Composer closes its callbacks at interpreter exit, when an exception that ended the run is sys.last_value.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        finished = state.max_duration is not None and state.timestamp >= state.max_duration
        status = "finished" if finished else f"stopped: {error!r}" if error else "stopped"
        self._write({"kind": "end", "step": int(state.timestamp.batch), "status": status})
        self._unwritten = []
        self._let_go()

    # Writing

    def _header(self, state: State) -> dict[str, Any]:
        cuda = state.device.name == "gpu"
        packages = {package: version for package in _PACKAGES if (version := installed(package)) is not None}
        return {
            "kind": "header",
            "format_version": FORMAT_VERSION,
            "run_name": state.run_name,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime()),
            "startup_seconds": time.time() - self._started,
            "step": int(state.timestamp.batch),
            "max_duration": str(state.max_duration),
            "precision": state.precision.value,
            "device": torch.cuda.get_device_name() if cuda else _cpu_name(),
            "device_type": state.device.name,
            "threads": torch.get_num_threads(),
            "world_size": dist.get_world_size(),
            "nodes": dist.get_world_size() // max(dist.get_local_world_size(), 1),
            "parameters": self._parameters,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, **packages},
            "hyperparameters": self._hyperparameters,
        }

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None and not self._unwritten:
            if self._waiting is not None:
                self._waiting.append(line)
            return
        self._unwritten.append(json.dumps(plain(line), allow_nan=False) + "\n")
        if len(self._unwritten) > RETRY and len(self._unwritten) % RETRY and line["kind"] != "end":
            return
        try:
            if self._file is None:
                self._open()
            assert self._file is not None
            self._file.write("".join(self._unwritten))
            self._file.flush()
            self._unwritten, self._whole = [], self._file.tell()
        except OSError as error:
            # A full disk must not end a training run.
            if len(self._unwritten) == 1:
                said = "its lines are kept, and written once they can be"
                log.error("run_log: cannot write to %s (%s); %s.", self.path, error, said)
            del self._unwritten[KEPT_LINES:]
            self._let_go()

    def _open(self, new: bool = False) -> None:
        """Appending, so that a resumed run goes on in its file (readers drop what it repeats); in another one where a run is writing it."""
        assert self.path is not None
        if self._whole is None and (_is_written(self.path) or (new and os.path.lexists(self.path))):
            numbered = (
                self.path.with_name(f"{self.path.stem}.{n}{self.path.suffix}") for n in itertools.count(1)
            )
            free = next(path for path in numbered if not os.path.lexists(path))
            if _is_written(self.path):
                log.warning("run_log: another run is writing %s; this one writes %s.", self.path, free.name)
                self.path = free
            else:
                self.path.rename(free)
                log.warning("run_log: %s is of an earlier run and is now %s.", self.path, free.name)
        self._file = self.path.open("a", encoding="utf-8")
        _live[self.path.absolute()] = self
        # A file system without locks; of the process, not of its data loaders.
        with contextlib.suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if self._whole is None:
            if _is_cut(self.path):
                self._file.write("\n")  # after the stump of a line, where the run was cut off
                self._file.flush()
            self._whole = self._file.tell()
        self._file.truncate(self._whole)  # less what is there of a line

    def _let_go(self) -> None:
        """Close the file, if it is open."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the failed write was logged already
                file.close()


def ensure_run_log(state: State, logger: Logger) -> RunLog:
    """The run's :class:`RunLog`, added to the run if its YAML has none.

    For callbacks and algorithms whose metrics the report reads; call it at INIT, before logging anything.
    """
    for destination in _run_logs(logger):
        return destination
    run_log = RunLog()
    run_log._asked = False
    run_log.init(state, logger)
    logger.destinations = (*logger.destinations, run_log)
    state.callbacks.insert(0, run_log)
    return run_log


def log_details(logger: Logger, metrics: dict[str, Any]) -> None:
    """Log to the run log alone: metrics that the report draws and that are too many for a tracker."""
    for destination in _run_logs(logger):
        destination.log_metrics(metrics)


def log_facts(logger: Logger, facts: dict[str, Any]) -> None:
    """Log to the run log alone: what was found out, and may be found otherwise later or after a resume. MLflow takes no second value."""
    for destination in _run_logs(logger):
        destination.log_hyperparameters(facts)


def _run_logs(logger: Logger) -> list[RunLog]:
    return [destination for destination in logger.destinations if isinstance(destination, RunLog)]


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: tensors become numbers or lists, non-finite numbers strings, the rest ``str``."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    return str(value)


def _seconds_before(path: Path, step: int) -> float:
    """Training seconds that the log at ``path`` had counted by batch ``step``; 0 for a new run."""
    if step == 0 or not path.exists():
        return 0.0
    seconds = 0.0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for text in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if line["kind"] == "batch" and line["step"] <= step:
                    seconds = float(line["seconds"])
    return seconds


_live: weakref.WeakValueDictionary[Path, RunLog] = weakref.WeakValueDictionary()
"""The logs of this process, whose locks do not tell one from another."""


def _is_written(path: Path) -> bool:
    """Whether a run that is going on writes the file."""
    if (other := _live.get(path.absolute())) is not None and other._file is not None:
        return True
    try:
        with path.open("rb") as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN) and os.access(path, os.R_OK)
    return False


def _is_cut(path: Path) -> bool:
    """Whether its last line has no end."""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _cpu_name() -> str:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.processor() or platform.machine()
