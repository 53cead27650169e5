"""The seventh half that was held out: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by another than who mended it. Published failures of training in
low precision and published practice, in models and recipes of their own (``mechanisms/seventh.py``). Rates fall to zero and batches are
of 16 rows or more, so that chance alone moves a final loss by 0.4 % at most, which was measured before any guard ran.

Changed before any guard saw them, by labels and floors alone: rows align in a model with QK norm and not in OLMo2, which chance moved by 2.2 % in four
blocks, 2.6 % in three and 0.24 % in two; the keys' mean grows 6 % a step under delayed scaling, as 5 % under current scaling ended at +4.3 %; channels
that differ by as much as FP8 bears are OPT's and not those of OLMo2 of three blocks (-4.4 %); FOG has three blocks and not four, for time.
"""

from __future__ import annotations

from case import Case
from mechanisms.base import Several, grows
from mechanisms.first import Activations, SwigluAlignment
from mechanisms.seventh import (
    AmaxKept,
    AmaxOfAnother,
    ChannelsExchange,
    GradientChannels,
    LanguageMeans,
    Lookahead,
    PerRowChange,
    Silent,
    Upcycled,
)
from mechanisms.third import KeyMean
from practices.fourth import Thaw
from practices.third import WeightDecay
from rates import cosine, linear

