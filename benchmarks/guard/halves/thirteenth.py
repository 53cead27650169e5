"""The thirteenth half of labelled runs that the guard was not tuned on: eight that diverge, and eight healthy ones, by two authors.

Written without sight of the guard's code, thresholds or results, by others than who mended it. Published failures of training in low precision: four of those
that are met most, in hosts, places and recipes that no half before has them (gate and up rows that align where the last amax alone sets the scale, massive
activations of few tokens before the down projections of FOG-opt, keys under FP8 attention between scaled branches, gains of layer norms under one scale a row), and
four causes that none before has (``mechanisms/thirteenth.py``): gradients of classes, values stretched within their heads, weights that oscillate, outputs
stretched. Published practice that none before has (``practices/thirteenth.py``): embeddings that begin anew, weights rounded to 4 bits, LAMB, early exits, a block cut
out, rows read from their end; and two causes of the twelfth, in other hosts and recipes, as small as FP8 bears: ten times as large, FP8 alone ends at +27 % (weights
that grow in a null space) and +10 % (activations scattered). Rates fall to zero, and batches of what diverges are of 16 rows, so that chance alone moves a final
loss by 0.12 % at most, which was measured before any guard ran; of the healthy ones that was not measured.

Changed before any guard saw them, by labels and high precision alone: where gains of layer norms grow, FP8 ended at +162 % and the label held, but high precision
ended at 3.2 where it had been at 1.7, because columns that shrink by 13 % a step were still moved by what was left of Adam's momentum. That momentum is
cleared now (``NormGainsGrowWithoutMomentum``); high precision ends at 1.4, and FP8 at +493 %. Scattered activations that FP8 bears first grew to 2, then to 10, where it
ended at +0.3 % and +0.4 %, but ten times as large at +0.7 % and +3.6 % only, so that they were hardly harmful; they grow to 15. Renamed after the run:
``massive_few_tokens_blocks``, which had the name of another case.
"""

from __future__ import annotations

from case import Case
from mechanisms.base import grows
from mechanisms.first import Activations, AttentionOutliers
from mechanisms.sixth import LearnedRowsAlign
from mechanisms.thirteenth import (
    ClassGradients,
    NormGainsGrowWithoutMomentum,
    OutputsStretched,
    ValuesStretched,
    WeightsOscillate,
)
from mechanisms.twelfth import NullSpaceGrows, ScatteredActivations
from practices.thirteenth import BlockCut, EarlyExits, EmbeddingsForgotten, Lamb, RowsReversed, WeightsRounded
from rates import cosine, linear

NORMS = [("*.norm_1", "*.Wqkv"), ("*.norm_2", "*.up_proj")]


