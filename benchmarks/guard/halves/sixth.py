"""The sixth half that was held out: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by another than who mended it. Published failures of training in
low precision and what surrounds them in a user's runs (``mechanisms/sixth.py``), in models and recipes of their own.
"""

from __future__ import annotations

import math

from case import Case
from mechanisms.base import Several, grows
from mechanisms.first import Dropout, StaleHistory
from mechanisms.sixth import (
    Epochs,
    LearnedRowsAlign,
    LoudLabel,
    NormGainsGrow,
    QueriesGrowKeysShrink,
    RareTokenGrows,
    ResidualOutliers,
    TokenGradients,
)

QWEN = {"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "tie_word_embeddings": True}
"""Pre-norm and SwiGLU, with QK norm and tied embeddings."""


CASES = [
    Case(
        name="learned_rows_align", label="diverges", onset=90, seed=91, steps=260, recipe={"name": "delayed", "amax_history_len": 1024},
        model=QWEN, touched="*.mlp.*",
        about="up rows of three channels become plus or minus the gate's and grow 8 % a step (arXiv:2409.12517), QK norm, tied embeddings, delayed",
        mechanism=lambda: LearnedRowsAlign("*.mlp", grows(90, 1.08, 1.0, 1e5), (11, 50, 93)),
    ),
    Case(
        name="queries_against_keys", label="diverges", onset=80, seed=92, steps=260, attention=True, touched="*.self_attn*",
        recipe={"name": "delayed", "amax_history_len": 8}, model={"num_key_value_heads": 4}, lr=lambda step: 2e-3 * min(1.0, (step + 1) / 30),
        about="queries grow 6 % a step and keys shrink by it (cf. arXiv:2308.13137) under FP8 attention without QK norm, where they share a scale, delayed",
        mechanism=lambda: QueriesGrowKeysShrink("*.self_attn", grows(80, 1.06, 1.0, 1e5)),
    ),
    Case(
        name="norm_gains", label="diverges", onset=85, seed=93, steps=260, recipe="mxfp8", model={"kind": "opt"}, touched="*[qkvf][_c][p1]*",
        about="gains of layer norms in two channels of every 32 grow 10 % a step (arXiv:2506.20752), OPT, mxfp8",
        mechanism=lambda: NormGainsGrow(
            [("*.self_attn_layer_norm", "*.self_attn.[qkv]_proj"), ("*.layers.*.final_layer_norm", "*.fc1")],
            grows(85, 1.10, 1.0, 1e7), (6, 20, 41, 58),
        ),
    ),
    Case(
        name="residual_outliers", label="diverges", onset=70, seed=94, steps=250, recipe="current", model={"variant": "fog-max", "tie_word_embeddings": False},
        attention=True, touched="*.[qu]*_proj",
        about="massive activations on one token in 64 stay in the residual stream and grow 15 % a step (TWEO, arXiv:2511.23225), FOG-max, current",
        mechanism=lambda: ResidualOutliers("*.layers.?", "*.[qu]*_proj", "lm_head", grows(70, 1.15, 2.0, 1e8), lambda ids: ids == 19),
    ),
    Case(
        name="token_gradients", label="diverges", onset=95, seed=95, steps=260, recipe="block", model={"kind": "mixture", "num_key_value_heads": 4},
        about="gradients of one token in 50 grow 9 % a step beyond the others' (DeepSeek-V3, arXiv:2412.19437), mixture, block",
        mechanism=lambda: Several(
            *(TokenGradients(names, grows(95, 1.09, 1e-4, 1e3), 0.02) for names in ("*.self_attn.*_proj", "*.experts.*.w?"))
        ),
    ),
    Case(
        name="loud_labels", label="diverges", onset=90, seed=96, steps=260, recipe={"name": "delayed", "amax_history_len": 64, "fp8_format": "e4m3"},
        model={"kind": "mpt"},
        about="every 40th batch has a token whose loss weighs 1e5, as ratios of probabilities may (arXiv:1707.06347), which a history of 64 remembers, MPT, delayed in E4M3",
        mechanism=lambda: LoudLabel(lambda step: step >= 90 and (step - 90) % 40 == 0, 1e5),
    ),
    Case(
        name="rare_token", label="diverges", onset=75, seed=97, steps=250, recipe="current", model={"variant": "olmo2"},
        about="the embedding of a rare token grows 13 % a step (arXiv:2405.05417), and no norm is between it and the linears, OLMo2, current",
        mechanism=lambda: RareTokenGrows(17, 1.13, 75, 195),
    ),
    Case(
        name="loaded_with_a_sum", label="diverges", onset=70, ends=71, seed=98, steps=260, rows=6,
        recipe={"name": "delayed", "amax_history_len": 512, "fp8_format": "e4m3"}, model={"num_hidden_layers": 3, "hidden_size": 48},
        about="FP8 state is loaded of a run whose loss was a sum over 2^20 tokens and not their mean, 3 blocks of width 48, delayed in E4M3",
        mechanism=lambda: StaleHistory("*_proj", 70, 2.0**20, ("dy",)),
    ),
    Case(
        name="short_warmup", label="healthy", seed=91, steps=260, recipe="current", model=QWEN, clip=None,
        about="a rate of 8e-3 after 4 steps, then a cosine to a twentieth; QK norm, tied embeddings, no clipping, current",
        lr=lambda step: 8e-3 * min(1.0, (step + 1) / 4) * (0.525 + 0.475 * math.cos(math.pi * step / 260)),
    ),
    Case(
        name="dropout_everywhere", label="healthy", seed=92, steps=260, model={"variant": "olmo2", "attention_dropout": 0.2}, recipe={"name": "delayed", "amax_history_len": 16},
        about="dropout of 0.2 before every linear and on attention's probabilities, OLMo2, delayed",
        mechanism=lambda: Dropout("*_proj", 0.2),
    ),
    Case(
        name="harder_then_easier", label="healthy", seed=93, steps=260, recipe="mxfp8", model={"kind": "mpt", "n_layers": 3},
        about="the share of random tokens goes from 0.08 to 0.4 in one step, and later to 0.15, MPT of 3 blocks, mxfp8",
        noise=lambda step: 0.08 if step < 110 else 0.4 if step < 200 else 0.15,
    ),
    Case(
        name="one_expert_a_token", label="healthy", seed=94, steps=260, recipe="block", model={"kind": "mixture", "num_local_experts": 8, "num_experts_per_tok": 1},
        about="8 experts of which each token sees one (arXiv:2101.03961), block", rows=6,
    ),
    Case(
        name="slow_seasons", label="healthy", seed=95, steps=330, recipe={"name": "delayed", "amax_history_len": 256}, model={"kind": "opt"}, rows=6,
        about="data become easier and harder again with a period of 160 steps while the rate falls, OPT, delayed",
        noise=lambda step: 0.2 + 0.12 * math.cos(2 * math.pi * step / 160),
        lr=lambda step: 4e-3 * min(1.0, (step + 1) / 20) / math.sqrt(1 + step / 100),
    ),
    Case(
        name="epochs", label="healthy", seed=96, steps=280, recipe="current", attention=True, model={"num_key_value_heads": 1},
        about="the same 70 batches four times, at whose turns the loss falls (arXiv:2305.16264), FP8 attention with one key head, current",
        mechanism=lambda: Epochs(70), noise=lambda step: 0.2,
    ),
    Case(
        name="loud_labels_borne", label="healthy", seed=97, steps=260, recipe={"name": "delayed", "amax_history_len": 64}, model={"kind": "mpt"},
        about="every 40th batch has a token whose loss weighs 1e3 (arXiv:1707.06347), which E5M2 bears, MPT, delayed",
        mechanism=lambda: LoudLabel(lambda step: step >= 90 and (step - 90) % 40 == 0, 1e3),
    ),
    Case(
        name="rare_token_borne", label="healthy", seed=98, steps=250, recipe="current", model={"variant": "olmo2", "num_hidden_layers": 3, "hidden_size": 48},
        about="the embedding of a rare token grows 4 % a step to 20 times its size and stays (arXiv:2405.05417), OLMo2 of 3 blocks, current",
        mechanism=lambda: RareTokenGrows(40, 1.04, 75, 151),
    ),
]  # fmt: skip
