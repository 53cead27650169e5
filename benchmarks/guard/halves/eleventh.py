"""The eleventh half that was held out, by two authors: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by others than who mended it. Published failures of training in low precision: four of those
that are met most, in hosts, places and recipes that no half before has them (gated units between norms, channels of queries and keys without QK norm, outliers that
come now and then and that a short history forgets, amaxes of gradients of another rank), and four causes that none before has (``mechanisms/eleventh.py``): gradients
scattered, a stretched basis, a scale that a block's weights share, means of each token of the vocabulary. Published practice that none before has
(``practices/eleventh.py``): heads that share keys, windows that grow, words that come later, tokens that are not learned, wrong ones that are unlearned, blocks in turn;
and two causes of the tenth, as small as FP8 bears. Rates fall to zero, and the batches of what diverges are of 16 rows, so that chance alone moves a final loss by
0.17 % at most, which was measured before any guard ran.

Changed before any guard saw them, by labels and high precision alone: experts shared the amaxes of what they read, of which one grew 16 % a step, and then a block's
linears those of their weights, and FP8 ended at +0.1 % and 0.0 %, as the amaxes that were shared were read before a batch had any; they are those of the batch
before it now. Heads part to 100 times and were to 20, which FP8 bore by far; the mean of the tokens so far is taken twice, and was 1.5 times (0.5 % above high
precision) and 3 times (0.9 %); a quarter of the tokens is learned, and was the half, which high precision hardly felt.
"""

from __future__ import annotations

from case import Case
from mechanisms.base import Several, grows
from mechanisms.eleventh import (
    QueryKeyChannelsExchange,
    ScatteredGradients,
    SharedAmax,
    StretchedBasis,
    TokenMeans,
)
from mechanisms.first import Activations
from mechanisms.seventh import AmaxOfAnother, ChannelsExchange
from mechanisms.sixth import LearnedRowsAlign
from mechanisms.tenth import HeadsPart, RunningMeans
from practices.eleventh import (
    BlocksSampled,
    GroupedQueries,
    HardTokens,
    Unlikelihood,
    VocabularyExtended,
    WindowGrows,
)
from rates import cosine, linear

