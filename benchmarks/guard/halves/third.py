"""The third half that was held out: its results were published and read on 2026-11-22, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by another than who mended it. Mechanisms that neither ``tuned.py``
nor ``halves/second.py`` have (``mechanisms/third.py``, ``practices/third.py``), on other hosts, sizes, rates and onsets.
"""

from __future__ import annotations

import math

import torch
from case import Case
from mechanisms.base import Several, grows
from mechanisms.first import Activations
from mechanisms.second import Multiplied
from mechanisms.third import GainsShrink, GrowthBeforeNorm, KeyMean, NeuronRescaled, QueryOutliers
from practices.third import (
    Adapters,
    Batches,
    Frozen,
    LateDropout,
    LossScale,
    Microbatches,
    OptimizerReset,
    RowGrows,
    TokenOutliers,
    WeightDecay,
)
from torch import Tensor


def loss_scale_spikes(step: int) -> float:
    """Every 5th step from 85 on: 2^4, and twice that in every step since."""
    return 2.0 ** min(48, 4 + step - 85) if step >= 85 and step % 5 == 0 else 1.0


def loss_scale_falls(step: int) -> float:
    """2^44 for 110 steps, then half as much in every step, down to 1."""
    return 2.0 ** max(0, 44 - max(0, step - 110))


