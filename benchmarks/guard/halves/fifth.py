"""The fifth half that was held out: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by another than who mended it. Its families are mixed, as
in a user's runs: half of what makes runs diverge is in no earlier half (``mechanisms/fifth.py``), the rest is elsewhere, in other models or at other rates.
"""

from __future__ import annotations

import math

from case import Case
from mechanisms.base import Several, Size, grows
from mechanisms.fifth import (
    ActivationsBesideAdapters,
    AttentionGradientOutliers,
    DecayedBeforeNorm,
    ExpertsAlign,
    LabelsSmoothed,
    MergedAdapters,
    ModalityNorms,
    OtherBetas,
    PairedGradients,
    PositionMean,
    PromptsMasked,
    SplitUnits,
    WordDropout,
)
from mechanisms.first import Activations, StaleHistory
from mechanisms.second import GradientOutliers, Multiplied
from practices.third import Adapters, Batches


def spikes(start: int, every: int, rate: float, first: float) -> Size:
    """Every ``every`` steps from ``start`` on: ``first``, growing by ``rate`` a step; else 0."""
    return lambda step: (
        first * rate ** (step - start) if step >= start and (step - start) % every == 0 else 0.0
    )


def pausing(size: Size, pause: int, resume: int) -> Size:
    """``size``, but 0 from ``pause`` to ``resume``."""
    return lambda step: 0.0 if pause <= step < resume else size(step)


