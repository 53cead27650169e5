"""The tenth half that was held out, by two authors: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by others than who mended it. Published failures of training in
low precision: four of those that are met most, in hosts and places that no half before has them (outputs of attention, units gated by GELU, heads
without QK norm, microbatches of unlike loss scales), and four causes that none before has (``mechanisms/tenth.py``): gradients in a subspace, scattered
weights, a sheared basis of queries and keys, means of the tokens so far. Published practice that none before has, and two causes of the ninth, as small as
FP8 bears (``practices/tenth.py``). Rates fall to zero, and the batches of what diverges are of 16 rows, so that chance alone moves a final loss by 0.10 % at
most, which was measured before any guard ran.

Changed before any guard saw them, by labels and high precision alone: the basis is sheared up to 30 times, and means grow to 20 times, both of which then stay;
without an end FP8 ended 121 % and 301 % above high precision, and with it 17 % and 8 %. Rows repeat from step 40 on, at six tokens, 24 in a batch at a rate of
1e-2, as nothing was copied from step 120 on at ten, and from step 60 on at eight copying had only begun at the end, by chance earlier in FP8, whose label did
not hold (-2.2 %). The two causes that FP8 bears are 1000 and 300 in size, and were 300 and 100, which it bore by far (ten times the first size, too).
"""

from __future__ import annotations

from case import Case
from mechanisms.base import Several, grows
from mechanisms.first import Activations
from mechanisms.ninth import AttentionSink, ValuesExchange
from mechanisms.tenth import (
    GatedUnitsAlign,
    GradientSubspace,
    HeadsPart,
    MicrobatchLossScales,
    QueriesAndKeysSheared,
    RunningMeans,
    ScatteredWeights,
)
from practices.tenth import (
    BalancedExperts,
    FewerExperts,
    FurtherTokens,
    Lion,
    PositionsDropped,
    RowsRepeat,
    UnitsRenewed,
)
from practices.third import Microbatches
from rates import cosine, linear

