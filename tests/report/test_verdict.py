"""What is said first: whether FP8's loss is as good as high precision's, model by model."""

import json
import math

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.report.comparison import compare
from foundry_fp8.report.runs import read_runs
from foundry_fp8.report.verdict import verdict
from tests.report.logs import END, batches, curve, header, report_runs, write_log


def csv_of(tmp_path, **runs):
    """``runs.csv`` of runs by name: losses, speed."""
    lines = ["run,precision,parameters,step,loss,tokens,seconds"]
    for name, (losses, speed, *parameters) in runs.items():
        size = parameters[0] if parameters else 1e9
        lines += [
            f"{name},{name.split('-')[0]},{size},{i},{loss},{100 * i},{100 * i / speed}"
            for i, loss in enumerate(losses, 1)
        ]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def said(path):
    return verdict(compare(read_runs([path])))


def judged(path, tmp_path, *options):
    result = CliRunner().invoke(app, ["compare", str(path), "--output", str(tmp_path / "out"), *options])
    return result.exit_code, json.loads((tmp_path / "out" / "comparison.json").read_text())


HIGH = curve(200, 0)
HEALTHY = [1.0002 * loss for loss in HIGH]


def test_a_run_that_is_nan_is_never_the_one_recommended(tmp_path):
    gone = [*HIGH[:150], *[math.nan] * 50]
    path = csv_of(tmp_path, bf16=(HIGH, 100), block=(HEALTHY, 117.6), delayed=(gone, 133))
    text = said(path)
    assert text.startswith("FP8 is fine: loss within the noise of this run (+0.02 %, band ")
    assert "over 200 of 200 steps), 1.18 x as fast, with block" in text
    assert text.endswith("; delayed diverged at step 151.") and "1.33" not in text
    code, found = judged(path, tmp_path)
    runs = {run["run"]: run for run in found["runs"]}
    assert code == 0 and found["models"][0]["run"] == "block"
    assert (runs["delayed"]["outcome"], runs["delayed"]["diverged_at"]) == ("diverged", 151)
    assert "It diverged at step 151." in runs["delayed"]["problems"]
    assert any(
        "not finite in 50 steps, first in step 151" in problem for problem in runs["delayed"]["problems"]
    )


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        pytest.param(
            kind,
            bad,
            marks=() if (kind == "csv") == math.isnan(bad) and bad != math.inf else pytest.mark.full,
        )
        for kind in ("csv", "log")
        for bad in (math.nan, math.inf, -math.inf)
    ],
)
def test_a_loss_that_is_not_finite_is_a_divergence_and_not_a_loss_that_was_not_logged(tmp_path, kind, bad):
    losses = [*HIGH[:20], bad, *HIGH[21:60]]  # whatever comes after it
    if kind == "csv":
        path = csv_of(tmp_path, bf16=(HIGH[:60], 100), block=(losses, 120))
    else:
        path = tmp_path / "runs"
        write_log(path / "bf16" / "run_log.jsonl", [header("bf16"), *batches(HIGH[:60]), END])
        write_log(path / "block" / "run_log.jsonl", [header("block", "block"), *batches(losses), END])
    assert said(path) == "FP8 diverged at step 21: block."
    code, found = judged(path, tmp_path, "--fail-above", "50")
    assert code == 1 and found["verdict"].startswith("FP8 diverged at step 21")
    table = (tmp_path / "out" / "comparison.md").read_text()
    assert "| diverged |" in table


def test_steps_without_a_loss_are_no_divergence(tmp_path):
    sparse = ["" if step % 5 else loss for step, loss in enumerate(HEALTHY)]
    path = csv_of(tmp_path, bf16=(HIGH, 100), block=(sparse, 120))
    assert "FP8 is fine: " in said(path) and "over 40 of 200 steps" in said(path)


def test_a_run_whose_loss_is_higher_does_not_hide_a_healthy_one(tmp_path):
    worse = [1.3793 * loss for loss in HIGH]
    path = csv_of(tmp_path, bf16=(HIGH, 100), block=(HEALTHY, 117.6), delayed=(worse, 133))
    text = said(path)
    assert text.startswith("FP8 is fine") and "with block" in text and text.endswith("; delayed: +37.93 %.")
    alone = csv_of(tmp_path, bf16=(HIGH, 100), delayed=(worse, 133))
    assert said(alone).startswith("FP8 is worse: loss above the noise of this run (+37.93 %, band ")
    assert judged(alone, tmp_path, "--fail-above", "40")[0] == 0
    assert judged(alone, tmp_path, "--fail-above", "37")[0] == 1


def test_a_loss_that_rises_far_and_stays_finite_diverged_where_it_left(tmp_path):
    losses = [*HIGH[:120], *[7.5 + 0.01 * i for i in range(80)]]
    assert said(csv_of(tmp_path, bf16=(HIGH, 100), block=(losses, 120))) == "FP8 diverged at step 121: block."


def test_a_loss_that_rises_in_both_runs_did_not_diverge(tmp_path):
    harder = [*HIGH[:120], *[loss + 2 for loss in HIGH[120:]]]  # other data from step 121 on
    assert said(csv_of(tmp_path, bf16=(harder, 100), block=(harder, 120))).startswith("FP8 is fine")


