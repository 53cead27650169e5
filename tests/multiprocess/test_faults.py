import json

import pytest

from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess

REFUSED = {
    "differ": "differs between ranks",
    "unwrapped": "wrapped by neither DDP nor FSDP",
    "ddp_parameters": "DDP gathers no parameters",
    "fsdp_int4": "only shards",
    "fsdp_feedback": "whole gradient on every rank",
    "inter_node": "nothing crosses nodes",
    "ddp_stochastic": "nothing is sharded",
    "no_all_to_all": "does not have",
    "fewer": "reshard_after_forward: <int> exclude each other",
    "divisor": "RuntimeError: A reduce-scatter through foundry_fp8 can sum or average",
}


def test_what_cannot_run_is_an_error_on_every_rank():
    codes, outputs = launch.run("run_faults.py", 4, "all", check=False)
    assert codes == [0] * 4, outputs
    for rank, output in enumerate(outputs):
        results = json.loads(output.split("RESULT ")[1].splitlines()[0])
        assert results["refusals"].keys() == REFUSED.keys()
        for case, said in REFUSED.items():
            assert said in results["refusals"][case], (rank, case, results["refusals"][case])
        # A bound all-gather survives a reload on the rank with padding; without it ranks would send other sizes.
        assert 0 < results["padded_reload"] < 0.05


@pytest.mark.full
def test_compression_on_one_rank_only_and_a_stuck_rank_end_within_the_time_limit_of_the_job():
    """20 s here, where torch gives a new group half an hour: then the test would kill the ranks. The two jobs wait together."""
    ports = launch.free_port(), launch.free_port()
    codes, outputs = launch.run("run_faults.py", 4, "waits", *ports, check=False, timeout=600)
    assert codes[0] == 3 and "ranks [1] did not set it up within 20 s" in outputs[0], (codes, outputs)
    assert codes[1] not in (0, -9), outputs[1]  # it ends by its own error, not by our time limit
    assert codes[2] == 4, (codes, outputs)


def test_a_rank_killed_in_a_backward_ends_the_others_and_a_restart_is_bit_exact(tmp_path):
    checkpoint = str(tmp_path / "checkpoint")
    codes, outputs = launch.run("run_restart.py", 3, checkpoint, "killed", check=False)
    assert codes == [5, -9, 5], (codes, outputs)  # -9 is the kill; the others end by an error of their own
    assert all("ended by:" in outputs[rank] for rank in (0, 2))
    restarted = launch.run("run_restart.py", 3, checkpoint, "restarted")
    assert restarted["bit_exact"] == [True] * 3
    assert restarted["residual"] > 0
