"""The fifteenth half of labelled runs that the guard was not tuned on: eight that diverge, and eight healthy ones, by two authors.

Written without sight of the guard's code, thresholds or results, by another than who mended it. Published failures of training in low precision: four of those that
are met most, in hosts, places and recipes that no half before has them (gate and up rows that align in FOG with SwiGLU and tanh on queries and keys, massive activations
behind separators in the stream of FOG-flash, queries of OPT without biases under FP8 attention, gains of RMS norms in front of GELU and a single head of keys), and
four causes that none before has (``mechanisms/fifteenth.py``): skips merged into weights, tails of activations that grow heavier, gradients of attention's output in
dimensions that values do not have, tokens that are drawn to their experts' centroids. Rates fall to zero and batches are of 16 rows, so that chance alone moves a final
loss by 0.12 % at most, which was measured before any guard ran. High precision ends within 0.6 % of a run without the cause.

Changed before any guard saw them, by labels alone: rows aligned in OP with SwiGLU, where FP8 ended at +0.9 % as the first and the last of four blocks were sick, and at
+1.9 % in all of three. Gains grew in front of MLPs alone, where FP8 ended at +2.1 %; they grow in front of attentions, too, and it ends at +12.3 %.

The healthy ones. Written without sight of the guard's code, thresholds or results, by another than who mended it. Published practice that none before has
(``practices/fifteenth.py``): blocks that share their weights and part, a second generation that learns from the first, weights that are
pretrained ones again now and then, experts that no token comes to, gradients that change their sign below a level of the loss, gradients at
weights uphill. And two causes, both of the thirteenth, in other hosts and recipes, as small as FP8 bears: weights that swing end at +0.2 %, and ten
times as far at +11.0 %; values that are stretched end at +0.3 %, and ten times as much at +5.0 %. Rates fall to zero, and batches are of 16
rows. All end within 0.6 % of high precision; by how much chance alone moves a final loss was not measured.

Changed before any guard saw them, by labels alone: weights swung in OLMo2 at a rate of 2e-3, to 0.03 (-1.4 %), 0.06 (-0.8 %), 0.3 (+6.0 %, where the label did not hold)
and 0.6 (+20.9 %), where the loss was still falling; with QK norm and GELU, at 3e-3, they reach 0.06 now, and 0.3 ended at +2.9 %. Values were stretched to 20
(+0.0 %), 50 (+0.3 %) and 100 (+0.9 %), and are to 60; 500 and 1000 ended at +4.1 % and +7.2 %. Gradients changed their sign at a rate of 5e-3 (+0.9 %), and do at 3e-3 (-0.4 %).
"""

from __future__ import annotations

from case import Case
from mechanisms.base import Several, grows
from mechanisms.fifteenth import ExpertCentroids, OutputGradientsUnread, SkipsMerged, TailsGrow
from mechanisms.first import SwigluAlignment
from mechanisms.sixth import ResidualOutliers
from mechanisms.third import QueryOutliers
from mechanisms.thirteenth import NormGainsGrowWithoutMomentum, ValuesStretched, WeightsOscillate
from practices.fifteenth import BlocksShared, BornAgain, ExpertsPruned, Flooded, Mixout, SharpnessAware
from rates import cosine, linear
from torch import Tensor

FOG = {
    "variant": "custom",
    "pre_norm": False,
    "post_norm": True,
    "final_norm": False,
    "qk_norm": "tanh",
    "input_scaling": True,
}
"""FOG-flash's norms, with any activation."""
GAINS = [
    ("*.layers.[12].input_norm", "*.layers.[12].*.qkv_proj"),
    ("*.layers.[12].mlp_norm", "*.layers.[12].*.up_proj"),
]


def after_a_separator(ids: Tensor) -> Tensor:
    """Tokens behind one of two of the vocabulary."""
    separators = (ids == 3) | (ids == 52)
    return separators.roll(1, -1) & (ids.new_ones(ids.shape).cumsum(-1) > 1)


