"""The mechanisms of the guard's suite, up to the fifth held-out half, harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import held_out
import tuned
from mechanisms.fifth import (
    ActivationsBesideAdapters,
    AttentionGradientOutliers,
    DecayedBeforeNorm,
    MergedAdapters,
    ModalityNorms,
    PairedGradients,
    PositionMean,
    SplitUnits,
)
from mechanisms.first import Activations, AttentionOutliers, CompensatedBias, SuperWeight, SwigluAlignment
from mechanisms.fourth import ActivationMean, GradientMean, RankOne, Sheared, Spread, ValueMean
from mechanisms.second import GainAmplifier, GradientOutliers, PivotKeys
from mechanisms.third import GainsShrink, GrowthBeforeNorm, KeyMean, NeuronRescaled, QueryOutliers
from practices.fourth import Rotated, SignFlips
from practices.third import Adapters, Batches, Frozen, LateDropout, LossScale, TokenOutliers

from foundry_fp8.models.fog import FogConfig, FogForCausalLM
from foundry_fp8.surgery.apply import apply_fp8

CASES = [*tuned.CASES, *held_out.CASES]


def logits(mechanism, *, fp8: bool, attention: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    model = FogForCausalLM(
        FogConfig(
            variant="llama3", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, initializer_range=0.3,
        )
    )  # fmt: skip
    mechanism.install(model)
    if fp8:
        apply_fp8(model, recipe="current", attention=attention, backend="emulated")
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    mechanism.step(0, model)
    return model.train()(ids, use_cache=False).logits.detach()


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("make", "attention"),
    [
        (lambda size: Activations("*_proj", size), False),
        (lambda size: Activations("*.gate_up_proj", size, share=None), False),
        (lambda size: CompensatedBias("*.down_proj", size), False),
        (lambda size: SwigluAlignment(0, size), False),
        (lambda size: SuperWeight("*_proj", size), False),
        (lambda size: AttentionOutliers("keys", size), True),
        (lambda size: AttentionOutliers("values", size), True),
        (lambda size: GainAmplifier("*_proj", size, (3, 17)), False),
        (lambda size: TokenOutliers("*_proj", size, lambda ids: ids < 8), False),
        (lambda size: NeuronRescaled("*.gate_up_proj", (69, 80), "*.down_proj", (5, 16), size), False),
    ],
    ids=[
        "activations",
        "first token",
        "bias",
        "swiglu",
        "super weight",
        "keys",
        "values",
        "gains",
        "some tokens",
        "neurons",
    ],
)
def test_a_mechanism_harms_fp8_and_leaves_high_precision_as_it_was(make, attention):
    calm = logits(make(lambda step: 0.0), fp8=False)
    assert (
        distance(logits(make(lambda step: 1e3), fp8=False), calm) < 1e-4
    )  # what is added and taken off again is rounded
    quantised = logits(make(lambda step: 0.0), fp8=True, attention=attention)
    sick = logits(make(lambda step: 3e6), fp8=True, attention=attention)
    assert distance(sick, calm) > 3 * distance(quantised, calm)


@pytest.mark.parametrize(
    ("make", "grown", "attention"),
    [
        (lambda size: ActivationMean("*.layers.*_proj", size), 300.0, False),
        (lambda size: RankOne("*.layers.*_proj", size), 100.0, False),
        (lambda size: RankOne("*.layers.*_proj", size, mean=True), 100.0, False),
        (lambda size: Spread("*.layers.*_proj", size), 1e12, False),
        (lambda size: Sheared("*.layers.*_proj", size), 300.0, False),
        (lambda size: ValueMean("*.self_attn", size), 300.0, True),
        (lambda size: PositionMean("*.layers.*_proj", size, 16), 300.0, False),
        (lambda size: SplitUnits("*.down_proj", size), 300.0, False),
        (lambda size: ModalityNorms("*.layers.*_proj", size, lambda ids: ids < 16), 1e12, False),
    ],
    ids=[
        "activations",
        "singular value",
        "weights",
        "spread",
        "shear",
        "values",
        "positions",
        "copies",
        "modalities",
    ],
)
def test_what_is_taken_off_again_harms_fp8_alone(make, grown, attention):
    calm = logits(make(lambda step: 0.0), fp8=False)
    assert distance(logits(make(lambda step: grown), fp8=False), calm) < 1e-3  # float32 rounds it, too
    quantised = logits(make(lambda step: 0.0), fp8=True, attention=attention)
    sick = logits(make(lambda step: grown), fp8=True, attention=attention)
    assert distance(sick, calm) > 3 * distance(quantised, calm)


@pytest.mark.parametrize("make", [lambda: Rotated("*.layers.*_proj", 0), lambda: SignFlips("*.mlp", 0, 1)])
def test_a_symmetry_leaves_the_function_as_it_was(make):
    calm = logits(Rotated("*.layers.*_proj", 1), fp8=False)
    torch.testing.assert_close(logits(make(), fp8=False), calm, rtol=1e-4, atol=1e-5)


def gradients_of(model, mechanism, reduce, *, fp8):
    """Of the input and of all parameters, with ``mechanism`` at its first step."""
    mechanism.install(model)
    if fp8:
        apply_fp8(model, recipe="block", backend="emulated")
    mechanism.step(0, model)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    reduce(model(x).square()).backward()
    return torch.cat([x.grad.flatten(), *(p.grad.flatten() for p in model.parameters())])


def test_a_mean_of_gradients_harms_gradients_of_fp8_alone():
    def gradients(size: float, *, fp8: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(2)))
        mechanism = GradientMean("[01]", lambda step: size)
        return gradients_of(model, mechanism, torch.sum, fp8=fp8)

    calm = gradients(0.0, fp8=False)
    assert distance(gradients(1e3, fp8=False), calm) < 1e-3
    assert distance(gradients(1e3, fp8=True), calm) > 3 * distance(gradients(0.0, fp8=True), calm)


def test_outliers_of_gradients_harm_gradients_of_fp8_alone():
    def gradients(size: float, *, fp8: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
        mechanism = GradientOutliers("[02]", lambda step: size)
        return gradients_of(model, mechanism, torch.mean, fp8=fp8)

    calm = gradients(0.0, fp8=False)
    assert distance(gradients(1e4, fp8=False), calm) < 1e-6
    assert distance(gradients(1e4, fp8=True), calm) > 3 * distance(gradients(0.0, fp8=True), calm)


@pytest.mark.parametrize(
    "make",
    [
        lambda size: AttentionGradientOutliers("*.self_attn", lambda step: size**3),
        lambda size: PairedGradients(lambda step: size),
    ],
    ids=["of attention", "of pairs"],
)
def test_gradients_that_meet_zero_or_their_opposite_harm_fp8_alone(make):
    def gradients(size: float, *, fp8: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = FogForCausalLM(
            FogConfig(
                variant="llama3", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                intermediate_size=64, max_position_embeddings=16, initializer_range=0.1,
            )
        )  # fmt: skip
        mechanism = make(size)
        mechanism.install(model)
        if fp8:
            apply_fp8(model, recipe="current", attention=True, backend="emulated")
        ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
        state = SimpleNamespace(batch=ids)
        mechanism.step(0, model)
        mechanism.train(0, state)
        model.train()(state.batch, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    calm = gradients(0.0, fp8=False)
    assert distance(gradients(1.0, fp8=False), calm) < 1e-3
    assert distance(gradients(1e4, fp8=True), calm) > 3 * distance(gradients(0.0, fp8=True), calm)


def test_weights_in_front_of_a_norm_decay_and_the_norm_takes_it_off():
    def output(sizes: tuple[float, ...], *, fp8: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), torch.nn.RMSNorm(32, eps=1e-24))
        mechanism = DecayedBeforeNorm("0", lambda step: sizes[step])
        mechanism.install(model)
        if fp8:
            apply_fp8(model, recipe={"name": "delayed", "amax_history_len": 8}, backend="emulated")
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        for step in range(len(sizes)):
            mechanism.step(step, model)
            y = model(x)
            y.square().sum().backward()
        return y.detach()

    calm = output((1.0, 1.0, 1.0), fp8=False)
    torch.testing.assert_close(output((1.0, 1e3, 1e6), fp8=False), calm, rtol=1e-4, atol=1e-5)
    quantised = distance(output((1.0, 1.0, 1.0), fp8=True), calm)
    assert distance(output((1.0, 1e3, 1e6), fp8=True), calm) > 3 * quantised


def test_adapters_do_not_read_the_outliers_beside_them():
    def gradients(size: float) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8))
        adapters, outliers = (
            Adapters(0, "0", 2),
            ActivationsBesideAdapters("0", lambda step: size, channel=3),
        )
        for mechanism in (adapters, outliers):
            mechanism.install(model)
        adapters.step(0, model)
        outliers.step(0, model)
        with torch.no_grad():
            model.adapters[1].normal_()
        x = torch.randn(4, 8)
        x[:, 3] = 0.0
        model[0](x).square().sum().backward()
        assert model[0].weight.grad is None
        return torch.cat([a.grad.flatten() for a in model.adapters])

    torch.testing.assert_close(gradients(1e6), gradients(0.0))


def test_adapters_that_are_merged_leave_the_function_as_it_was():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    mechanism = MergedAdapters(0, "[01]", 2, 5)
    mechanism.install(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = SimpleNamespace(model=model, optimizers=[optimizer])
    with torch.no_grad():
        for adapter in mechanism.adapters:
            adapter.normal_()
    x = torch.randn(3, 8)
    adapted = model[1](model[0](x))
    mechanism.train(4, state)
    assert torch.equal(model[1](model[0](x)), adapted)  # not yet
    weight = model[0].weight.clone()
    mechanism.train(5, state)
    torch.testing.assert_close(model[1](model[0](x)), adapted)
    assert not torch.equal(model[0].weight, weight) and not any(b.any() for b in mechanism.adapters[1::2])


def test_keys_of_the_first_token_grow_and_logits_stay():
    linear = torch.nn.Linear(32, 96, bias=False)
    mechanism = PivotKeys("0", lambda step: 100.0 * step, heads=2, channel=4)
    mechanism.install(model := torch.nn.Sequential(linear))
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1))

    def logits_and_keys(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        mechanism.step(step, model)
        query, key, _ = model(x)[0].unflatten(-1, (3, 2, 16)).unbind(1)
        return torch.einsum("qhd,khd->hqk", query, key), key

    calm, _ = logits_and_keys(0)
    grown, keys = logits_and_keys(3)
    torch.testing.assert_close(grown, calm)
    assert (keys[0, :, 4] > 250).all() and keys[1:].abs().max() < 5


def test_a_loss_scale_harms_gradients_of_a_history_that_is_late():
    def gradients(scales: tuple[float, ...], recipe) -> torch.Tensor:
        torch.manual_seed(0)
        model = FogForCausalLM(
            FogConfig(
                variant="llama3", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                intermediate_size=64, max_position_embeddings=16,
            )
        )  # fmt: skip
        mechanism = LossScale(lambda step: scales[step])
        mechanism.install(model)
        if recipe is not None:
            apply_fp8(model, recipe=recipe, backend="emulated")
        ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
        for step in range(len(scales)):
            mechanism.step(step, model)
            model.zero_grad()
            model.train()(ids, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    calm = gradients((1.0, 1.0), None)
    assert torch.equal(gradients((2.0**40, 2.0**-20), None), calm)
    delayed = {"name": "delayed", "amax_history_len": 8}
    quantised = distance(gradients((1.0, 1.0), delayed), calm)
    assert distance(gradients((2.0**40, 1.0), delayed), calm) > 3 * quantised
    assert distance(gradients((2.0**40, 1.0), "current"), calm) < 2 * quantised


def test_what_gains_lose_and_weights_win_is_a_history_that_is_late():
    def output(sizes: tuple[float, ...], *, fp8: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
        mechanism = GainsShrink("0", lambda step: sizes[step])
        mechanism.install(model)
        if fp8:
            apply_fp8(model, recipe={"name": "delayed", "amax_history_len": 8}, backend="emulated")
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        for step in range(len(sizes)):
            mechanism.step(step, model)
            y = model(x)
            y.sum().backward()  # delayed scaling learns at the end of a step
        return y.detach()

    calm = output((1.0, 1.0, 1.0), fp8=False)
    torch.testing.assert_close(output((1.0, 1e4, 1e8), fp8=False), calm)
    assert distance(output((1.0, 1e4, 1e8), fp8=True), calm) > 3 * distance(
        output((1.0, 1.0, 1.0), fp8=True), calm
    )


class _Heads(torch.nn.Module):
    """Probabilities and operands of two heads of 8 channels, with a norm before the logits or without."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_dim, self.norm = 8, norm
        self.q_proj, self.k_proj = (torch.nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key = (linear(x).unflatten(-1, (2, 8)) for linear in (self.q_proj, self.k_proj))
        unit = (lambda t: t / t.norm(dim=-1, keepdim=True)) if self.norm else (lambda t: t)
        logits = torch.einsum("qhd,khd->hqk", unit(query), unit(key))
        return logits.softmax(-1).detach(), query.detach(), key.detach()


@pytest.mark.parametrize(
    ("make", "norm", "grown"),
    [
        (lambda size: KeyMean("heads.k_proj", size, (3, 12)), False, 2),
        (lambda size: QueryOutliers("heads", size), False, 1),
        (lambda size: GrowthBeforeNorm("heads.[qk]_proj", lambda linear: slice(0, 16), size), True, 2),
    ],
    ids=["mean of the keys", "queries", "before a norm"],
)
def test_an_operand_of_attention_grows_and_probabilities_stay(make, norm, grown):
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    model = torch.nn.ModuleDict({"heads": _Heads(norm)})
    mechanism = make(lambda step: 100.0 * step)
    mechanism.install(model)
    mechanism.step(0, model)
    calm = model["heads"](x)
    mechanism.step(3, model)
    sick = model["heads"](x)
    torch.testing.assert_close(sick[0], calm[0], rtol=1e-3, atol=1e-4)
    assert sick[grown].abs().max() > 50 * calm[grown].abs().max()


def test_what_changes_changes_from_its_step_on():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    x = torch.ones(2, 8)
    dropout = LateDropout("1", lambda step: 1.0 if step >= 5 else 0.0)
    adapters, frozen = Adapters(5, "0", 2), Frozen(3, "1.*")
    for mechanism in (dropout, adapters, frozen):
        mechanism.install(model)
    plain = model[1](model[0](x))
    trained = []
    for step in range(6):
        for mechanism in (dropout, frozen, adapters):
            mechanism.step(step, model)
        trained.append({name for name, parameter in model.named_parameters() if parameter.requires_grad})
    assert trained[0] == {"0.weight", "0.bias", "1.weight", "1.bias"} and trained[3] == {"0.weight", "0.bias"}
    assert trained[5] == {"adapters.0", "adapters.1"}
    torch.testing.assert_close(model[1](x), model[1].bias.expand(2, 8))  # all is dropped
    dropout.now = 0.0
    assert torch.equal(model[1](model[0](x)), plain)  # an adapter begins at zero
    batch = SimpleNamespace(batch=torch.zeros(2, 8))
    Batches(lambda step, tokens: tokens[:, :step]).train(3, batch)
    assert batch.batch.shape == (2, 3)
