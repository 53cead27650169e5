"""The ninth half that is held out, healthy runs alone.

Written without sight of the guard's code, thresholds or results, by another than who mends it. Published practice of pretraining
and finetuning, and two causes that make runs diverge when they grow on, here as small as FP8 bears (``ninth_healthy.py``).

All eight held at once. Before any guard saw them the sizes of the last two were raised, from 1 to 1.8 and from 12 to 30, as they held by
far; FP8 ends between 0.0 % and +0.6 % of high precision.
"""

from __future__ import annotations

from case import Case
from changes import OptimizerReset
from mechanisms import Several, grows
from mixed_mechanisms import PositionMean
from ninth_healthy import ContextExtended, Muon, Pruned, RowsRewarded, ShrunkAndPerturbed, Stacked
from rates import cosine, linear
from sixth_mechanisms import QueriesGrowKeysShrink

CASES: list[Case] = [
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
