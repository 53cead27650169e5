"""Runs what docs/example.md shows, once a build, and puts the output of each command below it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

PAGE = Path(__file__).with_name("example.md")
FOLDER = Path(__file__).parents[1] / "build" / "example"
BLOCK = re.compile(r'^```(\w+) (title="(?P<file>[^"]+)"|exec)\n(?P<code>.*?)^```\n', re.M | re.S)
SHOWN = 40
"""Lines of a command's output on the page at most."""
OUTPUTS: dict[str, str] = {}


def on_startup(command: str, dirty: bool) -> None:
    """Write the files that the page shows and run its blocks, in their order."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    for block in BLOCK.finditer(PAGE.read_text()):
        if block["file"]:
            (FOLDER / block["file"]).write_text(block["code"])
        for text, command in _commands(block):
            OUTPUTS[text] = _run(command)


def on_files(files: Files, config: Any) -> Files:
    """Add the report page that the example made."""
    page = (FOLDER / "fp8-report" / "report.html").read_text()
    files.append(File.generated(config, "report.html", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """One block for each command, followed by what it printed."""

    def shown(block: re.Match[str]) -> str:
        if block["file"]:
            return block[0]
        return "\n".join(
            f"```{block[1]}\n{text}```\n"
            + (f"\n``` {{.text .output}}\n{OUTPUTS[text]}```\n" if OUTPUTS[text] else "")
            for text, _ in _commands(block)
        )

    return BLOCK.sub(shown, markdown) if page.file.src_uri == PAGE.name else markdown


def _commands(block: re.Match[str]) -> list[tuple[str, list[str]]]:
    """What a block runs, each with its text on the page: a Python block as a whole, a shell block line by line; of a file, nothing."""
    if block["file"]:
        return []
    if block[1] == "python":
        return [(block["code"], [sys.executable, "-c", block["code"]])]
    return [(line, ["sh", "-c", line]) for line in block["code"].splitlines(keepends=True)]


def _run(command: list[str]) -> str:
    bin_folder = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "76"}
    result = subprocess.run(command, cwd=FOLDER, env=environment, text=True, capture_output=True)
    if result.returncode:
        said = f"{result.stdout[-1500:]}{result.stderr[-1500:]}"
        raise PluginError(f"docs/example.md: {command[-1]!r} failed:\n{said}")
    lines = result.stdout.splitlines(keepends=True)
    if len(lines) > SHOWN:
        lines = [f"... ({len(lines) - SHOWN} lines)\n", *lines[-SHOWN:]]
    return "".join(lines)
