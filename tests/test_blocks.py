"""The YAML of every page and card is taken by LLM Foundry's builders, and the Python of the guides runs."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "trainers").glob("*.md")),
    *sorted((ROOT / "foundry_fp8").glob("*/*/README.md")),
]
SECTIONS = ("algorithms", "callbacks", "loggers")


def blocks(language, pages=PAGES):
    """One parameter a block of a page; indented blocks too."""
    found = []
    for page in pages:
        texts = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)
        for number, text in enumerate(texts):
            name = page.parent.name if page.name == "README.md" else page.stem
            found.append(pytest.param(text, id=f"{name}-{number}"))
    return found


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_is_taken_by_llm_foundry(text):
    from foundry_fp8.cli.run_check import _parts

    values = yaml.safe_load(text)
    if any(section in values for section in SECTIONS):
        assert [finding.text for finding in _parts(values)[0] if finding.level == "error"] == []


GUIDES = [ROOT / "docs" / f"{name}.md" for name in ("export", "unit_scaling")]
"""backends.md: tests/algorithms/test_fp8_card.py; trainers/: tests/integrations; the cards have tests of their own."""


@pytest.mark.parametrize("text", blocks("python", GUIDES))
def test_python_of_a_guide_runs(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "guide", "exec"), {})
