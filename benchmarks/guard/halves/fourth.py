"""The fourth half that was held out: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by another than who mended it. Mechanisms
that no earlier half has (``mechanisms/fourth.py``, ``practices/fourth.py``), more of them in few blocks of several, in turn, or in pauses.
"""

from __future__ import annotations

import torch
from case import Case
from mechanisms.base import Several, during, grows
from mechanisms.fourth import (
    ActivationMean,
    GradientMean,
    RankOne,
    Sheared,
    Spread,
    TokensAlike,
    UnitsDie,
    ValueMean,
)
from practices.fourth import (
    Averaged,
    EmbeddingNoise,
    GradientNoise,
    LayerDrop,
    Replay,
    Rotated,
    SignFlips,
    Thaw,
    ZLoss,
)
from practices.third import Adapters, Batches, LossScale, Microbatches
from torch import Tensor


def in_turn(size, every: int):
    """``size`` in every ``every``-th step, 0 between."""
    return lambda step: size(step) if step % every == 0 else 0.0


def pausing(size, pause: int, resume: int):
    """``size``, but 0 from ``pause`` to ``resume``."""
    return lambda step: 0.0 if pause <= step < resume else size(step)


def fill_in_the_middle(step: int, tokens: Tensor) -> Tensor:
    """From step 100 on the halves of every other row change places."""
    if step < 100:
        return tokens
    tokens = tokens.clone()
    tokens[::2] = torch.cat([tokens[::2, 16:], tokens[::2, :16]], dim=1)
    return tokens


def repeat_a_token(step: int, tokens: Tensor) -> Tensor:
    """Every 31st batch is of rows that repeat their first token."""
    return tokens[:, :1].expand_as(tokens).contiguous() if step % 31 == 30 else tokens


