"""The fifteenth half of labelled runs that the guard was not tuned on."""

from __future__ import annotations

from case import Case

CASES: list[Case] = []
