"""The method cards of `compressed_communication` and `hybrid_sharding`: their code runs."""

import re
from pathlib import Path

import pytest
import yaml

import foundry_fp8
from foundry_fp8.config import from_mapping
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
