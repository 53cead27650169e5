"""One model of several recipes beside everything else: gradients against float64 and against the same numerics alone, and checkpoints."""

import pytest

from tests.combinations.running import _run, interpreted
from tests.combinations.space import Case
from tests.combinations.test_pairs import IMPORTS, wrong
from tests.combinations.test_state import KINDS
from tests.combinations.test_state import check as check_resumes
from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess
CASES = (
    Case(fp8="policy", checkpoint="full", accumulation="two", dtype="bfloat16", evaluate=True, attention="delayed"),
    Case(fp8="policy", model="plain", wrapper="ddp", lora=True, accumulation="two-unsynchronised", evaluate=True),
    Case(fp8="policy", model="odd", wrapper="fsdp2", checkpoint="selective", init="meta", compression="exact"),
    Case(fp8="native-policy", wrapper="fsdp2", dtype="bfloat16", lora=True, checkpoint="full"),
)  # fmt: skip


def run_all(cases):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = []
    for case in cases:
        with interpreted(case):
            found.append(_run(case))
        dist.barrier()
    return found


@pytest.mark.parametrize(
    "cases", [CASES[:3], pytest.param(CASES[3:], marks=pytest.mark.full)], ids=["emulated", "native"]
)
def test_gradients_are_those_of_its_numerics_under_ddp_fsdp2_recompute_accumulation_and_lora(cases):
    ranks = launch.call(run_all, 2, cases, imports=IMPORTS)
    problems = {str(case): wrong(case, [rank[i] for rank in ranks]) for i, case in enumerate(cases)}
    assert not any(problems.values()), problems


@pytest.mark.full
def test_resuming_it_in_every_way(tmp_path):
    check_resumes(["fp8 policy", "fp8 measured"], KINDS, tmp_path, worlds=[4])
