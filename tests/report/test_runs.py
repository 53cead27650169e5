import math

import numpy as np
import pytest

from foundry_fp8.report.runs import read_run, read_runs
from tests.report.logs import END, batches, header, write_log


def test_a_line_cut_in_the_middle_costs_that_line_alone(tmp_path):
    lines = [header(), *batches([5, 4, 3])]
    run = read_run(write_log(tmp_path / "run_log.jsonl", lines, tail='{"kind": "batch", "step": 4, "lo'))
    assert run.step.tolist() == [1, 2, 3]
    assert any("1 of 5 lines cannot be read (line 5)" in problem for problem in run.problems)
    assert any("killed" in problem for problem in run.problems)


@pytest.mark.parametrize("cut", range(1, 400, 13))
def test_a_log_cut_anywhere_is_read_or_refused_with_a_reason(tmp_path, cut):
    path = write_log(tmp_path / "run_log.jsonl", [header(recipe="mxfp8"), *batches([5, 4, 3]), END])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * cut // 400])
    try:
        run = read_run(path)
    except ValueError as error:
        assert "none of its" in str(error)
    else:
        assert run.problems


def test_binary_in_the_middle_of_a_log_is_left_out(tmp_path):
    path = write_log(tmp_path / "run_log.jsonl", [header(), *batches([5, 4]), END])
    path.write_bytes(path.read_bytes().replace(b'"step": 1,', b'\x00\xff"st', 1))
    run = read_run(path)
    assert run.step.tolist() == [2]


def test_a_file_that_is_no_log_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello\nworld\n")
    with pytest.raises(ValueError, match="is not a run log: none of its 2 lines"):
        read_run(path)


def test_a_folder_without_a_log_says_how_to_get_one(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"holds no run \(run_log\.jsonl, W&B.*loggers: \{run_log: \{\}\}"
    ):
        read_run(tmp_path)


def test_a_folder_with_two_logs_is_two_runs(tmp_path):
    for name in ("a", "b"):
        write_log(tmp_path / "runs" / name / "run_log.jsonl", [header(name), *batches([1.0])])
    (tmp_path / "table.csv").write_text("step,loss\n1,2\n")  # a tracker's copy of the same, as likely as not
    assert [run.name for run in read_runs([tmp_path])] == ["a", "b"]
    with pytest.raises(ValueError, match=r"holds 2 runs \(a, b\)\. Name one\."):
        read_run(tmp_path)


def test_a_log_of_a_newer_version_is_refused_in_a_sentence(tmp_path):
    path = write_log(tmp_path / "run_log.jsonl", [{**header(), "format_version": 2}, *batches([1.0])])
    with pytest.raises(ValueError, match=r"newer foundry-fp8 \(format 2; this one reads up to 1\)"):
        read_run(path)


def test_a_log_of_the_first_version_with_a_row_for_each_layer_is_read(tmp_path):
    rows = [{"name": f"b.{i}", "action": "converted", "reason": "", "shape": [8, 8]} for i in range(3)]
    head = header(recipe="delayed")
    head["hyperparameters"]["fp8"]["rows"] = rows
    run = read_run(
        write_log(tmp_path / "run_log.jsonl", [{**head, "format_version": 1}, *batches([1.0]), END])
    )
    assert run.conversion["rows"] == rows and run.problems == []


def test_a_mistyped_path_names_the_nearest(tmp_path):
    (tmp_path / "delayed").mkdir()
    with pytest.raises(FileNotFoundError, match="Did you mean 'delayed'"):
        read_run(tmp_path / "delaed")


def test_nan_losses_stay_and_are_reported(tmp_path):
    lines = [header(), *batches([5, 4, math.nan, math.inf, 3]), END]
    run = read_run(write_log(tmp_path / "run_log.jsonl", lines))
    np.testing.assert_array_equal(run.loss, [5, 4, math.nan, math.inf, 3])
    assert run.problems == ["The loss is not finite in 2 steps, first in step 3."]


