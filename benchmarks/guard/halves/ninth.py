"""The ninth half that was held out, by two authors: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by others than who mended it. Published failures of training in
low precision, in places that no half before has them (``mechanisms/ninth.py``): padding, attention's sink and gains, values, units that are dead, gains
behind branches; published practice, and two causes as small as FP8 bears (``practices/ninth.py``). Rates fall to zero, and the batches of what diverges
are of 16 rows or more, so that chance alone moves a final loss by 0.31 % at most, which was measured before any guard ran.

Changed before any guard saw them, by labels, floors and high precision alone: units are dead in three blocks of four and grow 11 % a step, as 15 % in two
blocks ended at +2.2 % and in three at +4.8 %; values of one head are not trained, as high precision felt by 12 % what the optimizer's moments left of them;
gains behind experts grow 14 % a step, which ended higher than 18 %; the two causes that FP8 bears are 1.8 and 30 in size, and were 1 and 12, which it bore by far.
"""

from __future__ import annotations

from case import Case
from mechanisms.base import Several, grows
from mechanisms.fifth import PositionMean
from mechanisms.fourth import Spread
from mechanisms.ninth import (
    AttentionSink,
    DarkSignals,
    DeadUnitsGrow,
    PaddingGrows,
    QueryKeyGainsExchange,
    RowsExchange,
    ValuesExchange,
)
from mechanisms.sixth import QueriesGrowKeysShrink
from practices.ninth import ContextExtended, Muon, Pruned, RowsRewarded, ShrunkAndPerturbed, Stacked
from practices.third import Microbatches, OptimizerReset
from rates import cosine, linear

