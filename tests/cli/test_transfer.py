"""``examples/transfer.py``: what changes with width and depth, what stays, what is refused."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from foundry_fp8.models.mus import default_tau
from tests.integrations.test_examples import example

ROOT = Path(__file__).parents[2] / "yamls"


def run(path, *options):
    return CliRunner().invoke(example("transfer").app, [str(path), *options])


def test_mpt_grows_wider_and_deeper_and_its_learning_rate_stays():
    proxy = ROOT / "demo" / "mpt-mus.yaml"
    result = run(proxy, "--width", "1024", "--layers", "24")
    assert result.exit_code == 0, result.output
    old, new = OmegaConf.load(proxy), OmegaConf.create(result.stdout)
    assert (new.model.d_model, new.model.n_layers, new.model.n_heads) == (1024, 24, 16)
    assert new.model.attn_config.kv_n_heads == 8 and new.model.logit_scale == 1 / 1024
    assert new.model.attn_config.tau == new.model.ffn_config.tau == pytest.approx(default_tau(24))
    assert new.optimizer == old.optimizer and new.algorithms == old.algorithms
    assert "hidden weights at lr x sqrt(64 / 1024) = 0.015625" in result.stdout


def test_a_preset_gives_way_to_dimensions():
    new = OmegaConf.create(run(ROOT / "pretrain" / "mus-1b.yaml", "--width", "4096").stdout)
    assert (new.model.hidden_size, new.model.num_hidden_layers, new.model.num_attention_heads) == (
        4096,
        24,
        32,
    )
    assert "size" not in new.model and new.model.vocab_size == 100352


@pytest.mark.parametrize(
    "path, options, said",
    [
        ("pretrain/mpt-1b.yaml", ("--width", "4096"), "unit_scaling.base_width"),
        ("demo/mus.yaml", ("--width", "1000"), "--width: 1000 would make"),
        ("demo/mus.yaml", ("--width", "0"), "--width"),
    ],
)
def test_what_does_not_transfer_is_an_error(path, options, said):
    result = run(ROOT / path, *options)
    assert result.exit_code == 2 and said in result.output
