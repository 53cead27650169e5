"""What all tokens have in common, beside which their differences are below the last bit; and tokens of unlike norms."""

from __future__ import annotations

from case import Case, delayed
from mechanisms.base import Several, every, grows, without
from mechanisms.common_to_all_tokens import (
    ActivationMean,
    CommonOutputs,
    GradientMean,
    KeyMean,
    ModalityNorms,
    RankOne,
    RunningMeans,
    Spread,
)
from mechanisms.practices import Microbatches
from rates import cosine, linear

CASES = [
    Case(
        name="activation_mean", label="diverges", onset=70, seed=41, steps=220, recipe="current", touched="*.mlp.*",
        about="all activations before MLPs' linears move by a mean that grows 7 % a step (arXiv:2304.09145), current",
        mechanism=lambda: ActivationMean("*.mlp.*_proj", grows(70, 1.07, 0.2, 300.0)),
    ),
    Case(
        name="gradient_mean_in_turn", label="diverges", onset=87, seed=44, steps=270, recipe="block",
        about="every 3rd step the gradients behind all linears have a mean, which grows 10 % a step (arXiv:2004.01461), block",
        mechanism=lambda: GradientMean("*.layers.*_proj", every(3, grows(87, 1.10, 3e-4, 1e3))),
    ),
    Case(
        name="singular_value", label="diverges", onset=65, seed=43, steps=260, recipe="block", model={"kind": "opt", "num_hidden_layers": 3},
        about="one singular value of every linear grows 3 % a step (arXiv:2303.06296), OPT of 3 blocks, block",
        mechanism=lambda: Several(*(RankOne(names, grows(65, 1.03, 0.02, 5.0)) for names in ("*_proj", "*.fc?"))),
    ),
    Case(
        name="common_outputs", label="diverges", onset=60, seed=185, steps=270, rows=16, recipe="current", touched="*.[of][uc][t2]*",
        about="what branches write gains a part that all channels share and layer norms take off, 6 % more a step (cf. arXiv:2409.12951), OPT, current",
        model={"kind": "opt", "num_hidden_layers": 3}, lr=cosine(2e-3, 270),
        mechanism=lambda: Several(*(CommonOutputs(linears, grows(60, 1.06, 0.02, 10.0)) for linears in ("*.out_proj", "*.fc2"))),
    ),
    Case(
        name="key_mean", label="diverges", onset=75, seed=23, steps=260, rows=5, recipe=delayed(24), attention=True, model={"kind": "opt"}, touched="*.self_attn*",
        about="the mean of all keys grows 9 % a step under FP8 attention (arXiv:2410.02367), OPT, delayed",
        mechanism=lambda: KeyMean("*.k_proj", grows(75, 1.09, 0.5, 1e4), (3, 19, 35, 60)),
    ),
    Case(
        name="oversmoothed", label="diverges", onset=70, seed=148, steps=260, rows=16, recipe="block", model={"num_hidden_layers": 3},
        about="what linears read gains 5 % more of the mean of the tokens so far in each step, to 20 times (arXiv:2203.05962), 3 blocks, block",
        lr=linear(2e-3, 260), mechanism=lambda: RunningMeans("*.layers.*_proj", grows(70, 1.05, 0.3, 20.0)),
    ),
    Case(
        name="token_norms", label="diverges", onset=60, seed=46, steps=240, recipe="current", model={"num_hidden_layers": 3, "hidden_size": 48},
        about="tokens' norms spread by a factor that grows 25 % a step (arXiv:2206.01861), 3 blocks of width 48, current",
        mechanism=lambda: Spread("*.layers.*_proj", grows(60, 1.25, 1.0, 1e12)),
    ),
    Case(
        name="most_recent_of_two", label="diverges", onset=70, seed=128, steps=260, rows=16, recipe=delayed(amax_compute_algo="most_recent"),
        about="norms of a batch's two microbatches part by 3 % more a step (cf. arXiv:2206.01861), and each is scaled by the other's amax, delayed",
        lr=cosine(2e-3, 260), mechanism=lambda: Several(Microbatches(0, 8), Spread("*.layers.*_proj", grows(70, 1.03, 1.0, 1e4), cycle=2)),
    ),
    Case(
        name="modalities", label="diverges", onset=55, seed=66, steps=240, rows=6, recipe="current", model={"num_hidden_layers": 3, "hidden_size": 96},
        about="a quarter of the tokens is another modality, whose norms grow 12 % a step but for a pause (arXiv:2405.09818), width 96, current",
        mechanism=lambda: ModalityNorms("*.layers.*_proj", without(grows(55, 1.12, 1.0, 1e9), 120, 140), lambda ids: ids < 16),
    ),
]  # fmt: skip
