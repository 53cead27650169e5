"""What holds for everything that a YAML can name, found through the entry points, so that nothing new escapes."""

import importlib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import foundry_fp8
from foundry_fp8.config import ConfigError

PACKAGE = Path(foundry_fp8.__file__).parent
KINDS = ("llmfoundry_algorithms", "llmfoundry_callbacks")
OURS = [e for kind in KINDS for e in entry_points(group=kind) if e.value.startswith("foundry_fp8")]
every = pytest.mark.parametrize("entry", OURS, ids=lambda e: e.name)


def test_everything_the_blueprint_promises_can_be_named():
    names = {entry.name for entry in OURS}
    algorithms = {
        "fp8",
        "activation_checkpointing",
        "activation_compression",
        "compressed_communication",
        "fused_head",
        "hybrid_sharding",
        "unit_scaling",
    }
    assert algorithms | {"mfu_monitor", "kurtosis_monitor", "fp8_monitor", "divergence_guard"} <= names


@every
def test_it_is_a_composer_class_in_a_folder_of_its_own_with_a_card(entry):
    from composer.core import Algorithm, Callback

    cls = entry.load()
    assert issubclass(cls, Algorithm | Callback)
    package = importlib.import_module(entry.value.split(":")[0])
    assert cls.__name__ in package.__all__
    assert (PACKAGE / Path(*package.__name__.split(".")[1:]) / "README.md").is_file()


@every
def test_the_yaml_key_is_spelt_like_the_registered_name(entry):
    cls = entry.load()
    with pytest.raises(ConfigError, match=rf"{entry.name}\.no_such_option: unknown key"):
        cls(no_such_option=1)


@every
def test_llm_foundry_builds_it_by_name(entry):
    from llmfoundry import registry
    from llmfoundry.utils.builders import build_algorithm, build_callback

    built = build_algorithm(entry.name, {}) if entry.group == KINDS[0] else build_callback(entry.name, {})
    assert isinstance(built, entry.load())
    assert entry.name in getattr(registry, entry.group.removeprefix("llmfoundry_")).get_all()


@every
def test_an_algorithms_repr_rebuilds_it(entry):
    cls = entry.load()
    if entry.group != KINDS[0]:
        pytest.skip("callbacks have no repr in Composer")
    rebuilt = eval(repr(cls()), {cls.__name__: cls})
    assert repr(rebuilt) == repr(cls())


def test_every_public_module_names_what_it_exports():
    missing = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        if path.name != "__init__.py" and not path.name.startswith("_") and "__all__" not in text:
            missing.append(str(path.relative_to(PACKAGE)))
    assert missing == []


def test_core_packages_import_torch_alone():
    allowed = ("algorithms", "callbacks", "models", "cli", "data", "integrations", "report")
    offenders = []
    for path in PACKAGE.rglob("*.py"):
        package = path.relative_to(PACKAGE).parts[0]
        if package in allowed:
            continue
        for line in path.read_text().splitlines():
            words = line.split()[:2] if line.startswith(("import ", "from ")) else []
            if words and words[1].split(".")[0] in ("composer", "llmfoundry", "streaming", "transformers"):
                offenders.append(f"{path.relative_to(PACKAGE)}: {line}")
    assert offenders == []
