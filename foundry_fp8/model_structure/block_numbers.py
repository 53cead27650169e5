"""Which blocks a YAML names: LLM Foundry's grammar with its meaning, plus ``every-k`` and shares (``last-15%``).

Blocks are counted from 0. Numbers past the last block are accepted and select nothing, as in LLM Foundry, so that one
YAML serves models of several depths.

Source:
    LLM Foundry, ``llmfoundry/models/utils/act_ckpt.py`` (``get_target_block_list``, ``check_mapping_blocks_overlap``).
    Differences: errors are :class:`~foundry_fp8.config.ConfigError` (Foundry mixes ``assert`` and ``ValueError``),
    ``every-k`` and shares are new, and what Foundry reads a number or nothing into is refused: ``true``, numbers below zero, ranges
    that run backwards, an empty list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from foundry_fp8.config import ConfigError, Parse

__all__ = ["GRAMMAR", "Blocks", "format_blocks", "parse_blocks"]

GRAMMAR = (
    "an integer n (the first n), a list of block numbers, or a comma-separated string of first-n, middle-m, last-k, "
    "range-i-j (i to j-1) and every-k (0, k, 2k, ...); first, middle and last take a share too (last-15%, rounded up)"
)


def parse_blocks(spec: Any, n_blocks: int, key: str) -> frozenset[int]:
    """The blocks that ``spec`` names in a model of ``n_blocks`` blocks.

    It is of :data:`GRAMMAR`; a list may mix numbers and strings.

    Returns:
        Block numbers, all of them in ``range(n_blocks)``.

    Raises:
        ConfigError: ``spec`` is not of the grammar.
    """
    if _is_number(spec):
        chosen: Iterable[int] = range(min(spec, n_blocks))
    elif isinstance(spec, list) and spec:
        found: set[int] = set()
        for index, element in enumerate(spec):
            if _is_number(element):
                found.add(element)
            elif isinstance(element, str):
                found.update(_parse_element(element, n_blocks, f"{key}[{index}]"))
            else:
                raise ConfigError(
                    f"{key}[{index}]: {element!r} is not a block number or string. It takes {GRAMMAR}."
                )
        chosen = found
    elif isinstance(spec, str):
        chosen = {
            block
            for element in spec.replace(" ", "").split(",")
            for block in _parse_element(element, n_blocks, key)
        }
    else:
        raise ConfigError(f"{key}: {spec!r} does not name blocks. It takes {GRAMMAR}.")
    return frozenset(block for block in chosen if 0 <= block < n_blocks)


def _parse_element(element: str, n_blocks: int, key: str) -> range:
    """One of ``first-n``, ``middle-m``, ``last-k``, ``range-i-j``, ``every-k``."""
    kind, _, rest = element.partition("-")
    share = rest.removesuffix("%")
    if share != rest and share.isdecimal() and int(share) <= 100 and kind in ("first", "last", "middle"):
        rest = str(-(-n_blocks * int(share) // 100))
    try:
        if kind in ("first", "last", "middle", "every") and rest.isdigit():
            number = int(rest)
            if kind == "first":
                return range(min(number, n_blocks))
            if kind == "last":
                return range(max(n_blocks - number, 0), n_blocks)
            if kind == "middle":
                start = max((n_blocks - 1) // 2 - number // 2, 0)
                return range(start, min(start + number, n_blocks))
            if number > 0:
                return range(0, n_blocks, number)
        elif kind == "range":
            start, end = (int(number) for number in rest.split("-"))
            if start <= end:
                return range(start, min(end, n_blocks))
    except ValueError:
        pass
    raise ConfigError(f"{key}: {element!r} does not name blocks. It takes {GRAMMAR}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_blocks(spec: Any, key: str) -> Any:
    if spec is None:
        target = key.rpartition(".")
        raise ConfigError(f"{key}: no blocks given. For all of them write {target[0]}: [{target[2]}].")
    parse_blocks(spec, 0, key)
    return spec


Blocks = Annotated[Any, Parse(_check_blocks, GRAMMAR)]
"""What a YAML says of blocks: of the grammar, whatever the model's depth."""


def format_blocks(blocks: Iterable[int]) -> str:
    """The shortest comma list of ``range-i-j`` that names ``blocks``: what a pinned plan writes."""
    runs: list[list[int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][1] == block:
            runs[-1][1] = block + 1
        else:
            runs.append([block, block + 1])
    return ", ".join(f"range-{start}-{end}" for start, end in runs)
