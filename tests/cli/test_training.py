import json
import os
import sys
import time

import pytest

from foundry_fp8.cli.training import TrainingProcess, train_command

WRITES_A_LOG = """
import json, sys, time
with open(sys.argv[1], "w") as log:
    for step in range(1, 4):
        line = {"kind": "batch", "step": step, "tokens": 100 * step, "seconds": 0.5 * step, "loss": 5 - step}
        log.write(json.dumps(line) + "\\n"); log.flush()
    log.write('{"kind": "batch", "st'); log.flush()
    print("said something", flush=True)
    sys.exit(int(sys.argv[2]))
"""

# A child that ignores a polite end has a child of its own; both write their ids.
HAS_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def wait(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("code", [0, 3])
def test_progress_is_read_from_the_log_and_a_half_line_waits(tmp_path, code):
    folder = tmp_path / "run"
    process = TrainingProcess(
        [sys.executable, "-c", WRITES_A_LOG, str(folder / "run_log.jsonl"), str(code)], folder, threads=1
    )
    wait(lambda: process.returncode is not None)
    progress = process.progress()
    process.stop()
    assert (process.returncode, progress.step, progress.loss) == (code, 3, 2.0)
    assert progress.tokens_per_second == 200
    assert process.tail() == "said something"


def test_an_old_log_is_not_taken_for_the_new_run(tmp_path):
    (tmp_path / "run_log.jsonl").write_text(json.dumps({"kind": "batch", "step": 9, "loss": 1.0}) + "\n")
    process = TrainingProcess([sys.executable, "-c", "pass"], tmp_path, threads=1)
    wait(lambda: process.returncode is not None)
    assert process.progress().step == 0
    process.stop()


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="reads process states from /proc")
def test_stopping_ends_the_process_and_its_children(tmp_path):
    ids = tmp_path / "ids"
    process = TrainingProcess([sys.executable, "-c", HAS_A_CHILD, str(ids)], tmp_path / "run", threads=1)
    wait(lambda: ids.exists() and len(ids.read_text().split()) == 2)
    pids = [int(pid) for pid in ids.read_text().split()]
    assert all(map(alive, pids))
    process.stop()
    wait(lambda: not any(map(alive, pids)), 10)


def test_the_command_is_foundrys_own_entry(tmp_path):
    command = train_command(tmp_path / "x.yaml", {"algorithms.fp8.recipe": "block", "max_duration": "4ba"})
    assert command[1:5] == ["-m", "llmfoundry.cli.cli", "train", str(tmp_path / "x.yaml")]
    assert command[5:] == ["algorithms.fp8.recipe=block", "max_duration=4ba"]
