#!/usr/bin/env bash
# Two runs that start on one machine at the same moment: one of them ends with FileExistsError, whatever folders they read.
#
# One would guess: two training runs on one machine that read different local folders have nothing in common, so a script may start both at
# once (half of a node's GPUs each, two seeds, BF16 beside its FP8 twin).
# What happens: mosaicml-streaming's StreamingDataset names its shared memory by a number that all processes of a machine share. It looks for
# the first number that nobody has and registers it later, without a lock in between; who comes second is told that the file exists, and
# that error ends the run: of forty pairs that start together about thirty-six (0.12.0 and 0.13.0 have the same code).
# Why it matters: the error names a number, no folder and no run, and does not come again when one tries by hand, one after the other. Start the
# second run once the first has built its datasets (its first step), or give each a container. Another TMPDIR is no way out: shared memory is
# the machine's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "mosaicml-streaming==0.13.0" "torch==2.15.0"
cat > together.py <<'END'
import collections
import importlib.metadata
import multiprocessing
import warnings

from streaming import MDSWriter, StreamingDataset

ROUNDS = 40
warnings.filterwarnings("ignore")


def start(barrier, results, folder):
    for _ in range(ROUNDS):
        barrier.wait()
        try:
            dataset = StreamingDataset(local=folder, batch_size=1, shuffle=False)
            results.put("started")
        except FileExistsError:
            results.put("FileExistsError")
        barrier.wait()
        dataset = None


if __name__ == "__main__":
    for name in ("first", "second"):
        with MDSWriter(out=name, columns={"x": "int"}) as out:
            for x in range(4):
                out.write({"x": x})
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    runs = [context.Process(target=start, args=(barrier, results, name)) for name in ("first", "second")]
    for run in runs:
        run.start()
    seen = collections.Counter(results.get(timeout=120) for _ in range(2 * ROUNDS))
    for run in runs:
        run.join(60)
    print("mosaicml-streaming", importlib.metadata.version("mosaicml-streaming"))
    print(f"{2 * ROUNDS} datasets, two at a time in folders of their own: {dict(seen)}")
    assert seen["FileExistsError"] > 0 and seen["started"] >= ROUNDS, seen
END
venv/bin/python together.py 2> said.txt || { cat said.txt; exit 1; }
echo "as found"
