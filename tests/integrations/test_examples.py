"""The examples run, and each goes on from its checkpoint bit for bit, with the guard having acted."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor

from tests.integrations.test_training_state import same
from tests.multiprocess import launch
from tests.multiprocess.run_trainer import shard_on_cpu

EXAMPLES = Path(__file__).parents[2] / "examples"
IMPORTS = "torch.distributed.fsdp,torch.distributed.checkpoint,transformers.models.llama.modeling_llama,accelerate,tests.integrations.test_examples"

LOADS_SHARDED = pytest.mark.skipif(
    importlib.metadata.version("accelerate").startswith("1.8."),
    reason="Accelerate 1.8 loads no sharded optimizer under FSDP2",
)


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}  # fmt: skip


def run(name, sharded, *runs):
    """``(folder, steps)`` one after the other; what each ended with: whole weights, and the state."""
    if name == "plain":
        dist.init_process_group("gloo")
    elif sharded:
        os.environ |= FSDP2
        PartialState(cpu=True)
        shard_on_cpu()
    found = [example(name).train(folder, steps) for folder, steps in runs]
    if name == "accelerate_loop":
        assert (AcceleratorState().distributed_type == "FSDP") == sharded
    return [
        ({n: (w.full_tensor() if isinstance(w, DTensor) else w).clone() for n, w in weights.items()}, state)
        for weights, state in found
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "ranks", "sharded"),
    [
        pytest.param("plain", 1, True, marks=pytest.mark.full),
        ("plain", 2, True),
        pytest.param("accelerate_loop", 1, False, marks=pytest.mark.full),
        ("accelerate_loop", 2, False),
        pytest.param("accelerate_loop", 2, True, marks=LOADS_SHARDED),
    ],
)
def test_a_run_goes_on_from_its_checkpoint(name, ranks, sharded, tmp_path):
    whole, part = str(tmp_path / "whole"), str(tmp_path / "part")
    first = launch.call(run, ranks, name, sharded, (whole, 7), (part, 4), imports=IMPORTS)
    second = launch.call(run, ranks, name, sharded, (part, 7), imports=IMPORTS)
    assert all(same(first[rank][0], second[rank][0]) for rank in range(ranks))
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


def test_both_sides_of_rollouts_round_alike():
    engine, alike, float_scales = example("rollout").train(2)
    assert alike == 0.0 < float_scales
    assert engine["model.layers.0.mlp.up_proj.weight"].element_size() == 1


def test_each_example_is_the_code_of_its_page():
    docs = EXAMPLES.parent / "docs"
    pages = "".join(page.read_text() for page in (docs / "trainers").glob("*.md"))
    shown = set(re.findall(r"^\[`examples/(.+)`\]\(\.\./\.\./examples/\1\)$", pages, re.M))
    named = {
        n
        for page in docs.glob("*.md")
        for n in re.findall(r"`(?:python )?examples/(\w+\.py)", page.read_text())
    }
    assert "published_runs.py" in named
    assert shown == {path.name for path in EXAMPLES.glob("*.py")} - named
