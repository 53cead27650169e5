"""The mechanisms of the twelfth half harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from mechanisms.twelfth import AmaxOfShard, CommonOutputs, NullSpaceGrows, ScatteredActivations

from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.surgery.apply import apply_fp8
from tests.benchmarks.guard.test_mechanisms import distance
from tests.benchmarks.guard.test_mechanisms_later import assert_harms_fp8_alone

LLAMA = {"num_hidden_layers": 1}
OPT = {"kind": "opt", "num_hidden_layers": 1}
MPT = {"kind": "mpt", "n_layers": 1}
DELAYED = {"name": "delayed", "amax_history_len": 4}


@pytest.mark.parametrize(
    ("make", "grown", "fields", "recipe"),
    [
        (lambda size: CommonOutputs("*.fc2", size), 10.0, OPT, "current"),
        (lambda size: NullSpaceGrows("*.layers.*_proj", size), 30.0, LLAMA, "current"),
        (lambda size: ScatteredActivations("*.mlp.down_proj", size, 1 / 64), 100.0, LLAMA, "mxfp8"),
    ],
    ids=["outputs", "null space", "activations"],
)
def test_what_grows_harms_fp8_alone(make, grown, fields, recipe):
    assert_harms_fp8_alone(make, grown, fields, recipe, attention=False, felt=1e-3)


def grown(make, steps: int, fields) -> list[torch.Tensor]:
    """Losses of a few steps in high precision, in which ``make``'s size grows, and in which it does not."""

    def losses(rate: float) -> torch.Tensor:
        case = Case(
            name="x", label="healthy", about="", model=fields, steps=steps,
            mechanism=lambda: make(lambda step: 1.0 + rate * step),
        )  # fmt: skip
        return torch.tensor(train.train(case, "high").losses)

    return [losses(0.5), losses(0.0)]


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda size: CommonOutputs("*.fc2", size), OPT),
        (lambda size: NullSpaceGrows("*.layers.*_proj", size), LLAMA),
        (lambda size: AmaxOfShard("*.blocks.*_proj", size), MPT),
    ],
    ids=["outputs", "null space", "shard"],
)
def test_weights_are_trained_as_if_nothing_had_happened(make, fields):
    sick, calm = grown(make, 6, fields)
    torch.testing.assert_close(sick, calm, rtol=1e-3, atol=1e-3)


def test_no_weight_of_a_null_space_sticks_out():
    model = train.Model(Case(name="x", label="healthy", about="", model=LLAMA)).model
    mechanism = NullSpaceGrows("*.layers.*_proj", lambda step: 10.0)
    mechanism.install(model)
    mechanism.step(0, model)
    weight = model.model.layers[0].mlp.down_proj.weight
    assert 9.0 < float(weight.std()) < 11.0
    assert float(weight.abs().max() / weight.std()) < 6.0


def of_a_shard(size: float, recipe) -> tuple[torch.Tensor, torch.nn.Module]:
    """The logits of the last of some batches, and the model."""
    model = train.Model(Case(name="x", label="healthy", about="", model=MPT)).model.train()
    mechanism = AmaxOfShard("*.blocks.*_proj", lambda step: size if step else 1.0)
    mechanism.install(model)
    if recipe is not None:
        apply_fp8(model, recipe=recipe, backend="emulated")
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    for step in range(6):
        mechanism.step(step, model)
        out = model(input_ids=ids, use_cache=False).logits
    return out.detach(), model


def test_channels_beyond_a_shard_are_clipped():
    calm, _ = of_a_shard(1.0, None)
    assert distance(of_a_shard(30.0, None)[0], calm) < 1e-4
    assert distance(of_a_shard(30.0, DELAYED)[0], calm) > 3 * distance(of_a_shard(1.0, DELAYED)[0], calm)
    assert distance(of_a_shard(30.0, "current")[0], calm) < 2 * distance(of_a_shard(1.0, "current")[0], calm)


def test_amaxes_are_those_of_a_shard():
    read = {}
    _, model = of_a_shard(30.0, DELAYED)
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear) and name.endswith("up_proj"):
            module.register_forward_pre_hook(lambda module, args, name=name: read.update({name: args[0]}))
    model(input_ids=torch.arange(64).view(2, 32), use_cache=False)
    assert read
    for name, x in read.items():
        half = x.shape[-1] // 2
        amax = float(model.get_submodule(name).slots["x"].amax)
        assert amax == float(x[..., :half].abs().max())
        assert amax < 0.2 * float(x[..., half:].abs().max())
