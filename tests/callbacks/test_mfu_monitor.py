"""MFUMonitor in real runs, against torch's FlopCounterMode."""

from __future__ import annotations

import json
import logging
import time

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from foundry_fp8.observe.flops.attention import attention_shapes
from foundry_fp8.observe.flops.gemms import gemms_of
from foundry_fp8.report.runs import read_run
from tests.callbacks.conftest import batches, build_llama, series

pytestmark = pytest.mark.integration

PEAKS = {"fp32": 1e12, "bf16": 2e12, "fp8": 4e12, "fp4": 8e12}
ROWS, LENGTH = 4, 16
TOKENS = ROWS * LENGTH


def monitor(**options):
    from foundry_fp8.callbacks.mfu_monitor import MFUMonitor

    return MFUMonitor(**{"interval": 2, "peak_flops": PEAKS, "details": True} | options)


def fp8(**options):
    from foundry_fp8.algorithms.fp8 import FP8

    return FP8(**{"recipe": "current"} | options)


def per_batch(watch, batches: int):
    total = watch.meter.total
    return {k: v / batches for k, v in total.model.items()}, {
        k: v / batches for k, v in total.recomputed.items()
    }


def expected_linear(model) -> float:
    return sum(sum(gemm.flops(TOKENS).values()) for gemm in gemms_of(model))


def expected_attention(model, pairs=ROWS * LENGTH * (LENGTH + 1) / 2) -> float:
    return sum(3 * shape.forward_flops(pairs) for shape in attention_shapes(model))


def test_a_high_precision_run(train):
    model, watch = build_llama(), monitor()
    trainer = train(model, [watch], steps=5)
    flops, again = per_batch(watch, 4)  # the first batch is left out
    assert flops == {"fp32": expected_linear(model) + expected_attention(model)}
    assert sum(again.values()) == 0
    mfu, hfu = series(trainer, "mfu/mfu"), series(trainer, "mfu/hfu")
    assert len(mfu) == 3  # the second batch, the fourth, and what is left
    assert mfu == hfu
    assert series(trainer, "mfu/effective_peak") == pytest.approx([1.0] * 3)
    assert series(trainer, "mfu/speedup_cap") == pytest.approx([0.5] * 3)
    rate = series(trainer, "mfu/tflops_per_device")[0]
    assert mfu[0] == pytest.approx(rate)
    tokens = series(trainer, "mfu/tokens_per_sec_per_device")[0]
    assert tokens * flops["fp32"] / TOKENS / 1e12 == pytest.approx(rate)
    assert 0 < series(trainer, "mfu/mfu_end_to_end")[0] <= mfu[0] * 1.05


