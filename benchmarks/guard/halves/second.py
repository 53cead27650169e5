"""The second half that was held out: its results were published and read on 2026-11-22, so it is of the tuned half now.

Written without sight of the guard's code, by another than who tuned it. Other hosts, sizes, rates and onsets than in ``tuned.py``, and
mechanisms that it does not have (``mechanisms/second.py``). A step of onset is after the warm-up of 20 unless a case says so.
"""

from __future__ import annotations

import math

from case import Case
from mechanisms.base import Several, grows
from mechanisms.first import (
    Activations,
    AttentionOutliers,
    CompensatedBias,
    Dropout,
    StaleHistory,
    SuperWeight,
    SwigluAlignment,
)
from mechanisms.second import GainAmplifier, GradientOutliers, Multiplied, PivotKeys

FOUR = {"num_hidden_layers": 4}


def bursts(every: int, start: int, rate: float, first: float):
    """Every ``every`` steps from ``start`` on: ``first``, growing by ``rate`` a step."""
    return lambda step: (
        first * rate ** (step - start) if step >= start and (step - start) % every == 0 else 0.0
    )


CASES = [
    Case(
        name="gain_amplifier", label="diverges", onset=110, recipe="current", model=FOUR, steps=320, seed=5, touched="*.[gq]*_proj",
        about="gains of three channels grow 9 % a step and their weights shrink by it (arXiv:2209.13325), 4 blocks, current",
        mechanism=lambda: GainAmplifier("*.[gq]*_proj", grows(110, 1.09, 1.0, 1e7)),
    ),
    Case(
        name="gradient_outliers", label="diverges", onset=70, recipe="block", seed=6, steps=280,
        about="gradients of one channel behind every linear grow 25 % a step (arXiv:2006.08173), block",
        mechanism=lambda: GradientOutliers("*_proj", grows(70, 1.25, 1e-4, 1e8)),
    ),
    Case(
        name="swiglu_alignment_slow", label="diverges", onset=100, sick=(1, 2), touched="*.layers.[12].mlp.*", steps=400, seed=7,
        model={"num_hidden_layers": 3}, recipe={"name": "delayed", "amax_history_len": 64},
        about="rows of a channel of two blocks of three align and grow 4.5 % a step (arXiv:2409.12517), delayed",
        mechanism=lambda: Several(*(SwigluAlignment(i, grows(100, 1.045, 1.0, 1e6), channel) for i, channel in ((1, 60), (2, 17)))),
    ),
    Case(
        name="pivot_keys", label="diverges", onset=65, attention=True, recipe="current", seed=8, model={"kind": "mpt"}, touched="*.attn*",
        about="the first token's keys grow 35 % a step under FP8 attention (arXiv:2403.01241), MPT, current",
        mechanism=lambda: PivotKeys("*.Wqkv", grows(65, 1.35, 1.0, 1e8), heads=4),
    ),
    Case(
        name="microscaling_jump", label="diverges", onset=95, recipe="mxfp8", seed=9, model={"kind": "mpt", "d_model": 96, "n_layers": 3},
        about="one channel of every 32 jumps to 2e6 from one step to the next and stays (cf. arXiv:2506.20752), MPT of width 96, mxfp8",
        mechanism=lambda: Several(
            *(Activations(names, grows(95, 1.0, 2e6), channel=c) for names in ("*_proj", "*.Wqkv") for c in (1, 50, 90))
        ),
    ),
    Case(
        name="super_weight_block", label="diverges", onset=50, recipe="block", seed=10, model={"kind": "opt"}, steps=240,
        about="one weight of each linear grows 10 % a step (arXiv:2411.07191), OPT, block",
        mechanism=lambda: Several(*(SuperWeight(names, grows(50, 1.1, 0.2, 1e7), channel=33) for names in ("*_proj", "*.fc?"))),
    ),
    Case(
        name="stale_in_warmup", label="diverges", onset=12, ends=13, seed=11, rows=4, recipe={"name": "delayed", "amax_history_len": 1024},
        lr=lambda step: 4e-3 * min(1.0, (step + 1) / 40),
        about="amaxes of activations and weights 1e5 too large within the warm-up, as loaded from another run, delayed",
        mechanism=lambda: StaleHistory("*_proj", 12, 1e5, ("x", "w")),
    ),
    Case(
        name="two_sources", label="diverges", onset=80, seed=12, recipe={"name": "delayed", "amax_history_len": 4}, touched="*.fc2",
        model={"kind": "opt"},
        about="every 6th batch is of another source, whose activations grow 5 % a step and that a history of 4 forgets, OPT, delayed",
        mechanism=lambda: CompensatedBias("*.fc2", bursts(6, 80, 1.05, 2.0), channel=21),
    ),
    Case(
        name="super_experts", label="diverges", onset=75, recipe="current", seed=13, model={"kind": "mixture"}, touched="*.experts.*",
        about="massive activations before the down projections of experts grow 16 % a step (arXiv:2507.23279), mixture, current",
        mechanism=lambda: Activations("*.experts.*.w2", grows(75, 1.16, 3.0, 1e8), share=0.05, channel=11),
    ),
    Case(
        name="value_outliers_two_blocks", label="diverges", onset=60, sick=(0, 1), attention=True, recipe="current", seed=14,
        model={"num_hidden_layers": 3}, touched="*.layers.[01].self_attn*",
        about="one channel of the values of two of three blocks grows 15 % a step under FP8 attention (FOG), current",
        mechanism=lambda: AttentionOutliers("values", grows(60, 1.15, 2.0, 1e8), layers="[01]", channel=9),
    ),
    Case(
        name="head_growth", label="diverges in both", onset=90, seed=15, model={"kind": "opt"},
        about="the head grows 3 % a step and the logits with it (arXiv:2309.14322), OPT, delayed",
        mechanism=lambda: Multiplied("lm_head", 1.03, 90, 400),
    ),
    Case(
        name="stable_then_decay", label="healthy", seed=5, model={"kind": "opt"}, steps=300,
        about="a learning rate that is level, then falls to a twentieth within 60 steps, and the loss with it (arXiv:2404.06395), OPT",
        lr=lambda step: 6e-3 * min(1.0, (step + 1) / 20, max(0.05, (260 - step) / 60)),
    ),
    Case(
        name="lost_batches", label="healthy", seed=6, recipe="current", about="every 37th batch is all random tokens (PaLM's spikes, arXiv:2204.02311), current",
        noise=lambda step: 1.0 if step % 37 == 36 else 0.12,
    ),
    Case(
        name="alternating_data", label="healthy", seed=7, steps=300, model=FOUR, rows=6,
        about="easy and hard data in turn, 60 steps each, 4 blocks",
        noise=lambda step: 0.08 if (step // 60) % 2 == 0 else 0.3,
    ),
    Case(
        name="massive_but_borne", label="healthy", seed=8, recipe="block", steps=300, model={"num_hidden_layers": 3},
        about="activations on the first token grow 3 % a step to 200 and stay (arXiv:2402.17762), which block scaling bears",
        mechanism=lambda: Activations("*.down_proj", grows(80, 1.03, 1.0, 200.0), share=None, channel=13),
    ),
    Case(
        name="long_drift", label="healthy", seed=9, steps=400, about="the data become harder for 240 steps, then easier again",
        noise=lambda step: 0.1 + 0.35 * (1 - abs(step - 240) / 240),
    ),
    Case(
        name="fog_attention", label="healthy", seed=10, attention=True, model={"variant": "fog-max"}, recipe="current",
        about="FOG-max with FP8 attention at a large learning rate, current", lr=lambda step: 8e-3 * min(1.0, (step + 1) / 20),
    ),
    Case(
        name="no_warmup", label="healthy", seed=11, clip=None, model={"kind": "mpt"}, rows=4, lr=lambda step: 5e-3,
        about="neither warm-up nor clipping, MPT",
    ),
    Case(
        name="eight_experts", label="healthy", seed=12, rows=3, recipe="mxfp8", model={"kind": "mixture", "num_local_experts": 8},
        about="8 experts that see few tokens each, mxfp8",
    ),
    Case(
        name="gain_borne", label="healthy", seed=13, onset=0, model={"kind": "opt"}, about="gains of two channels rise to 12 within 30 steps and stay, OPT, delayed",
        mechanism=lambda: GainAmplifier("*.fc1", grows(100, 1.09, 1.0, 12.0), (5, 44)),
    ),
    Case(
        name="loaded_scales", label="healthy", seed=14, recipe={"name": "delayed", "amax_history_len": 32},
        about="amaxes 30 too large, as of a run with larger batches, which E4M3 bears, delayed",
        mechanism=lambda: StaleHistory("*_proj", 90, 30.0),
    ),
    Case(
        name="dropout_restarts", label="healthy", seed=15, model={"variant": "olmo2"},
        about="dropout of 0.2 before attention's linears, and a learning rate that starts again at 7e-3 every 45 steps (arXiv:1608.03983)",
        mechanism=lambda: Dropout("*.self_attn.*_proj", 0.2),
        lr=lambda step: 7e-3 * (0.52 + 0.48 * math.cos(math.pi * (step % 45) / 45)) * min(1.0, (step + 1) / 20),
    ),
]  # fmt: skip