CASES: list[Case] = [
    Case(
        name="units_align_under_tanh", label="diverges", onset=60, seed=401, steps=250, rows=16, recipe={"name": "current", "power_2_scales": True},
        model={**FOG, "activation": "swiglu", "num_hidden_layers": 2}, touched="*.mlp*", lr=cosine(2e-3, 250),
        about="gate and up rows of a channel, another in each block, align and grow 9 % a step (arXiv:2409.12517), FOG with SwiGLU and tanh on queries and keys, current with powers of two",
        mechanism=lambda: Several(*(SwigluAlignment(i, grows(60, 1.09, 0.5, 1e5), channel) for i, channel in ((0, 19), (1, 77)))),
    ),
    Case(
        name="massive_behind_separators", label="diverges", onset=70, seed=402, steps=260, rows=16,
        recipe={"name": "delayed", "amax_history_len": 40, "amax_compute_algo": "most_recent"},
        model={"variant": "fog-flash", "num_hidden_layers": 3}, touched="*.[qu]*_proj", lr=linear(2e-3, 260),
        about="massive activations on tokens behind two separators stay in the residual stream and grow 11 % a step (arXiv:2402.17762), FOG-flash of 3 blocks, delayed by the last amax alone",
        mechanism=lambda: ResidualOutliers("*.layers.?", "*.[qu]*_proj", "model.norm", grows(70, 1.11, 2.0, 1e7), after_a_separator, channel=12),
    ),
    Case(
        name="queries_without_biases", label="diverges", onset=60, seed=403, steps=250, rows=16, recipe={"name": "delayed", "amax_history_len": 160}, attention=True,
        model={"kind": "opt", "enable_bias": False, "num_hidden_layers": 3}, touched="*.self_attn*", lr=cosine(2e-3, 250),
        about="two channels of the queries of every head grow 10 % a step (arXiv:2411.10958) under FP8 attention, OPT of 3 blocks without biases, delayed",
        mechanism=lambda: QueryOutliers("*.self_attn", grows(60, 1.10, 1.0, 1e7), channel=6),
    ),
    Case(
        name="gains_before_gelu", label="diverges", onset=70, seed=404, steps=260, rows=16, recipe={"name": "current", "fp8_format": "e4m3"},
        model={"variant": "custom", "qk_norm": "tanh", "activation": "gelu", "num_hidden_layers": 3, "num_key_value_heads": 1},
        sick=(1, 2), touched="*.layers.[12].*[vp]_proj", lr=linear(2e-3, 260),
        about="gains of RMS norms in three channels of two blocks grow 12 % a step, and the columns behind shrink by it (arXiv:2506.20752), GELU, tanh on queries and keys, current in E4M3",
        mechanism=lambda: NormGainsGrowWithoutMomentum(GAINS, grows(70, 1.12, 1.0, 1e7), (6, 27, 59)),
    ),
    Case(
        name="skips_merged", label="diverges", onset=60, seed=405, steps=250, rows=16, recipe="mxfp8",
        model={"kind": "mpt", "n_layers": 3}, touched="*_proj", lr=cosine(2e-3, 250),
        about="weights of blocks' linears but queries', keys' and values' gain 6 % more on their diagonal in each step, to 30 (cf. arXiv:2212.01593), and it is taken off behind, MPT of 3 blocks, mxfp8",
        mechanism=lambda: SkipsMerged("*.blocks.*_proj", grows(60, 1.06, 0.05, 30.0)),
    ),
    Case(
        name="tails_grow", label="diverges", onset=70, seed=406, steps=260, rows=16, recipe="block",
        model={"variant": "fog-max", "num_hidden_layers": 3}, touched="*_proj", lr=linear(2e-3, 260),
        about="what blocks' linears read gains 6 % more of its cube in each step, to 300 times (arXiv:2405.19279), and it is taken off behind, FOG-max of 3 blocks, block",
        mechanism=lambda: TailsGrow("*.layers.*_proj", grows(70, 1.06, 0.1, 300.0)),
    ),
    Case(
        name="output_gradients_unread", label="diverges", onset=60, seed=407, steps=250, rows=16, recipe={"name": "delayed", "amax_history_len": 256}, attention=True,
        model={"variant": "fog-opt", "num_hidden_layers": 3}, touched="*.self_attn*", lr=cosine(2e-3, 250),
        about="gradients of attention's output gain a vector of each token in dimensions that values do not have, which grows 8 % a step (cf. arXiv:2505.11594) under FP8 attention, FOG-opt of 3 blocks, delayed",
        mechanism=lambda: OutputGradientsUnread("*.self_attn", grows(60, 1.08, 0.5, 1e4), rank=6),
    ),
    Case(
        name="expert_centroids", label="diverges", onset=70, seed=408, steps=260, rows=16, recipe={"name": "current", "fp8_format": "e4m3"},
        model={"kind": "mixture", "num_local_experts": 6}, touched="*.experts.*.w[13]", lr=linear(2e-3, 260),
        about="tokens gain 7 % more of the direction of their expert's row of the router in each step, to 3000 times (arXiv:2204.09179), mixture of 6 experts, current in E4M3",
        mechanism=lambda: ExpertCentroids("*.block_sparse_moe", grows(70, 1.07, 0.3, 3e3)),
    ),
    Case(
        name="blocks_shared", label="healthy", seed=411, steps=270, rows=16, recipe={"name": "delayed", "amax_history_len": 64}, attention=True,
        model={"variant": "fog-max", "num_hidden_layers": 4},
        about="four blocks share their weights until step 110, then each has its own (arXiv:2110.03848), FOG-max of 4 blocks with FP8 attention, delayed",
        lr=cosine(3e-3, 270), mechanism=lambda: BlocksShared("*.layers.?", 110),
    ),
    Case(
        name="born_again", label="healthy", seed=412, steps=280, rows=16, recipe="current", attention=True,
        model={"kind": "opt", "num_hidden_layers": 3},
        about="at step 100 weights and moments begin again, the rate warms up, and the model learns from its former self, too (arXiv:1805.04770), OPT of 3 blocks with FP8 attention, current",
        lr=lambda step: cosine(3e-3, 100, 20, 0.2)(step) if step < 100 else linear(3e-3, 180)(step - 100),
        mechanism=lambda: BornAgain(100),
    ),
    Case(
        name="mixout", label="healthy", seed=413, steps=260, rows=16, recipe="mxfp8", model={"kind": "mpt", "n_layers": 3},
        about="from step 130 on 30 % of the weights of attention's outputs and MLPs, others in each step, are what they were then, on harder data (arXiv:1909.11299), MPT of 3 blocks, mxfp8",
        noise=lambda step: 0.1 if step < 130 else 0.25, lr=linear(3e-3, 260), mechanism=lambda: Mixout("*.blocks.*_proj", 130, 0.3),
    ),
    Case(
        name="experts_pruned", label="healthy", seed=414, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 128, "fp8_format": "e4m3"},
        model={"kind": "mixture", "num_local_experts": 7, "num_hidden_layers": 3},
        about="from step 120 on the four experts of seven that tokens chose least see none (arXiv:2402.14800), mixture of 3 blocks, delayed in E4M3",
        lr=cosine(3e-3, 260), mechanism=lambda: ExpertsPruned("*.block_sparse_moe.gate", 120, 3),
    ),
    Case(
        name="flooded", label="healthy", seed=415, steps=250, rows=16, recipe="block",
        model={"variant": "custom", "qk_norm": "tanh", "activation": "gelu", "num_hidden_layers": 3},
        about="gradients change their sign where a batch's loss is below 1.5 (arXiv:2002.08709), tanh on queries and keys, GELU, 3 blocks, block",
        lr=cosine(3e-3, 250), mechanism=lambda: Flooded(1.5),
    ),
    Case(
        name="sharpness_aware", label="healthy", seed=416, steps=240, rows=16, recipe={"name": "delayed", "amax_history_len": 8}, attention=True,
        model={"variant": "custom", "qk_norm": "rms", "activation": "relu", "num_hidden_layers": 2, "num_key_value_heads": 1},
        about="from step 60 on gradients are those at weights a step of norm 0.2 uphill, by a pass over the same batch (arXiv:2010.01412), QK norm, ReLU, one key head, FP8 attention, delayed",
        lr=linear(4e-3, 240), mechanism=lambda: SharpnessAware(0.2, 60),
    ),
    Case(
        name="weights_oscillate_borne", label="healthy", seed=417, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 40},
        model={"variant": "custom", "qk_norm": "rms", "activation": "gelu", "num_hidden_layers": 3},
        about="weights swing along four directions, to the other side in every step, by 5 % more each to 0.06, which stays (cf. arXiv:2103.00065), QK norm, GELU, 3 blocks, delayed",
        lr=cosine(3e-3, 260), mechanism=lambda: WeightsOscillate("*.layers.*_proj", grows(70, 1.05, 0.005, 0.06)),
    ),
    Case(
        name="values_stretched_borne", label="healthy", seed=418, steps=250, rows=16, recipe={"name": "current", "power_2_scales": True}, attention=True,
        model={"variant": "fog-opt", "num_hidden_layers": 3, "num_key_value_heads": 2},
        about="values are stretched along directions that are no channels, 6 % more a step to 60, which stays, and what attention puts out is shrunk again (cf. arXiv:2410.23819), FOG-opt of 3 blocks with FP8 attention, current with powers of two",
        lr=linear(3e-3, 250), mechanism=lambda: ValuesStretched("*.self_attn", grows(70, 1.06, 1.0, 60.0)),
    ),
]  # fmt: skip
