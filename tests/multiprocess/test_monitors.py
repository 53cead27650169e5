"""The four callbacks on two gloo ranks: DDP and FSDP2."""

import json

import pytest

from tests.integration.foundry_runs import make_data
from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.full]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = make_data(tmp_path_factory.mktemp("data"))
    out = tmp_path_factory.mktemp("out")
    launch.run("run_monitors.py", 2, root, out, imports=launch.FOUNDRY)
    both = [json.loads((out / f"rank{r}.json").read_text()) for r in (0, 1)]
    for found in both:
        for name, case in found.items():
            assert "error" not in case, f"{name}: {case['error']}"
    return both


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_four_run_together_from_a_yaml(results, wrapper):
    for found in results:
        case = found[f"all-{wrapper}"]
        assert case["names"] == ["divergence_guard", "fp8_monitor", "kurtosis_monitor", "mfu_monitor"]
        assert case["failed"] == {}
        assert case.get("loss_is_that_of_an_unwatched_run", True)
        assert case["finite"]
        assert 0.3 < case["fp8_share"] < 1


def test_what_is_measured_of_shards_is_what_is_measured_of_whole_gradients(results):
    ddp, fsdp2 = (results[0][f"all-{wrapper}"]["gradient_error"] for wrapper in ("ddp", "fsdp2"))
    assert ddp == results[1]["all-ddp"]["gradient_error"]
    assert ddp[0] == pytest.approx(fsdp2[0], rel=0.1)  # other elements are sampled


def test_what_one_rank_sees_both_act_on(results):
    first, second = (found["outlier-fsdp2"] for found in results)
    assert first["failed"] is None
    assert first == second
    assert "demote" in first["events"]
    assert first["running"]["0.ffn.down_proj"] in ("current", "high_precision")


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_guard_that_breaks_on_one_rank_is_off_on_both_and_nobody_waits(results, when):
    first, second = (found[f"broken-{when}"] for found in results)
    assert "rank 1 failed with RuntimeError: broken on purpose" in first["failed"]
    assert "broken on purpose" in second["failed"]
    assert first["batches"] == second["batches"] == 4
