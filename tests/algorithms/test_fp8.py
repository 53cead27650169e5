"""The Composer algorithm: what the first batch ran is in the log, the report and the hyperparameters."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from torch import nn

import foundry_fp8
from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.callbacks.run_log import RunLog
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import RECIPES
from foundry_fp8.report.runs import read_run
from foundry_fp8.surgery.announcement import announcement, notices
from foundry_fp8.surgery.left_out import HEAD, ROUTER
from foundry_fp8.surgery.report import SurgeryReport, SurgeryRow


class Bypassing(ComposerModel):
    """Multiplies by the weight of ``inner`` without calling it."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, batch):
        return F.linear(self.outer(batch), self.inner.weight, self.inner.bias)

    def loss(self, outputs, batch):
        return outputs.pow(2).mean()


def run(*, callbacks=(), loggers=(), model=None, **options):
    return Trainer(
        model=model or Bypassing(),
        train_dataloader=torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=16),
        max_duration="2ba",
        algorithms=[FP8(**options)],
        callbacks=list(callbacks),
        loggers=list(loggers),
        device="cpu",
        progress_bar=False,
        run_name="mine",
    )


def test_a_run_says_what_became_of_the_model_whatever_the_logging_level(capsys):
    logging.disable(logging.CRITICAL)
    try:
        run(recipe="delayed", exclude=["outer"]).close()
    finally:
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err.splitlines()[0:3] == [
        "FP8: 1 of 2 linears (50.0 % of GEMM weights), delayed, emulated; log: runs/mine/run_log.jsonl",
        "  1 stays fp32 (outer): algorithms.fp8.exclude leaves it in high precision",
        "  Warning: emulated. The losses are FP8's, the speed is not: slower than high precision, and no MFU.",
    ]
    run(recipe="delayed", announce=False).close()
    assert "FP8:" not in capsys.readouterr().err


def test_a_run_and_its_twin_in_high_precision_load_each_others_checkpoints(caplog):
    on, off = FP8(recipe="delayed"), FP8(recipe="delayed", enabled=False)
    for algorithm in (on, off):
        trainer = Trainer(model=Bypassing(), algorithms=[algorithm], device="cpu", progress_bar=False)
        trainer.close()
    assert off.report is None and not any(isinstance(m, FP8Linear) for m in trainer.state.model.modules())
    off.load_state_dict(on.state_dict())
    before = on.state_dict()
    on.load_state_dict(off.state_dict())
    assert "FP8's state starts afresh" in caplog.text
    assert repr(on.state_dict()) == repr(before)


def report(rows, backend="native", recipe="current"):
    return SurgeryReport(rows=tuple(rows), recipes=(RECIPES[recipe](),), backend=backend)


def linear(name, reason="", elements=64):
    action = "skipped" if reason else "converted"
    return SurgeryRow(name=name, action=action, reason=reason or "current", shape=(elements, 1))


def test_the_line_names_what_usually_stays_and_a_line_each_what_does_not():
    rows = [linear(f"model.layers.{i}.{part}") for i in range(12) for part in ("up", "down")]
    rows += [linear(f"model.layers.{i}.router", ROUTER, 1) for i in range(12)] + [
        linear("model.lm_head", HEAD)
    ]
    rows += [linear(f"model.layers.{i}.odd", "64 is not a multiple of 128") for i in (0, 1)]
    text = announcement(report(rows), around="bf16", log="a.jsonl", notes=["Warning: x."])
    assert text.splitlines() == [
        "FP8: 24 of 39 linears (88.3 % of GEMM weights), current, native; model.layers.{0-11}.router, lm_head stay bf16; log: a.jsonl",
        "  2 stay bf16 (model.layers.{0-1}.odd): 64 is not a multiple of 128",
        "  Warning: x.",
    ]


def test_what_nobody_would_expect_is_said():
    few = report([linear("a"), linear("b", "because", 200)], recipe="delayed")
    said = notices(few, precision="fp32", device="cuda", callbacks=["SpeedMonitor"])
    assert [text.split(":")[0] for text in said] == ["Warning", "Warning", "Warning", "Note"]
    assert "only 24%" in said[0] and "precision: fp32" in said[1]
    assert "divergence_guard" in said[2] and "speed_monitor" in said[3]
    most = report([linear("a"), linear("b", HEAD, 2)])
    assert notices(most, precision="amp_bf16", device="cuda", callbacks=[]) == []


@pytest.mark.parametrize("odd", [1, 400])
def test_a_report_fits_into_what_mlflow_keeps_of_a_parameter(odd):
    rows = [
        linear(f"model.layers.{i}.{part}")
        for i in range(126)
        for part in ("q", "k", "v", "o", "gate", "up", "down")
    ]
    rows += [linear(f"odd_{i}_{'x' * 30}", f"reason {i}") for i in range(odd)]
    found = report(rows).to_dict()
    assert len(str(found)) < 6000
    assert found["total"] == len(rows) and found["converted"] == 126 * 7
    assert found["rows"][0] | {"count": 126, "name": "model.layers.{0-125}.q"} == found["rows"][0]
    assert sum(row["count"] for row in found["rows"]) + found.get("left_out", 0) == len(rows)
    assert ("left_out" in found) == (odd == 400)


