"""FSDP2 shards weights that are kept in FP8: forward, gradients and state as of the whole model, at a byte an element."""

from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from tests.multiprocess import launch
from tests.multiprocess.sharded_codes import KINDS, refusals, resumes, trains_alike

pytestmark = pytest.mark.multiprocess
IMPORTS = f"{launch.FSDP},torch.distributed.checkpoint.state_dict"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scales_trains_as_on_one_rank(kind):
    assert all(launch.call(trains_alike, 2, kind, "reshards", imports=IMPORTS))


@pytest.mark.parametrize(
    "option",
    [
        "bf16",
        "checkpointed",
        "hsdp",
        *(pytest.param(o, marks=pytest.mark.full) for o in ("keeps", "cast", "offloaded")),
    ],
)
def test_every_form_of_fsdp2_trains_as_one_rank(option):
    assert all(launch.call(trains_alike, 2, "blocks", option, imports=IMPORTS))


@pytest.mark.parametrize("kind", ["rows", "experts"])
def test_the_last_shards_may_be_short_or_empty(kind):
    assert all(launch.call(trains_alike, 4, kind, "reshards", imports=IMPORTS))


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_a_run_resumes_bit_for_bit(full, tmp_path):
    assert all(launch.call(resumes, 2, Path(tmp_path), full, imports=IMPORTS))


def test_what_would_lose_codes_is_refused():
    assert all(launch.call(refusals, 2, imports=IMPORTS))
