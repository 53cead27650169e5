"""The demo around its runs: data, command lines, progress, report and failures; the runs themselves are scripts here.

`tests/integration/test_demo.py`, in the full tier, trains for real; `tests/test_yamls.py` builds the demo's models.
"""

import json
import sys

import pytest
from typer.testing import CliRunner

import foundry_fp8.cli.training
from foundry_fp8.cli.main import app
from tests.report.logs import END, batches, curve, header, write_log

RUN = "import json, pathlib, shutil, sys; said = json.loads(sys.argv[1]); "
TRAINS = (
    "folder = pathlib.Path(said['variables.run_folder']); (folder / 'said.json').write_text(sys.argv[1]); "
)
TRAINS += "shutil.copy(sys.argv[2], folder / 'run_log.jsonl')"
FAILS = "print('out of memory, says the run'); sys.exit(3)"


@pytest.fixture
def demo(tmp_path, monkeypatch):
    """Run the demo with ``scripts[run's name]`` in place of LLM Foundry's entry; returns exit code and output."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"m{i:02}.py").write_text("def f(x):\n    return x + 1\n" * 200)

    def run(scripts, *arguments):
        def command(yaml, overrides):
            name = overrides["run_name"]
            log = write_log(
                tmp_path / f"{name}.jsonl",
                [header(name, None if name == "high-precision" else name), *batches(curve(8)), END],
            )
            said = json.dumps({"yaml": yaml, **overrides}, default=str)
            return [sys.executable, "-c", RUN + scripts.get(name, TRAINS), said, str(log)]

        monkeypatch.setattr(foundry_fp8.cli.training, "train_command", command)
        options = ["--output", str(tmp_path / "out"), "--corpus", str(corpus), *arguments]
        result = CliRunner().invoke(app, ["demo", *options], env={"COLUMNS": "160"})
        return result.exit_code, result.output

    return run


def test_runs_differ_in_the_recipe_alone_and_are_compared(demo, tmp_path):
    code, output = demo({}, "--steps", "8", "--recipes", "current,delayed+attention", "--seed", "3")
    assert code == 0, output
    said = {
        name: json.loads((tmp_path / "out/runs" / name / "said.json").read_text())
        for name in ("high-precision", "current", "delayed+attention")
    }
    assert said["high-precision"]["yaml"].endswith("foundry_fp8/yamls/demo/mpt-gqa.yaml")
    own = {name: {k: keys.pop(k) for k in list(keys) if "fp8" in k} for name, keys in said.items()}
    assert own == {
        "high-precision": {},
        "current": {"algorithms.fp8.recipe": "current"},
        "delayed+attention": {"algorithms.fp8.recipe": "delayed", "algorithms.fp8.attention": True},
    }
    for name, keys in said.items():
        assert keys.pop("run_name") == name and keys.pop("variables.run_folder").endswith(f"runs/{name}")
    assert said["high-precision"] == said["current"] == said["delayed+attention"]
    assert said["current"]["variables.global_seed"] == 3 and said["current"]["max_duration"] == "8ba"
    assert (tmp_path / "out" / "report" / "loss.png").exists()
    assert "current" in output and "high-precision" in output


def test_runs_train_side_by_side_and_start_one_after_the_other(demo, tmp_path):
    """streaming 0.12.0 and 0.13.0 look for a free name of shared memory and take it later: who starts at the same time gets an error."""
    names = ("high-precision", "current", "mxfp8")
    seen = "(folder / 'seen').write_text(' '.join(p.parent.name + ' ' + p.name for p in folder.parent.glob('*/*')))"
    before = TRAINS.replace("shutil", f"{seen}; time.sleep(0.5); shutil")
    script = f"import time; {before}; time.sleep(2); (folder / 'ended').touch()"
    code, output = demo(dict.fromkeys(names, script), "--steps", "8", "--recipes", "current,mxfp8")
    assert code == 0, output
    for i, name in enumerate(names):
        found = (tmp_path / "out/runs" / name / "seen").read_text()
        assert [other for other in names if f"{other} run_log.jsonl" in found] == [*names[:i]]
    assert "ended" not in (tmp_path / "out/runs" / names[1] / "seen").read_text()


def test_a_run_that_fails_is_shown_and_the_others_are_reported(demo, tmp_path):
    code, output = demo({"current": FAILS}, "--steps", "8", "--recipes", "current,mxfp8")
    assert code == 1
    assert "out of memory, says the run" in output and "failed (exit 3)" in output
    assert (tmp_path / "out" / "runs" / "mxfp8" / "run_log.jsonl").exists()
    assert (tmp_path / "out" / "report" / "report.html").exists()
