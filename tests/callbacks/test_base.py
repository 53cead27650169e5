"""A monitor that breaks must not break the run."""

from __future__ import annotations

import logging

import pytest
import torch

from foundry_fp8.config import ConfigError
from tests.callbacks.conftest import build_llama, series

pytestmark = pytest.mark.integration


def all_monitors():
    from foundry_fp8.callbacks.divergence_guard import DivergenceGuard
    from foundry_fp8.callbacks.fp8_monitor import FP8Monitor
    from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor
    from foundry_fp8.callbacks.mfu_monitor import MFUMonitor

    return [
        MFUMonitor(interval=2, peak_flops={"fp32": 1e12, "bf16": 1e12, "fp8": 1e12}),
        KurtosisMonitor(interval=1),
        FP8Monitor(interval=1),
        DivergenceGuard(interval=1, actions=["warn"]),
    ]


def break_it(monitor, where: str, monkeypatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(monitor, where, broken)


@pytest.mark.parametrize("where", ["fit_start", "batch_start", "batch_end", "fit_end"])
def test_a_monitor_that_raises_is_switched_off_once_and_training_goes_on(train, monkeypatch, caplog, where):
    from foundry_fp8.algorithms.fp8 import FP8

    monitors = all_monitors()
    for monitor in monitors:
        break_it(monitor, where, monkeypatch)
    with caplog.at_level(logging.ERROR):
        trainer = train(build_llama(), monitors, algorithms=[FP8(recipe="delayed")], steps=3)
    assert trainer.state.timestamp.batch.value == 3
    assert len(series(trainer, "loss/train/total")) == 3
    errors = [record for record in caplog.records if "off for the rest of this run" in record.message]
    assert sorted(record.args[0] for record in errors) == sorted(
        f"callbacks.{monitor.key}" for monitor in monitors
    )
    for monitor in monitors:
        assert "broken on purpose" in monitor.failed
    for module in trainer.state.model.modules():
        if getattr(module, "ledger", None) is not None:
            assert module.probe is None


def test_a_hook_that_raises_in_the_forward_is_caught(train, monkeypatch, caplog):
    from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor
    from foundry_fp8.observe import kurtosis

    def broken(*args, **kwargs):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(kurtosis, "row_sums", broken)
    monitor = KurtosisMonitor(interval=1)
    model = build_llama()
    hooks_before = count_hooks(model)
    trainer = train(model, [monitor], steps=2)
    assert trainer.state.timestamp.batch.value == 2
    assert "broken on purpose" in monitor.failed
    assert count_hooks(model) == hooks_before


def count_hooks(model) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()
    )


def test_the_weights_of_a_watched_run_are_those_of_an_unwatched_one(train):
    from foundry_fp8.algorithms.fp8 import FP8

    plain, watched = build_llama(), build_llama()
    train(plain, algorithms=[FP8(recipe="delayed")], steps=3)
    monitors = all_monitors()
    train(watched, monitors, algorithms=[FP8(recipe="delayed")], steps=3)
    assert all(monitor.failed is None for monitor in monitors), [monitor.failed for monitor in monitors]
    for (name, a), (_, b) in zip(plain.named_parameters(), watched.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert count_hooks(watched) == count_hooks(plain)


@pytest.mark.parametrize(
    ("module", "cls"),
    [("mfu_monitor", "MFUMonitor"), ("kurtosis_monitor", "KurtosisMonitor"), ("fp8_monitor", "FP8Monitor"),
     ("divergence_guard", "DivergenceGuard")],
)  # fmt: skip
def test_options_are_checked_at_construction_and_repr_rebuilds(module, cls):
    import importlib

    monitor = getattr(importlib.import_module(f"foundry_fp8.callbacks.{module}"), cls)
    with pytest.raises(ConfigError, match=rf"callbacks\.{module}\.intervall.*Did you mean 'interval'"):
        monitor(intervall=3)
    with pytest.raises(ConfigError, match=rf"callbacks\.{module}\.interval: 0"):
        monitor(interval=0)
    rebuilt = eval(repr(monitor(interval=7)), {cls: monitor})
    assert rebuilt.config == monitor(interval=7).config


@pytest.mark.full
def test_what_monitors_see_of_a_compiled_model(train, caplog):
    """A graph leaves out hooks that come later; each card says what is then missing."""
    from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor
    from foundry_fp8.callbacks.mfu_monitor import MFUMonitor

    watch = [MFUMonitor(interval=2, peak_flops={"fp32": 1e12}), KurtosisMonitor(interval=2)]
    logged = train(build_llama(1), watch, steps=4, compile_config={"backend": "eager"}).logged.data
    assert all(monitor.failed is None for monitor in watch)
    assert len(logged["mfu/mfu"]) == 2 and "mfu/hfu" not in logged
    assert not [key for key in logged if key.startswith("kurtosis")]
    assert sum("no tensor was seen" in record.getMessage() for record in caplog.records) == 1


def test_ranks_that_lost_each_other_end_the_run(train, monkeypatch):
    """Going on, this rank's next collective would meet another one of theirs."""
    from foundry_fp8.callbacks.mfu_monitor import MFUMonitor
    from foundry_fp8.distributed.attendance import RanksLost

    monitor = MFUMonitor(interval=2, peak_flops={"fp32": 1e12, "bf16": 1e12, "fp8": 1e12})

    def lost(*args, **kwargs):
        raise RanksLost("ranks [1] are not here")

    monkeypatch.setattr(monitor, "batch_start", lost)
    with pytest.raises(RanksLost):
        train(build_llama(), [monitor], steps=2)