CASES = [
    Case(
        name="rows_align_in_three_of_four", label="diverges", onset=60, seed=101, steps=280, rows=16, recipe="current", sick=(1, 2, 3),
        model={"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "num_hidden_layers": 4}, touched="*.layers.[123].mlp.*",
        about="gate and up rows of a channel of three blocks of four align and grow 6 % a step (arXiv:2409.12517), QK norm, current",
        mechanism=lambda: Several(*(SwigluAlignment(i, grows(60, 1.06, 1.0, 1e5), channel) for i, channel in ((1, 8), (2, 70), (3, 121)))),
        lr=cosine(2e-3, 280),
    ),
    Case(
        name="spikes_of_gated_units", label="diverges", onset=100, seed=102, steps=280, rows=16, sick=(0, 2),
        recipe={"name": "delayed", "amax_history_len": 2}, model={"num_hidden_layers": 3}, touched="*.layers.[02].mlp.down_proj", lr=linear(2e-3, 280),
        about="spikes on the first token before down projections of the first and the last block grow 15 % a step (arXiv:2405.14428), delayed",
        mechanism=lambda: Activations("*.layers.[02].mlp.down_proj", grows(100, 1.15, 2.0, 1e8), share=None, channel=77),
    ),
    Case(
        name="mean_of_learned_keys", label="diverges", onset=70, seed=103, steps=300, rows=16, recipe={"name": "delayed", "amax_history_len": 8}, attention=True,
        model={"kind": "mpt", "n_layers": 3}, touched="*.attn*", lr=cosine(3e-3, 300),
        about="the mean of all keys grows 6 % a step under FP8 attention (arXiv:2410.02367), MPT of 3 blocks, delayed",
        mechanism=lambda: KeyMean("*.Wqkv", grows(70, 1.06, 1.0, 3e4), (66, 85, 101, 120)),
    ),
    Case(
        name="channels_drift_apart", label="diverges", onset=50, seed=104, steps=240, rows=16, recipe="block", model={"kind": "mixture"},
        lr=cosine(2e-3, 240), touched="*.experts.*",
        about="channels of experts differ by a factor that grows 20 % a step and their weights by its inverse (cf. arXiv:2211.10438), mixture, block",
        mechanism=lambda: ChannelsExchange("*.experts.*.w?", grows(50, 1.2, 1.0, 1e14)),
    ),
    Case(
        name="amax_of_another_rank", label="diverges", onset=65, seed=105, steps=300, rows=16, recipe={"name": "delayed", "amax_history_len": 32},
        model={"kind": "opt"}, lr=linear(2e-3, 300), touched="*[qkvfo][_cu][p12t]*",
        about="amaxes of activations come from another rank, where they grow 12 % a step, OPT, delayed",
        mechanism=lambda: Several(*(AmaxOfAnother(names, grows(65, 1.12, 5.0, 1e9)) for names in ("*_proj", "*.fc?"))),
    ),
    Case(
        name="calibrated_once", label="diverges", onset=90, seed=106, steps=280, rows=24, recipe={"name": "delayed", "amax_history_len": 256},
        model={"num_key_value_heads": 4}, lr=cosine(2e-3, 280), touched="*.[gq]*_proj",
        about="amaxes stay what they are, and what norms put out grows 3 % a step and the weights behind shrink by it, delayed",
        mechanism=lambda: Several(AmaxKept("*.[gq]*_proj", 90), ChannelsExchange("*.[gq]*_proj", grows(90, 1.03, 1.0, 1e6), even=True)),
    ),
    Case(
        name="gradient_channels", label="diverges", onset=40, seed=107, steps=300, rows=16, recipe="mxfp8", model={"num_hidden_layers": 3},
        lr=linear(1e-3, 300), touched="*.layers.*",
        about="gradients of one channel of every 32 grow 25 % a step (arXiv:2006.08173), 3 blocks, mxfp8",
        mechanism=lambda: GradientChannels("*.layers.*_proj", grows(40, 1.25, 1e-3, 1e8)),
    ),
    Case(
        name="languages_part", label="diverges", onset=80, seed=108, steps=260, rows=16, recipe="current", attention=True,
        model={"variant": "fog-opt", "num_hidden_layers": 3}, lr=cosine(2e-3, 260), touched="*.[qu]*_proj",
        about="rows of four languages have means that part by 4 % more a step (arXiv:2004.05160), FOG-opt of 3 blocks, current",
        mechanism=lambda: LanguageMeans("*.layers.*.[qu]*_proj", grows(80, 1.04, 0.5, 300.0)),
    ),
    Case(
        name="published_recipe", label="healthy", seed=101, steps=300, rows=24, recipe={"name": "delayed", "amax_history_len": 1024},
        model={"num_hidden_layers": 3}, lr=cosine(3e-3, 300, 30, 0.1), mechanism=lambda: WeightDecay(0, 0.1),
        about="weight decay of 0.1, and a cosine that falls to a tenth (LLaMA, arXiv:2302.13971), 3 blocks, delayed",
    ),
    Case(
        name="fog_stable_then_decay", label="healthy", seed=102, steps=300, rows=16, attention=True, recipe={"name": "delayed", "amax_history_len": 64},
        model={"variant": "fog-max", "num_hidden_layers": 3},
        about="a rate that is level, then falls to zero within 80 steps (arXiv:2404.06395), FOG-max of 3 blocks with FP8 attention, delayed",
        lr=lambda step: 3e-3 * min(1.0, (step + 1) / 20, (300 - step) / 80),
    ),
    Case(
        name="added_blocks", label="healthy", seed=103, steps=280, rows=16, model={"num_hidden_layers": 4}, lr=cosine(2e-3, 280),
        recipe={"name": "delayed", "amax_history_len": 16},
        about="two blocks of four are the identity, and are trained from step 90 on (arXiv:2401.02415), delayed",
        mechanism=lambda: Several(Silent("*.layers.[13].*.[do]*_proj"), Thaw(90, "*.layers.[13].*")),
    ),
    Case(
        name="warmed_again", label="healthy", seed=104, steps=340, rows=16, model={"kind": "opt"}, recipe="block",
        about="at step 140 half of the rows become other data and the rate warms up again (arXiv:2403.08763), OPT, block",
        lr=lambda step: cosine(3e-3, 140, 20, 0.1)(step) if step < 140 else cosine(3e-3, 200)(step - 140),
        mechanism=lambda: PerRowChange(140, 2, lambda ids: 63 - ids),
    ),
    Case(
        name="upcycled", label="healthy", seed=105, steps=260, rows=16, recipe="current", model={"kind": "mixture"}, lr=linear(3e-3, 260),
        about="experts begin as copies (arXiv:2212.05055), mixture, current", mechanism=Upcycled,
    ),
    Case(
        name="lookahead", label="healthy", seed=106, steps=300, rows=16, recipe="mxfp8", model={"kind": "mpt"}, lr=cosine(4e-3, 300),
        about="every 6 steps weights go back by half of their way (arXiv:1907.08610), MPT, mxfp8", mechanism=lambda: Lookahead(6),
    ),
    Case(
        name="amax_of_another_rank_borne", label="healthy", seed=107, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 128},
        lr=cosine(2e-3, 260), about="amaxes of activations come from another rank, where they grow to 200 and stay, which E4M3 bears, delayed",
        mechanism=lambda: AmaxOfAnother("*.layers.*_proj", grows(70, 1.04, 5.0, 200.0)),
    ),
    Case(
        name="channels_apart_borne", label="healthy", seed=108, steps=260, rows=16, recipe="current", model={"kind": "opt", "num_hidden_layers": 3},
        lr=linear(2e-3, 260), about="channels differ by a factor that grows to 30 and stays (cf. arXiv:2211.10438), OPT of 3 blocks, current",
        mechanism=lambda: ChannelsExchange("*.layers.*[_f][pc][r12]*", grows(60, 1.05, 1.0, 30.0)),
    ),
]  # fmt: skip