CASES = [
    Case(
        name="padding_grows", label="diverges", onset=70, seed=121, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 128}, attention=True,
        model={"num_hidden_layers": 3, "num_key_value_heads": 4, "max_position_embeddings": 40}, lr=cosine(2e-3, 260),
        about="what stands at eight padded positions behind each row grows 6 % a step (cf. arXiv:2309.16588) under FP8 attention, 3 blocks, delayed",
        mechanism=lambda: PaddingGrows("*.layers.*.[gq]*_proj", grows(70, 1.06, 1.0, 1e6)),
    ),
    Case(
        name="attention_sink", label="diverges", onset=60, seed=122, steps=280, rows=16, recipe="current", attention=True,
        model={"kind": "mpt"}, touched="*att*n", lr=cosine(3e-3, 280),
        about="the first key takes all attention, by odds that grow 10 % a step (arXiv:2309.17453), under FP8 attention, MPT, current",
        mechanism=lambda: AttentionSink("*.attn", grows(60, 1.10, 1.0, 1e12)),
    ),
    Case(
        name="massive_query_gains", label="diverges", onset=80, seed=123, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 8}, attention=True,
        model={"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "num_hidden_layers": 3}, touched="*.layers.[02].*att*n", sick=(0, 2), lr=linear(2e-3, 280),
        about="gains of queries grow 10 % a step in three low-frequency pairs and the keys' shrink by it (arXiv:2502.01563), in two blocks of three under FP8 attention, delayed",
        mechanism=lambda: QueryKeyGainsExchange("*.layers.[02].self_attn", grows(80, 1.10, 1.0, 1e8), (5, 6, 7)),
    ),
    Case(
        name="dark_signals", label="diverges", onset=60, seed=124, steps=260, rows=16, recipe="mxfp8", model={"kind": "mpt", "n_layers": 3},
        lr=linear(2e-3, 260), touched="*.ffn.*",
        about="signals of each token that nothing reads grow 4 % a step (arXiv:2402.09221), MPT of 3 blocks, mxfp8",
        mechanism=lambda: DarkSignals("*.ffn.*_proj", grows(60, 1.04, 0.1, 300.0)),
    ),
    Case(
        name="dead_units_grow", label="diverges", onset=70, seed=125, steps=260, rows=16, recipe="block", model={"kind": "opt", "num_hidden_layers": 4},
        lr=cosine(2e-3, 260), sick=(0, 1, 2), touched="*.layers.[012].fc1",
        about="weights of dead units of three blocks of four grow 11 % a step (arXiv:2302.12902), OPT, block",
        mechanism=lambda: DeadUnitsGrow("*.layers.[012].fc1", grows(70, 1.11, 0.5, 1e9), (3, 47, 90)),
    ),
    Case(
        name="gains_behind_experts", label="diverges", onset=60, seed=126, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 64},
        model={"kind": "mixture"}, lr=cosine(2e-3, 260), touched="*.experts.*",
        about="gains behind experts' linears grow apart by up to 14 % a step and their weights shrink by it (cf. arXiv:2103.17239), mixture, delayed",
        mechanism=lambda: RowsExchange("*.experts.*.w?", grows(60, 1.14, 1.0, 1e12)),
    ),
    Case(
        name="values_against_outputs", label="diverges", onset=70, seed=127, steps=280, rows=16, recipe="current",
        model={"variant": "fog-opt", "num_hidden_layers": 3, "num_key_value_heads": 4}, lr=linear(2e-3, 280), touched="*.self_attn.*",
        about="values of one head grow 15 % a step and its columns of the output projection shrink by it (cf. arXiv:2306.00978), FOG-opt of 3 blocks, current",
        mechanism=lambda: ValuesExchange("*.self_attn", grows(70, 1.15, 1.0, 1e9), 1),
    ),
    Case(
        name="most_recent_of_two", label="diverges", onset=70, seed=128, steps=260, rows=16,
        recipe={"name": "delayed", "amax_compute_algo": "most_recent", "amax_history_len": 16}, model={"num_hidden_layers": 2}, lr=cosine(2e-3, 260),
        about="norms of a batch's two microbatches part by 3 % more a step (cf. arXiv:2206.01861), and each is scaled by the other's amax, delayed",
        mechanism=lambda: Several(Microbatches(0, 8), Spread("*.layers.*_proj", grows(70, 1.03, 1.0, 1e4), cycle=2)),
    ),
    Case(
        name="orthogonal_updates", label="healthy", seed=131, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 64}, attention=True,
        model={"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "num_hidden_layers": 3}, lr=cosine(4e-3, 260),
        about="blocks' weights are trained by Muon with a decay of 0.1 (arXiv:2502.16982), QK norm, FP8 attention, 3 blocks, delayed",
        mechanism=lambda: Muon("*.layers.*_proj"),
    ),
    Case(
        name="stacked_blocks", label="healthy", seed=132, steps=280, rows=12, recipe="current", model={"kind": "opt", "num_hidden_layers": 4},
        about="two blocks run until step 120, then copies of them follow (arXiv:2405.15319), OPT of 4 blocks, current",
        lr=linear(2e-3, 280), mechanism=lambda: Stacked("*.layers.?", 120),
    ),
    Case(
        name="pruned_by_and_by", label="healthy", seed=133, steps=300, rows=12, recipe="mxfp8", model={"num_hidden_layers": 3},
        about="the smallest weights become zero, 70 % of them between steps 80 and 220 (arXiv:1710.01878), 3 blocks, mxfp8",
        lr=cosine(3e-3, 300), mechanism=lambda: Pruned("*.layers.*_proj", 80, 220, 10, 0.7),
    ),
    Case(
        name="shrunk_and_perturbed", label="healthy", seed=134, steps=300, rows=16, recipe={"name": "delayed", "amax_history_len": 4}, model={"kind": "mpt"},
        about="at steps 110 and 190 weights shrink to half, noise is added, and optimizer and rate begin again (arXiv:1910.08475), MPT, delayed",
        lr=lambda step: cosine(3e-3, 110, 20)(step % 110) if step < 110 else cosine(3e-3, 80, 10)(step - 110) if step < 190 else cosine(3e-3, 110, 10)(step - 190),
        mechanism=lambda: Several(ShrunkAndPerturbed((110, 190), 0.5, 0.3), OptimizerReset((110, 190))),
    ),
    Case(
        name="context_extended", label="healthy", seed=135, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 256}, attention=True,
        model={"variant": "fog-flash", "rope_theta": 50.0, "rope_scaling": False},
        about="rows of 12 tokens until step 150, then of 32 with a base of RoPE of 5000 instead of 50 (arXiv:2309.16039), FOG-flash with FP8 attention, delayed",
        lr=cosine(3e-3, 280), mechanism=lambda: ContextExtended(150, 12, 5000.0),
    ),
    Case(
        name="rows_rewarded", label="healthy", seed=136, steps=260, rows=8, recipe="block", model={"kind": "mixture"},
        about="from step 120 on rows weigh the exponential of an advantage, up to 20 (arXiv:1910.00177), at a rate of 1e-3 that falls to zero, mixture, block",
        lr=lambda step: cosine(3e-3, 120, 20, 0.2)(step) if step < 120 else cosine(1e-3, 140, 10)(step - 120),
        mechanism=lambda: RowsRewarded(120, 0.5),
    ),
    Case(
        name="position_curve_borne", label="healthy", seed=137, steps=260, rows=16, recipe="current", model={"kind": "mpt", "n_layers": 3},
        about="what MLPs read moves along a curve of the position, which grows 2 % a step to 1.8 and stays (arXiv:2310.04861), MPT of 3 blocks, current",
        lr=linear(2e-3, 260), mechanism=lambda: PositionMean("*.ffn.*_proj", grows(70, 1.02, 0.2, 1.8)),
    ),
    Case(
        name="queries_against_keys_borne", label="healthy", seed=138, steps=260, rows=24, recipe={"name": "delayed", "amax_history_len": 16}, attention=True,
        model={"num_key_value_heads": 4}, lr=cosine(2e-3, 260),
        about="queries grow 4 % a step to 30 times their size, and keys shrink by it (cf. arXiv:2308.13137) under FP8 attention without QK norm, delayed",
        mechanism=lambda: QueriesGrowKeysShrink("*.self_attn", grows(80, 1.04, 1.0, 30.0)),
    ),
]  # fmt: skip
