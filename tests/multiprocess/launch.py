"""Runs a worker script on several gloo ranks of this machine, and returns what rank 0 wrote.

The ranks are forked from one process that has imported torch (and what else is asked for): importing is most of the
cost of a short multi-process test, and this way it is paid once.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


def run(
    script: str,
    world: int,
    *args: str,
    per_node: int | None = None,
    imports: str = "torch.distributed.fsdp",
    timeout: float = 240,
    check: bool = True,
):
    """Run ``script`` on ``world`` ranks to the end.

    Returns:
        Rank 0's JSON; with ``check=False``, ``(exit codes, outputs)`` of all ranks instead.
    """
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        spec = {"script": str(HERE / script), "args": args, "world": world, "per_node": per_node or world}
        spec |= {"port": port, "folder": folder, "imports": imports.split(","), "timeout": timeout}
        env = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
        env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent.parent), env.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, __file__, json.dumps(spec)], env=env, timeout=timeout + 60, check=True
        )
        codes = json.loads((Path(folder) / "codes").read_text())
        outputs = [(Path(folder) / f"out{rank}").read_text(errors="replace") for rank in range(world)]
        if not check:
            return codes, outputs
        shown = "\n".join(f"--- rank {r}\n{outputs[r][-3000:]}" for r in range(world) if codes[r])
        assert not any(codes), f"exit codes {codes}\n{shown}"
        return json.loads((Path(folder) / "result.json").read_text())


def through_composer(script: str, *args: object, timeout: float = 540) -> None:
    """Run ``script`` on two ranks through the composer launcher, and raise with its output if it fails."""
    launcher = Path(sys.executable).with_name("composer")
    path = os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [launcher, "-n", "2", HERE / script, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


def _fork_ranks(spec: dict) -> None:
    for module in spec["imports"]:
        importlib.import_module(module)
    children = []
    for rank in range(spec["world"]):
        child = os.fork()
        if child == 0:
            _be_rank(rank, spec)
        children.append(child)
    codes: dict[int, int] = {}
    deadline = time.monotonic() + spec["timeout"]
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.05)
    (Path(spec["folder"]) / "codes").write_text(json.dumps([codes[child] for child in children]))


def _be_rank(rank: int, spec: dict) -> None:
    out = os.open(Path(spec["folder"]) / f"out{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    world, per_node = spec["world"], spec["per_node"]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(per_node),
        NODE_RANK=str(rank // per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(spec["port"]),
        RESULT_FILE=str(Path(spec["folder"]) / "result.json"),
    )
    sys.argv = [spec["script"], *spec["args"]]
    code = 0
    try:
        runpy.run_path(spec["script"], run_name="__main__")
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _fork_ranks(json.loads(sys.argv[1]))
