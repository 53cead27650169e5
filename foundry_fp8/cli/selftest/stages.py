"""What is run, in which order and for how long: each stage processes of its own, so that none takes another with it."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from foundry_fp8.cli.selftest.cluster.ranks import CANNOT_RUN
from foundry_fp8.cli.selftest.processes import Ended
from foundry_fp8.cli.selftest.supervisors import Supervisors

__all__ = ["Outcome", "Stage", "run_stages", "stages_of"]

State = Literal["passed", "failed", "out of time", "not reached"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One process, or one on every rank."""

    name: str
    command: tuple[str, ...]
    """Prints a JSON object, whole or as its last line, if it has results."""
    limit_s: float
    every_rank: bool = False
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    needs: str = ""
    """A stage without which this one says nothing: it is not run where that one failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended."""

    stage: str
    state: State
    why: str = ""
    seconds: float = 0.0
    result: dict[str, Any] | None = None
    """The JSON object that it printed, on rank 0."""


def stages_of(output: Path, *, dry: bool) -> list[Stage]:
    """All stages: what gives a verdict first comes first; what runs on every rank before what takes long on one GPU.

    Args:
        output: The folder of the whole; some stages write below it.
        dry: The host path of each stage on a machine without a GPU: kernels interpreted, ranks on gloo, training on the CPU.
            Proves the scripts and measures nothing.
    """
    python = sys.executable
    said = ("--dry",) if dry else ()

    def module(name: str, *arguments: str) -> tuple[str, ...]:
        return (python, "-m", name, *arguments)

    def ranks(name: str, limit: float, of: str = "", needs: str = "network", **environment: str) -> Stage:
        command = module("foundry_fp8.cli.selftest.cluster", of or name, *said)
        environment = {} if dry else environment  # torch's checker asks for a GPU
        return Stage(name=name, command=command, limit_s=limit, every_rank=True, needs=needs, environment=environment)  # fmt: skip

    stages = [
        Stage(name="doctor", command=module("foundry_fp8.cli.main", "doctor", "--json"), limit_s=60),
        Stage(name="kernels", command=module("foundry_fp8.cli.selftest.kernels"), limit_s=90),
        ranks("network", 60, needs=""),
        ranks("collectives", 60),
        ranks("ddp", 60),
        ranks("fsdp1", 60),
        ranks("fsdp2", 60),
        ranks("hsdp", 60),
        ranks("compressed", 60),
        ranks("fsdp2 under torch's stream checker", 90, "fsdp2", TORCH_CUDA_SANITIZER="1"),
        Stage(
            name="training",
            command=module("foundry_fp8.cli.selftest.training", str(output), *said),
            limit_s=150,  # two runs, and importing LLM Foundry for each
        ),
    ]  # fmt: skip
    return [dataclasses.replace(stage, limit_s=10 * stage.limit_s) for stage in stages] if dry else stages


def run_stages(
    stages: Sequence[Stage],
    logs: Path,
    budget_s: float,
    *,
    dry: bool,
    supervisors: Supervisors | None = None,
    said: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Run every stage, within its own limit and what is left of the budget.

    ``said`` is called with each outcome as it comes.
    """
    supervisors = supervisors or Supervisors(1)
    deadline, outcomes = time.monotonic() + budget_s, dict[str, Outcome]()
    logs.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        left = deadline - time.monotonic()
        needed = outcomes.get(stage.needs)
        why = ""
        if needed is not None and needed.state != "passed":
            why = f"{needed.stage}: {needed.state}"
        elif left <= 0:
            why = f"the {budget_s:.0f} s were over"
        outcome = Outcome(stage=stage.name, state="not reached", why=why)
        if not why:
            outcome = _run(stage, logs, min(stage.limit_s, left), dry, supervisors)
        outcomes[stage.name] = outcome
        said(outcome)
    supervisors.end()
    return list(outcomes.values())


def _run(stage: Stage, logs: Path, limit_s: float, dry: bool, supervisors: Supervisors) -> Outcome:
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **stage.environment}
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    log, started = logs / stage.name.replace("'", "").replace(" ", "-"), time.monotonic()
    ends = supervisors.lead(stage.command, log, limit_s, environment, every_rank=stage.every_rank)
    state, why = _ending(ends, limit_s)
    seconds = round(time.monotonic() - started, 1)
    return Outcome(stage=stage.name, state=state, why=why, seconds=seconds, result=_json(ends[0].output))


def _ending(ends: Sequence[Ended], limit_s: float) -> tuple[State, str]:
    """The state of a stage, and why: first what a rank says itself, then where those were that had to be ended."""
    names = [f"rank {rank}" if len(ends) > 1 else "" for rank in range(len(ends))]
    hung = [f"{name} was at {e.where or 'no line of Python'}".strip() for name, e in zip(names, ends, strict=True) if e.code is None]  # fmt: skip
    own = [(name, end) for name, end in zip(names, ends, strict=True) if end.code]
    refused = [said for said in own if said[1].code == CANNOT_RUN]
    if refused:
        return "not reached", _last_line(refused[0][1])
    # Who only lost its peer says less than who failed.
    own.sort(
        key=lambda said: any(word in _last_line(said[1]) for word in ("Connection", "closed by peer", "NCCL"))
    )
    if own:
        name, end = own[0]
        code = f"signal {-end.code}" if end.code < 0 else f"exit {end.code}"  # type: ignore[operator]
        return "failed", "; ".join([f"{name} {code}: {_last_line(end)}".strip(), *hung])
    return ("out of time", f"ended after {limit_s:.0f} s; {'; '.join(hung)}") if hung else ("passed", "")


def _last_line(end: Ended) -> str:
    """What a process said last."""
    return ((end.errors.strip() or end.output.strip()).splitlines() or [""])[-1][-300:]


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
