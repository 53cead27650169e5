"""The method card of `fused_head`: its code runs."""

import re
from pathlib import Path

import torch
import yaml

import foundry_fp8
from foundry_fp8.activations.fused_head.apply import KEY, FusedHeadConfig
from foundry_fp8.config import from_mapping
from tests import model_zoo as zoo

CARD = (Path(foundry_fp8.__file__).parent / "algorithms/fused_head/README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", CARD, re.S | re.M)


def test_python_of_the_card_runs():
    (code,) = blocks("python")
    tokens = torch.randint(1, zoo.VOCABULARY, (2, 8))
    model = zoo.fog().train()
    exec(compile(code, "card", "exec"), {"model": model, "tokens": tokens, "labels": tokens})
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_yaml_of_the_card_is_a_valid_configuration():
    (code,) = blocks("yaml")
    from_mapping(FusedHeadConfig, yaml.safe_load(code)["algorithms"]["fused_head"], KEY)
