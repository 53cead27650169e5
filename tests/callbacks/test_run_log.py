import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.models import ComposerModel
from torch.utils.data import DataLoader

from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.callbacks.run_log import RunLog, ensure_run_log, log_facts, plain
from foundry_fp8.config import ConfigError
from foundry_fp8.report.runs import read_run


class Regression(ComposerModel):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.linear(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def eval_forward(self, batch, outputs=None):
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train):
        return {}


class LogsEveryBatch(Callback):
    """Logs what other callbacks do: a step's own number, tensors, non-finite values, at INIT, BATCH_END and FIT_END."""

    def fit_end(self, state, logger):
        logger.log_metrics({"mine/last": 7})

    def init(self, state, logger):
        logger.log_hyperparameters({"fp8": {"recipe": {"name": "delayed"}, "backend": "emulated"}})
        logger.log_table(["a", "b"], [[1, "x"]], name="facts")

    def batch_end(self, state, logger):
        step = int(state.timestamp.batch)
        logger.log_metrics({"mine/step": step, "mine/tensor": torch.tensor(0.5), "mine/nan": math.nan})
        if step == 2:
            logger.log_metrics({"mine/once": -math.inf})


def loader():
    torch.manual_seed(0)
    return DataLoader([(torch.randn(4), torch.randn(1)) for _ in range(16)], batch_size=4)


def trainer(path, duration="4ba", **options):
    loggers = [] if path is None else [RunLog(str(path))]
    callbacks = [LogsEveryBatch(), *options.pop("callbacks", [])]
    return Trainer(
        model=Regression(),
        train_dataloader=loader(),
        optimizers=options.pop("optimizers", None),
        max_duration=duration,
        device="cpu",
        progress_bar=False,
        loggers=[*loggers, *options.pop("loggers", [])],
        callbacks=callbacks,
        **options,
    )


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_a_batch_with_the_metrics_of_that_batch(tmp_path):
    path = tmp_path / "deep" / "run_log.jsonl"
    memory = InMemoryLogger()
    run = trainer(path, loggers=[memory])
    run.fit()
    run.close()
    found = lines(path)
    assert [line["kind"] for line in found] == ["header", "table", *["batch"] * 4, "metrics", "end"]
    header = found[0]
    assert header["hyperparameters"]["fp8"]["backend"] == "emulated"
    assert (header["world_size"], header["nodes"], header["device_type"]) == (1, 1, "cpu")
    assert header["parameters"] == 5
    assert header["versions"]["torch"] == torch.__version__
    batches = [line for line in found if line["kind"] == "batch"]
    assert [b["step"] for b in batches] == [b["metrics"]["mine/step"] for b in batches] == [1, 2, 3, 4]
    assert [b["samples"] for b in batches] == [4, 8, 12, 16]
    # Composer's own record of the same run.
    assert [b["loss"] for b in batches] == [value for _, value in memory.data["loss/train/total"]]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(batches))
    assert batches[0]["metrics"]["mine/tensor"] == 0.5
    assert batches[0]["metrics"]["mine/nan"] == "nan"
    assert [b["metrics"].get("mine/once") for b in batches] == [None, "-inf", None, None]
    assert found[-2]["metrics"]["mine/last"] == 7
    assert found[-1]["status"] == "finished"


def test_the_fields_of_every_line_are_those_of_the_docs(tmp_path):
    path = tmp_path / "run_log.jsonl"
    run = trainer(path, duration="2ba", eval_dataloader=loader(), eval_interval="1ba")
    run.fit()
    run.logger.log_hyperparameters({"late": 1})
    run.close()
    fields = {line["kind"]: set(line) - {"kind"} for line in lines(path)}
    guide = (Path(__file__).parents[2] / "docs/reports.md").read_text().split("| `kind` | Fields |")[1]
    rows = [row.split("|")[1:3] for row in guide.split("\n\n", 1)[0].splitlines()[2:]]
    stated: dict[str, str] = {}
    for kind, said in rows:
        name = kind.strip(" `")
        stated[name] = stated.get(name, "") + re.sub(r"\(.*?\)|[:;] .*", "", said)
    assert {kind: set(re.findall(r"`(\w+)`", said)) for kind, said in stated.items()} == fields


