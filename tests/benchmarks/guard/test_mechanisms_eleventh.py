"""The mechanisms of the eleventh half harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from mechanisms.base import Several
from mechanisms.eleventh import (
    QueryKeyChannelsExchange,
    ScatteredGradients,
    SharedAmax,
    StretchedBasis,
    TokenMeans,
)
from mechanisms.seventh import ChannelsExchange

from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.surgery.apply import apply_fp8
from tests.benchmarks.guard.test_mechanisms import distance
from tests.benchmarks.guard.test_mechanisms_later import assert_harms_fp8_alone

LLAMA = {"num_hidden_layers": 1}
MPT = {"kind": "mpt", "n_layers": 1}
E4M3 = {"name": "current", "fp8_format": "e4m3"}


@pytest.mark.parametrize(
    ("make", "grown", "fields", "recipe"),
    [
        (lambda size: ScatteredGradients("*.layers.*_proj", size), 3.0, LLAMA, E4M3),
        (lambda size: TokenMeans("*.ffn.*_proj", size), 100.0, MPT, "mxfp8"),
    ],
    ids=["gradients", "tokens"],
)
def test_what_grows_harms_fp8_alone(make, grown, fields, recipe):
    assert_harms_fp8_alone(make, grown, fields, recipe, attention=False, felt=1e-3)


def logits(mechanism, recipe, *, attention=False, steps=1, fields=LLAMA) -> torch.Tensor:
    """Of the last of some batches, of a model whose attention is not even."""
    model = train.Model(Case(name="x", label="healthy", about="", model=fields)).model.train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "qkv_proj" in name:
                weight *= 8.0
    mechanism.install(model)
    if recipe is not None:
        apply_fp8(model, recipe=recipe, attention=attention, backend="emulated")
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        mechanism.step(step, model)
        out = model(input_ids=ids, use_cache=False).logits
    return out.detach()


def test_channels_of_queries_and_keys_are_lost_to_attention():
    def of(size, recipe):
        mechanism = QueryKeyChannelsExchange("*.self_attn", lambda step: size)
        return logits(mechanism, recipe, attention=True)

    calm = of(1.0, None)
    assert distance(of(1e5, None), calm) < 1e-4
    assert distance(of(1e5, "current"), calm) > 3 * distance(of(1.0, "current"), calm)


def test_a_stretched_basis_is_lost_to_fp8_and_trained_as_if_nothing_had_happened():
    def of(size, recipe):
        return logits(StretchedBasis("*.layers.*_proj", lambda step: size), recipe)

    calm = of(1.0, None)
    assert distance(of(300.0, None), calm) < 1e-3
    assert distance(of(300.0, "current"), calm) > 3 * distance(of(1.0, "current"), calm)

    def trained(size):
        case = Case(
            name="x", label="healthy", about="", model=LLAMA, steps=6,
            mechanism=lambda: StretchedBasis("*.layers.*_proj", lambda step: 1.0 + step * size),
        )  # fmt: skip
        return torch.tensor(train.train(case, "high").losses)

    torch.testing.assert_close(trained(20.0), trained(0.0), rtol=1e-4, atol=1e-4)


def test_weights_are_lost_to_a_scale_that_a_block_shares():
    def of(size, recipe, start=0):
        exchange = ChannelsExchange("*.self_attn.qkv_proj", lambda step: size, even=True)
        return logits(Several(exchange, SharedAmax("*.layers.*", start)), recipe, steps=4)

    recipe = {"name": "delayed", "amax_history_len": 4}
    calm = of(1.0, None)
    assert distance(of(1e7, None), calm) < 1e-4
    assert distance(of(1e7, recipe), calm) > 3 * distance(of(1.0, recipe), calm)
    assert distance(of(1e7, recipe, start=9), calm) < 2 * distance(of(1.0, recipe), calm)


def test_amaxes_are_shared_within_a_block():
    model = train.Model(Case(name="x", label="healthy", about="", model={"kind": "mixture"})).model.train()
    apply_fp8(model, recipe={"name": "delayed", "amax_history_len": 4}, backend="emulated")
    model(input_ids=torch.arange(64).view(2, 32), use_cache=False)
    SharedAmax("*.layers.*", 0).step(0, model)
    found = []
    for block in model.model.layers:
        linears = [module for module in block.modules() if isinstance(module, FP8Linear)]
        amaxes = {float(module.slots["w"].amax) for module in linears}
        assert len(linears) == 16
        assert len(amaxes) == 1
        found += amaxes
    assert len(set(found)) == 2