def test_final_loss_is_nan_if_the_end_of_the_run_is(tmp_path):
    lines = [header(), *batches([5.0] * 19 + [math.nan]), END]
    assert math.isnan(read_run(write_log(tmp_path / "run_log.jsonl", lines)).final_loss)


def test_final_loss_is_the_mean_of_the_last_tenth(tmp_path):
    lines = [header(), *batches(range(100)), END]
    assert read_run(write_log(tmp_path / "run_log.jsonl", lines)).final_loss == np.mean(range(90, 100))


def test_speed_leaves_out_the_warm_up(tmp_path):
    lines = batches([1.0] * 20, tokens_per_second=80, tokens_per_step=40)
    for line in lines:
        line["seconds"] += 60  # a first step of a minute: compilation
    run = read_run(write_log(tmp_path / "run_log.jsonl", [header(world_size=2), *lines, END]))
    assert run.tokens_per_second_per_device == pytest.approx(40)


def test_a_resume_replaces_the_steps_that_it_repeats(tmp_path):
    lines = [header(), *batches([5, 4, 3, 2]), header(step=2), *batches([9, 8, 7], start=2), END]
    run = read_run(write_log(tmp_path / "run_log.jsonl", lines))
    assert run.step.tolist() == [1, 2, 3, 4, 5]
    assert run.loss.tolist() == [5, 4, 9, 8, 7]


def test_unknown_kinds_and_keys_are_passed_over(tmp_path):
    lines = [
        header(),
        {"kind": "future", "x": 1},
        *batches([1, 2], metrics=lambda s: {"a/b": [1], "c": 2}),
        END,
    ]
    run = read_run(write_log(tmp_path / "run_log.jsonl", lines))
    assert run.problems == []
    assert list(run.metrics) == ["c"]


def test_runs_of_one_name_are_distinguished_by_their_folders(tmp_path):
    paths = [write_log(tmp_path / n / "ck" / "run_log.jsonl", [header("same")]) for n in ("x", "y")]
    assert [run.name for run in read_runs(paths)] == ["x/ck", "y/ck"]


def test_a_run_started_again_without_fp8_is_not_shown_as_fp8(tmp_path):
    lines = [header(recipe="delayed"), *batches([5, 4, 3]), END, header(), *batches([6, 5]), END]
    run = read_run(write_log(tmp_path / "run_log.jsonl", lines))
    assert run.recipe == "high precision" and run.backend is None
    assert run.loss.tolist() == [6, 5]
    assert run.problems == ["It was started again under the same name: what came before is left out."]


def test_a_resume_in_another_precision_is_said_and_is_no_baseline(tmp_path):
    lines = [header(recipe="delayed"), *batches([5, 4]), header(step=2), *batches([3, 2], start=2), END]
    run = read_run(write_log(tmp_path / "run_log.jsonl", lines))
    assert run.recipe == "delayed then high precision"
    assert run.problems == [
        "Its precision changed when it was resumed (delayed from step 0, high precision from step 2): its figures mix them."
    ]


def test_models_are_distinguished_by_parameters_and_by_architecture(tmp_path):
    def run(folder, parameters=1000, **model):
        lines = [header(folder, config={"model": model}, parameters=parameters), *batches([1]), END]
        return read_run(write_log(tmp_path / folder / "run_log.jsonl", lines))

    mpt = run("mpt", name="mpt_causal_lm", d_model=8, init_device="cpu", attn_config={"attn_impl": "flash"})
    same = run(
        "same", name="mpt_causal_lm", d_model=8, init_device="meta", attn_config={"attn_impl": "torch"}
    )
    assert mpt.same_model(same)
    assert not mpt.same_model(run("larger", parameters=7000, name="mpt_causal_lm", d_model=8))
    assert not mpt.same_model(run("other", name="fog_causal_lm", variant="fog-max"))
    assert mpt.same_model(run("plain"))  # a run outside of LLM Foundry logs no model section
