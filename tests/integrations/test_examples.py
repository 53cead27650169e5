"""The examples run, and each goes on from its checkpoint bit for bit, with the guard having acted."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.integrations.test_training_state import same
from tests.multiprocess import launch

EXAMPLES = Path(__file__).parents[2] / "examples"
IMPORTS = "torch.distributed.fsdp,torch.distributed.checkpoint,transformers.models.llama.modeling_llama,accelerate,tests.integrations.test_examples"


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(*runs):
    """``(folder, steps)`` one after the other; what each ended with."""
    dist.init_process_group("gloo")
    ended = []
    for folder, steps in runs:
        weights, fp8 = example("plain").train(folder, steps)
        whole = {n: (w.full_tensor() if isinstance(w, DTensor) else w).clone() for n, w in weights.items()}
        ended.append((whole, fp8))
    return ended


def accelerated(*runs):
    ended = []
    for folder, steps in runs:
        weights, guard = example("accelerate_loop").train(folder, steps)
        ended.append(({n: w.clone() for n, w in weights.items()}, guard.state_dict()))
    return ended


@pytest.mark.multiprocess
@pytest.mark.parametrize("run", [plain, accelerated])
def test_two_ranks_go_on_from_a_checkpoint(run, tmp_path):
    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    first = launch.call(run, 2, (whole, 7), (part, 4), imports=IMPORTS)
    second = launch.call(run, 2, (part, 7), imports=IMPORTS)
    for rank in range(2):
        (expected, _), (resumed,) = first[rank], second[rank]
        assert same(expected, resumed)
    assert "high_precision" in repr(second[0])


@pytest.mark.filterwarnings(
    "ignore::FutureWarning:(transformers|accelerate)[.]",
    "ignore::UserWarning:(transformers|accelerate|torch)[.]",
)
def test_trainer_goes_on_from_its_last_checkpoint(tmp_path):
    train = example("trainer").train
    whole = train(str(tmp_path / "whole"))
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "part" / "checkpoint-4")
    resumed = train(str(tmp_path / "part"))
    assert resumed.state.global_step == whole.state.global_step == 6
    assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))


def test_each_example_is_the_code_of_its_section():
    page = (EXAMPLES.parent / "docs" / "trainers.md").read_text()
    assert set(re.findall(r'^--8<-- "examples/(.+)"$', page, re.M)) == {
        path.name for path in EXAMPLES.glob("*.py")
    }