def loss_scale_doubles(step: int) -> float:
    """2^-30, twice that every 50 steps, and a quarter after every third time."""
    return 2.0 ** (-30 + step // 50 - 3 * (step // 150))


def exchange_vocabulary(step: int, tokens: Tensor) -> Tensor:
    """From step 150 on every token stands for another."""
    others = torch.randperm(64, generator=torch.Generator().manual_seed(99))
    return others[tokens] if step >= 150 else tokens


def pad_some(step: int, tokens: Tensor) -> Tensor:
    """Every 29th batch is padding but for a row, and there every row's last quarter."""
    if step % 29 != 28:
        return tokens
    tokens = tokens.clone()
    tokens[1:], tokens[:, 24:] = 0, 0
    return tokens


CASES = [
    Case(
        name="unequal_neurons", label="diverges", onset=140, seed=22, steps=340, model={"kind": "opt", "num_hidden_layers": 3, "ffn_dim": 192},
        recipe={"name": "delayed", "amax_history_len": 8}, touched="*.fc?",
        about="a fifth of ReLU's neurons grow 10 % a step and their columns shrink by it (arXiv:1906.04721), OPT, delayed",
        mechanism=lambda: NeuronRescaled("*.fc1", range(0, 192, 5), "*.fc2", range(0, 192, 5), grows(140, 1.10, 1.0, 1e8)),
    ),
    Case(
        name="key_mean", label="diverges", onset=75, seed=23, attention=True, model={"kind": "opt"}, rows=5, touched="*.self_attn*",
        recipe={"name": "delayed", "amax_history_len": 24}, steps=260,
        about="the mean of all keys grows 9 % a step under FP8 attention (arXiv:2410.02367), OPT, delayed",
        mechanism=lambda: KeyMean("*.k_proj", grows(75, 1.09, 0.5, 1e4), (3, 19, 35, 60)),
    ),
    Case(
        name="query_outliers", label="diverges", onset=115, seed=24, attention=True, recipe="current", touched="*.self_attn*", rows=6,
        model={"kind": "mixture", "num_local_experts": 3, "num_key_value_heads": 4}, steps=280,
        about="a channel pair of the queries grows 17 % a step under FP8 attention (arXiv:2411.10958), mixture, current",
        mechanism=lambda: QueryOutliers("*.self_attn", grows(115, 1.17, 2.0, 1e8)),
    ),
    Case(
        name="loss_scale_spikes", label="diverges", onset=85, seed=25, steps=240, recipe={"name": "delayed", "amax_history_len": 12},
        model={"hidden_size": 96, "intermediate_size": 160}, lr=lambda step: 2e-3 * min(1.0, (step + 1) / 30),
        about="every 5th step the loss scale is larger, by ever more (arXiv:1710.03740), and the history remembers, width 96, delayed",
        mechanism=lambda: LossScale(loss_scale_spikes),
    ),
    Case(
        name="loss_scale_falls", label="diverges", onset=110, ends=154, seed=26, steps=300, rows=5, recipe={"name": "delayed", "amax_history_len": 512},
        model={"kind": "mixture", "num_hidden_layers": 1},
        about="the loss scale halves every step for 44 steps (arXiv:1710.03740); the history is 512 long, mixture of one block, delayed",
        mechanism=lambda: LossScale(loss_scale_falls),
    ),
    Case(
        name="emergent_features", label="diverges", onset=60, seed=27, steps=300, recipe="block", rows=4,
        model={"kind": "opt", "num_hidden_layers": 5, "hidden_size": 48, "ffn_dim": 96},
        about="outlier features emerge in one block after the other, 15 steps apart, and grow 12 % a step (arXiv:2208.07339), OPT of 5 blocks, block",
        mechanism=lambda: Several(
            *(
                Activations(f"*.layers.{i}.{names}", grows(60 + 15 * i, 1.12, 3.0, 1e8), channel=22)
                for i in range(5)
                for names in ("self_attn.*_proj", "fc?")
            )
        ),
    ),
    Case(
        name="residual_depth", label="diverges", onset=90, seed=28, steps=320, recipe="mxfp8",
        model={"num_hidden_layers": 5, "hidden_size": 64},
        about="two channels of every 32 grow 8 % a step and fourfold with each block (arXiv:2502.02732), 5 blocks, mxfp8",
        mechanism=lambda: Several(
            *(
                Activations(f"*.layers.{i}.*_proj", grows(90, 1.08, 4.0**i, 1e8), channel=channel)
                for i in range(5)
                for channel in (2, 18, 34, 51)
            )
        ),
    ),
    Case(
        name="delimiter_tokens", label="diverges", onset=70, seed=29, steps=240, recipe="current", model={"kind": "mpt", "n_layers": 4, "n_heads": 2},
        about="massive activations on two delimiters, wherever they stand, grow 30 % a step (arXiv:2402.17762), MPT of 4 blocks, current",
        mechanism=lambda: Several(
            *(
                TokenOutliers(names, grows(70, 1.3, 1.0, 1e8), lambda ids: (ids == 3) | (ids == 41), channel=30)
                for names in ("*.Wqkv", "*_proj")
            )
        ),
    ),
    Case(
        name="domain_outliers", label="diverges", onset=120, seed=30, steps=280, recipe={"name": "delayed", "amax_history_len": 100},
        model={"num_hidden_layers": 3, "num_key_value_heads": 4}, lr=lambda step: 2e-3 * min(1.0, (step + 1) / 20),
        about="a new domain, an eighth of the rows, brings outliers of 1e7 late in a row, from one step to the next, 3 blocks, delayed",
        mechanism=lambda: TokenOutliers(
            "*_proj", grows(120, 1.0, 1e7), lambda ids: (ids[:, :1] < 8) & (torch.arange(ids.shape[1]) >= 20), channel=45
        ),
    ),
    Case(
        name="growth_before_norm", label="diverges", onset=80, seed=31, steps=300, recipe="current", touched="*.qkv_proj",
        model={"variant": "olmo2", "num_attention_heads": 2, "num_key_value_heads": 2},
        about="weights of query and key in front of their norms grow 18 % a step (arXiv:2010.09697) and share a scale with the values', OLMo2, current",
        mechanism=lambda: GrowthBeforeNorm("*.qkv_proj", lambda linear: slice(0, 128), grows(80, 1.18, 1.0, 1e9)),
    ),
    Case(
        name="gains_shrink", label="diverges", onset=95, seed=32, steps=320, model={"kind": "mpt", "n_layers": 3}, touched="*.ffn.up_proj",
        recipe={"name": "delayed", "amax_history_len": 400}, lr=lambda step: 2e-3 * min(1.0, (step + 1) / 20),
        about="gains shrink 15 % a step and the weights behind grow by it (arXiv:1906.04721), the history is 400 long, MPT, delayed",
        mechanism=lambda: GainsShrink("*.ffn.up_proj", grows(95, 1 / 0.85, 1.0, 1e12)),
    ),
    Case(
        name="restart_too_large", label="diverges in both", onset=100, seed=33, steps=240, recipe="current", model={"kind": "opt"},
        about="the learning rate is a cosine that starts again 40 times as large (arXiv:1608.03983), OPT, current",
        lr=lambda step: (3e-3 if step < 100 else 0.12) * (0.5 + 0.5 * math.cos(math.pi * (step % 100) / 140)) * min(1.0, (step + 1) / 20),
    ),
    Case(
        name="other_vocabulary", label="healthy", seed=21, steps=400, recipe="current", model={"hidden_size": 48},
        about="from one step to the next every token stands for another, width 48, current",
        mechanism=lambda: Batches(exchange_vocabulary),
    ),
    Case(
        name="longer_sequences", label="healthy", seed=22, steps=280, model={"kind": "mpt"},
        about="sequences of 12 tokens for 140 steps, then of 32 (arXiv:2108.06084), MPT, delayed",
        mechanism=lambda: Batches(lambda step, tokens: tokens[:, : 12 if step < 140 else 32]),
    ),
    Case(
        name="accumulation", label="healthy", seed=23, rows=8, recipe={"name": "delayed", "amax_history_len": 4},
        about="from one step to the next a batch is accumulated from four microbatches, delayed",
        mechanism=lambda: Microbatches(100, 2),
    ),
    Case(
        name="label_noise_burst", label="healthy", seed=24, steps=280, model={"kind": "mixture"}, recipe="block",
        about="12 batches in a row of which 70 % is random, mixture, block",
        noise=lambda step: 0.7 if 130 <= step < 142 else 0.1,
    ),
    Case(
        name="padding", label="healthy", seed=25, steps=260, model={"kind": "opt"}, recipe={"name": "delayed", "amax_history_len": 64},
        about="every 29th batch is padding but for one row, OPT, delayed", mechanism=lambda: Batches(pad_some),
    ),
    Case(
        name="adapters", label="healthy", seed=26, steps=300, recipe="current", model={"num_hidden_layers": 3},
        about="after 150 steps the model is frozen and adapters of rank 4 are trained (arXiv:2106.09685), on harder data, current",
        noise=lambda step: 0.1 if step < 150 else 0.25, mechanism=lambda: Adapters(150, "*.layers.*_proj", 4),
        lr=lambda step: (3e-3 if step < 150 else 1e-2) * min(1.0, (step + 1) / 20),
    ),
    Case(
        name="optimizer_reset", label="healthy", seed=27, steps=300, model={"kind": "mpt", "n_layers": 4},
        about="the optimizer forgets its moments twice (arXiv:2307.05695), MPT of 4 blocks, delayed",
        mechanism=lambda: OptimizerReset((120, 210)),
    ),
    Case(
        name="weight_decay", label="healthy", seed=28, steps=300, recipe="mxfp8", model={"hidden_size": 96, "intermediate_size": 192},
        about="weight decay goes from 0 to 1 in one step, width 96, mxfp8", mechanism=lambda: WeightDecay(110, 1.0),
    ),
    Case(
        name="tiny_gradients", label="healthy", seed=29, steps=260, model={"kind": "opt"},
        about="a loss scale of 2^-30 that doubles and falls again (arXiv:1710.03740), OPT, delayed",
        mechanism=lambda: LossScale(loss_scale_doubles),
    ),
    Case(
        name="late_dropout", label="healthy", seed=30, steps=300, recipe="block", model={"variant": "fog-opt"},
        about="dropout goes from 0 to 0.25 in one step (arXiv:2303.01500), FOG-opt, block",
        mechanism=lambda: LateDropout("*.layers.*_proj", lambda step: 0.25 if step >= 150 else 0.0),
    ),
    Case(
        name="frozen_embedding", label="healthy", seed=31, steps=240, attention=True, model={"variant": "fog-flash"}, recipe="current",
        about="an embedding that is not trained, FOG-flash with FP8 attention, current", mechanism=lambda: Frozen(0, "*embed*"),
    ),
    Case(
        name="loud_token", label="healthy", seed=32, steps=300, rows=6, about="the embedding of one token grows 4 % a step (arXiv:1907.12009), which norms take off, delayed",
        mechanism=lambda: RowGrows(17, 1.04, 100, 250),
    ),
    Case(
        name="sharper_routers", label="healthy", seed=33, steps=280, recipe="current", model={"kind": "mixture", "num_local_experts": 6},
        about="routers' weights grow 2 % a step (arXiv:2202.08906), mixture of 6 experts, current",
        mechanism=lambda: Multiplied("*.gate", 1.02, 110, 220),
    ),
    Case(
        name="rate_steps", label="healthy", seed=34, steps=300, clip=None, rows=3,
        model={"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2},
        about="a rate of 6e-3 that falls to a tenth in one step, and rises again to the half, 4 blocks, no clipping, delayed",
        lr=lambda step: 6e-3 * min(1.0, (step + 1) / 20) * (1.0 if step < 130 else 0.1 if step < 220 else 0.5),
    ),
]  # fmt: skip
