"""The eighth half that was held out, healthy runs alone: its results were published and read on 2026-11-23, so it is of the tuned half now.

Written without sight of the guard's code, thresholds or results, by another than who mended it. Published practice of pretraining
and finetuning, and two causes that make runs diverge when they grow on, here as small as FP8 bears (``practices/eighth.py``).

Nothing was changed before any guard saw them: all ten held at once, with FP8 ending between -0.6 % and +0.8 % of high precision.
"""

from __future__ import annotations

from case import Case
from mechanisms.base import Several, grows
from mechanisms.fifth import OtherBetas, PromptsMasked
from mechanisms.first import SuperWeight, SwigluAlignment
from mechanisms.seventh import PerRowChange, Silent
from practices.eighth import Boilerplate, ShortDocuments, SwitchEma
from practices.third import Frozen, OptimizerReset
from rates import cosine, linear

CASES = [
    Case(
        name="inverse_square_root", label="healthy", seed=111, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 1024},
        model={"kind": "opt", "dropout": 0.1}, mechanism=lambda: OtherBetas(0, (0.9, 0.98)),
        about="a rate that falls with the root of the steps, a beta2 of 0.98 and dropout of 0.1 (arXiv:1706.03762), OPT, delayed",
        lr=lambda step: 3e-3 * min((step + 1) / 40, (40 / (step + 1)) ** 0.5),
    ),
    Case(
        name="silent_outputs", label="healthy", seed=112, steps=240, rows=12, recipe={"name": "delayed", "amax_history_len": 64},
        model={"kind": "mixture", "num_local_experts": 5}, lr=linear(2e-3, 240),
        about="what puts out to the residual stream begins with weights of zero (cf. arXiv:1901.09321), mixture of 5 experts, delayed",
        mechanism=lambda: Several(Silent("*.self_attn.o_proj"), Silent("*.experts.*.w2")),
    ),
    Case(
        name="finetuned", label="healthy", seed=113, steps=300, rows=16, recipe="block", model={"kind": "mpt", "n_layers": 3},
        about="at step 170 a new optimizer, a rate of 1e-3 that falls to zero, other data, of which the last quarter of each row is learned, MPT of 3 blocks, block",
        lr=lambda step: cosine(3e-3, 170, 20, 0.1)(step) if step < 170 else cosine(1e-3, 130, 10)(step - 170),
        mechanism=lambda: Several(
            PromptsMasked(170, 24), OptimizerReset((170,)), PerRowChange(170, 1, lambda ids: (ids + 7) % 64)
        ),
    ),
    Case(
        name="frozen_one_by_one", label="healthy", seed=114, steps=260, rows=16, recipe="current", attention=True,
        model={"variant": "custom", "qk_norm": "rms", "qk_gain": "trainable", "num_hidden_layers": 3, "num_key_value_heads": 1}, lr=cosine(3e-3, 260),
        about="embedding and blocks are no longer trained from step 80, 130 and 180 on (arXiv:1706.04983), QK norm, FP8 attention with one key head, current",
        mechanism=lambda: Several(Frozen(80, "*embed*"), Frozen(130, "*.layers.0.*"), Frozen(180, "*.layers.1.*")),
    ),
    Case(
        name="switched_average", label="healthy", seed=115, steps=260, rows=8, recipe={"name": "delayed", "amax_history_len": 4}, attention=True,
        model={"variant": "fog-max", "tie_word_embeddings": True},
        about="every 40 steps weights become their moving average (arXiv:2402.09240), a constant rate, FOG-max with FP8 attention, delayed",
        mechanism=lambda: SwitchEma(40, 0.95),
    ),
    Case(
        name="mixed_quality", label="healthy", seed=116, steps=240, rows=8, recipe="mxfp8", model={"num_key_value_heads": 4},
        about="the share of random tokens is another one between 0.1 and 0.8 in each batch, a constant rate, mxfp8",
        noise=lambda step: 0.1 + 0.7 * (step * 0.618034 % 1.0), lr=lambda step: 2e-3 * min(1.0, (step + 1) / 20),
    ),
    Case(
        name="boilerplate", label="healthy", seed=117, steps=280, rows=16, recipe={"name": "delayed", "amax_history_len": 1}, clip=None,
        model={"tie_word_embeddings": True, "num_hidden_layers": 3}, lr=cosine(2e-3, 280),
        about="2 of 16 rows are the same in all batches (arXiv:2107.06499), tied embeddings, 3 blocks, no clipping, delayed",
        mechanism=lambda: Boilerplate(2),
    ),
    Case(
        name="short_documents", label="healthy", seed=118, steps=260, rows=16, attention=True, model={"kind": "mpt", "n_heads": 8},
        lr=linear(3e-3, 260, 60), recipe={"name": "delayed", "amax_history_len": 16},
        about="rows are documents of 3 to 12 tokens, and warm-up is long, MPT of 8 heads with FP8 attention, delayed",
        mechanism=lambda: ShortDocuments((3, 12)),
    ),
    Case(
        name="rows_align_borne", label="healthy", seed=119, steps=260, rows=16, recipe="current", model={"num_hidden_layers": 3}, lr=cosine(2e-3, 260),
        about="gate and up rows of a channel of two blocks align and grow 4 % a step to 3 and stay (arXiv:2409.12517), 3 blocks, current",
        mechanism=lambda: Several(*(SwigluAlignment(i, grows(70, 1.04, 0.5, 3.0), channel) for i, channel in ((0, 33), (2, 90)))),
    ),
    Case(
        name="super_weight_borne", label="healthy", seed=120, steps=260, rows=20, recipe={"name": "delayed", "amax_history_len": 256},
        model={"kind": "opt"}, lr=linear(2e-3, 260),
        about="one weight before the residual stream grows 5 % a step to 3 and stays (arXiv:2411.07191), OPT, delayed",
        mechanism=lambda: SuperWeight("*.fc2", grows(80, 1.05, 0.1, 3.0), channel=60),
    ),
]  # fmt: skip
