"""What a run can switch on, which of it excludes each other, and rows in which every pair of values occurs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import covertable
import pytest

FACTORS: dict[str, tuple[Any, ...]] = {
    "model": ("llama", "plain", "odd"),
    "wrapper": ("none", "ddp", "fsdp1", "fsdp1-flat", "fsdp2", "hsdp1", "hsdp2"),
    "dtype": ("float32", "bfloat16", "float16"),
    "fp8": (
        "none",
        "delayed",
        "current",
        "block",
        "mxfp8",
        "native-delayed",
        "native-current",
        "native-block",
    ),
    "attention": (False, True, "delayed"),
    "checkpoint": ("none", "full", "selective", "targets", "offload"),
    "compression": ("none", "exact", "int8"),
    "fused_head": (False, True),
    "gradients": ("none", "int8"),
    "parameters": ("none", "int8", "e4m3"),
    "cache_weights": (False, True),
    "lora": (False, True),
    "frozen": (False, True),
    "tied": (False, True),
    "accumulation": ("one", "two", "two-unsynchronised", "two-forwards"),
    "clip": (False, True),
    "wrapped": ("first", "last"),
    "evaluate": (False, True),
    "init": ("cpu", "meta", "mixed"),
}
"""``attention``: FP8 attention in the linears' recipe, or in the delayed one whatever theirs is, with its logits' gradients in bfloat16.
``accumulation``: microbatches a step, without a reduction between them, or with both forwards before one backward.
``wrapped``: whether checkpoints and compression are applied to what is wrapped already. ``evaluate``: a forward in
``eval()`` between the steps. ``init``: where the model is made and converted: every rank with its weights, every rank
without, or only rank 0 with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row. A default is the value that switches nothing on."""

    model: str = "llama"
    wrapper: str = "none"
    dtype: str = "float32"
    fp8: str = "none"
    attention: bool | str = False
    checkpoint: str = "none"
    compression: str = "none"
    fused_head: bool = False
    gradients: str = "none"
    parameters: str = "none"
    cache_weights: bool = False
    lora: bool = False
    frozen: bool = False
    tied: bool = False
    accumulation: str = "one"
    clip: bool = False
    wrapped: str = "first"
    evaluate: bool = False
    init: str = "cpu"
    frozen_weights: bool = False

    @property
    def communicates(self) -> bool:
        return self.gradients != "none" or self.parameters != "none"

    @property
    def numerics(self) -> Case:
        """The same case without what must not change a gradient, and without what may round it on its way."""
        return Case(
            **{
                name: getattr(self, name)
                for name in (
                    "model", "dtype", "fp8", "attention", "lora", "frozen", "tied", "accumulation", "clip", "evaluate",
                    "frozen_weights",
                )
            }
        )  # fmt: skip

    def __str__(self) -> str:
        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return " ".join(
            f"{name}={value}" if not isinstance(value, bool) else name
            for name, value in changed.items()
            if value != getattr(DEFAULT, name) or name in ("model", "wrapper")
        )


DEFAULT = Case()

EXCLUDED: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "FP8 attention is delayed or current, and beside FP8 linears": (
        ("attention", "fp8"),
        lambda r: (
            (r["attention"] and r["fp8"] == "none")
            or (r["attention"] is True and r["fp8"].rpartition("-")[2] not in ("delayed", "current"))
        ),
    ),
    "native FP8 attention is cuDNN's, and a GPU's": (
        ("attention", "fp8"),
        lambda r: r["attention"] and r["fp8"].startswith("native"),
    ),
    "only native keeps quantised weights": (
        ("cache_weights", "fp8"),
        lambda r: r["cache_weights"] and not r["fp8"].startswith("native"),
    ),
    "one rank sends nothing": (
        ("gradients", "wrapper"),
        lambda r: r["gradients"] != "none" and r["wrapper"] == "none",
    ),
    "only FSDP gathers parameters": (
        ("parameters", "wrapper"),
        lambda r: r["parameters"] != "none" and r["wrapper"] in ("none", "ddp"),
    ),
    "only FSDP gives weights to a model without any, and torch unties what it gives them to": (
        ("init", "wrapper", "tied"),
        lambda r: r["init"] != "cpu" and (r["wrapper"] in ("none", "ddp") or r["tied"]),
    ),
    "of a model's buffers torch's FSDP1 sends to the first shard group alone (they are marked as sent before the others get them)": (
        ("init", "wrapper", "model"),
        lambda r: r["init"] == "mixed" and r["wrapper"] == "hsdp1" and r["model"] == "llama",
    ),
    "FSDP1's flat parameter trains as a whole or not at all": (
        ("wrapper", "frozen", "lora"),
        lambda r: r["wrapper"] == "fsdp1-flat" and (r["frozen"] or r["lora"]),
    ),
    "on a CPU, torch cannot drop the gather of an HSDP unit without any gradient (compat/cpu_stream_events)": (
        ("wrapper", "frozen", "model", "lora"),
        lambda r: r["wrapper"] == "hsdp2" and r["frozen"] and (r["model"] == "llama" or r["lora"]),
    ),
}
"""What cannot be asked for together, by reason."""


def allowed(row: dict[str, Any]) -> bool:
    """Whether no rule of :data:`EXCLUDED` speaks against the values that ``row`` names."""
    return not any(set(names) <= row.keys() and excluded(row) for names, excluded in EXCLUDED.values())


def beside_frozen_weights() -> tuple[Case, ...]:
    """Cases with frozen weights in FP8 in which every value that is allowed beside them occurs."""
    factors = FACTORS | {
        "wrapper": ("none", "ddp"),
        "fp8": ("block", "mxfp8", "native-block"),
        "parameters": ("none",),
        "init": ("cpu",),
    }
    both = {
        "operator": "fn",
        "requires": ["lora", "frozen"],
        "evaluate": lambda row: row["lora"] or row["frozen"],
    }
    rows = covertable.make(factors, strength=1, constraints=[*_constraints(), both])
    return tuple(Case(**row, frozen_weights=True) for row in rows)


def _constraints() -> list[dict[str, Any]]:
    return [
        {
            "operator": "fn",
            "requires": list(names),
            "evaluate": lambda row, excluded=excluded: not excluded(row),
        }
        for names, excluded in EXCLUDED.values()
    ]


@functools.cache
def covering(strength: int = 2) -> tuple[Case, ...]:
    """Cases in which every allowed combination of ``strength`` values occurs, always in the same order."""
    rows = covertable.make(FACTORS, strength=strength, constraints=_constraints())
    return tuple(Case(**row) for row in rows)


def pairs(sample: tuple[Case, ...], markexpr: str) -> list[Any]:
    """``sample``, and in the full tier beside it every pair of values, which takes seconds to find."""
    others = () if "not full" in markexpr else covering(2)
    return [*sample, *(pytest.param(case, marks=pytest.mark.full) for case in others if case not in sample)]