def documented(monitor):
    """The patterns of its card's keys: those that every logger gets, and those for the run log alone."""
    card = (Path(foundry_fp8.__file__).parent / "callbacks" / monitor / "README.md").read_text()
    rows = re.findall(r"^\| `([\w/<>]+/[\w/<>]+)` \| (.*?) \|$", card, re.M)
    patterns = {
        key: re.sub(r"<\w+>", "[^/]+", key) for key, said in rows if not said.startswith("hyperparameter")
    }
    starred = {key for key, said in rows if said.startswith("*")}
    return ({p for k, p in patterns.items() if (k in starred) == wanted} for wanted in (False, True))


def test_trackers_get_few_keys_and_always_the_same():
    """All monitors on, delayed scaling: what each due step sends beyond Composer's own, on 2 layers as on 4; and the cards say so."""
    from foundry_fp8.callbacks.divergence_guard import DivergenceGuard
    from foundry_fp8.callbacks.fp8_monitor import FP8Monitor
    from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor
    from foundry_fp8.callbacks.mfu_monitor import MFUMonitor
    from tests.callbacks.conftest import batches, build_llama

    sent = {}
    for layers in (2, 4):
        memory = InMemoryLogger()
        trainer = Trainer(
            model=Wrapped(build_llama(layers)),
            train_dataloader=torch.utils.data.DataLoader(batches(4), batch_size=4),
            max_duration="4ba",
            algorithms=[FP8(recipe="delayed")],
            callbacks=[
                MFUMonitor(interval=2, peak_flops={"fp8": 2e12, "bf16": 1e12, "fp32": 1e12}),
                *(kind(interval=2) for kind in (KurtosisMonitor, FP8Monitor, DivergenceGuard)),
            ],
            loggers=[memory],
            device="cpu",
            progress_bar=False,
        )
        trainer.fit()
        trainer.close()
        own = {
            key: len(found)
            for key, found in memory.data.items()
            if key.startswith(("mfu/", "kurt", "fp8", "guard"))
        }
        guards = ("guard/", "fp8_error/")  # which measures again at once where one short row is far off
        assert {count for key, count in own.items() if not key.startswith(guards)} == {2}
        sent[layers] = set(own)
    assert sent[2] == sent[4]
    assert 15 <= len(sent[2]) <= 27

    lines = [
        json.loads(line) for log in Path("runs").rglob("*.jsonl") for line in log.read_text().splitlines()
    ]
    logged = {
        key
        for line in lines
        for key in line.get("metrics", ())
        if key.startswith(("mfu/", "kurt", "fp8", "guard"))
    }
    everyone, run_log = zip(
        *map(documented, ("mfu_monitor", "kurtosis_monitor", "fp8_monitor", "divergence_guard")), strict=True
    )
    for patterns, keys in ((set().union(*everyone), sent[4]), (set().union(*run_log), logged - sent[4])):
        assert {key for key in keys if not any(re.fullmatch(p, key) for p in patterns)} == set()
        assert {p for p in patterns if not any(re.fullmatch(p, key) for key in keys)} == set()


class Wrapped(ComposerModel):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch).logits

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten())


def test_a_layer_that_nobody_calls_is_a_warning_after_the_first_batch(caplog, tmp_path):
    algorithm, memory = FP8(recipe="delayed"), InMemoryLogger()
    run_log = RunLog(str(tmp_path / "run_log.jsonl"))
    trainer = Trainer(
        model=Bypassing(),
        train_dataloader=torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=16),
        device_train_microbatch_size=8,
        max_duration="2ba",
        algorithms=[algorithm],
        loggers=[memory, run_log],
        device="cpu",
        progress_bar=False,
    )
    assert algorithm.report.converted == ["outer", "inner"]
    with caplog.at_level(logging.WARNING, "foundry_fp8"):
        trainer.fit()
    said = [record.message for record in caplog.records if "converted to FP8" in record.message]
    assert said == [
        "inner: converted to FP8, but in the first batch Bypassing multiplies by its weight itself. It does not run in FP8."
    ]
    assert algorithm.report.converted == ["outer"] and algorithm.report.converted_share == 0.5
    assert memory.hyperparameters["fp8"]["converted"] == 2
    assert "fp8_as_run" not in memory.hyperparameters  # it may change, and MLflow takes no second value
    trainer.close()
    assert read_run(tmp_path).hyperparameters["fp8_as_run"]["converted"] == 1


@pytest.mark.full
def test_of_a_compiled_model_nobody_says_what_did_not_run(caplog):
    """A graph keeps no ledger, so that every layer of a native backend would look as if it had not run."""
    algorithm, memory = FP8(recipe="current"), InMemoryLogger()
    trainer = Trainer(
        model=Bypassing(),
        train_dataloader=torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=16),
        max_duration="1ba",
        algorithms=[algorithm],
        loggers=[memory],
        compile_config={"backend": "eager"},
        device="cpu",
        progress_bar=False,
    )
    with caplog.at_level(logging.INFO, "foundry_fp8"):
        trainer.fit()
    trainer.close()
    assert "Under torch.compile nobody checks which of the converted layers run" in caplog.text
    assert "fp8_as_run" not in memory.hyperparameters and algorithm.report.converted == ["outer", "inner"]
