"""The labelled runs."""

from __future__ import annotations

from case import Case

from cases import both_precisions, gradients, healthy, histories, outliers, rescalings, tokens

CASES: list[Case] = [
    *outliers.CASES,
    *rescalings.CASES,
    *tokens.CASES,
    *gradients.CASES,
    *histories.CASES,
    *both_precisions.CASES,
    *healthy.CASES,
]
