"""The labelled runs on which the guard's thresholds may be chosen."""

from __future__ import annotations

import math

from case import Case
from halves import (
    eighth,
    eleventh,
    fifth,
    fourteenth,
    fourth,
    ninth,
    second,
    seventh,
    sixth,
    tenth,
    third,
    thirteenth,
    twelfth,
)
from mechanisms.base import Several, during, grows
from mechanisms.first import (
    Activations,
    AttentionOutliers,
    CompensatedBias,
    Dropout,
    EmbeddingGrowth,
    QueryKeyGrowth,
    StaleHistory,
    SuperWeight,
    SwigluAlignment,
)

BOTH = (0, 1)
LONG = {"name": "delayed", "amax_history_len": 256}

CASES: list[Case] = [
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
    # Until 2026-11-22 these were held out, those of halves/ after them. Their results were published and read, so they are no longer.
    Case(
        name="swiglu_alignment_current", label="diverges", onset=90, sick=BOTH, touched="*.mlp.*", recipe="current", seed=1,
        about="gate and up rows of a channel grow 20 % a step (arXiv:2409.12517), current",
        mechanism=lambda: Several(*(SwigluAlignment(i, grows(90, 1.2, 1.0, 1e5)) for i in (0, 1))),
    ),
    Case(
        name="value_outliers", label="diverges", onset=60, sick=BOTH, touched="*.self_attn*", attention=True, seed=2,
        about="one channel of the values grows 20 % a step under FP8 attention (FOG), delayed",
        mechanism=lambda: AttentionOutliers("values", grows(60, 1.2, 1.0, 1e8)),
    ),
    Case(
        name="massive_few_tokens", label="diverges", onset=90, sick=BOTH, recipe="current", seed=1,
        about="massive activations on one token of 256, anywhere (TWEO, arXiv:2511.23225), current",
        mechanism=lambda: Activations("*_proj", grows(90, 1.25, 1.0, 1e8), share=1 / 256),
    ),
    Case(
        name="bad_batches_one_block", label="diverges", onset=70, ends=111, sick=(0,), seed=2,
        recipe={"name": "delayed", "amax_history_len": 32},
        about="three batches, 20 steps apart, with inputs of 1e7 in one block; the history is 32 long, delayed",
        mechanism=lambda: Activations("*.layers.0.*_proj", lambda step: 1e7 if step in (70, 90, 110) else 0.0),
    ),
    Case(
        name="embedding_growth", label="diverges in both", onset=80, model={"tie_word_embeddings": True}, seed=1,
        about="a tied embedding grows by 2 % a step, and the logits with it",
        mechanism=lambda: EmbeddingGrowth(1.02, 80, 240),
    ),
    Case(
        name="microscaling_outliers", label="diverges", onset=80, sick=BOTH, recipe="mxfp8", seed=2,
        about="channels before every linear grow by 20 % a step, mxfp8",
        mechanism=lambda: Several(
            *(Activations("*_proj", grows(80, 1.2, 1.0, 1e8), channel=channel) for channel in (7, 40))
        ),
    ),
    Case(
        name="norm_gain_outliers", label="diverges", onset=60, sick=BOTH, touched="*.[gq]*_proj", seed=1,
        about="one channel behind each norm grows by 20 % a step, which delayed scaling clips",
        mechanism=lambda: CompensatedBias("*.[gq]*_proj", grows(60, 1.2, 0.1, 1e6)),
    ),
    Case(
        name="stale_gradient_scales", label="diverges", onset=100, ends=101, sick=BOTH, seed=2,
        recipe={"name": "delayed", "amax_history_len": 1024},
        about="amaxes of gradients 1e12 too large, as of a run with another loss scale or batch size, delayed",
        mechanism=lambda: StaleHistory("*_proj", 100, 1e12, ("dy",)),
    ),
    Case(
        name="rate_restarts", label="healthy", seed=1, about="the learning rate is a cosine that starts again every 60 steps",
        lr=lambda step: 8e-3 * (0.5 + 0.5 * math.cos(math.pi * (step % 60) / 60)) * min(1.0, (step + 1) / 20),
    ),
    Case(
        name="dropout_in_mlp", label="healthy", seed=1, about="dropout of 0.5 before each down projection, current",
        recipe="current", mechanism=lambda: Dropout("*.down_proj", 0.5),
    ),
    Case(
        name="easier_data", label="healthy", seed=1, about="the share of random tokens goes from 0.35 to 0.05 in one step",
        noise=lambda step: 0.35 if step < 90 else 0.05,
    ),
    Case(
        name="harder_data_twice", label="healthy", seed=2, about="the share of random tokens goes 0.05, 0.2, 0.5",
        noise=lambda step: 0.05 if step < 80 else 0.2 if step < 150 else 0.5,
    ),
    Case(
        name="noisy_batches", label="healthy", seed=1, about="every 17th batch is half random",
        noise=lambda step: 0.5 if step % 17 == 0 else 0.1,
    ),
    Case(
        name="single_rows", label="healthy", seed=2, about="batches of 1 x 32 tokens, current", rows=1, recipe="current",
    ),
    Case(
        name="mixture_high_rate", label="healthy", seed=1, about="a sparse mixture of 4 experts at a learning rate of 1e-2",
        model={"kind": "mixture"}, lr=lambda step: 1e-2 * min(1.0, (step + 1) / 30),
    ),
    Case(
        name="outliers_that_stop", label="healthy", seed=2, about="activations on the first token that grow to 20 and stay, current",
        recipe="current", mechanism=lambda: Activations("*.down_proj", grows(60, 1.05, 1.0, 20.0), share=None),
    ),
    *second.CASES,
    *third.CASES,
    *fourth.CASES,
    *fifth.CASES,
    *sixth.CASES,
    *seventh.CASES,
    *eighth.CASES,
    *ninth.CASES,
    *tenth.CASES,
    *eleventh.CASES,
    *twelfth.CASES,
    *thirteenth.CASES,
    *fourteenth.CASES,
]  # fmt: skip
