"""FOG's YAMLs build the models they name, with the optimizer's groups and the schedule they say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from foundry_fp8.models.fog import FogConfig, FogForCausalLM
from foundry_fp8.surgery.apply import FP8Config, apply_fp8
from foundry_fp8.surgery.attention import FP8AttentionState

ROOT = Path(__file__).parents[3] / "yamls"
PRETRAIN = [ROOT / "pretrain" / f"fog-{size}.yaml" for size in ("390m", "1.5b", "8b")]
VARIANTS = ("max", "opt", "flash")


def load(path: Path, variant: str = "max") -> dict[str, Any]:
    cfg = OmegaConf.merge(OmegaConf.load(path), {"variables": {"variant": f"fog-{variant}"}})
    return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", PRETRAIN, ids=lambda p: p.stem)
def test_pretraining_settings_are_the_references(path: Path, variant: str) -> None:
    from llmfoundry.utils.builders import build_optimizer

    cfg = load(path, variant)
    size = path.stem.removeprefix("fog-")
    model = {k: v for k, v in cfg["model"].items() if k not in ("name", "init_device")}
    assert (model["variant"], model["size"]) == (f"fog-{variant}", size)
    config = FogConfig(**model)
    with torch.device("meta"):
        built = FogForCausalLM(config)
    tokens = {"390m": 128, "1.5b": 256, "8b": 512}[size] * 4096
    assert cfg["global_train_batch_size"] * cfg["max_seq_len"] == tokens
    lr = {"390m": 1e-3, "1.5b": 2.5e-4, "8b": 3e-4}[size]
    assert cfg["optimizer"]["lr"] == lr and cfg["optimizer"]["weight_decay"] == pytest.approx(0.1 * lr)
    assert cfg["scheduler"]["alpha_f"] * lr == pytest.approx(1e-8, rel=0.02)
    fp8 = FP8Config(**cfg["algorithms"]["fp8"])
    assert fp8.attention and fp8.recipe.amax_history_len == 1024  # type: ignore[union-attr]

    options = dict(cfg["optimizer"])
    optimizer = build_optimizer(built, options.pop("name"), options)
    for group in optimizer.param_groups:
        assert {p.dim() > 1 for p in group["params"]} == {group["weight_decay"] > 0}


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    "variant", ["max", *(pytest.param(v, marks=pytest.mark.full) for v in ("opt", "flash"))]
)
def test_it_trains_with_fp8_attention_and_without_transformer_engine(variant: str) -> None:
    """The file's own model and FP8 settings at a small size: gradients stay FP8's distance from the exact ones."""
    cfg = load(PRETRAIN[0], variant)
    torch.manual_seed(0)
    options = {k: v for k, v in cfg["model"].items() if k not in ("name", "init_device", "size")}
    model = FogForCausalLM(FogConfig(**{**options, **SMALL, "vocab_size": 64})).train()
    exact = copy.deepcopy(model)
    report = apply_fp8(model, **{**cfg["algorithms"]["fp8"], "backend": "emulated"})
    assert [row.action for row in report.attention] == ["converted"] * 2
    ids = torch.randint(0, 64, (2, 32))
    for _ in range(3):  # delayed scales follow
        for each in (model, exact):
            each.zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
    found, expected = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, exact))  # type: ignore[union-attr]
    assert 0.01 < float((found - expected).norm() / expected.norm()) < 0.25
    state = FP8AttentionState.of(model)
    assert state is not None
    for attention in state.modules.values():
        calls = attention.ledger.calls
        assert calls["fprop", "fp8"] == 6 and calls["dgrad", "fp8"] == 12 and len(calls) == 2


def test_the_demo_is_small() -> None:
    cfg = load(ROOT / "demo" / "fog.yaml")
    model = {k: v for k, v in cfg["model"].items() if k not in ("name", "init_device")}
    assert 3e6 < sum(p.numel() for p in FogForCausalLM(FogConfig(**model)).parameters()) < 5e6
