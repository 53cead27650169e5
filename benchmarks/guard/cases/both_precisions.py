"""Runs that diverge in both precisions."""

from __future__ import annotations

from case import Case
from mechanisms.both_precisions import Multiplied, TokensAlike

CASES = [
    Case(
        name="rate_too_large", label="diverges in both", onset=80, about="the learning rate grows by 4 % a step",
        lr=lambda step: 3e-3 * min(1.0, (step + 1) / 20) * 1.04 ** max(0, step - 80),
    ),
    Case(
        name="head_growth", label="diverges in both", onset=90, seed=15, model={"kind": "opt"},
        about="the head grows 3 % a step and the logits with it (arXiv:2309.14322), OPT, delayed",
        mechanism=lambda: Multiplied("lm_head", 1.03, 90),
    ),
    Case(
        name="tokens_alike", label="diverges in both", onset=80, seed=53, steps=220, recipe="mxfp8", model={"num_hidden_layers": 3},
        about="tokens become alike, by one hundredth more a step (rank collapse, arXiv:2103.03404), 3 blocks, mxfp8",
        mechanism=lambda: TokensAlike("*.layers.?", lambda step: min(0.97, max(0.0, 0.01 * (step - 80)))),
    ),
]  # fmt: skip
