"""The mechanisms of the fifteenth half harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from mechanisms.fifteenth import ExpertCentroids, OutputGradientsUnread, SkipsMerged, TailsGrow

from tests.benchmarks.guard.test_mechanisms_later import assert_harms_fp8_alone

FOG = {"variant": "fog-opt", "num_hidden_layers": 1}
MIXTURE = {"kind": "mixture", "num_hidden_layers": 1}
MPT = {"kind": "mpt", "n_layers": 1}


@pytest.mark.parametrize(
    ("make", "grown", "fields", "recipe", "attention"),
    [
        (lambda size: SkipsMerged("*.blocks.*_proj", size), 30.0, MPT, "current", False),
        (lambda size: TailsGrow("*.layers.*_proj", size), 100.0, FOG, "block", False),
        (lambda size: OutputGradientsUnread("*.self_attn", size, 6), 300.0, FOG, "current", True),
        (lambda size: ExpertCentroids("*.block_sparse_moe", size), 300.0, MIXTURE, "current", False),
    ],
    ids=["skips", "tails", "gradients", "experts"],
)
def test_what_grows_harms_fp8_alone(make, grown, fields, recipe, attention):
    assert_harms_fp8_alone(make, grown, fields, recipe, attention, felt=1e-2)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda size: SkipsMerged("*.blocks.*_proj", size), MPT),
        (lambda size: TailsGrow("*.layers.*_proj", size), FOG),
        (lambda size: OutputGradientsUnread("*.self_attn", size, 6), FOG),
        (lambda size: ExpertCentroids("*.block_sparse_moe", size), MIXTURE),
    ],
    ids=["skips", "tails", "gradients", "experts"],
)
def test_weights_are_trained_as_if_nothing_had_happened(make, fields):
    def losses(rate: float) -> torch.Tensor:
        case = Case(
            name="x", label="healthy", about="", model=fields, steps=6,
            mechanism=lambda: make(lambda step: rate * step),
        )  # fmt: skip
        return torch.tensor(train.train(case, "high").losses)

    torch.testing.assert_close(losses(0.5), losses(0.0), rtol=1e-3, atol=1e-3)


def _called(model, name: str, of) -> torch.Tensor:
    """What ``of(inputs, outputs)`` is of the module ``name`` when ``model`` reads 4 rows; hooks of before are seen."""
    seen = []
    module = dict(model.named_modules())[name]
    module.register_forward_hook(lambda module, args, output: seen.append(of(args, output).detach()) and None)
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    model.train()(input_ids=ids, use_cache=False)
    return seen[0]


def test_weights_gain_on_the_diagonal_alone_whatever_their_shape():
    model = train.Model(Case(name="x", label="healthy", about="", model=MPT)).model
    mechanism = SkipsMerged("*.blocks.*_proj", lambda step: 2.0)
    weights = [m.weight for name, m in model.named_modules() if "blocks" in name and name.endswith("_proj")]
    assert {tuple(weight.shape) for weight in weights} == {(64, 64), (128, 64), (64, 128)}
    before = [weight.detach().clone() for weight in weights]
    mechanism.install(model)
    mechanism.step(0, model)
    for weight, calm in zip(weights, before, strict=True):
        torch.testing.assert_close((weight - calm).detach(), 2.0 * torch.eye(*weight.shape))


def test_tails_are_heavier_and_no_channel_sticks_out():
    def kurtosis(x: torch.Tensor) -> float:
        return float(x.pow(4).mean() / x.square().mean().square())

    name = "model.layers.0.mlp.down_proj"
    model = train.Model(Case(name="x", label="healthy", about="", model=FOG)).model
    calm = _called(model, name, lambda args, output: args[0])
    mechanism = TailsGrow("*.layers.*_proj", lambda step: 100.0)
    mechanism.install(model)
    mechanism.step(0, model)
    grown = _called(model, name, lambda args, output: args[0])
    assert kurtosis(grown) > 3 * kurtosis(calm)
    torch.testing.assert_close(grown.sign(), calm.sign())
    rows = grown.square().mean((0, 1)).sqrt()
    assert float(rows.max() / rows.median()) < 10.0


def test_gradients_grow_where_values_are_zero():
    model = train.Model(Case(name="x", label="healthy", about="", model=FOG)).model
    attention = model.model.layers[0].self_attn
    d, kv = attention.head_dim, attention.kv_heads
    mechanism = OutputGradientsUnread("*.self_attn", lambda step: 100.0, 6)
    mechanism.install(model)
    mechanism.step(0, model)
    name = "model.layers.0.self_attn.qkv_proj"
    values = _called(model, name, lambda args, output: output[..., -kv * d :]).unflatten(-1, (kv, d))
    assert int(torch.linalg.matrix_rank(values.flatten(0, 2), rtol=1e-4)) == d - 6
    x = torch.randn(4, 32, attention.heads * d, requires_grad=True)
    attention.o_proj(x).sum().backward()
    grad = x.grad.unflatten(-1, (attention.heads, d))
    share = grad @ torch.linalg.svd(values.flatten(0, 2))[2][: d - 6].T
    assert float(share.norm() / grad.norm()) < 0.1


def test_experts_read_their_row_of_the_router_and_the_router_does_not():
    model = train.Model(Case(name="x", label="healthy", about="", model=MIXTURE)).model
    block = "model.layers.0.block_sparse_moe"
    routed = _called(model, f"{block}.gate", lambda args, output: output)
    mechanism = ExpertCentroids("*.block_sparse_moe", lambda step: 100.0)
    mechanism.install(model)
    mechanism.step(0, model)
    torch.testing.assert_close(_called(model, f"{block}.gate", lambda args, output: output), routed)
    rows = dict(model.named_modules())[block].gate.weight
    for i in (0, 3):
        read = _called(model, f"{block}.experts.{i}.w1", lambda args, output: args[0])
        assert float(torch.cosine_similarity(read, rows[i], -1).min()) > 0.99
