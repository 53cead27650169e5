"""What the site has beside docs/: the method cards, the help of every command, and tables made from the code; links between them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
CARDS = sorted((ROOT / "foundry_fp8").glob("*/*/README.md"))
PAGES = {str(card.relative_to(ROOT)): f"cards/{card.parent.name}.md" for card in CARDS}
"""The page of each card, by its path in the repository."""
MARKER = re.compile(r"^\[.+\]\(.+\) <!-- table: (\w+) -->$", re.M)
"""A line that stands for a table; in the repository it links to the code that the table is made from."""
INCLUDED = re.compile(r"^`(examples/.+)`$", re.M)
"""What is left of a line that links to an example: it stands for its code."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the cards and the commands."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "reference/commands.md", content=_commands()))
    files.append(File.generated(config, "reference/logged.md", content=_logged()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the tables in; links to files of the repository become links to their pages, or plain text where a file has none."""
    markdown = MARKER.sub(lambda match: TABLES[match[1]](), markdown)
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
    """The help of every command, each with its options: imported here, as nothing asks for it."""
    from typer import Context
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from foundry_fp8.cli.main import COMMANDS, app, imported

    def whole(name: str, group: Any) -> Any:
        group.commands = {one: imported(file, one) for one, (file, _) in COMMANDS[name].items()}
        for one, (_, text) in COMMANDS[name].items():
            group.commands[one].short_help = text
        if "plan" in group.commands:
            whole("plan", group.commands["plan"])
        return group

    group = whole("foundry-fp8", get_command(app))
    return get_docs_for_click(obj=group, ctx=Context(group, info_name="foundry-fp8"), name="foundry-fp8")


def _logged() -> str:
    """The tables of logged keys of all cards."""
    parts = ["# Logged keys", "Keys marked * go to the run log alone; with `details: true` to every logger."]
    for source, page in PAGES.items():
        table = re.search(r"^\| key \| meaning \|\n(\|.*\n)+", (ROOT / source).read_text(), re.M)
        if table:
            parts += [f"## [{Path(page).stem}](../{page})", table[0]]
    return "\n\n".join(parts)


def _table(header: str, rows: list[tuple[str, ...]]) -> str:
    lines = [header, "|---" * len(rows[0]) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _clashes() -> str:
    """Settings that ``foundry-fp8 doctor`` refuses."""
    from foundry_fp8.run.clashes import CLASHES

    rows = [
        (clash.settings, "error" if clash.error else "warning", re.sub(r"\{.*?\}", "...", clash.text))
        for clash in CLASHES
        if "composer" in clash.trainers
    ]
    return _table("| Settings | | Message |", rows)


def _left_out() -> str:
    """Linears that conversion leaves in high precision."""
    from foundry_fp8.surgery import left_out

    reasons = (left_out.HEAD, left_out.ROUTER, left_out.ADAPTER, left_out.TIED)
    return "\n".join(f"- {reason}" for reason in reasons)


def _gpus() -> str:
    """What ``recipe: auto`` is on each kind of GPU."""
    from foundry_fp8.gpus import GPUS

    rows = [
        (name, f"{gpu.memory_bytes / 1e9:.0f} GB", gpu.recipe or "none: no FP8") for name, gpu in GPUS.items()
    ]
    return _table("| `--gpu`; with a number `--hardware`: `h100x8` | Memory | `recipe: auto` |", rows)


TABLES = {"clashes": _clashes, "gpus": _gpus, "left_out": _left_out}
