"""A report goes into a folder of its own, and replaces its own files alone."""

import os

import pytest
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from tests.report.logs import END, batches, curve, header, write_log


@pytest.fixture
def compare(tmp_path):
    for name, recipe in (("bf16", None), ("fp8", "block")):
        write_log(
            tmp_path / "runs" / name / "run_log.jsonl", [header(name, recipe), *batches(curve(20)), END]
        )

    def run(output, *options):
        arguments = ["compare", str(tmp_path / "runs"), "--output", str(output), *options]
        result = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
        return result.exit_code, result.output

    return run


def test_a_folder_with_other_files_is_left_alone_unless_forced(tmp_path, compare):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "thesis.tex").write_text("years")
    code, output = compare(out)
    assert code == 2 and "FP8 is fine" not in output
    assert f"--output {out} holds files that are not of a report (thesis.tex). Name another folder" in output
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    code, output = compare(out, "--force")
    assert code == 0 and (out / "report.html").exists() and (out / "thesis.tex").read_text() == "years"


def test_a_report_is_replaced_without_a_question(tmp_path, compare):
    out = tmp_path / "deep" / "report"
    assert compare(out)[0] == 0
    first = sorted(path.name for path in out.iterdir())
    (out / "tasks.png").write_bytes(b"of an earlier comparison")
    assert compare(out)[0] == 0
    assert sorted(path.name for path in out.iterdir()) == first  # no temporary file, no old figure


def test_a_link_out_of_the_folder_is_replaced_and_not_followed(tmp_path, compare):
    out, outside = tmp_path / "report", tmp_path / "outside"
    out.mkdir()
    outside.write_text("mine")
    names = ("report.html", "comparison.csv", "comparison.md", "comparison.json", "loss.png", "tasks.png")
    for name in names:
        (out / name).symlink_to(outside)
    assert compare(out)[0] == 0
    assert outside.read_text() == "mine"
    assert not any(path.is_symlink() for path in out.iterdir())


def test_files_are_readable_as_the_umask_says(tmp_path, compare):
    before = os.umask(0o022)
    try:
        assert compare(tmp_path / "report")[0] == 0
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "report").iterdir()} == {0o644}


@pytest.mark.parametrize("where", ["a file", "below a file", "a folder in the place of a file"])
def test_what_cannot_be_written_is_said_in_a_sentence(tmp_path, compare, where):
    file = tmp_path / "file"
    file.write_text("x")
    out = {"a file": file, "below a file": file / "report"}.get(where, tmp_path / "out")
    if where.startswith("a folder"):
        (out / "report.html").mkdir(parents=True)
    code, output = compare(out)
    assert code == 2 and "cannot be written (" in output and "Errno" not in output and file.read_text() == "x"
    assert not [path for path in tmp_path.rglob(".foundry-fp8-*")]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_said_in_a_sentence(tmp_path, compare):
    out = tmp_path / "out"
    out.mkdir(mode=0o500)
    code, output = compare(out)
    assert code == 2 and "cannot be written (Permission denied)" in output