def test_what_is_written_can_be_read_back(tmp_path):
    path = tmp_path / "run_log.jsonl"
    run = trainer(path, run_name="mine")
    run.fit()
    run.close()
    read = read_run(path)
    assert (read.name, read.recipe, read.backend, read.status) == ("mine", "delayed", "emulated", "finished")
    assert read.problems == []
    assert read.step.tolist() == [1, 2, 3, 4]
    assert read.metrics["mine/once"].steps.tolist() == [2]
    assert read.metrics["mine/once"].values.tolist() == [-math.inf]
    assert (read.metrics["mine/last"].steps.tolist(), read.metrics["mine/last"].values.tolist()) == ([4], [7])
    assert read.tables[0].rows == [[1, "x"]]


def test_evaluation_has_its_own_line(tmp_path):
    path = tmp_path / "run_log.jsonl"

    class LogsEval(Callback):
        def eval_end(self, state, logger):
            logger.log_metrics({"metrics/eval/LanguageCrossEntropy": 1.5})

    run = trainer(path, callbacks=[LogsEval()], eval_dataloader=loader(), eval_interval="2ba")
    run.fit()
    run.close()
    evals = [line for line in lines(path) if line["kind"] == "eval"]
    assert [line["step"] for line in evals] == [2, 4]
    assert evals[0]["metrics"]["metrics/eval/LanguageCrossEntropy"] == 1.5
    assert read_run(path).eval_loss() == 1.5


def test_a_resumed_run_goes_on_in_its_file_and_is_read_as_one(tmp_path):
    path = tmp_path / "run_log.jsonl"
    first = trainer(path, duration="3ba", save_folder=str(tmp_path / "ck"), save_interval="2ba", run_name="r")
    first.fit()
    first.close()
    # From the checkpoint after step 2: step 3 is done again, differently.
    second = trainer(path, duration="4ba", load_path=str(tmp_path / "ck" / "ep0-ba2-rank0.pt"), run_name="r")
    for parameter in second.state.model.parameters():
        parameter.data.add_(1.0)
    second.fit()
    second.close()
    steps = [line["step"] for line in lines(path) if line["kind"] == "batch"]
    assert steps == [1, 2, 3, 3, 4]
    repeated = [line["loss"] for line in lines(path) if line["kind"] == "batch"][3]
    read = read_run(path)
    assert read.step.tolist() == [1, 2, 3, 4]
    assert read.loss[2] == repeated


def test_without_a_path_the_log_lies_under_runs_and_never_among_the_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = trainer(None, loggers=[RunLog()], save_folder=str(tmp_path / "{run_name}" / "ck"), run_name="named")
    run.fit()
    run.close()
    assert (tmp_path / "runs" / "named" / "run_log.jsonl").exists()
    assert not list((tmp_path / "named" / "ck").glob("*.jsonl"))


def test_an_evaluation_before_training_is_in_the_log(tmp_path):
    path = tmp_path / "run_log.jsonl"
    run = trainer(path, eval_dataloader=loader())
    run.logger.log_metrics({"metrics/eval/CrossEntropy": 9.0})
    run.eval()
    run.fit()
    run.close()
    found = lines(path)
    assert [line["kind"] for line in found[:3]] == ["header", "table", "eval"]
    assert found[2]["step"] == 0 and found[2]["metrics"]["metrics/eval/CrossEntropy"] == 9.0
    assert read_run(path).evals["metrics/eval/CrossEntropy"].steps.tolist() == [0]


def test_a_second_run_of_one_name_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "run_log.jsonl"
    for duration in ("4ba", "2ba", "3ba"):
        run = trainer(path, duration)
        run.fit()
        run.close()
    kept = [path, tmp_path / "run_log.1.jsonl", tmp_path / "run_log.2.jsonl"]
    assert [len(read_run(file).step) for file in kept] == [3, 4, 2]
    assert len(read_run(tmp_path).step) == 3  # a folder means its newest run


def test_a_path_that_cannot_be_written_is_an_error_if_it_was_asked_for(tmp_path, monkeypatch):
    (tmp_path / "runs").write_text("a file where the folder should be")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"loggers\.run_log\.path: .* cannot be written"):
        trainer(None, loggers=[RunLog()]).fit()

    class Asks(Callback):
        def init(self, state, logger):
            ensure_run_log(state, logger)

    run = trainer(None, callbacks=[Asks()])
    run.fit()
    assert run.state.timestamp.batch.value == 4


