"""The published studies' runs: LLM Foundry takes each, plans are those of ``plan speed``, and small ones train and are compared."""

from __future__ import annotations

import re

import pytest
import yaml
from omegaconf import OmegaConf
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.report.runs import read_runs
from tests.integrations.test_examples import example

published = example("published_runs")
NEW_KEYS = {"algorithms.fp8.enabled"}
every_study = pytest.mark.parametrize("study", published.STUDIES)
some_studies = pytest.mark.parametrize(
    "study",
    [
        pytest.param(s, marks=() if s in ("aws", "fog-recipes") else pytest.mark.full)
        for s in published.STUDIES
    ],
)


@every_study
def test_each_run_changes_keys_that_its_yaml_has_and_stays_a_run(study):
    runs = list(published.STUDIES[study]())
    names = [run.name for run in runs]
    assert len(set(names)) == len(names) and {run.over for run in runs} <= {"", *names}
    for run in runs:
        plain = OmegaConf.load(published.YAMLS / f"{run.yaml}.yaml")
        unknown = {key for key in run.changes if OmegaConf.select(plain, key) is None} - NEW_KEYS
        assert not unknown, (run.name, unknown)
        config = OmegaConf.to_container(published.configured(run), resolve=True)
        ranks = published.PER_NODE * run.nodes
        assert config["run_name"] == run.name
        assert config["global_train_batch_size"] % (ranks * config["device_train_microbatch_size"]) == 0
        fp8 = run_of(config, ranks).fp8
        assert fp8.enabled == ("bf16" not in run.name)


@some_studies
def test_a_command_says_what_the_yaml_then_is(study):
    """As LLM Foundry reads its command line."""
    for run in published.STUDIES[study]():
        said = published.command(run)
        path, *changes = said.partition(" train ")[2].split()
        assert path == f"yamls/pretrain/{run.yaml}.yaml"
        config = OmegaConf.merge(
            OmegaConf.load(published.YAMLS / f"{run.yaml}.yaml"), OmegaConf.from_cli(changes)
        )
        assert config == published.configured(run)
        ranks = re.search(r"--world_size (\d+)", said)
        assert (int(ranks[1]) if ranks else 8) == 8 * run.nodes


def test_aws_published_speeds_are_the_quotients_of_its_tables():
    plain = {
        "mpt-1b": [40200, 38500, 39500, 38200, 35500, 33500],
        "mpt-7b": [9350, 9400, 9300, 9250, 8700, 7900],
    }
    fp8 = {
        "mpt-1b": [40800, 41600, 42000, 41800, 39500, 38000],
        "mpt-7b": [11000, 10750, 10600, 10400, 10100, 9700],
    }
    for model, rates in published.AWS.items():
        assert rates == pytest.approx(
            [b / a for a, b in zip(plain[model], fp8[model], strict=True)], abs=1e-3
        )


def test_a_plan_is_that_of_plan_speed(tmp_path):
    runs = [run for run in published.aws() if run.yaml == "mpt-1b" and run.nodes == 16]
    *_, last = lines = list(published.plan(runs))
    assert len(lines) == 1 + len(runs)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(OmegaConf.to_container(published.configured(runs[-1]), resolve=True)))
    said = CliRunner().invoke(app, ["plan", "speed", str(path), "--gpus", "128"]).stdout
    rate, over = re.search(r"delayed +128 +(\d+) +[\d.]+%  ([\d.]+)", said).groups()
    assert last.split()[1:] == ["128", "h100", rate, over, str(published.AWS["mpt-1b"][4])]


@pytest.mark.full
@pytest.mark.parametrize("study, count", [("databricks", 2), ("fog-recipes", 5), ("nemo", 3)])
def test_small_runs_train_on_a_cpu_and_are_compared(study, count, tmp_path):
    runs = list(published.STUDIES[study]())[:count]
    published.train_small(runs, tmp_path, 2)
    found = read_runs([tmp_path / "runs"])
    assert {run.name for run in found} == {run.name for run in runs}
    for run in runs:
        report = next(one for one in found if one.name == run.name)
        assert (report.recipe == "high precision") == ("bf16" in run.name), (run.name, report.recipe)
    assert (tmp_path / "report" / "report.html").exists()
