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
        elif block[1] == "python":
            OUTPUTS[block["code"]] = _run([sys.executable, "-c", block["code"]])
        else:
            for line in block["code"].splitlines():
                OUTPUTS[line] = _run(["sh", "-c", line])


def on_files(files: Files, config: Any) -> Files:
    """Add the report page that the example made."""
    page = (FOLDER / "fp8-report" / "report.html").read_text()
    files.append(File.generated(config, "report.html", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """One block for each command, followed by what it printed."""

    def shown(block: re.Match[str]) -> str:
        language, code = block[1], block["code"]
        if block["file"]:
            return block[0]
        parts = [code] if language == "python" else code.splitlines(keepends=True)
        pairs = [(part, OUTPUTS[part if language == "python" else part.strip()]) for part in parts]
        return "\n".join(
            f"```{language}\n{part}```\n" + (f"\n``` {{.text .output}}\n{out}```\n" if out else "")
            for part, out in pairs
        )

    return BLOCK.sub(shown, markdown) if page.file.src_uri == PAGE.name else markdown


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
