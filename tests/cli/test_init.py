"""LLM Foundry's own kinds of YAML (written anew in foundry_yamls/) with FP8 added."""

import difflib
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from foundry_fp8.cli.hardware import parse_hardware
from foundry_fp8.cli.init import add_fp8
from foundry_fp8.cli.main import app
from foundry_fp8.config import ConfigError

YAMLS = sorted((Path(__file__).parent / "foundry_yamls").glob("*.yaml"))
ONE_NODE, TWO_NODES = parse_hardware("h100x8"), parse_hardware("h100x16")


def changed(before, after):
    """Lines taken away, lines added."""
    lines = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[0] in "+-"]
    return [line[2:] for line in lines if line[0] == "-"], [line[2:] for line in lines if line[0] == "+"]


def values(text):
    return OmegaConf.to_container(OmegaConf.create(text), resolve=True)


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_lines_are_added_and_nothing_else_changes(path):
    before = path.read_text()
    after, said = add_fp8(before, TWO_NODES)
    gone, new = changed(before, after)
    assert gone == []
    assert [line.split("#")[0].rstrip() for line in new if line.strip()] == [
        "  fp8: {recipe: current}",
        "  hybrid_sharding: {shard: node}",
        "  mfu_monitor: {}",
        "  divergence_guard: {}",
        "loggers:",
        "  run_log: {}",
    ]
    assert all("#" in line for line in new if line.strip() and line != "loggers:") and len(said) == 5
    was, now = values(before), values(after)
    assert now.pop("loggers") == {"run_log": {}}
    for section, names in (
        ("algorithms", ("fp8", "hybrid_sharding")),
        ("callbacks", ("mfu_monitor", "divergence_guard")),
    ):
        assert [now[section].pop(name) for name in names][1] in ({}, {"shard": "node"})
    assert now == was
    assert add_fp8(after, TWO_NODES) == (after, [])
    assert "hybrid_sharding" not in add_fp8(before, ONE_NODE)[0]


MODEL = "model:\n  name: mpt_causal_lm\n"


@pytest.mark.parametrize(
    "before",
    [
        f"{MODEL}  d_model: 64",
        f"{MODEL}callbacks: null\nseed: null\n",
        "model:\n    name: m\nalgorithms:\n    gradient_clipping:\n        clipping_type: norm\nlist:\n- 1\n-   a: 2\n    b: 3\n",
        "model:\n  name: m\nother:\n    a: 1\nalgorithms:\n      gradient_clipping:\n        clipping_type: norm\n",
        f"{MODEL}algorithms: {{gradient_clipping: {{}}}}\nloggers:\n  null_logger: null\n",
    ],
    ids=["no end of line", "null", "four spaces", "many spaces", "flow"],
)
def test_what_is_written_is_what_was_there_and_what_was_added(before):
    after, _ = add_fp8(before, ONE_NODE)
    wanted = values(before)
    for section, added in (
        ("algorithms", {"fp8": {"recipe": "current"}}),
        ("callbacks", {"mfu_monitor": {}, "divergence_guard": {}}),
        ("loggers", {"run_log": {}}),
    ):
        wanted[section] = {**(wanted.get(section) or {}), **added}
    assert values(after) == wanted and add_fp8(after, ONE_NODE) == (after, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"variables:\n  own: {{}}\n{MODEL}callbacks: ${{variables.own}}\n",
            "callbacks refers to something else",
        ),
        (f"{MODEL}algorithms: &all {{}}\ncallbacks: *all\n", "algorithms refers to something else"),
        ("model:\n  name: m\t# after a tab\n", "cannot be changed line by line"),
    ],
    ids=["interpolation", "anchor", "tab"],
)
def test_what_cannot_be_added_to_is_said(text, said):
    with pytest.raises(ConfigError, match=said):
        add_fp8(text, ONE_NODE)


@pytest.mark.parametrize(
    "key",
    [
        "fsdp_config:\n  sharding_strategy: NO_SHARD\n",
        "fsdp_config:\n  sharding_strategy: SHARD_GRAD_OP\n",
        "fsdp_config: {}\ntp_config: {strategy: ffn}\n",
    ],
)
def test_hybrid_sharding_is_left_out_where_doctor_refuses_it(key):
    assert "hybrid_sharding" not in add_fp8(MODEL + key, TWO_NODES)[0]
    assert "hybrid_sharding" in add_fp8(f"{MODEL}fsdp_config: {{}}\n", TWO_NODES)[0]


def test_other_ways_to_fp8_are_replaced_and_said():
    text = "model:\n  name: mpt_causal_lm\n  fc_type: te\n  ffn_config: {ffn_type: te_ln_mlp}\nprecision: amp_fp8  # was fast\n"
    after, said = add_fp8(text, ONE_NODE)
    now = values(after)
    assert (now["precision"], now["model"]["fc_type"], now["model"]["ffn_config"]) == (
        "amp_bf16",
        "torch",
        {"ffn_type": "mptmlp"},
    )
    assert "# was fast" in after and sum(line.startswith("~") for line in said) == 3


@pytest.mark.parametrize(
    ("text", "hardware", "message"),
    [
        ("model: [", "h100x8", "cannot be read as a YAML"),
        ("- a\n- b\n", "h100x8", "no training run of LLM Foundry"),
        ("model: {}\n", "a100x8", "a100 does not multiply FP8"),
    ],
)
def test_what_cannot_be_helped_is_said_in_a_sentence(text, hardware, message):
    with pytest.raises(ConfigError, match=message):
        add_fp8(text, parse_hardware(hardware))


@pytest.mark.parametrize("text", ["h10x8", "h100x0", "8xh100", "h100x8x2"])
def test_hardware_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"is not like h100x8\. Known: a100, a100-40g, l40s, .*h100"):
        parse_hardware(text)
    assert parse_hardware("H100x64").nodes == 8 and parse_hardware("b200").devices == 8


def test_the_command_writes_shows_a_diff_and_refuses_with_2(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAMLS[0].read_text())
    shown = CliRunner().invoke(app, ["init", str(path), "--diff"])
    assert (
        shown.exit_code == 0
        and "+  fp8: {recipe: current}" in shown.output
        and path.read_text() == YAMLS[0].read_text()
    )
    written = CliRunner().invoke(app, ["init", str(path)])
    assert written.exit_code == 0 and "+ algorithms.fp8: linear layers in FP8" in written.output
    assert "fp8: {recipe: current}" in path.read_text()
    again = CliRunner().invoke(app, ["init", str(path)])
    assert "Nothing to add" in again.output
    refused = CliRunner().invoke(app, ["init", str(path), "--hardware", "h10"])
    assert refused.exit_code == 2 and "Did you mean 'h100'?" in refused.output
