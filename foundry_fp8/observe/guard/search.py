"""Which of many are at fault, by bisection: U. Junker, "QuickXplain", AAAI 2004. Of n with k at fault: 2 k log2(n / k) + 2 k questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["smallest_sufficient"]


def smallest_sufficient(
    names: Sequence[str], sufficient: Callable[[Sequence[str]], bool], *, questions: int = 64
) -> list[str]:
    """A part of ``names`` that is sufficient, and is not once any of it is left out.

    Args:
        names: In the order of the model, as neighbours are asked about together. All of them are sufficient; that is not asked.
        sufficient: The question.
        questions: After so many, what is undivided stays whole.
    """
    left = questions

    def within(candidates: Sequence[str], given: Sequence[str], *, ask: bool) -> list[str]:
        """The part of ``candidates`` that is needed beside ``given``."""
        nonlocal left
        left -= ask
        if ask and left >= 0 and sufficient(given):
            return []
        if len(candidates) == 1 or left <= 0:
            return list(candidates)
        first, second = candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]
        of_second = within(second, [*given, *first], ask=True)
        return within(first, [*given, *of_second], ask=bool(of_second)) + of_second

    return within(names, [], ask=True) if names else []
