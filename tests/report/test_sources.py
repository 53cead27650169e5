"""Runs as trackers keep them, written by the trackers' own libraries and read back.

The quick twin of the slow ones is TensorBoard's: all go through ``sources/tracked.py``.
"""

import json
import math
import shutil
import sys

import numpy as np
import pytest

from foundry_fp8.report.comparison import compare
from foundry_fp8.report.runs import read_run, read_runs

CONFIG = {
    "n_gpus": 16,
    "n_params": 7_000_000_000,
    "precision": "amp_bf16",
    "model": {"name": "mpt_causal_lm"},
    "fp8": {"recipe": {"name": "current"}, "backend": "native", "converted": 8, "rows": []},
}
STEPS = 20


def at(step):
    """What Composer's loggers send at a step: tokens before it, loss and time after it."""
    found = {
        "loss/train/total": 3 - step / 10,
        "time/token": 4096 * step,
        "wall_clock/train": (step + 1) / 3600,
    }
    return found | ({"metrics/eval/LanguageCrossEntropy": 2.5} if step == STEPS - 1 else {})


def check(run, *, config=True, clock=True):
    assert run.step.tolist() == list(range(1, STEPS + 1))
    np.testing.assert_allclose(run.loss, [3 - s / 10 for s in range(STEPS)], rtol=1e-6)
    assert run.eval_loss() == 2.5
    assert run.devices == (16 if config else 1)
    assert run.tokens_per_second_per_device == pytest.approx(4096 / run.devices, rel=1e-4)
    if config:
        assert (run.recipe, run.backend, run.model, run.nodes) == ("current", "native", "mpt 7B", 2)
    else:
        assert any("How many devices" in problem for problem in run.problems)
    assert any("speed_monitor" in problem for problem in run.problems) is not clock


@pytest.mark.full
def test_an_mlflow_store(tmp_path):
    tracking = pytest.importorskip("mlflow.tracking", reason="MLflow is not installed")
    from mlflow.entities import Metric, Param

    store = tmp_path / "job" / "mlruns"
    client = tracking.MlflowClient(tracking_uri=store.as_uri())
    experiment = client.create_experiment("e")
    for name in ("mine", "an evaluation"):
        run = client.create_run(experiment, run_name=name)
        metrics = [
            Metric(k, v, 0, s)
            for s in range(STEPS)
            for k, v in at(s).items()
            if name == "mine" or k[0] == "m"
        ]
        params = [Param(key, str(value)) for key, value in CONFIG.items()]
        client.log_batch(run.info.run_id, metrics=metrics, params=params)
        client.set_terminated(run.info.run_id)
    (run,) = read_runs([tmp_path])
    assert (run.name, run.status) == ("mine", "finished")
    check(run)


def test_tensorboard_event_files(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "mine" / "tensorboard")) as writer:
        for step in range(STEPS):
            for key, value in at(step).items():
                writer.add_scalar(key, value, step)
    (run,) = read_runs([tmp_path])
    assert run.name == "mine"
    check(run, config=False)


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """A folder of W&B's, of one run."""
    wandb = pytest.importorskip("wandb", reason="W&B is not installed")
    folder = tmp_path_factory.mktemp("wandb")
    run = wandb.init(
        mode="offline", dir=str(folder), name="mine", config=CONFIG, settings=wandb.Settings(console="off")
    )
    for step in range(STEPS):
        run.log({key: value for key, value in at(step).items() if key != "wall_clock/train"}, step=step)
    run.finish()
    wandb.teardown()  # finish() only asks W&B's service to close the file; this waits until it has ended
    return folder


@pytest.mark.integration
@pytest.mark.full
def test_a_wandb_folder_that_was_logged_offline(offline):
    (run,) = read_runs([offline])
    assert (run.name, run.status) == ("mine", "finished")
    assert (run.recipe, run.devices, run.model) == ("current", 16, "mpt 7B")
    assert run.loss.tolist() == [3 - s / 10 for s in range(STEPS)]
    assert np.isfinite(run.seconds).all() and any("speed_monitor" in problem for problem in run.problems)


