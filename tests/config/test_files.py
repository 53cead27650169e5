"""Every file of ours is written whole or not at all, and what is not ours stays."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.cli.selftest.verdict import keep
from foundry_fp8.config import ConfigError
from foundry_fp8.config.files import move_into, refuse_files, write_file

RUN = "model:\n  name: mpt_causal_lm\n" + "# a line of the user\n" * 400


def init(*arguments):
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def limited(code):
    """``code`` where no file may have more than 4,096 bytes, as on a disk that is nearly full."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    command = [
        sys.executable,
        "-B",
        "-c",
        code,
    ]  # else it leaves cut .pyc files, and who imports them next fails
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)


@pytest.mark.parametrize("output", [False, True])
def test_a_full_disk_leaves_the_yaml_as_it_was_and_says_so(tmp_path, output):
    pytest.importorskip("omegaconf")
    run, other = tmp_path / "run.yaml", tmp_path / "other.yaml"
    run.write_text(RUN)
    options = ["--output", str(other)] if output else []
    done = limited(f"from foundry_fp8.cli.main import app; app({['init', str(run), *options]!r})")
    assert done.returncode == 2 and "cannot be written (File too large)" in done.stderr, done
    assert run.read_text() == RUN and [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_init_keeps_another_file_unless_forced_and_the_mode_of_its_own(tmp_path):
    run, other = tmp_path / "run.yaml", tmp_path / "other.yaml"
    run.write_text(RUN), other.write_text("mine")
    refused = init(run, "--output", other)
    assert refused.exit_code == 2 and "--force" in refused.output and other.read_text() == "mine"
    assert init(run, "--output", other, "--force").exit_code == 0 and "recipe" in other.read_text()
    run.chmod(0o600)
    assert init(run).exit_code == 0 and run.stat().st_mode & 0o777 == 0o600
    assert init(run, "--output", run).exit_code == 0  # its own file is no other's


def test_init_writes_through_no_link(tmp_path):
    target, run = tmp_path / "shared" / "base.yaml", tmp_path / "run.yaml"
    target.parent.mkdir()
    target.write_text(RUN)
    run.symlink_to(target)
    assert init(run).exit_code == 0
    assert target.read_text() == RUN and "recipe" in run.read_text() and not run.is_symlink()


def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path):
    """Ten writers, each killed at another moment."""
    file = tmp_path / "file.json"
    code = (
        "import sys, json; from pathlib import Path; from foundry_fp8.config.files import write_file\n"
        "print(flush=True)\n"
        "while True:\n"
        "    for n in range(10): write_file(Path(sys.argv[1]), json.dumps([n] * 200_000), '--output')\n"
    )
    write_file(file, json.dumps([0] * 200_000), "--output")
    for number in range(10):
        writer = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        try:
            writer.wait(0.02 + 0.013 * number)
        except subprocess.TimeoutExpired:
            writer.kill()
        writer.wait()
        assert len(set(json.loads(file.read_text()))) == 1
    refuse_files(tmp_path, "--output", "", [file.name])  # what a killed writer left is ours


def test_a_name_as_long_as_a_name_can_be(tmp_path):
    file = tmp_path / ("n" * 255)
    write_file(file, "text", "--output")
    assert file.read_text() == "text"


def test_what_an_interrupted_writer_made_is_gone(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    (tmp_path / "file").write_text("before")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "file", "after", "--output")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


def test_selftest_asks_before_it_writes_among_files_of_others(tmp_path):
    """It writes ``logs`` there: those of somebody else do not belong beside them."""
    (tmp_path / "thesis.tex").write_text("mine")
    arguments = ["selftest", "--dry", "--only", "doctor", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "--force" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_verdicts_write_through_no_link_and_whole(tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    (tmp_path / "foundry_fp8").mkdir()
    outside.write_text("mine")
    (tmp_path / "foundry_fp8" / "selftest.json").symlink_to(outside)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep({"claims": []})
    assert outside.read_text() == "mine"
    monkeypatch.setenv("XDG_CACHE_HOME", str(outside))  # where nothing can be
    with pytest.raises(ConfigError, match="cannot be written"):
        keep({"claims": []})


def test_no_other_place_writes_files():
    """Logs of processes are streams; a data set is built in a folder that nobody reads yet."""
    streams = {"cli/training.py", "cli/selftest/processes.py", "callbacks/run_log.py", "config/files.py"}
    fresh = {"data/shards.py", "cli/yaml_model.py"}
    root = Path(__file__).parents[2] / "foundry_fp8"
    writing = ("write_text(", "write_bytes(", '.open("w', '.open("x', '.open("a', "savefig(path")
    found = {
        str(file.relative_to(root))
        for file in root.rglob("*.py")
        if any(word in file.read_text() for word in writing)
    }
    assert found <= streams | fresh


def test_an_export_over_another_loses_nothing_when_a_file_cannot_be_replaced(tmp_path):
    """And goes into folders, through no link."""
    made, folder, outside = tmp_path / "made", tmp_path / "folder", tmp_path / "outside"
    for place, text in ((made, "new"), (folder, "old")):
        (place / "deep").mkdir(parents=True)
        for name in ("config.json", "a.safetensors", "deep/template"):
            (place / name).write_text(text)
    (folder / "b.safetensors").write_text("old"), (folder / "notes").mkdir()
    (made / "notes").write_text("new")
    with pytest.raises(ConfigError, match="notes is a folder, in the place of a file"):
        move_into(folder, made, "config.json", ["*.safetensors"], "export")
    assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"old"}
    (folder / "notes").rmdir()
    outside.mkdir(), (folder / "deep").rename(tmp_path / "kept")
    (folder / "deep").symlink_to(outside)
    move_into(folder, made, "config.json", ["*.safetensors"], "export")
    assert {path.read_text() for path in folder.rglob("*") if path.is_file()} == {"new"}
    assert not (folder / "b.safetensors").exists() and not list(outside.iterdir())


def test_a_link_to_a_folder_is_a_folder_to_export_into(tmp_path):
    made, place = tmp_path / "made", tmp_path / "place"
    made.mkdir(), place.symlink_to(tmp_path / "disk")
    (made / "config.json").write_text("new")
    move_into(place.resolve(), made, "config.json", [], "export")
    assert (tmp_path / "disk" / "config.json").read_text() == "new"