CASES = [
    Case(
        name="activation_mean", label="diverges", onset=70, seed=41, steps=220, recipe="current", touched="*.mlp.*",
        about="all activations before MLPs' linears move by a mean that grows 7 % a step (arXiv:2304.09145), current",
        mechanism=lambda: ActivationMean("*.mlp.*_proj", grows(70, 1.07, 0.2, 300.0)),
    ),
    Case(
        name="activation_mean_one_of_five", label="diverges", onset=80, seed=42, steps=240, recipe="mxfp8", sick=(3,), touched="*.layers.3.*",
        model={"num_hidden_layers": 5, "intermediate_size": 96}, lr=lambda step: 2e-3 * min(1.0, (step + 1) / 20),
        about="the activations of one block of five move by a mean that grows 8 % a step (arXiv:2304.09145), mxfp8",
        mechanism=lambda: ActivationMean("*.layers.3.*_proj", grows(80, 1.08, 0.2, 300.0)),
    ),
    Case(
        name="singular_value", label="diverges", onset=65, seed=43, steps=260, recipe="block", model={"kind": "opt", "num_hidden_layers": 3},
        about="one singular value of every linear grows 3 % a step (arXiv:2303.06296), OPT of 3 blocks, block",
        mechanism=lambda: Several(*(RankOne(names, grows(65, 1.03, 0.02, 5.0)) for names in ("*_proj", "*.fc?"))),
    ),
    Case(
        name="gradient_mean_in_turn", label="diverges", onset=87, seed=44, steps=270, recipe="block",
        about="every 3rd step the gradients behind all linears have a mean, which grows 10 % a step (arXiv:2004.01461), block",
        mechanism=lambda: GradientMean("*.layers.*_proj", in_turn(grows(87, 1.10, 3e-4, 1e3), 3)),
    ),
    Case(
        name="value_mean", label="diverges", onset=110, seed=45, steps=240, recipe="current", attention=True, touched="*.self_attn*",
        model={"num_key_value_heads": 1}, lr=lambda step: 2e-3 * min(1.0, (step + 1) / 20),
        about="the values' mean grows 9 % a step under FP8 attention with one key head (arXiv:2411.10958), current",
        mechanism=lambda: ValueMean("*.self_attn", grows(110, 1.09, 0.2, 1e3)),
    ),
    Case(
        name="token_norms", label="diverges", onset=60, seed=46, steps=240, recipe="current", model={"num_hidden_layers": 3, "hidden_size": 48},
        about="tokens' norms spread by a factor that grows 25 % a step (arXiv:2206.01861), 3 blocks of width 48, current",
        mechanism=lambda: Spread("*.layers.*_proj", grows(60, 1.25, 1.0, 1e12)),
    ),
    Case(
        name="unlike_microbatches", label="diverges", onset=90, seed=47, steps=210, recipe={"name": "delayed", "amax_history_len": 6},
        model={"kind": "opt"}, touched="*.fc?",
        about="norms of the four microbatches of a batch spread by a factor that grows 30 % a step (arXiv:2206.01861), OPT, delayed",
        mechanism=lambda: Several(Microbatches(0, 2), Spread("*.fc?", grows(90, 1.3, 1.0, 1e14), cycle=4)),
    ),
    Case(
        name="adapters_on_a_singular_value", label="diverges", onset=120, seed=48, steps=250, recipe="current", touched="*.mlp.*",
        about="adapters are trained from step 90 on (arXiv:2106.09685), and a singular value of frozen MLPs grows 6 % a step, current",
        mechanism=lambda: Several(Adapters(90, "*.layers.*_proj", 4), RankOne("*.mlp.*_proj", grows(120, 1.06, 0.02, 5.0))),
        lr=lambda step: (3e-3 if step < 90 else 1e-2) * min(1.0, (step + 1) / 20),
    ),
    Case(
        name="gradient_mean_that_ends", label="diverges", onset=75, ends=190, seed=49, steps=215, recipe="current",
        model={"num_hidden_layers": 4, "hidden_size": 48}, sick=(1, 2), touched="*.layers.[12].mlp.*",
        about="gradients in the MLPs of two blocks of four have a mean that grows 9 % a step and is gone at 190 (arXiv:2004.01461), current",
        mechanism=lambda: GradientMean("*.layers.[12].mlp.*_proj", during(grows(75, 1.09, 3e-4, 1e3), 190)),
    ),
    Case(
        name="two_causes", label="diverges", onset=110, seed=50, steps=250, sick=(0, 2), touched="*.layers.[02].*",
        model={"num_hidden_layers": 4, "hidden_size": 48}, recipe={"name": "delayed", "amax_history_len": 16},
        noise=lambda step: 0.05 if step < 95 else 0.15,
        about="after harder data a mean of one block's MLP and a singular value of another's attention grow 5 % a step, 4 blocks, delayed",
        mechanism=lambda: Several(
            ActivationMean("*.layers.0.mlp.*_proj", grows(110, 1.05, 0.3, 300.0)),
            RankOne("*.layers.2.self_attn.*_proj", grows(110, 1.05, 0.03, 5.0)),
        ),
    ),
    Case(
        name="activation_mean_pauses", label="diverges", onset=65, seed=51, steps=250, recipe="mxfp8", model={"kind": "mpt", "n_layers": 3},
        touched="*.ffn.*",
        about="a mean of the activations grows 8 % a step, is gone from step 135 to 165, and comes back (arXiv:2304.09145), MPT, mxfp8",
        mechanism=lambda: ActivationMean("*.ffn.*_proj", pausing(grows(65, 1.08, 0.3, 300.0), 135, 165)),
    ),
    Case(
        name="weight_mean_of_experts", label="diverges", onset=75, seed=52, steps=220, recipe={"name": "delayed", "amax_history_len": 32},
        model={"kind": "mixture", "num_local_experts": 3, "hidden_size": 48}, touched="*.experts.*", rows=6,
        about="the mean of the experts' weights grows 6 % a step (arXiv:1903.10520), mixture of 3 experts, delayed",
        mechanism=lambda: RankOne("*.experts.*.w?", grows(75, 1.06, 0.02, 5.0), mean=True),
    ),
    Case(
        name="tokens_alike", label="diverges in both", onset=80, seed=53, recipe="mxfp8", model={"num_hidden_layers": 3},
        about="tokens become alike, by one hundredth more a step (rank collapse, arXiv:2103.03404), 3 blocks, mxfp8", steps=220,
        mechanism=lambda: TokensAlike("*.layers.?", lambda step: min(0.97, max(0.0, 0.01 * (step - 80)))),
    ),
    Case(
        name="sheared_basis", label="diverges", onset=65, seed=56, steps=230, recipe="current", model={"num_hidden_layers": 4, "hidden_size": 48},
        sick=(1,), touched="*.layers.1.*",
        about="in one block of four the basis of activations and weights is sheared, by 8 % more a step (arXiv:2403.12544), current",
        mechanism=lambda: Sheared("*.layers.1.*_proj", grows(65, 1.08, 0.1, 300.0)),
    ),
    Case(
        name="value_mean_in_turn", label="diverges", onset=76, seed=57, steps=230, attention=True, model={"num_hidden_layers": 3}, sick=(0,),
        recipe={"name": "delayed", "amax_history_len": 3}, touched="*.layers.0.self_attn*",
        about="every 4th step the values of one block of three have a mean, which grows 7 % a step, under FP8 attention (arXiv:2411.10958), delayed",
        mechanism=lambda: ValueMean("*.layers.0.self_attn", in_turn(grows(76, 1.07, 0.5, 1e3), 4)),
    ),
    Case(
        name="singular_value_slow", label="diverges", onset=60, seed=58, steps=340, recipe="mxfp8", model={"num_hidden_layers": 4},
        sick=(2,), touched="*.layers.2.*", rows=4,
        about="one singular value of the linears of one block of four grows 1.5 % a step (arXiv:2303.06296), mxfp8",
        mechanism=lambda: RankOne("*.layers.2.*_proj", grows(60, 1.015, 0.06, 5.0)),
    ),
    Case(
        name="layer_drop", label="healthy", seed=41, steps=240, model={"num_hidden_layers": 4, "hidden_size": 48},
        about="from step 80 on a tenth of the blocks is left out of each step (arXiv:1909.11556), 4 blocks, delayed",
        mechanism=lambda: LayerDrop("*.layers.?", 80, 0.1),
    ),
    Case(
        name="averaged_weights", label="healthy", seed=42, steps=240, model={"kind": "mpt"}, recipe={"name": "delayed", "amax_history_len": 32},
        about="at step 130 all weights become the mean of their last 40 steps (arXiv:2306.03241), MPT, delayed",
        mechanism=lambda: Averaged(130, 40),
    ),
    Case(
        name="rotated_basis", label="healthy", seed=43, steps=240, recipe="current",
        about="at step 120 what all linears read is rotated, and their weights with it (arXiv:2404.00456), current",
        mechanism=lambda: Rotated("*.layers.*_proj", 120),
    ),
    Case(
        name="sign_flips", label="healthy", seed=44, steps=240, recipe="block",
        about="every 13 steps a third of the neurons changes sign, before and behind (arXiv:2209.04836), block",
        mechanism=lambda: SignFlips("*.mlp", 70, 13),
    ),
    Case(
        name="z_loss", label="healthy", seed=45, steps=220, recipe="current", model={"kind": "mixture", "hidden_size": 48}, rows=6,
        about="a z-loss is switched on at step 100 (arXiv:2204.02311), mixture, current", mechanism=lambda: ZLoss(100, 0.05),
    ),
    Case(
        name="embedding_noise", label="healthy", seed=46, steps=260, recipe="mxfp8", model={"kind": "mpt", "n_layers": 1},
        about="embeddings are noisy from step 110 on (arXiv:2310.05914), MPT of one block, mxfp8", mechanism=lambda: EmbeddingNoise(110, 0.2),
    ),
    Case(
        name="huge_batches", label="healthy", seed=47, steps=230, recipe="current", attention=True, model={"num_key_value_heads": 1},
        about="every 23rd batch is six times as large, FP8 attention with one key head, current", mechanism=lambda: Replay(23, 5),
    ),
    Case(
        name="repeated_tokens", label="healthy", seed=48, steps=240, attention=True, recipe={"name": "delayed", "amax_history_len": 64},
        model={"variant": "fog-max"},
        about="every 31st batch is rows of one token repeated, FOG-max with FP8 attention, delayed", mechanism=lambda: Batches(repeat_a_token),
    ),
    Case(
        name="loss_scale_shakes", label="healthy", seed=49, steps=230, recipe="mxfp8", model={"hidden_size": 96, "num_hidden_layers": 1},
        about="the loss scale is another power of two up to 2^8 in every step (arXiv:1710.03740), width 96, mxfp8",
        mechanism=lambda: LossScale(lambda step: 2.0 ** (step * 37 % 9)),
    ),
    Case(
        name="thaw", label="healthy", seed=50, steps=240, recipe="current", model={"kind": "opt", "num_hidden_layers": 3},
        about="the first block is not trained for 120 steps, then it is (arXiv:1801.06146), OPT of 3 blocks, current",
        mechanism=lambda: Thaw(120, "*.layers.0.*"),
    ),
    Case(
        name="fill_in_the_middle", label="healthy", seed=51, steps=230, model={"kind": "opt"}, recipe={"name": "delayed", "amax_history_len": 8},
        about="from step 100 on every other row has its halves exchanged (arXiv:2207.14255), OPT, delayed",
        mechanism=lambda: Batches(fill_in_the_middle),
    ),
    Case(
        name="activation_mean_borne", label="healthy", seed=52, steps=260, recipe="block", model={"num_hidden_layers": 3, "hidden_size": 48},
        about="a mean of the activations grows 2 % a step for 110 steps, to 0.9, and stays (arXiv:2304.09145), block",
        mechanism=lambda: ActivationMean("*.mlp.*_proj", grows(80, 1.02, 0.1, 0.9)),
    ),
    Case(
        name="token_norms_borne", label="healthy", seed=53, steps=220, recipe="current", rows=6,
        about="tokens' norms spread by a factor that grows to 100 and stays (arXiv:2206.01861), which E4M3 bears, current",
        mechanism=lambda: Spread("*.layers.*_proj", grows(60, 1.05, 1.0, 100.0)),
    ),
    Case(
        name="gradient_noise", label="healthy", seed=54, steps=240, clip=None, model={"tie_word_embeddings": True}, recipe="current",
        about="noise as large as gradients is added to them, and ebbs away (arXiv:1511.06807), tied embeddings, no clipping, current",
        mechanism=lambda: GradientNoise(80, lambda step: 80 / step),
    ),
    Case(
        name="weight_mean_borne", label="healthy", seed=55, steps=240, recipe="mxfp8", model={"num_hidden_layers": 3, "hidden_size": 64}, rows=6,
        about="the mean of one block's weights grows 2 % a step to 0.04 and stays (arXiv:1903.10520), 3 blocks, mxfp8",
        mechanism=lambda: RankOne("*.layers.1.*_proj", grows(70, 1.02, 0.01, 0.04), mean=True),
    ),
    Case(
        name="units_pushed", label="healthy", seed=54, recipe="block", model={"kind": "opt"}, steps=220,
        about="0.1 more is taken off what ReLU's units read in every step (arXiv:1903.06733), which their biases make up for, OPT, block",
        mechanism=lambda: UnitsDie("*.fc1", lambda step: max(0.0, 0.1 * (step - 100))),
    ),
]  # fmt: skip