def test_a_callback_can_ask_for_a_log_and_gets_one_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Asks(Callback):
        def init(self, state, logger):
            ensure_run_log(state, logger)

    run = trainer(None, callbacks=[Asks(), Asks()], run_name="asked")
    run.fit()
    run.close()
    assert sum(isinstance(d, RunLog) for d in run.logger.destinations) == 1
    assert len(read_run(tmp_path / "runs" / "asked").step) == 4


def test_a_run_that_stops_early_says_so(tmp_path):
    path = tmp_path / "run_log.jsonl"

    class Breaks(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 2:
                raise RuntimeError("broken on purpose")

    run = trainer(path, callbacks=[Breaks()])
    try:
        run.fit()
    except RuntimeError:
        run.close()
    assert lines(path)[-1] == {
        "kind": "end",
        "step": 2,
        "status": "stopped: RuntimeError('broken on purpose')",
    }
    assert any("did not finish" in problem for problem in read_run(path).problems)


def test_a_disk_that_is_full_at_the_end_is_said_once_and_closing_raises_nothing(tmp_path, caplog):
    """Composer closes a run's callbacks at interpreter exit, and logs what they raise."""
    run_log = RunLog(path=str(tmp_path / "run_log.jsonl"))
    state = SimpleNamespace(max_duration=None, timestamp=SimpleNamespace(batch=3))
    with Path("/dev/full").open("a", encoding="utf-8") as full:
        run_log._file = full
        run_log.close(state, None)
        run_log.close(state, None)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left on device" in caplog.text


def test_a_full_disk_ends_the_log_and_not_the_run(tmp_path, caplog):
    run = trainer(tmp_path / "run_log.jsonl")
    log = run.logger.destinations[0]

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    class Fills(Callback):
        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 1:
                log._file = Full()

    run.state.callbacks.append(Fills())
    run.fit()
    assert run.state.timestamp.batch.value == 4
    assert caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.inf, "inf"),
        (torch.tensor([1.0, math.nan]), [1.0, "nan"]),
        ({1: (torch.float32, True)}, {"1": ["torch.float32", True]}),
        (torch.tensor(3), 3),
    ],
)
def test_plain_values_are_strict_json(value, expected):
    assert plain(value) == expected
    json.dumps(plain(value), allow_nan=False)


def test_a_path_that_is_no_string_is_refused():
    for path in (3, "", "logs/{run}/x", "{"):
        with pytest.raises(
            ConfigError, match=r"loggers\.run_log\.path: .* is not a string of printable characters"
        ):
            RunLog(path)


