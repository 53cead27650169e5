"""What the documents say of a GPU, and what the stages showed of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from foundry_fp8.backends.size_rule import size_reason
from foundry_fp8.cli.selftest.rank_claims import RANK_CLAIMS
from foundry_fp8.cli.selftest.stages import Outcome
from foundry_fp8.numerics.recipes import RECIPES

__all__ = ["CLAIMS", "Claim", "Verdict", "judge"]

LINEARS = {
    "llama3-8b wq, wo": (4096, 4096),
    "llama3-8b wk, wv": (4096, 1024),
    "llama3-8b gate, up": (4096, 14336),
    "llama3-8b down": (14336, 4096),
}
"""Groups of ``benchmarks/step_gpu.py``: in_features and out_features."""

Word = Literal["confirmed", "refuted", "not reached"]
Judged = tuple[bool, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of a document that a GPU can confirm or refute."""

    document: str
    quote: str
    """Its words in the document."""
    stages: tuple[str, ...]
    """Where to look: the first of them that has a result."""
    shown: Callable[[Outcome], Judged]
    """Whether that stage confirms it, and its figures."""
    hangs: bool = False
    """A stage that ran out of time refutes it."""
    exits: bool = False
    """Judged by whether the stage passed, without a result."""
    next: str = "Report it: foundry-fp8 selftest packs what an issue needs."
    """What to do where it is refuted."""
    avoid: str = ""
    """YAML lines with which a run does without it."""
    keys: tuple[str, ...] = ()
    """YAML keys of runs that rely on it; ``key=value`` for one value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a claim."""

    claim: Claim
    word: Word
    figures: str


def judge(outcomes: list[Outcome], *, dry: bool = False) -> list[Verdict]:
    """One verdict a claim, in their order. A dry run confirms nothing; what fails there would fail on a GPU too."""
    by_name = {outcome.stage: outcome for outcome in outcomes}
    return [_judged(claim, by_name, dry=dry) for claim in CLAIMS]


def _judged(claim: Claim, outcomes: Mapping[str, Outcome], *, dry: bool) -> Verdict:
    reasons = []
    for name in claim.stages:
        outcome = outcomes.get(name)
        if outcome is None:
            continue
        ended = outcome.state in (
            ("passed", "failed", "out of time") if claim.hangs else ("passed", "failed")
        )
        if ended if claim.exits else outcome.result is not None:
            try:
                right, figures = claim.shown(outcome)
            except (KeyError, ValueError, TypeError) as error:
                reasons.append(f"{name}: no such figures ({type(error).__name__}: {error})")
                continue
            if right and dry:
                return Verdict(claim=claim, word="not reached", figures=f"{name}: rehearsed without a GPU")
            return Verdict(
                claim=claim, word="confirmed" if right else "refuted", figures=f"{name}: {figures}"
            )
        reasons.append(f"{name}: {outcome.state}{': ' if outcome.why else ''}{outcome.why}")
    return Verdict(claim=claim, word="not reached", figures="; ".join(reasons) or "no such stage")


def _passes(outcome: Outcome) -> Judged:
    return outcome.state == "passed", outcome.why or f"passed in {outcome.seconds:.0f} s"


def _checks(outcome: Outcome) -> Judged:
    """All checks of a stage on every rank."""
    rows = (outcome.result or {}).get("rows", [])
    wrong = [f"{row['check']}: {row['figures']}" for row in rows if not row["ok"]]
    if outcome.state == "passed":
        return True, "; ".join(f"{row['check']}: {row['figures']}" for row in rows)
    return False, "; ".join(wrong) or outcome.why


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    assert outcome.result is not None
    if outcome.result.get("machine", {}).get("smoke"):
        raise ValueError("tiny tensors, which measure nothing")
    rows: list[dict[str, Any]] = outcome.result["rows"]
    return rows


def _kernels(outcome: Outcome) -> Judged:
    assert outcome.result is not None
    recipes = outcome.result["recipes"]
    states = {name: entry["state"] for name, entry in recipes.items()}
    if "interpreted" in states.values():
        raise ValueError("interpreted")
    why = "; ".join(entry["why"] for entry in recipes.values() if entry["state"] == "wrong")
    right = "wrong" not in states.values() and "right" in states.values()
    return right, why or ", ".join(f"{name} {state}" for name, state in states.items())


def _supported(outcome: Outcome) -> Judged:
    assert outcome.result is not None
    if all(device["capability"] is None for device in outcome.result["devices"]):
        raise ValueError("no GPU")
    found = {e["recipe"]: e for e in outcome.result["support"] if e["backend"] == "native"}
    refused = [
        f"{name}: {found[name]['reason']}"
        for name in ("delayed", "current", "block")
        if not found[name]["ok"]
    ]
    return not refused, "; ".join(refused) or "delayed, current and block"


