"""Outliers: one element sets the scale of all others."""

from __future__ import annotations

from case import Case
from mechanisms.base import Several, grows
from mechanisms.outliers import (
    Activations,
    ActivationsBesideAdapters,
    AttentionSink,
    GainAmplifier,
    KeyOutliers,
    QueryOutliers,
    RareTokenGrows,
    ResidualOutliers,
    ScatteredWeights,
    SuperWeight,
    SwigluAlignment,
)
from mechanisms.practices import Adapters
from rates import cosine

CASES = [
    Case(
        name="swiglu_alignment", label="diverges", onset=80, blocks=(0, 1), touched="*.mlp.*",
        about="gate and up rows of a channel align and grow 12 % a step (arXiv:2409.12517), delayed",
        mechanism=lambda: Several(*(SwigluAlignment(i, grows(80, 1.12, 1.0, 1e5)) for i in (0, 1))),
    ),
    Case(
        name="massive_first_token", label="diverges", onset=80, blocks=(0, 1), recipe="current",
        about="massive activations on the first token (arXiv:2402.17762), current",
        mechanism=lambda: Activations("*_proj", grows(80, 1.2, 1.0, 1e7), share=None),
    ),
    Case(
        name="residual_outliers", label="diverges", onset=70, seed=94, steps=250, recipe="current", attention=True, touched="*.[qu]*_proj",
        about="massive activations on one token in 64 stay in the residual stream and grow 15 % a step (TWEO, arXiv:2511.23225), FOG-max, current",
        model={"variant": "fog-max", "tie_word_embeddings": False},
        mechanism=lambda: ResidualOutliers("*.layers.?", "*.[qu]*_proj", "lm_head", grows(70, 1.15, 2.0, 1e8), lambda ids: ids == 19),
    ),
    Case(
        name="massive_in_frozen_base", label="diverges", onset=125, seed=70, steps=230, recipe="current", blocks=(0, 1, 2), touched="*.layers.[012].*",
        about="adapters are trained from step 100 on (arXiv:2106.09685); three frozen blocks of four have outliers that grow 30 % a step, current",
        model={"num_hidden_layers": 4}, lr=lambda step: (3e-3 if step < 100 else 8e-3) * min(1.0, (step + 1) / 20),
        mechanism=lambda: Several(
            Adapters(100, "*.layers.*_proj", 6), ActivationsBesideAdapters("*.layers.[012].*_proj", grows(125, 1.3, 1.0, 1e8), share=0.02, channel=18),
        ),
    ),
    Case(
        name="microscaling_jump", label="diverges", onset=95, recipe="mxfp8", seed=9, model={"kind": "mpt", "d_model": 96, "n_layers": 3},
        about="one channel of every 32 jumps to 2e6 from one step to the next and stays (cf. arXiv:2506.20752), MPT of width 96, mxfp8",
        mechanism=lambda: Several(*(Activations(names, grows(95, 1.0, 2e6), channel=c) for names in ("*_proj", "*.Wqkv") for c in (1, 50, 90))),
    ),
    Case(
        name="super_weight", label="diverges", onset=80, blocks=(0, 1), recipe="current",
        about="one weight of each linear grows 20 % a step (arXiv:2411.07191), current",
        mechanism=lambda: SuperWeight("*_proj", grows(80, 1.2, 0.1, 1e7)),
    ),
    Case(
        name="scattered_weights", label="diverges", onset=60, seed=146, steps=260, rows=16, recipe="current", blocks=(1, 2, 3), touched="*.layers.[123].*_proj",
        about="one weight in 256, anywhere, grows 10 % a step in three blocks of four (arXiv:2306.03078), FOG-opt, current",
        model={"variant": "fog-opt", "num_hidden_layers": 4}, lr=cosine(2e-3, 260),
        mechanism=lambda: ScatteredWeights("*.layers.[123].*_proj", grows(60, 1.10, 0.05, 3e4)),
    ),
    Case(
        name="key_outliers", label="diverges", onset=80, blocks=(0, 1), touched="*.self_attn*", attention=True,
        about="two channels of the keys grow 20 % a step (arXiv:2402.02750) under FP8 attention without QK norm, delayed",
        mechanism=lambda: KeyOutliers("model.layers.*.self_attn", grows(80, 1.2, 1.0, 1e7)),
    ),
    Case(
        name="query_outliers", label="diverges", onset=115, seed=24, steps=280, rows=6, attention=True, recipe="current", touched="*.self_attn*",
        about="a channel pair of the queries grows 17 % a step under FP8 attention (arXiv:2411.10958), mixture of experts, current",
        model={"kind": "mixture", "num_local_experts": 3, "num_key_value_heads": 4},
        mechanism=lambda: QueryOutliers("*.self_attn", grows(115, 1.17, 2.0, 1e8)),
    ),
    Case(
        name="attention_sink", label="diverges", onset=60, seed=122, steps=280, rows=16, recipe="current", attention=True, touched="*att*n",
        about="the first key takes all attention, by odds that grow 10 % a step (arXiv:2309.17453), under FP8 attention, MPT, current",
        model={"kind": "mpt"}, lr=cosine(3e-3, 280), mechanism=lambda: AttentionSink("*.attn", grows(60, 1.10, 1.0, 1e12)),
    ),
    Case(
        name="gain_amplifier", label="diverges", onset=110, recipe="current", steps=320, seed=5, touched="*.[gq]*_proj", model={"num_hidden_layers": 4},
        about="gains of three channels grow 9 % a step and their weights shrink by it (arXiv:2209.13325), 4 blocks, current",
        mechanism=lambda: GainAmplifier("*.[gq]*_proj", grows(110, 1.09, 1.0, 1e7)),
    ),
    Case(
        name="rare_token", label="diverges", onset=75, seed=97, steps=250, recipe="current", model={"variant": "olmo2"},
        about="the embedding of a rare token grows 13 % a step (arXiv:2405.05417), and no norm is between it and the linears, OLMo2, current",
        mechanism=lambda: RareTokenGrows(17, 1.13, 75, 195),
    ),
]  # fmt: skip