CASES = [
    Case(
        name="position_curve", label="diverges", onset=60, seed=61, steps=250, recipe="current", model={"kind": "mpt", "n_layers": 3},
        touched="*.ffn.*", rows=6,
        about="what MLPs read moves along a curve of the position, which grows 2 % a step (arXiv:2310.04861), MPT of 3 blocks, current",
        mechanism=lambda: PositionMean("*.ffn.*_proj", grows(60, 1.02, 0.5, 300.0)),
    ),
    Case(
        name="paired_gradients", label="diverges", onset=90, seed=62, steps=240, recipe="block", rows=12,
        about="rows come in pairs whose gradients are opposite and grow 8 % a step (arXiv:2305.18290), block",
        mechanism=lambda: PairedGradients(grows(90, 1.08, 1e-3, 1e3)),
    ),
    Case(
        name="decay_before_norm", label="diverges", onset=45, seed=63, steps=220, recipe={"name": "delayed", "amax_history_len": 512},
        model={"variant": "olmo2", "num_hidden_layers": 3, "hidden_size": 48, "norm_eps": 1e-24}, sick=(0, 2), touched="*.layers.[02].*.[do]*_proj",
        about="weights before the norms of two blocks of three decay by 8 % a step (arXiv:1706.05350), OLMo2, the history is 512 long, delayed",
        mechanism=lambda: DecayedBeforeNorm("*.layers.[02].*.[do]*_proj", grows(45, 1 / 0.92, 1.0, 1e6)),
    ),
    Case(
        name="split_units", label="diverges", onset=70, seed=64, steps=240, recipe="mxfp8", model={"kind": "opt", "num_hidden_layers": 3, "hidden_size": 96},
        lr=lambda step: 2e-3 * min(1.0, (step + 1) / 20),
        about="what leaves units that are copies grows in opposite directions, 6 % a step (arXiv:1511.05641), OPT of 3 blocks, mxfp8",
        mechanism=lambda: Several(*(SplitUnits(names, grows(70, 1.06, 0.02, 1e3)) for names in ("*_proj", "*.fc?"))),
    ),
    Case(
        name="attention_gradients", label="diverges", onset=40, seed=65, steps=230, recipe={"name": "current", "fp8_format": "e4m3"}, attention=True,
        model={"num_key_value_heads": 4}, touched="*.self_attn*", lr=lambda step: 1e-3 * min(1.0, (step + 1) / 20),
        about="gradients of attention's output have a channel that grows 30 % a step (arXiv:2505.11594) under FP8 attention, current in E4M3",
        mechanism=lambda: AttentionGradientOutliers("*.self_attn", grows(40, 1.3, 1e-2, 1e8)),
    ),
    Case(
        name="modalities", label="diverges", onset=55, seed=66, steps=240, recipe="current", rows=6,
        model={"num_hidden_layers": 3, "hidden_size": 96},
        about="a quarter of the tokens is another modality, whose norms grow 12 % a step but for a pause (arXiv:2405.09818), width 96, current",
        mechanism=lambda: ModalityNorms("*.layers.*_proj", pausing(grows(55, 1.12, 1.0, 1e9), 120, 140), lambda ids: ids < 16),
    ),
    Case(
        name="gradient_spikes", label="diverges", onset=75, seed=67, steps=240, recipe={"name": "delayed", "amax_history_len": 24, "fp8_format": "e4m3"},
        model={"kind": "mpt"}, clip=0.5,
        about="every 19th step gradients have spikes (arXiv:2501.06842), 7 % larger a step, which a history of 24 remembers, MPT, delayed in E4M3",
        mechanism=lambda: Several(*(GradientOutliers(names, spikes(75, 19, 1.07, 1.0), channel=12) for names in ("*_proj", "*.Wqkv"))),
    ),
    Case(
        name="alignment_in_experts", label="diverges", onset=85, seed=68, steps=230, recipe={"name": "delayed", "amax_history_len": 4},
        model={"kind": "mixture", "hidden_size": 48}, touched="*.experts.*",
        about="gate and up rows of a channel of all experts align and grow 9 % a step (arXiv:2409.12517), mixture of width 48, delayed",
        mechanism=lambda: ExpertsAlign("*.experts.*", grows(85, 1.09, 1.0, 1e6)),
    ),
    Case(
        name="stale_after_restarts", label="diverges", onset=70, ends=161, seed=69, steps=240, recipe={"name": "delayed", "amax_history_len": 80},
        model={"kind": "opt", "num_hidden_layers": 3, "hidden_size": 48},
        about="a run restarts twice, each time with amaxes 3e5 too large in its histories of 80, OPT of 3 blocks, delayed",
        mechanism=lambda: Several(*(StaleHistory(names, at, 3e5) for names in ("*_proj", "*.fc?") for at in (70, 160))),
    ),
    Case(
        name="massive_in_frozen_base", label="diverges", onset=125, seed=70, steps=230, recipe="current", model={"num_hidden_layers": 4},
        sick=(0, 1, 2), touched="*.layers.[012].*",
        about="adapters are trained from step 100 on (arXiv:2106.09685); three frozen blocks of four have outliers that grow 30 % a step, current",
        mechanism=lambda: Several(
            Adapters(100, "*.layers.*_proj", 6),
            ActivationsBesideAdapters("*.layers.[012].*_proj", grows(125, 1.3, 1.0, 1e8), share=0.02, channel=18),
        ),
        lr=lambda step: (3e-3 if step < 100 else 8e-3) * min(1.0, (step + 1) / 20),
    ),
    Case(
        name="bad_rows_in_turn", label="diverges", onset=80, seed=71, steps=230, recipe={"name": "delayed", "amax_history_len": 16},
        model={"variant": "fog-opt", "num_hidden_layers": 4}, sick=(0, 3), touched="*.layers.[03].*",
        about="in turn, bad batches spoil one block's activations and another's gradients, every 8 steps, FOG-opt of 4 blocks, delayed",
        mechanism=lambda: Several(
            Activations("*.layers.0.*_proj", lambda step: 1e7 if step >= 80 and step % 16 == 0 else 0.0, share=0.02, channel=40),
            GradientOutliers("*.layers.3.*_proj", lambda step: 1e7 if step >= 80 and step % 16 == 8 else 0.0, channel=25),
        ),
    ),
    Case(
        name="entropy_collapse", label="diverges in both", onset=95, seed=72, steps=220, recipe="current", model={"kind": "mixture"}, touched="*.self_attn.*",
        about="weights of queries and keys grow 5 % a step until each token sees one other (arXiv:2303.06296), mixture, current",
        mechanism=lambda: Several(*(Multiplied(names, 1.05, 95, 190) for names in ("*.q_proj", "*.k_proj"))),
    ),
    Case(
        name="batches_grow", label="healthy", seed=73, steps=240, model={"kind": "opt"},
        about="batches of 2 rows, then of 4 and of 8, instead of a rate that falls (arXiv:1711.00489), OPT, delayed",
        mechanism=lambda: Batches(lambda step, tokens: tokens[: 2 if step < 80 else 4 if step < 150 else 8]),
    ),
    Case(
        name="annealed", label="healthy", seed=74, steps=240, recipe="block", model={"num_hidden_layers": 3},
        about="the last 90 steps are annealed to a rate of 0 on cleaner data (arXiv:2407.21783), 3 blocks, block",
        noise=lambda step: 0.25 if step < 150 else 0.05,
        lr=lambda step: 4e-3 * min(1.0, (step + 1) / 20, (240 - step) / 90),
    ),
    Case(
        name="prompts_masked", label="healthy", seed=75, steps=230, recipe="current", model={"kind": "mixture", "num_local_experts": 3},
        about="from step 90 on only the second half of each row is learned (arXiv:2203.02155), mixture, current",
        mechanism=lambda: PromptsMasked(90, 16),
    ),
    Case(
        name="other_betas", label="healthy", seed=76, steps=230, recipe="mxfp8", model={"kind": "mpt", "d_model": 96},
        about="from step 110 on Adam's moments forget more slowly, MPT of width 96, mxfp8",
        mechanism=lambda: OtherBetas(110, (0.95, 0.999)),
    ),
    Case(
        name="merged_adapters", label="healthy", seed=77, steps=250, recipe="current", model={"num_hidden_layers": 3, "hidden_size": 48},
        about="adapters from step 80 on, merged into the weights every 40 steps (arXiv:2307.05695), current",
        mechanism=lambda: MergedAdapters(80, "*.layers.*_proj", 4, 40),
        lr=lambda step: 3e-3 * min(1.0, (step + 1) / 20) if step < 80 else 8e-3 * min(1.0, (step % 40 + 1) / 10),
    ),
    Case(
        name="labels_smoothed", label="healthy", seed=78, steps=220, recipe={"name": "delayed", "amax_history_len": 4}, model={"kind": "opt", "num_hidden_layers": 3},
        about="labels are smoothed from step 100 on (arXiv:1512.00567), OPT of 3 blocks, delayed", mechanism=lambda: LabelsSmoothed(100, 0.2),
    ),
    Case(
        name="word_dropout", label="healthy", seed=79, steps=240, recipe="block", model={"kind": "mpt", "n_heads": 2},
        about="a tenth of the tokens has no embedding from step 70 on (arXiv:1512.05287), MPT, block", mechanism=lambda: WordDropout(70, 0.1),
    ),
    Case(
        name="always_clipped", label="healthy", seed=80, steps=220, recipe="mxfp8", model={"num_hidden_layers": 5}, clip=0.02, rows=3,
        about="gradients are clipped at 0.02 in all steps, and the rate is a cosine, 5 blocks, mxfp8",
        lr=lambda step: 6e-3 * min(1.0, (step + 1) / 30) * (0.55 + 0.45 * math.cos(math.pi * step / 220)),
    ),
    Case(
        name="buckets", label="healthy", seed=81, steps=240, attention=True, model={"variant": "fog-opt"}, recipe={"name": "delayed", "amax_history_len": 3},
        about="batches are of rows of 8, 16, 24 or 32 tokens in turn, FOG-opt with FP8 attention, delayed",
        mechanism=lambda: Batches(lambda step, tokens: tokens[:, : 8 * (1 + step % 4)]),
    ),
    Case(
        name="attention_gradients_borne", label="healthy", seed=82, steps=220, recipe="current", attention=True,
        about="gradients of attention's output have a channel that grows to 0.03 and stays (arXiv:2505.11594) under FP8 attention, current",
        mechanism=lambda: AttentionGradientOutliers("*.self_attn", grows(70, 1.06, 1e-3, 0.03), channel=9),
    ),
    Case(
        name="modalities_borne", label="healthy", seed=83, steps=230, recipe="current", model={"num_hidden_layers": 2, "hidden_size": 96}, rows=5,
        about="an eighth of the tokens is another modality, whose norms grow to 60 and stay (arXiv:2405.09818), width 96, current",
        mechanism=lambda: ModalityNorms("*.layers.*_proj", grows(60, 1.05, 1.0, 60.0), lambda ids: ids >= 56),
    ),
    Case(
        name="gradient_spikes_borne", label="healthy", seed=84, steps=240, recipe={"name": "delayed", "amax_history_len": 8}, model={"kind": "opt"},
        about="every 23rd step gradients have spikes a thousand times as large (arXiv:2501.06842), which E5M2 bears, OPT, delayed",
        mechanism=lambda: Several(*(GradientOutliers(names, spikes(60, 23, 1.0, 1.0), channel=50) for names in ("*_proj", "*.fc?"))),
    ),
]  # fmt: skip