CASES = [
    Case(
        name="rows_align_tanh", label="diverges", onset=60, seed=201, steps=250, rows=16,
        recipe={"name": "delayed", "amax_history_len": 16, "amax_compute_algo": "most_recent"},
        model={"variant": "custom", "qk_norm": "tanh", "num_hidden_layers": 3, "tie_word_embeddings": True}, sick=(0, 2), touched="*.layers.[02].mlp*", lr=cosine(2e-3, 250),
        about="up rows of a channel in two blocks of three become the gate's and grow 9 % a step (arXiv:2409.12517), tanh on queries and keys, tied embeddings, delayed by the last amax alone",
        mechanism=lambda: LearnedRowsAlign("*.layers.[02].mlp", grows(60, 1.09, 1.0, 3e3), (23,)),
    ),
    Case(
        name="massive_few_tokens_blocks", label="diverges", onset=70, seed=202, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 256, "fp8_format": "e4m3"},
        model={"variant": "fog-opt", "num_hidden_layers": 3}, touched="*.mlp.down_proj", lr=linear(2e-3, 260),
        about="one token in 64 has a massive activation before each down projection, which grows 12 % a step (arXiv:2511.23225), FOG-opt of 3 blocks, delayed in E4M3",
        mechanism=lambda: Activations("*.mlp.down_proj", grows(70, 1.12, 2.0, 1e6), share=1 / 64, channel=101),
    ),
    Case(
        name="keys_layer_scale", label="diverges", onset=60, seed=203, steps=250, rows=16, recipe={"name": "current", "fp8_format": "e4m3"}, attention=True,
        model={"variant": "custom", "layer_scale": True, "activation": "gelu", "num_hidden_layers": 3, "num_key_value_heads": 4}, touched="*.self_attn*", lr=cosine(2e-3, 250),
        about="two channels of the keys grow 10 % a step (arXiv:2402.02750) under FP8 attention without QK norm, GELU, branches scaled, 3 blocks, current in E4M3",
        mechanism=lambda: AttentionOutliers("keys", grows(60, 1.10, 1.0, 1e7), channel=6),
    ),
    Case(
        name="gains_one_block_scale", label="diverges", onset=60, seed=204, steps=250, rows=16, recipe="block",
        model={"kind": "mpt", "n_layers": 3}, touched="*.[Wu][qp]*", lr=linear(2e-3, 250),
        about="gains of layer norms in three channels grow 13 % a step, and the columns behind shrink by it (arXiv:2506.20752), MPT of 3 blocks, block",
        mechanism=lambda: NormGainsGrowWithoutMomentum(NORMS, grows(60, 1.13, 1.0, 1e8), (4, 29, 50)),
    ),
    Case(
        name="gradients_of_classes", label="diverges", onset=60, seed=205, steps=250, rows=16, recipe="current",
        model={"kind": "opt", "num_hidden_layers": 3}, lr=cosine(2e-3, 250),
        about="gradients of all tokens that the same token follows gain one vector, which grows 8 % a step (cf. arXiv:2402.19449), OPT of 3 blocks, current",
        mechanism=lambda: ClassGradients("*.layers.*.[qkvof][_uc][pt12]*", grows(60, 1.08, 1e-5, 10.0)),
    ),
    Case(
        name="values_stretched", label="diverges", onset=60, seed=206, steps=250, rows=16, recipe={"name": "delayed", "amax_history_len": 64}, attention=True,
        model={"variant": "fog-max", "num_hidden_layers": 3}, touched="*.self_attn*", lr=linear(2e-3, 250),
        about="values are stretched along directions that are no channels, 7 % more a step, to 3000, and what attention puts out is shrunk again (cf. arXiv:2410.23819), FOG-max of 3 blocks with FP8 attention, delayed",
        mechanism=lambda: ValuesStretched("*.self_attn", grows(60, 1.07, 1.0, 3e3)),
    ),
    Case(
        name="weights_oscillate", label="diverges", onset=70, seed=207, steps=260, rows=16, recipe="mxfp8",
        model={"kind": "mixture", "num_experts_per_tok": 4}, touched="*.[qkvow]*[123j]", lr=cosine(2e-3, 260),
        about="weights swing along four directions, to the other side in every step, by 6 % more each (cf. arXiv:2103.00065), mixture whose tokens see all four experts, mxfp8",
        mechanism=lambda: WeightsOscillate("*.[qkvow]*[123j]", grows(70, 1.06, 0.01, 10.0)),
    ),
    Case(
        name="outputs_stretched", label="diverges", onset=70, seed=208, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 96},
        model={"variant": "custom", "qk_norm": "rms", "num_hidden_layers": 2, "num_key_value_heads": 1}, touched="*_proj", lr=cosine(2e-3, 260),
        about="outputs of linears are stretched by their weights along directions that are no channels, 6 % more a step, to 3000, and shrunk again behind (cf. arXiv:1802.09568), QK norm, one key head, delayed",
        mechanism=lambda: OutputsStretched("*.layers.*_proj", grows(70, 1.06, 1.0, 3e3)),
    ),
    Case(
        name="embeddings_forgotten", label="healthy", seed=211, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 32},
        model={"kind": "opt", "num_hidden_layers": 3},
        about="at steps 80 and 140 the embedding begins anew (arXiv:2307.01163), OPT of 3 blocks, delayed",
        lr=linear(3e-3, 280), mechanism=lambda: EmbeddingsForgotten((80, 140)),
    ),
    Case(
        name="weights_rounded", label="healthy", seed=212, steps=260, rows=16, recipe="current", model={"kind": "mpt", "n_layers": 3},
        about="from step 120 on blocks' weights are rounded to 4 bits, with straight-through gradients (arXiv:1712.05877), MPT of 3 blocks, current",
        lr=cosine(3e-3, 260), mechanism=lambda: WeightsRounded("*.blocks.*_proj", 120, 4),
    ),
    Case(
        name="trust_ratios", label="healthy", seed=213, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 64}, attention=True,
        model={"variant": "custom", "qk_norm": "rms", "num_hidden_layers": 3, "hidden_size": 48},
        about="all parameters are trained by LAMB with a decay of 0.01 (arXiv:1904.00962), QK norm, FP8 attention, 3 blocks of width 48, delayed",
        lr=linear(2e-2, 260), mechanism=lambda: Lamb(0.01),
    ),
    Case(
        name="early_exits", label="healthy", seed=214, steps=250, rows=12, recipe="mxfp8", model={"num_hidden_layers": 4},
        about="the head learns from what each of the first three blocks puts out, too (arXiv:2404.16710), 4 blocks, mxfp8",
        lr=cosine(3e-3, 250, last=0.05), mechanism=lambda: EarlyExits(0.3),
    ),
    Case(
        name="block_cut", label="healthy", seed=215, steps=270, rows=12, recipe={"name": "delayed", "amax_history_len": 8}, attention=True,
        model={"variant": "fog-flash", "num_hidden_layers": 4},
        about="at step 140 the third of four blocks is cut out, and the rate warms up again (arXiv:2403.03853), FOG-flash with FP8 attention, delayed",
        lr=lambda step: cosine(3e-3, 140, 20, 0.2)(step) if step < 140 else cosine(2e-3, 130, 15)(step - 140),
        mechanism=lambda: BlockCut("model.layers.2", 140),
    ),
    Case(
        name="rows_reversed", label="healthy", seed=216, steps=260, rows=16, recipe="block", model={"kind": "mixture", "num_local_experts": 3},
        about="from step 110 on every other row is read from its end (arXiv:2403.13799), mixture of 3 experts, block",
        lr=cosine(3e-3, 260, last=0.1), mechanism=lambda: RowsReversed(110),
    ),
    Case(
        name="null_space_borne", label="healthy", seed=217, steps=260, rows=16, recipe="current", attention=True,
        model={"variant": "llama3", "num_hidden_layers": 3},
        about="weights grow 5 % a step to 0.15 in directions that no input has, and stay (cf. arXiv:2103.07113), 3 blocks with FP8 attention, current",
        lr=linear(3e-3, 260), mechanism=lambda: NullSpaceGrows("*.layers.*_proj", grows(70, 1.05, 0.01, 0.15)),
    ),
    Case(
        name="scattered_borne", label="healthy", seed=218, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 16}, model={"kind": "mpt"},
        about="one element of 64 of what MLPs' down projections read gains or loses what grows 6 % a step to 15 and stays (cf. arXiv:2503.08040), MPT, delayed",
        lr=cosine(3e-3, 260), mechanism=lambda: ScatteredActivations("*.ffn.down_proj", grows(70, 1.06, 0.1, 15.0), share=1 / 64),
    ),
]  # fmt: skip
