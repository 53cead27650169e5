"""What is run, in which order and for how long: each stage a process of its own, so that none takes another with it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

__all__ = ["Outcome", "Stage", "checkout", "run_stages", "stages_of"]

State = Literal["passed", "failed", "out of time", "not reached"]

_GRACE_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One process."""

    name: str
    command: tuple[str, ...]
    """Run from the checkout, where there is one. Prints a JSON object, whole or as its last line, if it has results."""
    limit_s: float
    needs_checkout: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    stage: str
    state: State
    why: str = ""
    seconds: float = 0.0
    result: dict[str, Any] | None = None
    """The JSON object that it printed."""


def checkout() -> Path | None:
    """The repository that this package lies in; ``None`` for an installed wheel, which has no tests and benchmarks."""
    root = Path(__file__).parents[3]
    return (
        root if (root / "benchmarks" / "step_gpu.py").exists() and (root / "tests" / "gpu").is_dir() else None
    )


def stages_of(output: Path, *, dry: bool) -> list[Stage]:
    """All stages: what gives a verdict first comes first, small sizes before full ones.

    Args:
        output: The folder of the whole; the training stage writes below it.
        dry: The host path of each stage on a machine without a GPU: kernels interpreted, tests collected, benchmarks on tiny tensors,
            training on the CPU. Proves the scripts and measures nothing.
    """
    python = sys.executable

    def module(name: str, *arguments: str) -> tuple[str, ...]:
        return (python, "-m", name, *arguments)

    def tests(name: str, limit: float, *paths: str) -> Stage:
        how = (
            ("--collect-only", "-q")
            if dry
            else ("-q", "-p", "no:cacheprovider", "--timeout", str(int(limit)))
        )
        return Stage(name=name, command=module("pytest", *paths, *how), limit_s=limit, needs_checkout=True)

    def benchmark(name: str, limit: float, *arguments: str) -> Stage:
        script = f"benchmarks/{name.split(',')[0]}_gpu.py"
        said = ("--smoke",) if dry else arguments
        return Stage(name=name, command=(python, script, *said), limit_s=limit, needs_checkout=True)

    reduced = ("--models", "llama3-8b", "--tokens", "4096", "--repeats", "5")
    stages = [
        Stage(name="doctor", command=module("foundry_fp8.cli.main", "doctor", "--json"), limit_s=60),
        Stage(name="kernels", command=module("foundry_fp8.cli.selftest.kernels"), limit_s=90),
        benchmark("step, reduced", 75, *reduced, "--layers", "1"),
        tests("tests of the native backend", 120, "tests/gpu/test_native.py"),
        benchmark("gemm, reduced", 40, *reduced),
        benchmark("quantize, reduced", 40, "--repeats", "5"),
        benchmark(
            "context, reduced",
            60,
            "--models",
            "fog-1.5b",
            "--contexts",
            "4096",
            "16384",
            "--repeats",
            "5",
            "--layers",
            "1",
        ),
        Stage(
            name="training",
            command=module("foundry_fp8.cli.selftest.training", str(output), *(("--dry",) if dry else ())),
            limit_s=110,
        ),
        tests("tests of the kernels", 90, "tests/kernels", "--ignore=tests/kernels/ptx"),
        tests("tests of Transformer Engine and FSDP2", 60, "tests/gpu", "--ignore=tests/gpu/test_native.py"),
    ]
    if not dry:  # the same scripts as above
        stages += [
            benchmark("gemm, full", 60, "--models", "llama3-8b"),
            benchmark("step, full", 120, "--models", "llama3-8b"),
            benchmark("quantize, full", 60),
        ]
    return [dataclasses.replace(stage, limit_s=900) for stage in stages] if dry else stages


def run_stages(
    stages: Sequence[Stage],
    logs: Path,
    budget_s: float,
    *,
    dry: bool,
    said: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run every stage, within its own limit and what is left of the budget.

    Args:
        stages: What to run.
        logs: Folder for what each stage prints.
        budget_s: For all of them.
        dry: Kernels run interpreted.
        said: Called with each outcome as it comes.
    """
    root, deadline, outcomes = checkout(), time.monotonic() + budget_s, []
    logs.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        left = deadline - time.monotonic()
        if stage.needs_checkout and root is None:
            outcome = Outcome(
                stage=stage.name, state="not reached", why="needs a checkout; this is an installed wheel"
            )
        elif left <= 0:
            outcome = Outcome(stage=stage.name, state="not reached", why=f"the {budget_s:.0f} s were over")
        else:
            outcome = _run(stage, logs, min(stage.limit_s, left), root, dry)
        outcomes.append(outcome)
        said(outcome)
    return outcomes


def _run(stage: Stage, logs: Path, limit_s: float, root: Path | None, dry: bool) -> Outcome:
    log = logs / f"{stage.name.replace(', ', '-').replace(' ', '-')}.log"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if root is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    with log.open("wb") as sink, (errors := log.with_suffix(".err")).open("wb") as trouble:
        process = subprocess.Popen(
            stage.command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=trouble,
            start_new_session=True,  # so that its own children end with it
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
        except BaseException:
            _end(process)
            raise
    seconds, text = time.monotonic() - started, log.read_text(errors="replace")
    found = {"stage": stage.name, "seconds": round(seconds, 1), "result": _json(text)}
    if code is None:
        return Outcome(**found, state="out of time", why=f"ended after {limit_s:.0f} s")  # type: ignore[arg-type]
    if code:
        tail = (errors.read_text(errors="replace").strip() or text.strip()).splitlines()[-1:]
        return Outcome(**found, state="failed", why=f"exit {code}: {''.join(tail)[-300:]}")  # type: ignore[arg-type]
    return Outcome(**found, state="passed")  # type: ignore[arg-type]


def _end(process: subprocess.Popen[bytes]) -> None:
    for how, wait in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, how)
            process.wait(wait)
            return
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            return


def _json(text: str) -> dict[str, Any] | None:
    """The object that is the whole text, or its last line."""
    for candidate in (text, *text.strip().splitlines()[-1:]):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None
