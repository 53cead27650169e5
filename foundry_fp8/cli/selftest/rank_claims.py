"""What the stages on every rank show, in the words of docs/reference/selftest.md, and what to do where they do not."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RANK_CLAIMS", "RankClaim"]


class RankClaim(NamedTuple):
    """Of one stage."""

    stage: str
    quote: str
    next: str
    """What to do where it is refuted."""
    avoid: str = ""
    """YAML lines with which a run does without it."""
    keys: tuple[str, ...] = ()
    """YAML keys of runs that rely on it."""


FP8 = ("algorithms.fp8",)
BF16 = "algorithms: {fp8: {enabled: false}}"
WHOLE = "algorithms: {compressed_communication: {gradients: none}}"
COMPRESSED = ("algorithms.compressed_communication",)

RANK_CLAIMS = (
    RankClaim(
        "network",
        "torch's collectives give known numbers, and no link is three times slower than another of its kind",
        "Run nccl-tests on the same nodes; a slow link is named above.",
    ),
    RankClaim(
        "collectives",
        "compressed collectives give the bits that gloo gives on the CPU",
        "Leave gradients uncompressed.",
        WHOLE,
        COMPRESSED,
    ),
    *(
        RankClaim(
            stage,
            f"training steps under {title} have the gradients of an unwrapped FP8 model",
            "Train in BF16, or in FP8 under a wrapper that passed.",
            BF16,
            FP8,
        )
        for stage, title in (("ddp", "DDP"), ("fsdp1", "FSDP1"), ("fsdp2", "FSDP2"), ("hsdp", "HSDP"))
    ),
    RankClaim(
        "compressed",
        "compressed gradients are within 5 % of whole ones, and replicas stay equal",
        "Leave gradients uncompressed.",
        WHOLE,
        COMPRESSED,
    ),
    RankClaim(
        "checkpoint",
        "a sharded checkpoint is written",
        "Check the space and the rights of the folder that --output names.",
    ),
    RankClaim(
        "resume", "a new process takes the next step bit for bit", "Do not resume FP8 runs here.", BF16, FP8
    ),
    RankClaim(
        "features",
        "offload changes no gradient; compressed activations and the fused head stay near",
        "Leave out the one that is named above.",
        keys=(
            "algorithms.activation_checkpointing.offload",
            "algorithms.activation_compression",
            "algorithms.fused_head",
        ),
    ),
    RankClaim(
        "transformer engine",
        "Transformer Engine's gradients are near high precision",
        "Use the native backend.",
        "algorithms: {fp8: {backend: native}}",
        ("algorithms.fp8.backend=transformer_engine",),
    ),
    RankClaim(
        "compile",
        "compiled gradients are as near to high precision as those of eager mode",
        "Train without torch.compile.",
        "compile_config: null",
        ("compile_config",),
    ),
    RankClaim(
        "block",
        "blocks of Llama-3 8B are faster in FP8 than in BF16",
        "Compare clocks and power of this GPU with another of its kind.",
        keys=FP8,
    ),
    RankClaim(
        "fsdp2 under torch's stream checker",
        "no stream reads what another may still write",
        "Report it.",
        keys=FP8,
    ),
)