@pytest.mark.integration
@pytest.mark.full
def test_a_wandb_file_cut_in_the_middle_is_read_so_far(offline, tmp_path):
    (file,) = offline.rglob("*.wandb")
    cut = tmp_path / "cut.wandb"
    cut.write_bytes(file.read_bytes()[: file.stat().st_size * 3 // 5])
    run = read_run(cut)
    assert 0 < len(run.step) < STEPS and run.status == "unknown"


@pytest.mark.parametrize(
    ("module", "name"),
    [("wandb", "run.wandb"), ("mlflow", "mlflow.db"), ("tensorboard", "events.out.tfevents.1")],
)
def test_a_library_that_is_missing_is_named(module, name, tmp_path, monkeypatch):
    for loaded in [key for key in sys.modules if key.split(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ImportError, match=rf"needs `pip install {module}"):
        read_runs([tmp_path / name])


def test_a_csv_holds_several_runs(tmp_path):
    lines = ["run,precision,devices,nodes,parameters,step,loss,tokens,seconds,grad_norm"]
    for name, precision, speed in (("a", "bf16", 100), ("b", "mxfp8", 150)):
        lines += [
            f"{name},{precision},8,1,1e9,{s},{5 - s / 10},{800 * s},{800 * s / speed},1" for s in range(1, 21)
        ]
    (tmp_path / "runs.csv").write_text("\n".join(lines))
    first, second = compare(read_runs([tmp_path]))
    assert (first.run.recipe, second.run.recipe, second.run.devices) == ("high precision", "mxfp8", 8)
    assert second.percent_faster == pytest.approx(50)
    assert second.run.metrics["grad_norm"].values.tolist() == [1.0] * 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step,value\n1,2\n", "has no column 'loss' \\(it has step, value\\)"),
        ("step,loss\n", "no line below its header"),
        ("step,loss\n1,abc\n", "column 'loss': could not convert"),
        ("", "has no column 'step' \\(it has none\\)"),
    ],
)
def test_a_csv_that_is_none_is_refused(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path / "x.csv")


def test_a_tracker_run_without_training_is_refused(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("accuracy", math.pi, 1)
    with pytest.raises(ValueError, match=r"holds no loss/train/total: it is no training run of Composer"):
        read_runs([tmp_path])
    shutil.rmtree(tmp_path)


def test_trainers_state_is_read_from_the_latest_checkpoint(tmp_path):
    def save(run, step, losses, **more):
        folder = tmp_path / run / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        history = [
            {"loss": loss, "grad_norm": 1.0, "epoch": 0.1, "step": i + 1} for i, loss in enumerate(losses)
        ]
        history += [{"eval_loss": 2.5, "step": step}, {"guard": "batch 1, model: alarm", "step": 1}]
        state = {"log_history": history, "global_step": step, "max_steps": 4, **more}
        (folder / "trainer_state.json").write_text(json.dumps(state))

    asked = {"FP8Callback": {"args": {"recipe": {"name": "delayed"}}, "attributes": {}}}
    save("fp8", 2, [4.0, 3.0], stateful_callbacks=asked)
    save("fp8", 4, [4.0, 3.0, 2.0, 1.0], stateful_callbacks=asked)
    save("bf16", 4, [4.0, 3.0, 2.0, float("nan")])
    bf16, fp8 = read_runs([tmp_path])
    assert (bf16.name, bf16.recipe, fp8.name, fp8.recipe) == ("bf16", "high precision", "fp8", "delayed")
    assert fp8.loss.tolist() == [4.0, 3.0, 2.0, 1.0] and fp8.step.tolist() == [1, 2, 3, 4]
    assert fp8.metrics["grad_norm"].values.tolist() == [1.0] * 4 and fp8.eval_loss() == 2.5
    assert fp8.status == "finished" and "no time of its steps" in fp8.problems[0]
    assert math.isnan(bf16.final_loss)
    assert read_run(tmp_path / "fp8" / "checkpoint-2").status == "unknown"
    for text, said in (("{}", "is no trainer_state.json"), ('{"log_history": []}', "holds no training loss")):
        (tmp_path / "trainer_state.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            read_run(tmp_path / "trainer_state.json")