def test_a_shorter_run_says_over_how_many_steps_it_is_compared_and_is_not_preferred(tmp_path):
    path = csv_of(tmp_path, bf16=(HIGH[:30], 100), block=(HIGH[:12], 150))
    assert "over 12 of 30 steps" in said(path)
    _, found = judged(path, tmp_path)
    assert "It is compared over 12 of the 30 steps of bf16." in found["runs"][1]["problems"]
    path = csv_of(tmp_path, bf16=(HIGH[:30], 100), block=(HIGH[:12], 150), current=(HIGH[:30], 120))
    assert "over 30 of 30 steps), 1.20 x as fast, with current" in said(path)


@pytest.mark.parametrize(
    ("runs", "because"),
    [
        ({"block": (HIGH, 1)}, "no FP8 run has a run in high precision of the same model on as many devices beside it"),
        pytest.param({"bf16": (HIGH, 1)}, "none of the runs is in FP8", marks=pytest.mark.full),
        pytest.param({"bf16": (HIGH[:3], 1), "block": (HIGH, 1)}, "block and bf16 have the loss of 3 steps in common, which is too few",
                     marks=pytest.mark.full),
        ({"bf16": ([*HIGH[:9], math.nan], 1), "block": (HIGH, 1)},
         "the loss of bf16, which it is compared with, is not finite in step 10"),
        pytest.param({"bf16": ([0.0] * 9, 1), "block": (HIGH, 1)}, "the loss of bf16 is not above zero", marks=pytest.mark.full),
        ({"bf16": ([""] * 9, 1), "block": (HIGH, 1)}, "block and bf16 have the loss of 0 steps in common, which is too few"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_has_a_reason_and_fails_a_script(tmp_path, runs, because):
    path = csv_of(tmp_path, **runs)
    assert said(path) == f"FP8: cannot say, because {because}."
    assert judged(path, tmp_path)[0] == 0
    assert judged(path, tmp_path, "--fail-above", "1e9")[0] == 1


def test_noise_that_hides_everything_is_no_all_clear(tmp_path):
    rng = np.random.default_rng(3)
    noisy = [3 + value for value in rng.normal(0, 0.5, 20)]
    path = csv_of(tmp_path, bf16=(noisy, 100), block=(noisy, 120))
    assert said(path).startswith("FP8: cannot say, because the noise of bf16 (band ")
    assert "hides a difference of +0.00 %" in said(path)


def test_each_model_has_a_verdict_of_its_own(tmp_path):
    gone = [*HIGH[:150], math.nan]
    path = csv_of(
        tmp_path,
        **{"bf16": (HIGH, 100, 1e9), "block": (HEALTHY, 120, 1e9)},
        **{"bf16-7b": (HIGH, 50, 7e9), "block-7b": (gone, 90, 7e9), "block-13b": (HIGH, 90, 13e9)},
    )
    one, seven, thirteen = said(path).splitlines()
    assert one.startswith("1B: FP8 is fine: ") and "1.20 x as fast" in one
    assert seven == "7B: FP8 diverged at step 151: block-7b."
    assert thirteen.startswith("13B: FP8: cannot say, because no FP8 run has a run in high precision")
    page = report_runs([path], tmp_path / "out", console=Console(quiet=True), title="t").read_text()
    assert page.count('<p class="verdict">') == 3
    assert page.index('<p class="verdict">') < page.index("<table")
    assert judged(path, tmp_path, "--fail-above", "5")[0] == 1


def test_a_run_on_more_devices_is_preferred_only_if_it_is_healthy(tmp_path):
    for devices, losses in ((8, HIGH), (64, [*HIGH[:100], math.inf])):
        for name, recipe, values in (("bf16", None, HIGH), ("block", "block", losses)):
            lines = [header(f"{name}-{devices}", recipe, devices, device_type="gpu"), *batches(values), END]
            write_log(tmp_path / f"{name}{devices}" / "run_log.jsonl", lines)
    text = said(tmp_path)
    assert "with block-8 on 8 GPUs" in text and text.endswith("block-64 diverged at step 101.")


@pytest.mark.parametrize("limit", ["nan", "inf"])
def test_a_limit_that_is_no_number_is_refused(tmp_path, limit):
    path = csv_of(tmp_path, bf16=(HIGH, 100), block=(HIGH, 120))
    result = CliRunner().invoke(
        app, ["compare", str(path), "--output", str(tmp_path / "o"), "--fail-above", limit]
    )
    assert result.exit_code == 2 and "it is a number of percent" in result.output


def test_terminal_page_and_markdown_begin_with_the_verdict(tmp_path):
    path = csv_of(tmp_path, bf16=(HIGH, 100), block=(HEALTHY, 120))
    console = Console(record=True, width=300)
    page = report_runs([path], tmp_path / "out", console=console, title="t")
    text = said(path)
    assert console.export_text().startswith(text)
    assert (page.parent / "comparison.md").read_text().startswith(text)
    assert f'</h1>\n<p class="verdict">{text}</p>' in page.read_text()
