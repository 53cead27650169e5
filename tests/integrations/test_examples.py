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


def run(name, *runs):
    """``(folder, steps)`` one after the other; what each ended with: whole weights, and the state."""
    if name == "plain":
        dist.init_process_group("gloo")
    found = [example(name).train(folder, steps) for folder, steps in runs]
    return [
        ({n: (w.full_tensor() if isinstance(w, DTensor) else w).clone() for n, w in weights.items()}, state)
        for weights, state in found
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["plain", "accelerate_loop"])
def test_two_ranks_go_on_from_a_checkpoint(name, tmp_path):
    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    first = launch.call(run, 2, name, (whole, 7), (part, 4), imports=IMPORTS)
    second = launch.call(run, 2, name, (part, 7), imports=IMPORTS)
    assert all(same(first[rank][0], second[rank][0]) for rank in range(2))
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
