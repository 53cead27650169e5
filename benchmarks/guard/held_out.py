"""The labelled runs that the guard was not tuned on: do not look at these while choosing a threshold."""

from __future__ import annotations

from case import Case

CASES: list[Case] = []
"""Empty since the last ones were published and read: they are in ``tuned.py`` now."""
