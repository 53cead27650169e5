"""Which of many are at fault: a search by bisection.

Source: U. Junker, "QuickXplain: Preferred Explanations and Relaxations for Over-Constrained Problems", AAAI 2004. With k at fault among n it asks
about 2 k log2(n / k) + 2 k questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["smallest_sufficient"]


def smallest_sufficient(
    names: Sequence[str], sufficient: Callable[[Sequence[str]], bool], *, questions: int = 64
) -> list[str]:
    """A part of ``names`` that is sufficient, and is not once any of it is left out.

    Neighbours are asked about together, so ``names`` come in the order of the model.

    Args:
        names: All of which together are sufficient; that is not asked.
        sufficient: The question.
        questions: After so many, what is undivided stays whole.
    """
    asked = 0

    def ask(part: Sequence[str]) -> bool:
        nonlocal asked
        asked += 1
        return sufficient(part)

    def within(candidates: Sequence[str], given: Sequence[str], *, ask_given: bool) -> list[str]:
        """The part of ``candidates`` that is needed beside ``given``."""
        if ask_given and ask(given):
            return []
        if len(candidates) == 1 or asked >= questions:
            return list(candidates)
        first, second = candidates[: len(candidates) // 2], candidates[len(candidates) // 2 :]
        of_second = within(second, [*given, *first], ask_given=True)
        of_first = within(first, [*given, *of_second], ask_given=bool(of_second))
        return of_first + of_second

    return within(names, [], ask_given=True) if names else []