CASES = [
    Case(
        name="sandwiched_units_align", label="diverges", onset=60, seed=161, steps=270, rows=16, recipe="block",
        model={"variant": "custom", "post_norm": True, "num_hidden_layers": 4}, sick=(1, 2, 3), touched="*.layers.[123].mlp*", lr=linear(2e-3, 270),
        about="up rows of two channels in three blocks of four become plus or minus the gate's and grow 8 % a step (arXiv:2409.12517), norms before and behind each branch, block",
        mechanism=lambda: LearnedRowsAlign("*.layers.[123].mlp", grows(60, 1.08, 0.5, 1e5), (11, 50)),
    ),
    Case(
        name="query_key_channels_exchange", label="diverges", onset=60, seed=162, steps=270, rows=16, recipe={"name": "delayed", "amax_history_len": 32}, attention=True,
        model={"num_hidden_layers": 3}, touched="*att*n", lr=cosine(2e-3, 270),
        about="channels of queries part by up to 12 % more a step, and the keys' the other way (cf. arXiv:2405.04532), under FP8 attention without QK norm, 3 blocks, delayed",
        mechanism=lambda: QueryKeyChannelsExchange("*.self_attn", grows(60, 1.12, 1.0, 1e6)),
    ),
    Case(
        name="outliers_now_and_then", label="diverges", onset=70, seed=163, steps=270, rows=16, recipe={"name": "delayed", "amax_history_len": 4},
        model={"kind": "opt", "num_hidden_layers": 3}, touched="*.fc2", lr=cosine(2e-3, 270),
        about="one token in 1500 has an outlier behind ReLU, which grows 10 % a step and that a history of 4 forgets (cf. arXiv:2511.23225), OPT of 3 blocks, delayed",
        mechanism=lambda: Activations("*.fc2", grows(70, 1.10, 10.0, 1e8), share=1 / 1500, channel=77),
    ),
    Case(
        name="gradients_of_another_rank", label="diverges", onset=60, seed=164, steps=260, rows=16,
        recipe={"name": "delayed", "amax_history_len": 16, "fp8_format": "e4m3"}, model={"variant": "op1", "num_hidden_layers": 3}, lr=cosine(2e-3, 260),
        about="amaxes of gradients come from another rank, where they grow 18 % a step (cf. arXiv:2310.18313), OP of 3 blocks, delayed in E4M3",
        mechanism=lambda: AmaxOfAnother("*.layers.*_proj", grows(60, 1.18, 1e-3, 1e9), ("dy",)),
    ),
    Case(
        name="gradients_scattered", label="diverges", onset=60, seed=165, steps=260, rows=16, recipe={"name": "current", "fp8_format": "e4m3"},
        model={"variant": "fog-max", "num_hidden_layers": 2}, lr=linear(2e-3, 260),
        about="one element of 256 of the gradients gains or loses what grows 9 % a step (arXiv:1912.03194), FOG-max, current in E4M3",
        mechanism=lambda: ScatteredGradients("*.layers.*_proj", grows(60, 1.09, 1e-4, 10.0)),
    ),
    Case(
        name="basis_stretched", label="diverges", onset=70, seed=166, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 512}, attention=True,
        model={"variant": "fog-flash", "num_hidden_layers": 3}, touched="*_proj", lr=cosine(2e-3, 280),
        about="what linears read is stretched along directions that are no channels, 5 % more a step, to 1000 (cf. arXiv:2110.09348), FOG-flash of 3 blocks with FP8 attention, delayed",
        mechanism=lambda: StretchedBasis("*.layers.*_proj", grows(70, 1.05, 1.0, 1000.0)),
    ),
    Case(
        name="block_shares_a_scale", label="diverges", onset=60, seed=167, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 64},
        model={"kind": "mixture", "num_hidden_layers": 3}, touched="*.self_attn.[qkv]_proj", lr=linear(2e-3, 260),
        about="what queries, keys and values are made of grows 15 % a step and their weights shrink by it, and all weights of a block share their amaxes (cf. arXiv:2304.11277), mixture of 3 blocks, delayed",
        mechanism=lambda: Several(
            ChannelsExchange("*.self_attn.[qkv]_proj", grows(60, 1.15, 1.0, 1e9), even=True), SharedAmax("*.layers.*", 60)
        ),
    ),
    Case(
        name="tokens_outweigh_context", label="diverges", onset=70, seed=168, steps=260, rows=16, recipe="mxfp8",
        model={"kind": "mpt", "n_layers": 3}, touched="*.ffn.*", lr=cosine(2e-3, 260),
        about="what MLPs read gains a vector of each token of the vocabulary, which grows 5 % a step to 100 (cf. arXiv:1909.00512), MPT of 3 blocks, mxfp8",
        mechanism=lambda: TokenMeans("*.ffn.*_proj", grows(70, 1.05, 0.3, 100.0)),
    ),
    Case(
        name="grouped_queries", label="healthy", seed=171, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 64}, attention=True,
        model={"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "num_hidden_layers": 3, "num_key_value_heads": 4},
        about="at step 150 four heads of keys and values become two, by their means, and the rate warms up again (arXiv:2305.13245), QK norm, FP8 attention, 3 blocks, delayed",
        lr=lambda step: cosine(3e-3, 150, 20, 0.1)(step) if step < 150 else cosine(2e-3, 130, 15)(step - 150),
        mechanism=lambda: GroupedQueries("*.self_attn.qkv_proj", 150, 4, 2),
    ),
    Case(
        name="vocabulary_extended", label="healthy", seed=172, steps=300, rows=16, recipe="current", model={"kind": "mpt", "n_layers": 3},
        about="at step 140 a quarter of the words is new, whose embeddings begin as the mean of all others (arXiv:2305.14481), tied embeddings, MPT of 3 blocks, current",
        lr=lambda step: cosine(3e-3, 140, 20, 0.3)(step) if step < 140 else cosine(3e-3, 160, 15)(step - 140),
        mechanism=lambda: VocabularyExtended(140, 48),
    ),
    Case(
        name="hard_tokens", label="healthy", seed=173, steps=260, rows=12, recipe="block", model={"kind": "mixture"},
        about="from step 100 on only a quarter of the tokens is learned, the one predicted worst (arXiv:1604.03540, cf. arXiv:2404.07965), mixture, block",
        lr=linear(3e-3, 260), mechanism=lambda: HardTokens(100, 0.25),
    ),
    Case(
        name="window_grows", label="healthy", seed=174, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 256}, attention=True,
        model={"variant": "fog-flash", "sliding_window": 2}, lr=cosine(3e-3, 260),
        about="each query sees 2 keys, and from step 60 on one more every 5 steps (arXiv:2503.15450), FOG-flash with FP8 attention, delayed",
        mechanism=lambda: WindowGrows(lambda step: min(32, 2 + max(0, step - 55) // 5)),
    ),
    Case(
        name="unlikelihood", label="healthy", seed=175, steps=280, rows=8, recipe="mxfp8", model={"kind": "opt", "num_hidden_layers": 3},
        about="from step 120 on wrong tokens that came before are unlearned (arXiv:1908.04319), OPT of 3 blocks, mxfp8",
        lr=cosine(3e-3, 280), mechanism=lambda: Unlikelihood(120),
    ),
    Case(
        name="blocks_sampled", label="healthy", seed=176, steps=300, rows=16, recipe={"name": "delayed", "amax_history_len": 4}, model={"num_hidden_layers": 4},
        about="from step 130 on one block of four at a time is trained, drawn every 10 steps, on harder data (arXiv:2403.17919), 4 blocks, delayed",
        noise=lambda step: 0.1 if step < 130 else 0.25, lr=cosine(3e-3, 300),
        mechanism=lambda: BlocksSampled("*.layers.?", 130, 10),
    ),
    Case(
        name="heads_part_borne", label="healthy", seed=177, steps=260, rows=24, recipe="current", attention=True, model={"num_key_value_heads": 4},
        about="queries of four heads part by up to 12 % more a step to 100 times, and their keys the other way, and stay (cf. arXiv:2407.08608), under FP8 attention without QK norm, current",
        lr=linear(2e-3, 260), mechanism=lambda: HeadsPart("*.self_attn", grows(70, 1.06, 1.0, 100.0)),
    ),
    Case(
        name="running_means_borne", label="healthy", seed=178, steps=260, rows=16, recipe={"name": "delayed", "amax_history_len": 32}, model={"kind": "mpt"},
        about="what linears read gains the mean of the tokens so far, 4 % more a step to twice, which stays (arXiv:2203.05962), MPT, delayed",
        lr=cosine(3e-3, 260), mechanism=lambda: RunningMeans("*.blocks.*_proj", grows(70, 1.04, 0.1, 2.0)),
    ),
]  # fmt: skip
