"""The twelfth half that was held out, by two authors: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by others than who mended it. Published failures of training in low precision: four of those
that are met most, in hosts, places and recipes that no half before has them (massive activations on the first token where no norm is in front of linears, keys of one
head under FP8 attention between norms, gains of norms in front of experts and routers, gradients that underflow as their scale falls by and by), and four causes
that none before has (``mechanisms/twelfth.py``): outputs that layer norms take off, weights that grow in the null space of what they read, amaxes of one shard
of the channels, activations scattered. Published practice that none before has (``practices/twelfth.py``), and two causes of the eleventh, as small as FP8 bears. Rates
fall to zero, and batches of what diverges are of 16 rows, so that chance alone moves a final loss by 0.14 % at most, which was measured before any guard ran.

Changed before any guard saw them, by labels and high precision alone: where the first token is massive, gate and up rows aligned, in two blocks of OP and then in
all three, at 9 % and 5.5 % a step, and FP8 ended at +0.4 %, +2.4 % and +2.9 %, as OP hardly needs its MLPs. The mixture had six experts of which a token sees two,
and chance moved its loss by 0.9 %; gradients shrank in OLMo2, where FP8 ended at +60 % and chance moved the loss by 3.1 %, as it was still falling. It is FOG-flash
now, where FP8 ends at +10 %. Gradients that are projected had 8 directions, and FP8 ended 5.9 % below high precision, as little was learned; the basis was stretched to 12, 20, 30
and more before it was to 10, and means of tokens to 3, 10, 15 and 30 before they were to 25.
"""

from __future__ import annotations

import torch
from case import Case
from mechanisms.base import Several, grows
from mechanisms.eleventh import StretchedBasis, TokenMeans
from mechanisms.first import AttentionOutliers
from mechanisms.sixth import NormGainsGrow, ResidualOutliers
from mechanisms.twelfth import AmaxOfShard, CommonOutputs, NullSpaceGrows, ScatteredActivations
from practices.third import LossScale
from practices.twelfth import DepthDrawn, GradientsProjected, InputsSampled, Relufied, Rewound, UnitWeights
from rates import cosine, linear
from torch import Tensor

GAINS = [
    ("*.input_layernorm", "*.self_attn.[qkv]_proj"),
    ("*.post_attention_layernorm", "*.block_sparse_moe.*[wt][13e]"),  # of experts, and the router's
]


