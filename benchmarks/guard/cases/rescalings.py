"""Rescalings: the function stays, and a factor leaves the range of the format or of the scale."""

from __future__ import annotations

from case import Case, delayed
from mechanisms.base import grows
from mechanisms.rescalings import (
    GrowthBeforeNorm,
    LossScale,
    NeuronRescaled,
    QueriesGrowKeysShrink,
)
from rates import level

CASES = [
    Case(
        name="unequal_neurons", label="diverges", onset=140, seed=22, steps=340, recipe=delayed(8), touched="*.fc?",
        about="a fifth of ReLU's neurons grow 10 % a step and their columns shrink by it (arXiv:1906.04721), OPT, delayed",
        model={"kind": "opt", "num_hidden_layers": 3, "ffn_dim": 192},
        mechanism=lambda: NeuronRescaled("*.fc1", "*.fc2", range(0, 192, 5), grows(140, 1.10, 1.0, 1e8)),
    ),
    Case(
        name="growth_before_norm", label="diverges", onset=80, seed=31, steps=300, recipe="current", touched="*.qkv_proj",
        about="weights of query and key in front of their norms grow 18 % a step (arXiv:2010.09697) and share a scale with the values', OLMo2, current",
        model={"variant": "olmo2", "num_attention_heads": 2, "num_key_value_heads": 2},
        mechanism=lambda: GrowthBeforeNorm("*.qkv_proj", slice(0, 128), grows(80, 1.18, 1.0, 1e9)),
    ),
    Case(
        name="queries_against_keys", label="diverges", onset=80, seed=92, steps=260, recipe=delayed(8), attention=True, touched="*.self_attn*",
        about="queries grow 6 % a step and keys shrink by it (cf. arXiv:2308.13137) under FP8 attention without QK norm, where they share a scale, delayed",
        model={"num_key_value_heads": 4}, lr=level(2e-3, 30), mechanism=lambda: QueriesGrowKeysShrink("*.self_attn", grows(80, 1.06, 1.0, 1e5)),
    ),
    Case(
        name="loss_scale_spikes", label="diverges", onset=85, seed=25, steps=240, recipe=delayed(12), lr=level(2e-3, 30),
        about="every 5th step the loss scale is larger, by ever more (arXiv:1710.03740), and the history remembers, width 96, delayed",
        model={"hidden_size": 96, "intermediate_size": 160},
        mechanism=lambda: LossScale(lambda step: 2.0 ** min(48, step - 81) if step >= 85 and step % 5 == 0 else 1.0),
    ),
]  # fmt: skip