CASES = [
    Case(
        name="outliers_before_outputs", label="diverges", onset=60, seed=141, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 256},
        model={"variant": "fog-flash", "num_hidden_layers": 3}, touched="*.self_attn.o_proj", lr=cosine(2e-3, 260),
        about="one channel of what attention's output projections read grows 9 % a step (cf. arXiv:2306.12929), FOG-flash of 3 blocks, delayed",
        mechanism=lambda: Activations("*.self_attn.o_proj", grows(60, 1.09, 1.0, 1e8), channel=22),
    ),
    Case(
        name="gelu_units_align", label="diverges", onset=70, seed=142, steps=280, rows=16, recipe="mxfp8",
        model={"kind": "mpt", "ffn_config": {"ffn_type": "mptglu"}}, touched="*.ffn.*", lr=linear(2e-3, 280),
        about="gate and up rows of a channel of every 32 align and grow 7 % a step (arXiv:2409.12517), MPT with units gated by GELU, mxfp8",
        mechanism=lambda: GatedUnitsAlign("*.ffn", grows(70, 1.07, 0.5, 1e5), (5, 37, 69, 101)),
    ),
    Case(
        name="heads_part", label="diverges", onset=60, seed=143, steps=260, rows=16, recipe="current", attention=True,
        model={"num_hidden_layers": 3, "num_key_value_heads": 4}, touched="*att*n", lr=cosine(2e-3, 260),
        about="queries of four heads part by up to 12 % more a step, and their keys the other way (cf. arXiv:2407.08608), under FP8 attention without QK norm, 3 blocks, current",
        mechanism=lambda: HeadsPart("*.self_attn", grows(60, 1.06, 1.0, 1e5)),
    ),
    Case(
        name="microbatches_of_unlike_loss", label="diverges", onset=60, seed=144, steps=260, rows=16,
        recipe={"name": "delayed", "amax_history_len": 1, "fp8_format": "e4m3"}, model={"kind": "opt"}, lr=linear(2e-3, 260),
        about="gradients of a batch's two microbatches part by 9 % more a step (cf. arXiv:2310.18313), and each is scaled by the other's amax, OPT, delayed in E4M3",
        mechanism=lambda: Several(Microbatches(0, 8), MicrobatchLossScales(grows(60, 1.09, 1.0, 1e12))),
    ),
    Case(
        name="gradients_in_a_subspace", label="diverges", onset=60, seed=145, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 1024},
        model={"kind": "mixture"}, touched="*.experts.*", lr=cosine(2e-3, 260),
        about="gradients behind experts' linears grow 12 % a step in a subspace of four dimensions (arXiv:2405.16002), mixture, delayed",
        mechanism=lambda: GradientSubspace("*.experts.*.w?", grows(60, 1.12, 1e-5, 1.0)),
    ),
    Case(
        name="scattered_weights", label="diverges", onset=60, seed=146, steps=260, rows=16, recipe="current",
        model={"variant": "fog-opt", "num_hidden_layers": 4}, touched="*.layers.[123].*_proj", sick=(1, 2, 3), lr=cosine(2e-3, 260),
        about="one weight in 256, anywhere, grows 10 % a step in three blocks of four (arXiv:2306.03078), FOG-opt, current",
        mechanism=lambda: ScatteredWeights("*.layers.[123].*_proj", grows(60, 1.10, 0.05, 3e4)),
    ),
    Case(
        name="sheared_queries_and_keys", label="diverges", onset=80, seed=147, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 64}, attention=True,
        model={"kind": "mpt", "n_layers": 3}, touched="*att*n", lr=cosine(2e-3, 280),
        about="half of each head's queries gains 5 % more of the other in each step, to 30 times, and the keys lose it (cf. arXiv:2410.09426), under FP8 attention, MPT of 3 blocks, delayed",
        mechanism=lambda: QueriesAndKeysSheared("*.attn", grows(80, 1.05, 0.3, 30.0)),
    ),
    Case(
        name="oversmoothed", label="diverges", onset=70, seed=148, steps=260, rows=16, recipe="block", model={"num_hidden_layers": 3},
        lr=linear(2e-3, 260),
        about="what linears read gains 5 % more of the mean of the tokens so far in each step, to 20 times (arXiv:2203.05962), 3 blocks, block",
        mechanism=lambda: RunningMeans("*.layers.*_proj", grows(70, 1.05, 0.3, 20.0)),
    ),
    Case(
        name="signed_updates", label="healthy", seed=151, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 32},
        model={"kind": "mpt", "n_layers": 4}, lr=cosine(6e-4, 280),
        about="all parameters are trained by Lion with a decay of 1 (arXiv:2302.06675), MPT of 4 blocks, delayed",
        mechanism=lambda: Lion(1.0),
    ),
    Case(
        name="positions_dropped", label="healthy", seed=152, steps=300, rows=16, recipe={"name": "delayed", "amax_history_len": 128}, attention=True,
        model={"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "num_hidden_layers": 3, "rope_theta": 100.0, "rope_scaling": False},
        about="RoPE is left out from step 170 on, and the rate warms up again (arXiv:2512.12167), QK norm, FP8 attention, 3 blocks, delayed",
        lr=lambda step: cosine(3e-3, 170, 20, 0.1)(step) if step < 170 else cosine(2e-3, 130, 15)(step - 170),
        mechanism=lambda: PositionsDropped(170),
    ),
    Case(
        name="rows_repeat", label="healthy", seed=153, steps=320, rows=24, recipe="current", attention=True, noise=lambda step: 0.5,
        model={"variant": "fog-max", "rope_theta": 100.0, "rope_scaling": False}, lr=linear(1e-2, 320),
        about="from step 40 on every other row is six tokens again and again, which heads learn to copy (arXiv:2209.11895), half of the tokens random, a rate of 1e-2, FOG-max with FP8 attention, current",
        mechanism=lambda: RowsRepeat(40, 6),
    ),
    Case(
        name="fewer_experts", label="healthy", seed=154, steps=260, rows=16, recipe="block",
        model={"kind": "mixture", "num_local_experts": 6, "num_experts_per_tok": 6}, lr=cosine(3e-3, 260),
        about="from step 110 on each token is seen by one expert and not by six (arXiv:2112.14397), with losses of balance and of routers' logits, mixture, block",
        mechanism=lambda: Several(BalancedExperts("*.gate", 1), FewerExperts("*.block_sparse_moe", 110, 1)),
    ),
    Case(
        name="units_renewed", label="healthy", seed=155, steps=300, rows=8, recipe={"name": "delayed", "amax_history_len": 4}, model={"kind": "opt", "num_hidden_layers": 3},
        about="every 20 steps an eighth of the units, the least useful ones, begins anew (arXiv:2306.13812), OPT of 3 blocks, delayed",
        lr=cosine(3e-3, 300), mechanism=lambda: UnitsRenewed("*.layers.?", 60, 240, 20, 0.125),
    ),
    Case(
        name="further_tokens", label="healthy", seed=156, steps=280, rows=12, recipe="mxfp8", model={"num_hidden_layers": 3},
        about="from step 80 on three more heads learn the tokens after the next (arXiv:2404.19737), 3 blocks, mxfp8",
        lr=linear(3e-3, 280), mechanism=lambda: FurtherTokens(80, 3),
    ),
    Case(
        name="attention_sink_borne", label="healthy", seed=157, steps=260, rows=24, recipe={"name": "delayed", "amax_history_len": 64}, attention=True,
        model={"kind": "mpt", "n_layers": 2}, lr=cosine(3e-3, 260),
        about="the first key takes all attention, by odds that grow 6 % a step to 1000 and stay (arXiv:2309.17453), under FP8 attention, MPT, delayed",
        mechanism=lambda: AttentionSink("*.attn", grows(60, 1.06, 1.0, 1000.0)),
    ),
    Case(
        name="values_grow_borne", label="healthy", seed=158, steps=260, rows=16, recipe="current",
        model={"variant": "fog-opt", "num_hidden_layers": 3, "num_key_value_heads": 4}, lr=linear(2e-3, 260),
        about="values of one head grow 6 % a step to 300 times their size and stay, and its columns of the output projection shrink by it (cf. arXiv:2306.00978), FOG-opt of 3 blocks, current",
        mechanism=lambda: ValuesExchange("*.self_attn", grows(70, 1.06, 1.0, 300.0), 1),
    ),
]  # fmt: skip
