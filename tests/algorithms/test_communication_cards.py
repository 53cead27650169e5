"""The method cards of `compressed_communication` and `hybrid_sharding`: their code runs, their tables are the configuration."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest
import yaml

import foundry_fp8
from foundry_fp8.config import accept, from_mapping
from foundry_fp8.distributed.compression.config import KEY, CompressionConfig
from foundry_fp8.distributed.hybrid_sharding.apply import KEY as HYBRID_KEY
from foundry_fp8.distributed.hybrid_sharding.apply import HybridShardingConfig
from tests.multiprocess import launch

CONFIGS = {
    "compressed_communication": (CompressionConfig, KEY),
    "hybrid_sharding": (HybridShardingConfig, HYBRID_KEY),
}


def card(name):
    return (Path(foundry_fp8.__file__).parent / "algorithms" / name / "README.md").read_text()


def blocks(name, language):
    found = re.findall(rf"^```{language}\n(.*?)```", card(name), re.S | re.M)
    assert found, f"no {language} in the card of {name}"
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", CONFIGS)
def test_python_of_the_card_runs(name, tmp_path):
    for code in blocks(name, "python"):
        (tmp_path / "card.py").write_text(code)
        ranks = int(re.search(r"--nproc-per-node (\d+)", card(name))[1])
        codes, outputs = launch.run(tmp_path / "card.py", ranks, check=False)
        assert codes == [0] * ranks, outputs
        if name == "compressed_communication":
            summary, *_, ratio = outputs[0].strip().splitlines()
            assert "as int8" in summary and float(ratio) > 2


@pytest.mark.parametrize("name", CONFIGS)
def test_yaml_of_the_card_is_a_valid_configuration(name):
    config, key = CONFIGS[name]
    for code in blocks(name, "yaml"):
        from_mapping(config, yaml.safe_load(code)["algorithms"][name], key)


@pytest.mark.parametrize("name", CONFIGS)
def test_options_and_defaults_are_those_of_the_config(name):
    table = card(name).split("<!-- options", 1)[1].split("\n\n", 1)[0]
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table.splitlines()[3:]
    ]
    documented = {row[0]: yaml.safe_load(row[1]) for row in rows}
    config, key = CONFIGS[name]
    assert list(documented) == [field.name for field in dataclasses.fields(config)]
    plain = config()
    for (
        option,
        default,
    ) in documented.items():  # one by one: some contradict each other, and some are written as 100ba
        hint = typing.get_type_hints(config, include_extras=True)[option]
        assert accept(hint, default, key) == getattr(plain, option), option