def gradients_shrink(step: int) -> float:
    """2^48 for 60 steps, then half as much every third step, down to 1."""
    return 2.0 ** max(0, 48 - max(0, step - 60) // 3)


def first(ids: Tensor) -> Tensor:
    """The first token of each row."""
    return (torch.arange(ids.shape[1]) == 0).expand(ids.shape)


CASES = [
    Case(
        name="massive_first_without_norms", label="diverges", onset=60, seed=181, steps=270, rows=16, recipe={"name": "current", "power_2_scales": True},
        model={"variant": "op1", "activation": "swiglu", "num_hidden_layers": 3}, touched="*.[qg]*_proj", lr=linear(2e-3, 270),
        about="massive activations on the first token stay in the residual stream and grow 12 % a step (arXiv:2402.17762), OP of 3 blocks with SwiGLU, current with powers of two",
        mechanism=lambda: ResidualOutliers("*.layers.?", "*.[qg]*_proj", "model.norm", grows(60, 1.12, 10.0, 1e7), first),
    ),
    Case(
        name="keys_of_one_head", label="diverges", onset=70, seed=182, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 512}, attention=True,
        model={"variant": "custom", "post_norm": True, "num_hidden_layers": 4, "num_key_value_heads": 1}, sick=(1, 2), touched="*.layers.[12].self_attn*", lr=cosine(2e-3, 280),
        about="two channels of the only head of keys grow 10 % a step in two blocks of four (arXiv:2402.02750), under FP8 attention without QK norm, norms before and behind each branch, delayed",
        mechanism=lambda: AttentionOutliers("keys", grows(70, 1.10, 1.0, 1e7), layers="[12]", channel=5),
    ),
    Case(
        name="gains_before_experts", label="diverges", onset=60, seed=183, steps=270, rows=16, recipe="block",
        model={"kind": "mixture", "num_hidden_layers": 3, "num_experts_per_tok": 4}, touched="*.[qkvw]*[13j]", lr=cosine(2e-3, 270),
        about="gains of RMS norms in three channels grow 12 % a step, and the columns of attentions, experts and routers behind shrink by it (arXiv:2506.20752), mixture of 3 blocks whose tokens see all four experts, block",
        mechanism=lambda: NormGainsGrow(GAINS, grows(60, 1.12, 1.0, 1e8), (10, 31, 55)),
    ),
    Case(
        name="gradients_shrink", label="diverges", onset=60, ends=204, seed=184, steps=270, rows=16,
        recipe={"name": "delayed", "amax_history_len": 128, "fp8_format": "e4m3"}, model={"variant": "fog-flash", "num_hidden_layers": 3}, lr=cosine(2e-3, 270),
        about="the loss scale halves every third step (arXiv:1710.03740), and what a history of 128 remembers flushes gradients, FOG-flash of 3 blocks, delayed in E4M3",
        mechanism=lambda: LossScale(gradients_shrink),
    ),
    Case(
        name="common_outputs", label="diverges", onset=60, seed=185, steps=270, rows=16, recipe="current",
        model={"kind": "opt", "num_hidden_layers": 3}, touched="*.[of][uc][t2]*", lr=cosine(2e-3, 270),
        about="what branches write gains a part that all channels share and layer norms take off, 6 % more a step (cf. arXiv:2409.12951), OPT of 3 blocks, current",
        mechanism=lambda: Several(*(CommonOutputs(linears, grows(60, 1.06, 0.02, 10.0)) for linears in ("*.out_proj", "*.fc2"))),
    ),
    Case(
        name="null_space_grows", label="diverges", onset=70, seed=186, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 1024}, attention=True,
        model={"variant": "fog-opt", "num_hidden_layers": 3}, touched="*_proj", lr=linear(2e-3, 280),
        about="weights grow 6 % a step in directions that no input has (cf. arXiv:2103.07113), FOG-opt of 3 blocks with FP8 attention, delayed",
        mechanism=lambda: NullSpaceGrows("*.layers.*_proj", grows(70, 1.06, 0.02, 30.0)),
    ),
    Case(
        name="amaxes_of_a_shard", label="diverges", onset=60, seed=187, steps=270, rows=16, recipe={"name": "delayed", "amax_history_len": 16},
        model={"kind": "mpt", "n_layers": 3}, lr=cosine(2e-3, 270),
        about="half of the channels of what linears read grow 5 % a step, their weights shrink by it, and amaxes are those of the other half (cf. arXiv:2310.18313), MPT of 3 blocks, delayed",
        mechanism=lambda: AmaxOfShard("*.blocks.*_proj", grows(60, 1.05, 1.0, 30.0)),
    ),
    Case(
        name="activations_scattered", label="diverges", onset=70, seed=188, steps=280, rows=16, recipe="mxfp8",
        model={"variant": "llama3-smooth-swiglu", "num_hidden_layers": 3}, touched="*.mlp.down_proj", lr=linear(2e-3, 280),
        about="one element of 64 of what gated units put out gains or loses what grows 8 % a step (cf. arXiv:2503.08040), smooth SwiGLU, 3 blocks, mxfp8",
        mechanism=lambda: ScatteredActivations("*.mlp.down_proj", grows(70, 1.08, 0.01, 100.0), share=1 / 64),
    ),
    Case(
        name="relufied", label="healthy", seed=191, steps=300, rows=16, recipe="block", model={"kind": "mpt", "n_layers": 3},
        about="at step 150 GELU becomes ReLU, and the rate warms up again (arXiv:2310.04564), MPT of 3 blocks, block",
        lr=lambda step: cosine(3e-3, 150, 20, 0.2)(step) if step < 150 else cosine(2e-3, 150, 15)(step - 150),
        mechanism=lambda: Relufied("*.ffn", 150),
    ),
    Case(
        name="inputs_sampled", label="healthy", seed=192, steps=280, rows=12, recipe={"name": "delayed", "amax_history_len": 24}, model={"kind": "opt"},
        about="from step 100 on tokens that are read are the model's own, half of them in the end (arXiv:1506.03099), by a pass before each step, OPT, delayed",
        lr=linear(3e-3, 280), mechanism=lambda: InputsSampled(lambda step: min(0.5, max(0.0, (step - 100) / 240))),
    ),
    Case(
        name="depth_drawn", label="healthy", seed=193, steps=260, rows=12, recipe={"name": "delayed", "amax_history_len": 128}, attention=True,
        model={"variant": "custom", "qk_norm": "tanh", "num_hidden_layers": 3},
        about="the middle one of three blocks runs one to four times, as is drawn for each step (arXiv:2502.05171), tanh on queries and keys, FP8 attention, delayed",
        lr=cosine(3e-3, 260), mechanism=lambda: DepthDrawn("model.layers.1", 4),
    ),
    Case(
        name="gradients_projected", label="healthy", seed=194, steps=280, rows=16, recipe="mxfp8", model={"variant": "olmo2", "num_hidden_layers": 3},
        about="blocks' weights are trained in 16 directions of their gradients, other ones every 50 steps (arXiv:2403.03507), OLMo2 of 3 blocks, mxfp8",
        lr=cosine(4e-3, 280, last=0.1), mechanism=lambda: GradientsProjected("*.layers.*_proj", 16, 50, 1.0),
    ),
    Case(
        name="rewound", label="healthy", seed=195, steps=300, rows=12, recipe="current", model={"kind": "mixture", "num_local_experts": 3},
        about="before steps 130 and 210 there are 8 bad batches, and then weights and moments are those of 20 steps before again (arXiv:2204.02311), mixture of 3 experts, current",
        noise=lambda step: 0.9 if 122 <= step < 130 or 202 <= step < 210 else 0.1, lr=cosine(4e-3, 300, last=0.05),
        mechanism=lambda: Rewound((130, 210), 20),
    ),
    Case(
        name="unit_weights", label="healthy", seed=196, steps=260, rows=8, recipe={"name": "delayed", "amax_history_len": 6}, attention=True,
        model={"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "num_hidden_layers": 4, "hidden_size": 48},
        about="weights of blocks are on the sphere before every step, without a warm-up (arXiv:2410.01131), QK norm, FP8 attention, 4 blocks of width 48, delayed",
        lr=linear(4e-3, 260, 1), mechanism=lambda: UnitWeights(("*.qkv_proj", "*.gate_up_proj"), ("*.o_proj", "*.down_proj")),
    ),
    Case(
        name="basis_stretched_borne", label="healthy", seed=197, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 48}, model={"kind": "mpt"},
        about="what linears read is stretched along directions that are no channels, 5 % more a step to 10, which stays (cf. arXiv:2110.09348), MPT, delayed",
        lr=cosine(3e-3, 260), mechanism=lambda: StretchedBasis("*.blocks.*_proj", grows(70, 1.05, 1.0, 10.0)),
    ),
    Case(
        name="tokens_outweigh_borne", label="healthy", seed=198, steps=260, rows=16, recipe="current", model={"variant": "fog-max", "num_hidden_layers": 3},
        about="what MLPs read gains a vector of each token of the vocabulary, which grows 5 % a step to 25 and stays (cf. arXiv:1909.00512), FOG-max of 3 blocks, current",
        lr=linear(2e-3, 260), mechanism=lambda: TokenMeans("*.mlp.*_proj", grows(70, 1.05, 0.3, 25.0)),
    ),
]  # fmt: skip
