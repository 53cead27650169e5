"""The rules of FP8 attention on real hardware, one case a rule."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from foundry_fp8.backends.attention_requirements import (
    AttentionMachine,
    AttentionShape,
    attention_requirement,
)
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling

SHAPE = AttentionShape(head_dim=128, sequence=4096)
HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("recipe", "changes", "capability", "cudnn", "reason"),
    [
        (DelayedScaling(), {}, HOPPER, (9, 5, 1), None),  # torch 2.7.0 as released
        (DelayedScaling(), {"sequence": 4000}, HOPPER, (9, 5, 1), r"multiples of 128 \(here 4000\)"),
        (DelayedScaling(), {"sequence": 4000}, HOPPER, (9, 7, 0), None),
        (DelayedScaling(), {"padding": True}, HOPPER, (9, 19, 0), "the batch is padded"),
        (DelayedScaling(), {}, HOPPER, (9, 2, 0), "from 9.2.1 on"),
        (DelayedScaling(), {}, HOPPER, (9, 10, 0), "9.10.0 is broken"),
        (
            DelayedScaling(),
            {"head_dim": 64},
            HOPPER,
            (9, 19, 0),
            "head_dim is 64, and on Hopper it has to be 128",
        ),
        (DelayedScaling(), {"head_dim": 64}, BLACKWELL, (9, 19, 0), None),
        (DelayedScaling(), {"head_dim": 72}, BLACKWELL, (9, 19, 0), "multiple of 16 up to 128"),
        (DelayedScaling(), {}, BLACKWELL, (9, 5, 1), "Blackwell needs 9.7"),
        (DelayedScaling(), {"window": True}, HOPPER, (9, 21, 0), "a sliding window in FP8"),
        (DelayedScaling(), {"window": True}, BLACKWELL, (9, 21, 0), None),
        (
            DelayedScaling(),
            {"bias": True},
            BLACKWELL,
            (9, 21, 0),
            "no form for something added to the logits",
        ),
        (DelayedScaling(), {"documents": True}, HOPPER, (9, 21, 0), "no form for document masks"),
        (DelayedScaling(), {}, (8, 9), (9, 21, 0), "compute capability 8.9, and FP8 attention runs on 9.0"),
        (DelayedScaling(), {}, (12, 0), (9, 21, 0), "compute capability 12.0"),
        (CurrentScaling(), {}, BLACKWELL, (9, 19, 0), "with the delayed recipe alone, not current"),
        (BlockScaling(), {}, HOPPER, (9, 19, 0), "with the delayed recipe alone, not block"),
    ],
)
def test_rule(recipe: Any, changes: dict[str, Any], capability: Any, cudnn: Any, reason: str | None) -> None:
    machine = AttentionMachine(capability=capability, cudnn=cudnn, te=(2, 8, 0))
    found = attention_requirement(recipe, dataclasses.replace(SHAPE, **changes), machine)
    assert found.ok is (reason is None), found.reason
    if reason is not None:
        assert re.search(reason, found.reason) and found.remedy


@pytest.mark.parametrize(
    ("cudnn", "te", "ok"),
    [((9, 19, 0), (2, 13, 0), True), ((9, 18, 1), (2, 13, 0), False), ((9, 19, 0), (2, 12, 0), False)],
)
@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_deterministic_runs_need_a_cudnn_and_a_te_that_can(
    capability: Any, cudnn: Any, te: Any, ok: bool
) -> None:
    machine = AttentionMachine(capability=capability, cudnn=cudnn, te=te, deterministic=True)
    found = attention_requirement(DelayedScaling(), SHAPE, machine)
    assert found.ok is ok
    assert attention_requirement(
        DelayedScaling(), SHAPE, dataclasses.replace(machine, deterministic=False)
    ).ok
    alone = attention_requirement(DelayedScaling(), SHAPE, dataclasses.replace(machine, te=None))
    assert alone.ok is (cudnn >= (9, 19)) and "Transformer" not in alone.reason
    if not ok:
        assert "from cuDNN 9.19 and Transformer Engine 2.13 on" in found.reason
        assert "deterministic_mode: false" in found.remedy
