"""Which modules: include and exclude patterns on whole names.

The one form of selection in this package. Patterns are :mod:`fnmatch` globs on the fully qualified module name, so
``*.ffn.*`` and ``*.layers.1.*`` mean what they say (``layers.1`` does not take ``layers.10``). A pattern that matches
nothing is an error.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from foundry_fp8.config import ConfigError, nearest

__all__ = ["check_patterns_match", "matches"]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` matches any of the globs (case-sensitive)."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns_match(patterns: Sequence[str], names: Sequence[str], key: str, what: str) -> None:
    """Raise if a pattern matches none of ``names``.

    Args:
        patterns: Globs.
        names: The names there are.
        key: The YAML key, for the message.
        what: What the names are ("linear layers"), for the message.

    Raises:
        ConfigError: Names the pattern and the nearest name.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            close = nearest(pattern.strip("*."), names)
            shown = ", ".join(list(names)[:4]) + (", ..." if len(names) > 4 else "")
            raise ConfigError(
                f"{key}: pattern {pattern!r} matches none of the model's {len(names)} {what} ({shown}).{close}"
            )
