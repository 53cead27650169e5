"""Reading of what anybody wrote: whatever a line of a log holds, what it can cost is that line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["LARGEST", "clean", "decode", "number", "parse", "plain_text", "text_lines", "whole"]

LARGEST = 3.4028235e38  # float32's: no training computes with larger numbers
MOST_CHARACTERS, MOST_TEXT, MOST_DEPTH, MOST_PARTS = 2**25, 2000, 50, 4
"""Of a line; of a text in it; of what is nested in it; of objects that a crash left in one line."""
_SPACE = re.compile("[\t-\r\x85\u2028\u2029]")
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_START = re.compile(r'\{"kind":\s*"')


def text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield ``(line number, line)`` of what is not blank; of an immense line the start. A byte order mark is no text."""
    with file.open(encoding="utf-8-sig", errors="replace") as text:
        number = 0
        while line := text.readline(MOST_CHARACTERS):
            number, rest = number + 1, line
            while len(rest) == MOST_CHARACTERS and rest[-1] != "\n":
                rest = text.readline(MOST_CHARACTERS)
            if line.strip():
                yield number, line


def plain_text(text: str) -> str:
    """One line of at most 2,000 characters; a replacement stands for control characters and lone surrogates."""
    return _UNSEEN.sub("\ufffd", _SPACE.sub(" ", text[:MOST_TEXT]))


def clean(value: Any, depth: int = MOST_DEPTH) -> Any:
    """The same with every text as :func:`plain_text`. Raises ``ValueError`` where more than 50 are nested."""
    if depth < 0:
        raise ValueError(f"more than {MOST_DEPTH} are nested")
    if isinstance(value, dict):
        return {plain_text(str(key)): clean(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, depth - 1) for item in value]
    return plain_text(value) if isinstance(value, str) else value


def _bounded(text: str) -> int | float | str:
    """A literal as a number; as the text that it is, where it is larger than float32 can hold."""
    if abs(float(text)) > LARGEST:
        return text
    return int(text) if text.lstrip("-").isdigit() else float(text)


_DECODER = json.JSONDecoder(parse_int=_bounded, parse_float=_bounded)


def parse(text: str) -> Any:
    """A JSON text, cleaned. Raises ``ValueError`` whatever is wrong with it."""
    try:
        return clean(_DECODER.decode(text))
    except RecursionError as error:
        raise ValueError("too deeply nested") from error


def decode(line: str) -> list[Any]:
    """The objects of a line, ``None`` for what is none: a resumed log may go on behind what a crash cut off."""
    found: list[Any] = []
    text, at = line.strip(), 0
    while at < len(text) and len(found) < MOST_PARTS:
        try:
            value, end = _DECODER.raw_decode(text, at)
            found.append(clean(value))
            at = len(text) - len(text[end:].lstrip())
        except (ValueError, RecursionError):
            found.append(None)
            later = _START.search(text, at + 1)
            at = later.start() if later else len(text)
    return found


def number(value: Any) -> float:
    """A logged value as a float, the texts nan, inf and -inf too. Raises ``ValueError`` for what is no number."""
    named = isinstance(value, str) and re.fullmatch(r"\s*(nan|[+-]?inf(inity)?)\s*", value, re.IGNORECASE)
    if not named and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise ValueError(f"{str(value)[:20]!r} is no number")
    return float(value)


def whole(value: Any) -> int:
    """A step. Raises ``ValueError`` for what is no whole number from 0 to 2^53."""
    found = number(value)
    if not (0 <= found <= 2**53 and found == int(found)):
        raise ValueError(f"{str(value)[:20]!r} is no step")
    return int(found)
