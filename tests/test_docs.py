"""What the documents point to is there: links, files and commands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "foundry_fp8").rglob("*.md")])


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_its_links_lead_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    assert [t for t in targets if t and not (document.parent / t).exists()] == []


def expanded(name):
    """``a{b,c}`` as a shell reads it."""
    match = re.search(r"\{(.*?)\}", name)
    if match is None:
        return [name]
    return [e for choice in match[1].split(",") for e in expanded(name.replace(match[0], choice, 1))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_files_it_names_are_there(document):
    """From the root, or (in backticks too) from the package."""
    rooms = "|".join(p.name for p in (ROOT / "foundry_fp8").iterdir() if p.is_dir())
    named = re.findall(
        rf"`((?:foundry_fp8|tests|benchmarks|docs|{rooms})/[\w./*{{}},-]+)`", document.read_text()
    )
    paths = [path.rstrip("/") for name in named for path in expanded(name)]
    assert [p for p in paths if not [*ROOT.glob(p), *(ROOT / "foundry_fp8").glob(p)]] == []


def test_the_makes_that_documents_and_ci_name_are_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    ci = ROOT / ".github" / "workflows" / "ci.yml"
    named = {
        target
        for d in [*DOCUMENTS, ci]
        for target in re.findall(r"(?:`|: |    )make ([a-z-]+)", d.read_text())
    }
    assert {"demo", "test", "test-all", "release"} <= named
    assert named <= targets
