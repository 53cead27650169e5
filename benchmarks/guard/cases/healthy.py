"""Healthy runs: practice that changes a run without harm, and causes of divergence in a small size."""

from __future__ import annotations

import math

from case import Case, delayed
from mechanisms.base import Several, every, grows
from mechanisms.common_to_all_tokens import ActivationMean, Spread
from mechanisms.gradients import AttentionGradientOutliers, GradientOutliers
from mechanisms.outliers import AttentionSink, RareTokenGrows, SuperWeight, SwigluAlignment
from mechanisms.practices import (
    Dropout,
    LabelsSmoothed,
    OptimizerReset,
    SwitchEma,
)
from rates import cosine, linear

CASES = [
    Case(
        name="warmup_spike", label="healthy", about="a learning rate of 1.5e-2 after two steps, then 3e-3",
        lr=lambda step: 1.5e-2 if 2 <= step < 20 else 3e-3,
    ),
    Case(
        name="harder_data", label="healthy", about="the share of random tokens goes from 0.1 to 0.35 in one step",
        noise=lambda step: 0.1 if step < 100 else 0.35,
    ),
    Case(
        name="stable_then_decay", label="healthy", seed=5, model={"kind": "opt"}, steps=300,
        about="a learning rate that is level, then falls to a twentieth within 60 steps, and the loss with it (arXiv:2404.06395), OPT",
        lr=lambda step: 6e-3 * min(1.0, (step + 1) / 20, max(0.05, (260 - step) / 60)),
    ),
    Case(
        name="annealed", label="healthy", seed=74, steps=240, recipe="block", model={"num_hidden_layers": 3},
        about="the last 90 steps are annealed to a rate of 0 on cleaner data (arXiv:2407.21783), 3 blocks, block",
        noise=lambda step: 0.25 if step < 150 else 0.05, lr=lambda step: 4e-3 * min(1.0, (step + 1) / 20, (240 - step) / 90),
    ),
    Case(
        name="dropout_restarts", label="healthy", seed=15, model={"variant": "olmo2"},
        about="dropout of 0.2 before attention's linears, and a learning rate that starts again at 7e-3 every 45 steps (arXiv:1608.03983)",
        lr=lambda step: 7e-3 * (0.52 + 0.48 * math.cos(math.pi * (step % 45) / 45)) * min(1.0, (step + 1) / 20),
        mechanism=lambda: Dropout("*.self_attn.*_proj", 0.2),
    ),
    Case(
        name="labels_smoothed", label="healthy", seed=78, steps=220, recipe=delayed(4), model={"kind": "opt", "num_hidden_layers": 3},
        about="labels are smoothed from step 100 on (arXiv:1512.00567), OPT of 3 blocks, delayed", mechanism=lambda: LabelsSmoothed(100, 0.2),
    ),
    Case(
        name="optimizer_reset", label="healthy", seed=27, steps=300, model={"kind": "mpt", "n_layers": 4},
        about="the optimizer forgets its moments twice (arXiv:2307.05695), MPT of 4 blocks, delayed", mechanism=lambda: OptimizerReset((120, 210)),
    ),
    Case(
        name="switched_average", label="healthy", seed=115, steps=260, recipe=delayed(4), attention=True, model={"variant": "fog-max", "tie_word_embeddings": True},
        about="every 40 steps weights become their moving average (arXiv:2402.09240), a constant rate, FOG-max with FP8 attention, delayed",
        mechanism=lambda: SwitchEma(40, 0.95),
    ),
    Case(
        name="eight_experts", label="healthy", seed=12, rows=3, recipe="mxfp8", model={"kind": "mixture", "num_local_experts": 8},
        about="8 experts that see few tokens each, mxfp8",
    ),
    Case(
        name="swiglu_alignment_small", label="healthy", seed=119, steps=260, rows=16, recipe="current", model={"num_hidden_layers": 3}, lr=cosine(2e-3, 260),
        about="gate and up rows of a channel of two blocks align and grow 4 % a step to 3 and stay (arXiv:2409.12517), 3 blocks, current",
        mechanism=lambda: Several(*(SwigluAlignment(i, grows(70, 1.04, 0.5, 3.0), channel) for i, channel in ((0, 33), (2, 90)))),
    ),
    Case(
        name="super_weight_small", label="healthy", seed=120, steps=260, rows=20, recipe=delayed(256), model={"kind": "opt"}, lr=linear(2e-3, 260),
        about="one weight before the residual stream grows 5 % a step to 3 and stays (arXiv:2411.07191), OPT, delayed",
        mechanism=lambda: SuperWeight("*.fc2", grows(80, 1.05, 0.1, 3.0), channel=60),
    ),
    Case(
        name="attention_sink_small", label="healthy", seed=157, steps=260, rows=24, recipe=delayed(64), attention=True, lr=cosine(3e-3, 260),
        about="the first key takes all attention, by odds that grow 6 % a step to 1000 and stay (arXiv:2309.17453), under FP8 attention, MPT, delayed",
        model={"kind": "mpt", "n_layers": 2}, mechanism=lambda: AttentionSink("*.attn", grows(60, 1.06, 1.0, 1000.0)),
    ),
    Case(
        name="rare_token_small", label="healthy", seed=98, steps=250, recipe="current", model={"variant": "olmo2", "num_hidden_layers": 3, "hidden_size": 48},
        about="the embedding of a rare token grows 4 % a step to 20 times its size and stays (arXiv:2405.05417), OLMo2 of 3 blocks, current",
        mechanism=lambda: RareTokenGrows(40, 1.04, 75, 151),
    ),
    Case(
        name="activation_mean_small", label="healthy", seed=52, steps=260, recipe="block", model={"num_hidden_layers": 3, "hidden_size": 48},
        about="a mean of the activations grows 2 % a step for 110 steps, to 0.9, and stays (arXiv:2304.09145), block",
        mechanism=lambda: ActivationMean("*.mlp.*_proj", grows(80, 1.02, 0.1, 0.9)),
    ),
    Case(
        name="token_norms_small", label="healthy", seed=53, steps=220, recipe="current", rows=6,
        about="tokens' norms spread by a factor that grows to 100 and stays (arXiv:2206.01861), which E4M3 has the range for, current",
        mechanism=lambda: Spread("*.layers.*_proj", grows(60, 1.05, 1.0, 100.0)),
    ),
    Case(
        name="gradient_spikes_small", label="healthy", seed=84, steps=240, recipe=delayed(8), model={"kind": "opt"},
        about="every 23rd step gradients have spikes a thousand times as large (arXiv:2501.06842), which E5M2 has the range for, OPT, delayed",
        mechanism=lambda: Several(*(GradientOutliers(names, every(23, grows(60, 1.0), 60), channel=50) for names in ("*_proj", "*.fc?"))),
    ),
    Case(
        name="attention_gradients_small", label="healthy", seed=82, steps=220, recipe="current", attention=True,
        about="gradients of attention's output have a channel that grows to 0.03 and stays (arXiv:2505.11594) under FP8 attention, current",
        mechanism=lambda: AttentionGradientOutliers("*.self_attn", grows(70, 1.06, 1e-3, 0.03), channel=9),
    ),
]  # fmt: skip
