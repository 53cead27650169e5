"""Runs a worker on several gloo ranks of this machine: a script, or a function of an importable module."""

import atexit
import contextlib
import importlib
import json
import os
import pickle
import random
import socket
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT = 1500.0
"""Seconds after which ranks that hang are killed. Not a measure of speed: nothing here takes a tenth of it."""
FSDP = "torch.distributed.fsdp"
COMPOSER = f"{FSDP},composer"
FOUNDRY = f"{COMPOSER},llmfoundry.command_utils.train"


def run(script, world, *args, imports=FSDP, check=True, **options):
    """Run ``script`` on ``world`` ranks to the end.

    Args:
        script: A path, from this folder.
        world: How many ranks.
        args: Its ``sys.argv[1:]``.
        imports: Modules, separated by commas, that are imported once for all tests of this pytest process.
        check: Raise if a rank fails.
        options: ``per_node`` (ranks), ``timeout`` (seconds), ``environment`` (a dict).

    Returns:
        What rank 0 wrote to ``$RESULT_FILE`` (``None`` if nothing); with ``check=False``, ``(exit codes, outputs)`` of all
        ranks instead.
    """
    if "composer" in imports:
        importlib.import_module("composer")  # skips the test where it is not installed
    with tempfile.TemporaryDirectory() as folder:
        request = {"script": str(HERE / script), "args": list(map(str, args))}
        codes, outputs = _ranks(folder, request, world, imports, **options)
        if not check:
            return codes, outputs
        _raise_if_failed(codes, outputs)
        written = Path(folder) / "result.json"
        return json.loads(written.read_text()) if written.exists() else None


def call(function, world, *args, imports=FSDP, **options):
    """Call ``function(*args)`` on ``world`` ranks; returns what each rank returned, in the order of the ranks.

    Ranks have what ``init_process_group("gloo")`` reads, but no group yet. The function's module is imported in the ranks,
    so it should be cheap to import or among ``imports``; ``args`` and results are pickled.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = {"function": (function.__module__, function.__qualname__), "args": args}
        codes, outputs = _ranks(folder, request, world, imports, **options)
        _raise_if_failed(codes, outputs)
        return [pickle.loads((Path(folder) / f"returned{rank}").read_bytes()) for rank in range(world)]


def through_composer(script, *args, ranks=2):
    """Run ``script`` through the composer launcher, and raise with its output if it fails."""
    launcher = Path(sys.executable).with_name("composer")
    ended = subprocess.run(
        [launcher, "-n", str(ranks), HERE / script, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=_environment(),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


def _ranks(folder, request, world, imports, *, per_node=None, timeout=TIMEOUT, environment=None):
    request |= {"world": world, "per_node": per_node or world, "folder": folder, "port": free_port()}
    request |= {"imports": imports.split(","), "timeout": timeout, "environment": environment or {}}
    codes = _server().ask(request)
    assert isinstance(codes, list), codes  # the traceback of an import
    return codes, [(Path(folder) / f"out{rank}").read_text(errors="replace") for rank in range(world)]


def _raise_if_failed(codes, outputs):
    shown = "\n".join(f"--- rank {r}\n{outputs[r][-3000:]}" for r, code in enumerate(codes) if code)
    assert not any(codes), f"exit codes {codes}\n{shown}"


def free_port():
    """A port below the range from which the kernel serves other processes, so that nobody takes it before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _environment():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


class _Server:
    def __init__(self):
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [sys.executable, HERE / "ranks.py", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=_environment(),
            cwd=ROOT,
        )
        theirs.close()
        atexit.register(self.close)

    def ask(self, request):
        self.connection.send(request)
        return self.connection.recv()

    def close(self):
        self.connection.close()
        self.process.wait()


_running = []


def _server():
    if not _running or _running[0].process.poll() is not None:
        _running[:] = [_Server()]
    return _running[0]
