"""The half of the labelled runs on which the guard's thresholds may be chosen."""

from __future__ import annotations

from case import Case
from mechanisms import (
    Activations,
    AttentionOutliers,
    CompensatedBias,
    Dropout,
    QueryKeyGrowth,
    Several,
    StaleHistory,
    SuperWeight,
    SwigluAlignment,
    during,
    grows,
)

BOTH = (0, 1)
LONG = {"name": "delayed", "amax_history_len": 256}

CASES = [
    Case(
        name="swiglu_alignment", label="diverges", onset=80, sick=BOTH, touched="*.mlp.*",
        about="gate and up rows of a channel align and grow 12 % a step (arXiv:2409.12517), delayed",
        mechanism=lambda: Several(*(SwigluAlignment(i, grows(80, 1.12, 1.0, 1e5)) for i in (0, 1))),
    ),
    Case(
        name="key_outliers", label="diverges", onset=80, sick=BOTH, touched="*.self_attn*", attention=True,
        about="two channels of the keys grow 20 % a step (arXiv:2402.02750) under FP8 attention without QK norm, delayed",
        mechanism=lambda: AttentionOutliers("keys", grows(80, 1.2, 1.0, 1e7)),
    ),
    Case(
        name="massive_first_token", label="diverges", onset=80, sick=BOTH, recipe="current",
        about="massive activations on the first token (arXiv:2402.17762), current",
        mechanism=lambda: Activations("*_proj", grows(80, 1.2, 1.0, 1e7), share=None),
    ),
    Case(
        name="bad_batch", label="diverges", onset=80, ends=81, sick=BOTH, recipe={"name": "delayed", "amax_history_len": 64},
        about="one batch with inputs of 4e5, which the amax history remembers for 64 steps, delayed",
        mechanism=lambda: Activations("*_proj", during(grows(80, 1.0, 4e5), 81)),
    ),
    Case(
        name="rate_too_large", label="diverges in both", onset=80,
        about="the learning rate grows by 4 % a step",
        lr=lambda step: 3e-3 * min(1.0, (step + 1) / 20) * 1.04 ** max(0, step - 80),
    ),
    Case(
        name="super_weight", label="diverges", onset=80, sick=BOTH, recipe="current",
        about="one weight of each linear grows 20 % a step (arXiv:2411.07191), current",
        mechanism=lambda: SuperWeight("*_proj", grows(80, 1.2, 0.1, 1e7)),
    ),
    Case(
        name="channel_outliers", label="diverges", onset=80, sick=BOTH, touched="*.down_proj",
        about="one channel before each down projection grows 15 % a step, which delayed scaling clips",
        mechanism=lambda: CompensatedBias("*.down_proj", grows(80, 1.15, 0.1)),
    ),
    Case(
        name="stale_history", label="diverges", onset=80, ends=81, sick=BOTH, recipe=LONG,
        about="FP8 state whose amaxes are 1.2e5 too large, as after loading another run's, delayed",
        mechanism=lambda: StaleHistory("*_proj", 80, 1.2e5),
    ),
    Case(
        name="warmup_spike", label="healthy", about="a learning rate of 1.5e-2 after two steps, then 3e-3",
        lr=lambda step: 1.5e-2 if 2 <= step < 20 else 3e-3,
    ),
    Case(name="dropout", label="healthy", about="dropout of 0.3 before every linear", mechanism=lambda: Dropout("*_proj", 0.3)),
    Case(
        name="harder_data", label="healthy", about="the share of random tokens goes from 0.1 to 0.35 in one step",
        noise=lambda step: 0.1 if step < 100 else 0.35,
    ),
    Case(
        name="slow_drift", label="healthy", about="the data become harder by little in every step",
        noise=lambda step: 0.1 + 0.3 * step / 200,
    ),
    Case(name="high_rate", label="healthy", about="a learning rate of 2e-2 that trains well", lr=lambda step: 2e-2 * min(1.0, (step + 1) / 30)),
    Case(name="small_batch", label="healthy", about="batches of 2 x 32 tokens", rows=2),
    Case(name="mixture", label="healthy", about="a sparse mixture of 4 experts", model={"kind": "mixture"}),
    Case(
        name="growing_logits", label="healthy", attention=True,
        about="query and key weights grow by 2 % a step for 100 steps under FP8 attention, which bears it",
        mechanism=lambda: QueryKeyGrowth(1.02, 60, 160),
    ),
    Case(
        name="lasting_outliers", label="healthy", about="massive activations of 50 on the first token, from the start",
        mechanism=lambda: Activations("*_proj", lambda step: 50.0, share=None),
    ),
]  # fmt: skip
