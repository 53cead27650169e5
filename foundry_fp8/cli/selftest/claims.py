"""What each stage shows, in the words of docs/reference/selftest.md, what to do where it does not, and the verdicts."""

from __future__ import annotations

import dataclasses
from typing import Literal

from foundry_fp8.cli.selftest.stages import Outcome

__all__ = ["CLAIMS", "Claim", "Verdict", "judge"]

Word = Literal["confirmed", "refuted", "not reached"]


@dataclasses.dataclass(frozen=True)
class Claim:
    """One sentence that a stage on GPUs confirms or refutes."""

    stage: str
    quote: str
    next: str
    """What to do where it is refuted."""
    avoid: str = ""
    """YAML lines with which a run does without it."""
    keys: tuple[str, ...] = ()
    """YAML keys of runs that rely on it."""
    hangs: bool = True
    """A stage that ran out of time refutes it."""


FP8 = ("algorithms.fp8",)
BF16 = "algorithms: {fp8: {enabled: false}}"
WHOLE = "algorithms: {compressed_communication: {gradients: none}}"
COMPRESSED = ("algorithms.compressed_communication",)
REPORT = "Report it: foundry-fp8 selftest packs what an issue needs."
WRAPPERS = {"ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "hsdp": "HSDP"}

CLAIMS = (
    Claim("kernels", "the native kernels give the bytes of their definitions; NaN and Inf stay visible", REPORT, BF16, FP8),
    Claim("network", "torch's collectives give known numbers, and no link is three times slower than another of its kind",
          "Run nccl-tests on the same nodes; a slow link is named above."),
    Claim("collectives", "compressed collectives give the bits that gloo gives on the CPU",
          "Leave gradients uncompressed.", WHOLE, COMPRESSED),
    *(Claim(stage, f"training steps under {title} have the gradients of an unwrapped FP8 model",
            "Train in BF16, or in FP8 under a wrapper that passed.", BF16, FP8) for stage, title in WRAPPERS.items()),
    Claim("compressed", "compressed gradients are within 5 % of whole ones, and replicas stay equal",
          "Leave gradients uncompressed.", WHOLE, COMPRESSED),
    Claim("fsdp2 under torch's stream checker", "no stream reads what another may still write", REPORT, keys=FP8),
    Claim("training", "a run of LLM Foundry in FP8 ends within 3.4 % of the loss of BF16", REPORT, BF16, FP8, hangs=False),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a claim."""

    claim: Claim
    word: Word
    figures: str


def judge(outcomes: list[Outcome], *, dry: bool = False) -> list[Verdict]:
    """One verdict a claim, in their order. A dry run confirms nothing; what fails there would fail on a GPU too."""
    by_name = {outcome.stage: outcome for outcome in outcomes}
    return [_judged(claim, by_name.get(claim.stage), dry=dry) for claim in CLAIMS]


def _judged(claim: Claim, outcome: Outcome | None, *, dry: bool) -> Verdict:
    if outcome is None:
        return Verdict(claim=claim, word="not reached", figures="no such stage")
    if outcome.state == "passed" and dry:
        return Verdict(claim=claim, word="not reached", figures=f"{claim.stage}: rehearsed without a GPU")
    rows = (outcome.result or {}).get("rows", [])
    said = [f"{row['check']}: {row['figures']}" for row in rows if row["ok"] == (outcome.state == "passed")]
    figures = f"{claim.stage}: {'; '.join(said) or outcome.why}"
    if outcome.state == "passed":
        return Verdict(claim=claim, word="confirmed", figures=figures)
    if outcome.state == "failed" or (outcome.state == "out of time" and claim.hangs):
        return Verdict(claim=claim, word="refuted", figures=figures)
    return Verdict(claim=claim, word="not reached", figures=f"{claim.stage}: {outcome.state}: {outcome.why}")
