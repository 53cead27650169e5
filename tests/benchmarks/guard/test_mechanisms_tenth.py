"""The mechanisms of the tenth half harm FP8 and leave high precision as it was."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from mechanisms.tenth import (
    GatedUnitsAlign,
    GradientSubspace,
    HeadsPart,
    MicrobatchLossScales,
    QueriesAndKeysSheared,
    RunningMeans,
    ScatteredWeights,
)

from foundry_fp8.surgery.apply import apply_fp8
from tests.benchmarks.guard.test_mechanisms import distance
from tests.benchmarks.guard.test_mechanisms_later import assert_harms_fp8_alone

MPT = {"kind": "mpt", "n_layers": 1}
LLAMA = {"num_hidden_layers": 1, "num_key_value_heads": 4}
GATED = {**MPT, "ffn_config": {"ffn_type": "mptglu"}}


@pytest.mark.parametrize(
    ("make", "grown", "fields", "recipe", "attention"),
    [
        (lambda size: GatedUnitsAlign("*.ffn", size, (5, 37, 69, 101)), 1e3, GATED, "mxfp8", False),
        (lambda size: GradientSubspace("*.layers.*_proj", size), 3.0, LLAMA, "current", False),
        (lambda size: ScatteredWeights("*.layers.*_proj", size), 300.0, LLAMA, "current", False),
        (lambda size: QueriesAndKeysSheared("*.attn", size), 100.0, MPT, "current", True),
        (lambda size: RunningMeans("*.layers.*_proj", size), 100.0, LLAMA, "block", False),
    ],
    ids=["units", "gradients", "weights", "basis", "means"],
)  # fmt: skip
def test_what_grows_harms_fp8_alone(make, grown, fields, recipe, attention):
    assert_harms_fp8_alone(make, grown, fields, recipe, attention, felt=1e-3)


def test_heads_that_part_are_lost_to_attention():
    def logits(size: float, recipe: str | None) -> torch.Tensor:
        model = train.Model(Case(name="x", label="healthy", about="", model=LLAMA)).model.train()
        with torch.no_grad():
            model.model.layers[0].self_attn.qkv_proj.weight *= 8.0  # so that attention is not even
        mechanism = HeadsPart("*.self_attn", lambda step: size)
        mechanism.install(model)
        if recipe is not None:
            apply_fp8(model, recipe=recipe, attention=True, backend="emulated")
        mechanism.step(0, model)
        ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
        return model(input_ids=ids, use_cache=False).logits.detach()

    calm = logits(1.0, None)
    assert distance(logits(1e5, None), calm) < 1e-4
    assert distance(logits(1e5, "current"), calm) > 3 * distance(logits(1.0, "current"), calm)


def test_only_the_channels_that_align_change():
    model = train.Model(Case(name="x", label="healthy", about="", model=GATED)).model
    mechanism = GatedUnitsAlign("*.ffn", lambda step: 7.0, (5, 37))
    mechanism.install(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    mechanism.step(0, model)
    ffn = model.transformer.blocks[0].ffn
    torch.testing.assert_close(ffn.gate_proj.weight[[5, 37]], ffn.up_proj.weight[[5, 37]])
    torch.testing.assert_close(ffn.gate_proj.weight[[5, 37]].norm(dim=1), torch.full((2,), 7.0))
    others = [i for i in range(128) if i not in (5, 37)]
    for name, weight in model.named_parameters():
        rows = others if name.endswith(("gate_proj.weight", "up_proj.weight")) else slice(None)
        torch.testing.assert_close(weight[rows], before[name][rows])


def test_microbatches_of_unlike_scales_give_the_same_gradients_in_high_precision():
    def gradients(size: float, recipe: dict | None) -> torch.Tensor:
        """Of the second of two batches of two microbatches, each scaled by the amax of the one before it."""
        torch.manual_seed(0)
        fields = {"kind": "opt", "num_hidden_layers": 1}
        model = train.Model(Case(name="x", label="healthy", about="", model=fields)).model.train()
        mechanism = MicrobatchLossScales(lambda step: size)
        mechanism.install(model)
        if recipe is not None:
            apply_fp8(model, recipe=recipe, backend="emulated")
        ids = torch.randint(0, 64, (2, 4, 32), generator=torch.Generator().manual_seed(1))
        for step in range(2):
            mechanism.step(step, model)
            model.zero_grad()
            for part in ids:
                model(input_ids=part, use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.dim() > 1])

    calm = gradients(1.0, None)
    torch.testing.assert_close(gradients(2.0**20, None), calm)
    recipe = {"name": "delayed", "amax_history_len": 1, "fp8_format": "e4m3"}
    assert distance(gradients(2.0**20, recipe), calm) > 3 * distance(gradients(1.0, recipe), calm)
