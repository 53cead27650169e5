"""Gradients that lose their precision; the forward is as it was."""

from __future__ import annotations

from case import Case, delayed
from mechanisms.base import Several, every, grows
from mechanisms.gradients import AttentionGradientOutliers, GradientOutliers, PairedGradients, TokenGradients
from rates import level

CASES = [
    Case(
        name="gradient_outliers", label="diverges", onset=70, recipe="block", seed=6, steps=280,
        about="gradients of one channel behind every linear grow 25 % a step (arXiv:2006.08173), block",
        mechanism=lambda: GradientOutliers("*_proj", grows(70, 1.25, 1e-4, 1e8)),
    ),
    Case(
        name="gradient_spikes", label="diverges", onset=75, seed=67, steps=240, recipe=delayed(24, fp8_format="e4m3"), model={"kind": "mpt"}, clip=0.5,
        about="every 19th step gradients have spikes (arXiv:2501.06842), 7 % larger a step, which a history of 24 remembers, MPT, delayed in E4M3",
        mechanism=lambda: Several(*(GradientOutliers(names, every(19, grows(75, 1.07), 75), channel=12) for names in ("*_proj", "*.Wqkv"))),
    ),
    Case(
        name="token_gradients", label="diverges", onset=95, seed=95, steps=260, recipe="block", model={"kind": "mixture", "num_key_value_heads": 4},
        about="gradients of one token in 50 grow 9 % a step beyond the others' (DeepSeek-V3, arXiv:2412.19437), mixture of experts, block",
        mechanism=lambda: Several(*(TokenGradients(names, grows(95, 1.09, 1e-4, 1e3)) for names in ("*.self_attn.*_proj", "*.experts.*.w?"))),
    ),
    Case(
        name="paired_gradients", label="diverges", onset=90, seed=62, steps=240, recipe="block", rows=12,
        about="rows come in pairs whose gradients are opposite and grow 8 % a step (arXiv:2305.18290), block",
        mechanism=lambda: PairedGradients(grows(90, 1.08, 1e-3, 1e3)),
    ),
    Case(
        name="attention_gradients", label="diverges", onset=40, seed=65, steps=230, attention=True, recipe={"name": "current", "fp8_format": "e4m3"},
        about="gradients of attention's output have a channel that grows 30 % a step (arXiv:2505.11594) under FP8 attention, current in E4M3",
        model={"num_key_value_heads": 4}, touched="*.self_attn*", lr=level(1e-3),
        mechanism=lambda: AttentionGradientOutliers("*.self_attn", grows(40, 1.3, 1e-2, 1e8)),
    ),
]  # fmt: skip
