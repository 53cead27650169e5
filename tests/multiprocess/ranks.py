"""A process that has imported what workers need, and forks gloo ranks from itself on request; ``launch.py`` talks to it.

Importing is most of the cost of a short multi-process test. It is paid once for all tests of a pytest process, and every
test still gets fresh ranks: random numbers, process groups and patches of one do not reach the next.

Ranks end in a barrier and not in destroy_process_group: up to torch 2.7 a gloo group is destroyed with the interpreter's lock
held while it joins threads that may want that lock for the last tensor that they let go (pytorch pull requests 154976, in
2.8, and 56017). One of some hundred runs of compressed DDP hung there.
"""

import faulthandler
import gc
import importlib
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path


def serve(connection):
    """Run one request after another until the other side closes."""
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            for module in request["imports"]:
                importlib.import_module(module)
        except BaseException:
            connection.send(traceback.format_exc())
            continue
        gc.freeze()  # no rank looks for garbage in what it shares with the others
        connection.send(_run(request, connection))


def _run(request, connection):
    """Exit codes by rank."""
    children = []
    for rank in range(request["world"]):
        child = os.fork()
        if child == 0:
            connection.close()
            _be_rank(rank, request)
        children.append(child)
    codes = {}
    deadline = time.monotonic() + request["timeout"]
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
            continue
        abandoned = connection.poll(0.02)  # nothing is sent while ranks run: the other side is gone
        if abandoned or time.monotonic() > deadline:
            for child in set(children) - codes.keys():
                os.kill(child, signal.SIGKILL)
            deadline = float("inf")
            if abandoned:
                os._exit(1)
    return [codes[child] for child in children]


def _be_rank(rank, request):
    folder = Path(request["folder"])
    out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    world, per_node = request["world"], request["per_node"]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(per_node),
        NODE_RANK=str(rank // per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(request["port"]),
        RESULT_FILE=str(folder / "result.json"),
        **request["environment"],
    )
    os.chdir(folder)
    faulthandler.enable()  # where a signal ends it
    faulthandler.dump_traceback_later(0.9 * request["timeout"])  # where it hangs, before it is killed
    code = 0
    try:
        if "script" in request:
            sys.argv = [request["script"], *request["args"]]
            runpy.run_path(request["script"], run_name="__main__")
        else:
            module, name = request["function"]
            result = getattr(importlib.import_module(module), name)(*request["args"])
            (folder / f"returned{rank}").write_bytes(pickle.dumps(result))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
