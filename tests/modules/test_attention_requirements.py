"""The rules of FP8 attention on real hardware, one case a rule."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from foundry_fp8.modules.attention_requirements import AttentionShape, attention_requirement
from foundry_fp8.recipes import BlockScaling, CurrentScaling, DelayedScaling

SHAPE = AttentionShape(head_dim=128, sequence=4096)
HOPPER, BLACKWELL = (9, 0), (10, 0)


@pytest.mark.parametrize(
    ("recipe", "changes", "capability", "cudnn", "reason"),
    [
        (DelayedScaling(), {}, HOPPER, (9, 5, 1), None),  # torch 2.7.0 as released
        (DelayedScaling(), {"sequence": 4000}, HOPPER, (9, 5, 1), r"multiples of 128 \(here 4000\)"),
        (DelayedScaling(), {"padding": True}, HOPPER, (9, 5, 1), "without padding masks"),
        (DelayedScaling(), {"padding": True, "sequence": 4000}, HOPPER, (9, 7, 0), None),
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
        (CurrentScaling(), {}, HOPPER, (9, 19, 0), "under current scaling needs 10.0 and cuDNN 9.14"),
        (CurrentScaling(), {}, BLACKWELL, (9, 14, 0), None),
        (BlockScaling(), {}, HOPPER, (9, 19, 0), "block recipe has no FP8 attention"),
    ],
)
def test_rule(recipe: Any, changes: dict[str, Any], capability: Any, cudnn: Any, reason: str | None) -> None:
    found = attention_requirement(
        recipe, dataclasses.replace(SHAPE, **changes), capability=capability, cudnn=cudnn
    )
    assert found.ok is (reason is None), found.reason
    if reason is not None:
        assert re.search(reason, found.reason) and found.remedy
