"""The labelled runs that the guard was not tuned on: do not look at these while choosing a threshold. None at present."""

from __future__ import annotations

from case import Case

CASES: list[Case] = []
