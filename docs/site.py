"""What the site has beside docs/: the method cards and the help of every command; links between them."""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
CARDS = sorted((ROOT / "foundry_fp8").glob("*/*/README.md"))
PAGES = {str(card.relative_to(ROOT)): f"cards/{card.parent.name}.md" for card in CARDS}
"""The page of each card, by its path in the repository."""
INCLUDED = re.compile(r'^--8<-- "(.+)"$', re.M)
"""A line that stands for a file of the repository: its code."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the cards and the commands."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository become links to their pages, or plain text where a file has none."""
    source = next(
        (path for path, own in PAGES.items() if own == page.file.src_uri), f"docs/{page.file.src_uri}"
    )

    def linked(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        own = PAGES.get(found, found.removeprefix("docs/") if found.startswith("docs/") else None)
        if own is None:
            return "" if image else text
        relative = posixpath.relpath(own, posixpath.dirname(page.file.src_uri) or ".")
        return f"{image}[{text}]({relative}{'#' + anchor if anchor else ''})"

    return INCLUDED.sub(_code, LINK.sub(linked, markdown))


def _code(match: re.Match[str]) -> str:
    return f"```python\n{(ROOT / match[1]).read_text()}```"


def _commands() -> str:
    command = ["-m", "typer", "foundry_fp8.cli.main", "utils", "docs", "--name", "foundry-fp8"]
    return subprocess.run(
        [sys.executable, *command], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout
