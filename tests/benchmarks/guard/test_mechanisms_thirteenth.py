"""The mechanisms of the thirteenth half harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from mechanisms.thirteenth import (
    ClassGradients,
    NormGainsGrowWithoutMomentum,
    OutputsStretched,
    ValuesStretched,
    WeightsOscillate,
)

from tests.benchmarks.guard.test_mechanisms_later import assert_harms_fp8_alone

LLAMA = {"num_hidden_layers": 1}
OPT = {"kind": "opt", "num_hidden_layers": 1}
MIXTURE = {"kind": "mixture", "num_hidden_layers": 1}
MPT = {"kind": "mpt", "n_layers": 1}
NORMS = [("*.norm_1", "*.Wqkv"), ("*.norm_2", "*.up_proj")]


@pytest.mark.parametrize(
    ("make", "grown", "fields", "recipe", "attention"),
    [
        (lambda size: ClassGradients("*.fc[12]", size), 1.0, OPT, "current", False),
        (lambda size: ValuesStretched("*.self_attn", size), 3e3, LLAMA, "current", True),
        (lambda size: WeightsOscillate("*.w[123]", size), 3.0, MIXTURE, "mxfp8", False),
        (lambda size: OutputsStretched("*.layers.*_proj", size), 1e3, LLAMA, "current", False),
    ],
    ids=["gradients", "values", "weights", "outputs"],
)
def test_what_grows_harms_fp8_alone(make, grown, fields, recipe, attention):
    assert_harms_fp8_alone(make, grown, fields, recipe, attention, felt=1e-2)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda size: ClassGradients("*.fc[12]", size), OPT),
        (lambda size: ValuesStretched("*.self_attn", size), LLAMA),
        (lambda size: WeightsOscillate("*.w[123]", size), MIXTURE),
        (lambda size: OutputsStretched("*.layers.*_proj", size), LLAMA),
    ],
    ids=["gradients", "values", "weights", "outputs"],
)
def test_weights_are_trained_as_if_nothing_had_happened(make, fields):
    def losses(rate: float) -> torch.Tensor:
        case = Case(
            name="x", label="healthy", about="", model=fields, steps=6,
            mechanism=lambda: make(lambda step: rate * step),
        )  # fmt: skip
        return torch.tensor(train.train(case, "high").losses)

    torch.testing.assert_close(losses(0.5), losses(0.0), rtol=1e-3, atol=1e-3)


def test_gradients_of_a_class_are_moved_alike():
    model = train.Model(Case(name="x", label="healthy", about="", model=OPT)).model.train()
    mechanism = ClassGradients("*.fc1", lambda step: 1.0)
    seen = []
    linear = next(module for name, module in model.named_modules() if name.endswith("fc1"))
    # Before the mechanism's hook, so that the gradient is the one that the linear gets.
    linear.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: seen.append(grad)) and None
    )
    mechanism.install(model)
    mechanism.step(0, model)
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    gradients, follows = seen[0].reshape(-1, linear.out_features), ids.roll(-1, dims=1).flatten()
    for token in follows.unique():
        of_class = gradients[follows == token]
        assert float((of_class - of_class[0]).abs().max()) < 0.05
    assert 0.9 < float(gradients.std()) < 1.1


def test_weights_swing_to_the_other_side():
    model = train.Model(Case(name="x", label="healthy", about="", model=LLAMA)).model
    weight = model.model.layers[0].mlp.down_proj.weight
    mechanism = WeightsOscillate("*.down_proj", lambda step: 2.0 if step < 2 else 0.0)
    mechanism.install(model)
    before = weight.detach().clone()
    moved = []
    for step in range(3):
        mechanism.step(step, model)
        moved.append((weight - before).detach())
    torch.testing.assert_close(moved[1], -moved[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moved[2], torch.zeros_like(before), rtol=0, atol=1e-5)
    assert int(torch.linalg.matrix_rank(moved[0], rtol=1e-3)) == 4
    assert 1.0 < float(moved[0].std()) < 4.0


def test_no_channel_of_stretched_outputs_sticks_out():
    model = train.Model(Case(name="x", label="healthy", about="", model=LLAMA)).model
    mechanism = OutputsStretched("*.down_proj", lambda step: 1e3)
    mechanism.install(model)
    mechanism.step(0, model)
    rows = model.model.layers[0].mlp.down_proj.weight.detach().norm(dim=1)
    assert float(rows.max() / rows.median()) < 10.0


def test_what_shrinks_behind_gains_is_not_moved_by_its_momentum():
    def losses(rate: float) -> torch.Tensor:
        case = Case(
            name="x", label="healthy", about="", model=MPT, steps=60,
            mechanism=lambda: NormGainsGrowWithoutMomentum(
                NORMS, lambda step: 0.0 if step < 10 else max(1.001, rate ** (step - 10)), (4, 29, 50)
            ),
        )  # fmt: skip
        return torch.tensor(train.train(case, "high").losses)

    torch.testing.assert_close(losses(1.3), losses(1.0), rtol=2e-2, atol=2e-2)