def _fast(recipe: str, least: float) -> Callable[[Outcome], Judged]:
    """The best of a block's rows of ``recipe`` in eager mode is ``least`` times as fast as BF16, or faster."""

    def shown(outcome: Outcome) -> Judged:
        found = [
            (row["speedup"], row["group"], row["variant"])
            for row in _rows(outcome)
            if "speedup" in row
            and "blocks" in row["group"]
            and row["variant"].startswith(f"native {recipe} ")
        ]
        speed, group, variant = max(found)
        return speed >= least, f"{variant} on {group}: {speed:.2f} x BF16"

    return shown


def _auto_wins(outcome: Outcome) -> Judged:
    """No linear that ``auto`` would convert is slower than BF16."""
    recipe, lost, seen = RECIPES["current"](), [], 0
    for row in _rows(outcome):
        sizes = LINEARS.get(row["group"])
        if sizes and row["variant"] == "native current eager" and size_reason(recipe, *sizes) is None:
            seen += 1
            if row["speedup"] < 1:
                lost.append(f"{row['group']} {row['speedup']:.2f} x")
    if not seen:
        raise ValueError("no linear of the table")
    return not lost, "; ".join(lost) or f"{seen} of {seen} linears at least as fast as BF16"


def _bandwidth(outcome: Outcome) -> Judged:
    large = [
        row for row in _rows(outcome) if row.get("size") in ("4096 x 4096", "8192 x 4096", "8192 x 14336")
    ]
    worst = min((row for row in large if "share" in row), key=lambda row: row["share"])
    return worst[
        "share"
    ] >= 0.85, f"least: {worst['kernel']}, {worst['size']}: {worst['share']:.2f} of a copy"


def _follows(outcome: Outcome) -> Judged:
    assert outcome.result is not None
    high, fp8 = (outcome.result["runs"][name] for name in ("high-precision", "current"))
    if fp8["backend"] == "emulated":
        raise ValueError("emulated")
    apart = fp8["final_loss"] / high["final_loss"] - 1
    speed = fp8["tokens_per_second"] / high["tokens_per_second"]
    return abs(apart) < 0.034, (
        f"loss {apart:+.2%}, {speed:.2f} x the tokens per second, MFU {high['mfu']} and {fp8['mfu']}"
    )


STEPS = ("step",)
CLAIMS = (
    Claim(
        document="docs/kernels.md",
        quote="It runs the delayed, current and block recipes on NVIDIA GPUs from compute capability 8.9 on",
        stages=("doctor",),
        shown=_supported,
    ),
    Claim(
        document="docs/architecture.md",
        quote="Inf and NaN stay visible through quantisation",
        stages=("kernels",),
        shown=_kernels,
    ),
    Claim(
        document="docs/kernels.md",
        quote="A training step can be captured",
        stages=("tests of the native backend",),
        shown=_passes,
        exits=True,
    ),
    Claim(
        document="docs/kernels.md",
        quote="every kernel gives the bytes of",
        stages=("tests of the kernels",),
        shown=_passes,
        exits=True,
    ),
    Claim(
        document="README.md",
        quote="the default on Hopper; has no state",
        stages=STEPS,
        shown=_fast("current", 1.0),
    ),
    Claim(
        document="README.md",
        quote="fastest; for models without outliers",
        stages=STEPS,
        shown=_fast("delayed", 1.0),
    ),
    Claim(
        document="README.md",
        quote="larger models and long runs on Hopper, at some cost in speed",
        stages=STEPS,
        shown=_fast("block", 1.0),
    ),
    Claim(
        document="docs/results.md",
        quote="On a GPU `recipe: auto` leaves layers in BF16 that a size rule predicts to be no faster",
        stages=STEPS,
        shown=_auto_wins,
    ),
    Claim(
        document="benchmarks/quantize_gpu.py",
        quote="The target is 0.85 on 4096 x 4096 and larger",
        stages=("quantize",),
        shown=_bandwidth,
    ),
    Claim(
        document="docs/results.md",
        quote="FP8 trains like float32",
        stages=("training",),
        shown=_follows,
    ),
    *(
        Claim(
            document="docs/reference/selftest.md",
            quote=claim.quote,
            stages=(claim.stage,),
            shown=_checks,
            exits=True,
            hangs=True,
            next=claim.next,
            avoid=claim.avoid,
            keys=claim.keys,
        )
        for claim in RANK_CLAIMS
    ),
)
