"""The README's plan of the house is the one that `make lint` holds, and the public names are what they say."""

import re
import subprocess
import sys
from pathlib import Path

import foundry_fp8
from tests.mutants import MUTANTS

ROOT = Path(foundry_fp8.__file__).parents[1]


def rooms_of_the_contract():
    text = (ROOT / "pyproject.toml").read_text().split("[[tool.importlinter.contracts]]")[1]
    listed = re.search(r"layers = \[(.*?)\]", text, re.S)[1]
    return [set(re.findall(r"\w+", line)) for line in re.findall(r'"(.*?)"', listed)][
        ::-1
    ]  # the lowest first


def rooms_of_the_readme():
    plan = (ROOT / "README.md").read_text().split("    foundry_fp8/\n", 1)[1].split("\n\n", 1)[0]
    return [re.match(r"\s+([a-z_]+)(?:/|\.py)", line)[1] for line in plan.splitlines()]


def test_the_readme_lists_every_room_in_the_order_of_the_contract():
    readme, contract = rooms_of_the_readme(), rooms_of_the_contract()
    assert set(readme) == set().union(*contract)
    place = {room: floor for floor, rooms in enumerate(contract) for room in rooms}
    floors = [place[room] for room in readme if room != "config" and room != "compat"]
    assert floors == sorted(floors)


def test_every_public_name_can_be_imported():
    assert set(foundry_fp8.__all__) == {*foundry_fp8._HOMES, "__version__"}
    for name in foundry_fp8.__all__:
        assert getattr(foundry_fp8, name) is not None
    assert set(dir(foundry_fp8)) == set(foundry_fp8.__all__)


IMPORTS = """
import sys
import torch
before = set(sys.modules)
sys.modules["triton"] = None  # whoever imports it now fails
import foundry_fp8
new = {m for m in set(sys.modules) - before if not m.startswith("foundry_fp8")} - {"triton"}
assert not new, new
import foundry_fp8.backends.native
for name, home in foundry_fp8._HOMES.items():
    if not home.startswith("models."):  # which are transformers'
        getattr(foundry_fp8, name)
others = {"composer", "llmfoundry", "streaming", "transformers", "transformer_engine"} & set(sys.modules)
assert not others, others
kernels = {m for m in sys.modules if m.startswith("foundry_fp8.kernels.")} - {"foundry_fp8.kernels.launch"}
assert not kernels, kernels
"""


def test_importing_the_package_loads_nothing_beside_torch_and_its_names_need_torch_alone():
    """And no Triton."""
    result = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_every_mutant_is_one_of_todays_code():
    for mutant in MUTANTS:
        text = (ROOT / "foundry_fp8" / mutant.file).read_text()
        assert text.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r}: update tests/mutants.py"
        assert [test for test in mutant.tests.split() if not (ROOT / "tests" / test).exists()] == []


def test_the_documented_yamls_are_those_of_the_package():
    assert (ROOT / "yamls").resolve() == (ROOT / "foundry_fp8" / "yamls").resolve()
