"""The matrix of docs/communication.md: wrapper x what is compressed x fp32, accumulation, resume."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import launch

# Largest error of the gradient's direction: int8 rounds once per shot (5e-3 each with blocks of 32, and a second, weaker
# one through the activations where weights are rounded); e4m3 has 3 mantissa bits (2.4e-2 a pass). FSDP1 rounds norms and
# embeddings too, because its flat parameter mixes them with the matrices.
DIRECTION = {"none": 1e-6, "gradients": 1.5e-2, "parameters": 1e-2, "both": 5e-2}
# Least ratio of uncompressed to sent bytes. FSDP2 leaves the embedding, norms and biases of this small model alone.
LEAST_RATIO = {"gradients": 3.3, "parameters": 1.4, "both": 2.0}


@pytest.mark.multiprocess
def test_every_cell_of_the_matrix():
    results = launch.run("run_wrappers.py", 4)
    assert len(results) == 7
    wrong = []
    for kind, cells in results.items():
        assert {"none/fp32", "gradients/fp32", "gradients/accumulation", "gradients/resume"} <= cells.keys()
        assert ("parameters/resume" in cells) == (kind not in ("ddp", "fsdp1-NO_SHARD"))
        for cell, got in cells.items():
            what, how = cell.split("/")
            if how == "resume":
                replicates = what != "parameters" and kind in (
                    "ddp",
                    "fsdp1-NO_SHARD",
                    "fsdp1-HYBRID_SHARD",
                    "hsdp2",
                )
                if not got["bit_exact"] or (got["residuals"] > 0) != replicates:
                    wrong.append((kind, cell, got))
                continue
            bound = DIRECTION[what] * (2 if what == "parameters" and kind.startswith("fsdp1") else 1)
            ok = abs(got["ratio"] - 1) < max(bound, 1e-6) and got["direction"] < bound and got["same"]
            ok &= got.get("state_exact", True) and got["calls"] > 0
            if what == "none":
                ok &= got["sent"] == got["logical"]
            else:
                ok &= got["direction"] > 1e-4  # something was compressed
                gathers = kind in ("fsdp2", "hsdp2") or ("parameters" in cells and what != "gradients")
                least = 1.1 if gathers and what == "gradients" else LEAST_RATIO[what]
                ok &= got["logical"] / got["sent"] > least
            if not ok:
                wrong.append((kind, cell, got))
    assert not wrong, "\n".join(map(str, wrong))