@pytest.mark.parametrize(
    "recipe, wgrad, low",
    [("current", "fp8", "fp8"), ("current", "high_precision", "fp8"), ("nvfp4", "fp8", "fp4")],
)
def test_each_gemm_counts_in_the_precision_it_ran_in(train, recipe, wgrad, low):
    model, watch = build_llama(), monitor()
    # nvfp4 takes multiples of 32.
    runs = {n for n, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in n}
    if recipe == "nvfp4":
        runs = {n for n in runs if all(size % 32 == 0 for size in model.get_submodule(n).weight.shape)}
    blocks = sum(gemm.per_token for gemm in gemms_of(model) if gemm.name in runs) * TOKENS
    linear = expected_linear(model)
    trainer = train(model, [watch], algorithms=[fp8(recipe=recipe, wgrad=wgrad)], steps=5)
    flops, _ = per_batch(watch, 4)
    assert flops[low] == blocks * (3 if wgrad == "fp8" else 2)
    assert sum(flops.values()) == linear + expected_attention(model)
    share = flops[low] / sum(flops.values())
    assert series(trainer, f"mfu/{low}_flop_fraction") == pytest.approx([share] * 3)
    ideal = flops[low] / PEAKS[low] + flops["fp32"] / 1e12
    assert series(trainer, "mfu/effective_peak")[0] == pytest.approx(sum(flops.values()) / ideal / 1e12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_hfu_counts_what_checkpointing_runs_again(train, reentrant, converted):
    """Against torch's counter: all that ran in a batch, minus what the model needs."""
    model, watch = build_llama(), monitor()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    algorithms = [fp8()] if converted else []
    trainer = train(model, [watch], algorithms=algorithms, steps=5)
    flops, again = per_batch(watch, 4)
    assert sum(flops.values()) == expected_linear(model) + expected_attention(model)

    model.train()
    ids = torch.stack([row["input_ids"] for row in batches(1)])
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.float().sum().backward()
    rotary = sum(sum(v.values()) for k, v in counter.get_flop_counts().items() if k.endswith("rotary_emb"))
    full_square = expected_attention(model, ROWS * LENGTH**2)
    by_torch = counter.get_total_flops() - rotary - expected_linear(model) - full_square
    # torch's counter sees the whole square of attention again, we count attended pairs.
    ours = sum(again.values()) + full_square / 3 - expected_attention(model) / 3
    tolerance = {}
    if converted and not reentrant:
        # torch stops a recompute when the last saved tensor is there. An FP8 GEMM saves after it has run, so the block's
        # last one runs and the ledger, written when the module returns, does not see it: 2 * tokens * 64 * 32 a block.
        tolerance = {"abs": 2 * 2 * TOKENS * 64 * 32}
    assert ours == pytest.approx(by_torch, **tolerance)
    assert series(trainer, "mfu/hfu")[0] > series(trainer, "mfu/mfu")[0]


def test_selectively_saved_gemms_are_not_recomputed(train):
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    model, watch = build_llama(), monitor()
    for layer in model.model.layers:
        original = layer.forward
        contexts = partial(create_selective_checkpoint_contexts, policy)
        layer.forward = partial(checkpoint, original, use_reentrant=False, context_fn=contexts)
    train(model, [watch], steps=3)
    _, again = per_batch(watch, 2)
    assert sum(again.values()) == pytest.approx(expected_attention(model) / 3)


def test_frozen_weights_have_no_wgrad_and_the_first_batch_settles_dgrad(train):
    model, watch = build_llama(), monitor()
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    train(model, [watch], steps=3)
    flops, _ = per_batch(watch, 2)
    forward = sum(gemm.per_token for gemm in gemms_of(model)) * TOKENS
    block = sum(gemm.per_token for gemm in gemms_of(model) if ".layers.1." in gemm.name) * TOKENS
    head = sum(gemm.per_token for gemm in gemms_of(model) if gemm.name == "lm_head") * TOKENS
    attention = expected_attention(model) / 3 / 2  # one layer, forward
    assert sum(flops.values()) == forward + 2 * block + head + attention * (1 + 3)


def test_padding_and_evaluation_are_not_training_work(train):
    model, watch = build_llama(), monitor()
    data = batches(5)
    for row in data:
        row["attention_mask"] = torch.ones(LENGTH, dtype=torch.long)
        row["attention_mask"][LENGTH // 2 :] = 0
    loader = torch.utils.data.DataLoader(data, batch_size=ROWS)
    trainer = train(model, [watch], steps=5, data=data, algorithms=[fp8(evaluate="fp8")],
                    eval_dataloader=loader, eval_interval="1ba")  # fmt: skip
    half = LENGTH // 2
    flops, _ = per_batch(watch, 4)
    pairs = ROWS * half * (half + 1) / 2
    assert sum(flops.values()) == expected_linear(model) + expected_attention(model, pairs)
    computed = series(trainer, "mfu/tokens_per_sec_per_device")
    assert series(trainer, "mfu/tokens_nonpad_per_sec_per_device") == pytest.approx([x / 2 for x in computed])


def test_an_unknown_device_logs_rates_and_says_once_how_to_give_a_peak(train, caplog):
    watch = monitor(peak_flops="auto")
    with caplog.at_level(logging.WARNING):
        trainer = train(build_llama(), [watch], steps=5)
    assert watch.failed is None
    assert series(trainer, "mfu/tflops_per_device")
    assert not series(trainer, "mfu/mfu")
    said = [record.getMessage() for record in caplog.records if "no MFU is logged" in record.getMessage()]
    assert len(said) == 1
    assert "peak_flops" in said[0]


def test_a_precision_without_peak_logs_no_mfu_and_says_so(train, caplog):
    watch = monitor(peak_flops={"bf16": 1e12, "fp32": 1e12})
    with caplog.at_level(logging.WARNING):
        trainer = train(build_llama(), [watch], algorithms=[fp8()], steps=5)
    assert watch.failed is None
    assert not series(trainer, "mfu/mfu")
    assert sum("no MFU. fp8 has no peak (" in record.getMessage() for record in caplog.records) == 1


def test_every_documented_key_is_logged_and_the_other_way_round(train):
    from pathlib import Path

    import foundry_fp8.callbacks.mfu_monitor as room

    trainer = train(build_llama(), [monitor()], algorithms=[fp8()], steps=3)
    card = (Path(room.__file__).parent / "README.md").read_text()
    documented = {line.split("`")[1] for line in card.splitlines() if line.startswith("| `mfu/")}
    logged = {key for key in trainer.logged.data if key.startswith("mfu/")}
    once = {"mfu/peak_source", "mfu/peak_detail", "mfu/peak_bf16", "mfu/peak_fp8"}
    assert logged == documented - once
    trainer.close()
    assert once <= set(read_run(next(Path("runs").rglob("run_log.jsonl"))).hyperparameters)


def test_the_second_batch_is_logged_and_then_the_batches_that_the_interval_divides(train):
    trainer = train(build_llama(), [monitor(interval=4)], steps=9)
    at = [int(timestamp.batch) for timestamp, _ in trainer.logged.data["mfu/mfu"]]
    assert at == [2, 4, 8, 9]
    assert len(series(trainer, "mfu/tokens_per_sec_per_device")) == 4


@pytest.mark.parametrize("peaks", ["auto", "measured"])
def test_an_emulated_run_has_rates_and_no_mfu(train, caplog, peaks):
    with caplog.at_level(logging.WARNING):
        trainer = train(build_llama(), [monitor(peak_flops=peaks)], algorithms=[fp8()], steps=3)
    assert series(trainer, "mfu/tflops_per_device") and series(trainer, "mfu/tokens_per_sec_per_device")
    assert not series(trainer, "mfu/mfu") and not series(trainer, "mfu/hfu")
    assert sum("FP8 is emulated here" in record.getMessage() for record in caplog.records) == 1


def test_saving_and_evaluating_count_neither_in_the_run_log_nor_in_mfu(train, tmp_path, monkeypatch):
    from composer.core import Callback

    from foundry_fp8.callbacks import step_clock
    from foundry_fp8.callbacks.run_log import RunLog

    away, real = [0.0], time.perf_counter
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: real() + away[0])

    class Slow(Callback):
        """A thousand seconds for each checkpoint and each evaluation."""

        def batch_checkpoint(self, state, logger):
            away[0] += 1000

        def eval_start(self, state, logger):
            away[0] += 1000

    loader = torch.utils.data.DataLoader(batches(1), batch_size=ROWS)
    log = RunLog(path="log.jsonl")
    trainer = train(build_llama(), [monitor(interval=1), Slow(), log], steps=4,
                    eval_dataloader=loader, eval_interval="1ba")  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["kind"] == "batch"]
    steps = [TOKENS / rate for rate in series(trainer, "mfu/tokens_per_sec_per_device")]
    assert len(steps) == 3 and away[0] == 8000
    assert 0 < sum(steps) <= seconds[-1] - seconds[0] < 1000


def test_attention_in_fp8_counts_in_fp8(train):
    found = {}
    for attention in (False, True):
        model, watch = build_llama(), monitor()
        train(model, [watch], steps=3, algorithms=[fp8(recipe="delayed", attention=attention)])
        found[attention], _ = per_batch(watch, 2)
    moved = expected_attention(model)
    assert found[True]["fp8"] == found[False]["fp8"] + moved
    assert found[True]["fp32"] == found[False]["fp32"] - moved