@pytest.mark.parametrize("partly", [False, True], ids=["nothing", "half a line"])
def test_what_a_full_disk_did_not_take_is_written_later(tmp_path, caplog, partly):
    path = tmp_path / "run_log.jsonl"
    run = trainer(path, "6ba")
    log = run.logger.destinations[0]
    opened = log._open

    class Fills(Callback):
        """Full from the second batch to the fourth."""

        def batch_start(self, state, logger):
            if state.timestamp.batch.value == 1:
                log._file.close()
                log._file = Full()
                log._open = full
            if state.timestamp.batch.value == 4:
                log._open = opened

    class Full:
        def write(self, text):
            if partly:
                with path.open("a") as file:
                    file.write(text[: len(text) // 2])
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    def full():
        raise OSError(28, "No space left on device")

    run.state.callbacks.append(Fills())
    run.fit()
    run.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "batch"] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["kind"] == "end" and caplog.text.count("No space left on device") == 1


@pytest.mark.parametrize("resumed", [False, True])
def test_two_live_runs_of_one_name_have_files_of_their_own(tmp_path, caplog, resumed):
    path = tmp_path / "run_log.jsonl"
    first = RunLog(path=str(path))
    state = trainer(tmp_path / "other.jsonl").state
    first.fit_start(state, None)
    if resumed:
        state.timestamp = state.timestamp.to_next_batch()
    second = RunLog(path=str(path))
    second.fit_start(state, None)
    assert first.path == path and second.path == tmp_path / "run_log.1.jsonl"
    assert "another run is writing" in caplog.text and "run_log.1.jsonl" in caplog.text
    for log in (first, second):
        log.close(state, None)
        lines = [json.loads(line)["kind"] for line in log.path.read_text().splitlines()]
        assert lines == ["header", "end"]


def test_a_link_out_of_the_folder_is_set_aside_and_not_written_through(tmp_path):
    outside, path = tmp_path / "outside", tmp_path / "runs" / "run_log.jsonl"
    path.parent.mkdir()
    path.symlink_to(outside)
    run = trainer(path)
    run.fit()
    run.close()
    assert not outside.exists() and not path.is_symlink() and path.read_text()


def test_a_run_of_another_process_is_seen_and_its_end_too(tmp_path, caplog):
    path = tmp_path / "run_log.jsonl"
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    other.stdout.readline()
    state = trainer(tmp_path / "other.jsonl").state
    state.timestamp = state.timestamp.to_next_batch()
    for alive, name in ((True, "run_log.1.jsonl"), (False, "run_log.jsonl")):
        if not alive:
            other.kill()
            other.wait()
        log = RunLog(path=str(path))
        log.fit_start(state, None)
        assert log.path == tmp_path / name
        log.close(state, None)


class OneValueEach(LoggerDestination):
    """As MLflow, which takes no second value of a parameter, in a resumed run neither."""

    def __init__(self):
        self.taken = {}

    def log_hyperparameters(self, hyperparameters):
        for name, value in hyperparameters.items():
            if name.startswith(("fp8", "mfu", "found")):
                assert self.taken.setdefault(name, str(value)) == str(value), name


class Again(Callback):
    """Reports what it found out, otherwise in each step."""

    def batch_end(self, state, logger):
        log_facts(logger, {"found": int(state.timestamp.batch)})


def test_what_changes_goes_into_the_run_log_alone(tmp_path):
    tracker = OneValueEach()
    for _ in range(2):  # a run and its resumption
        model = trainer(tmp_path / "run_log.jsonl", callbacks=[Again()], loggers=[tracker])
        model.fit()
        model.close()
    assert "found" not in tracker.taken and read_run(tmp_path).hyperparameters["found"] == 4


def test_a_measured_choice_is_no_hyperparameter_of_a_tracker(tmp_path):
    tracker, model = OneValueEach(), Regression()
    model.linear = torch.nn.Sequential(
        torch.nn.Linear(4, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)
    )
    fitted = Trainer(
        model=model, train_dataloader=loader(), max_duration="3ba", device="cpu", progress_bar=False,
        algorithms=[FP8(recipe={"name": "measured", "warmup": 1, "error": 0.9, "recipes": ["current"]})],
        loggers=[tracker, RunLog(str(tmp_path / "run_log.jsonl"))],
    )  # fmt: skip
    fitted.fit()
    fitted.close()
    assert "fp8" in tracker.taken and "fp8_as_run" not in tracker.taken
    assert read_run(tmp_path).hyperparameters["fp8_as_run"]["recipe"] != "measured"


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_resumed_log_whose_last_line_was_cut_begins_a_line_of_its_own(tmp_path, cut):
    path = tmp_path / "run_log.jsonl"
    first = trainer(path, duration="3ba", save_folder=str(tmp_path / "ck"), save_interval="2ba", run_name="r")
    first.fit()
    first.close()
    whole = [text for text in path.read_text().splitlines() if '"kind": "end"' not in text]
    path.write_text("\n".join(whole)[:-cut])
    second = trainer(path, duration="4ba", load_path=str(tmp_path / "ck" / "ep0-ba2-rank0.pt"), run_name="r")
    second.fit()
    second.close()
    texts = path.read_text().splitlines()
    assert texts[len(whole) - 1] == whole[-1][:-cut] and json.loads(texts[len(whole)])["kind"] == "header"
    assert read_run(path).step.tolist() == [1, 2, 3, 4]


def test_a_run_that_begins_again_by_reset_time_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "run_log.jsonl"
    run = trainer(path, "4ba")
    run.fit()
    run.fit(duration="2ba")  # goes on
    run.fit(duration="3ba", reset_time=True)
    run.close()
    assert read_run(path).step.tolist() == [1, 2, 3]
    kept = tmp_path / "run_log.1.jsonl"
    assert read_run(kept).step.tolist() == [1, 2, 3, 4, 5, 6] and "begun again" in read_run(kept).status
