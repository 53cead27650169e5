"""Seeds for stochastic rounding, which a resumed run draws again.

Rounding to the nearest code has a bias where many small elements share a block with a large one: they are zero in every step.
Rounding up with the probability of what is left over has none: ``E[round(x)] = x``, at up to four times the squared error. It is for
what no error feedback corrects.

A seed depends on the rank, the leg, the batch and the number of seeds drawn since the batch began, and on nothing else: the random
numbers of the model (dropout) are the same with and without it, and a run resumed at a batch draws what the first run drew.
"""

from __future__ import annotations

import hashlib

__all__ = ["Noise"]


class Noise:
    """The seeds of one leg.

    ``leg`` and ``rank`` distinguish it from others, so that their errors are independent and average out.
    """

    def __init__(self, leg: str, rank: int) -> None:
        self._key = f"{leg}/{rank}"
        self._batch = 0
        self._drawn = 0

    def start_batch(self, batch: int) -> None:
        """Say which batch comes next."""
        self._batch, self._drawn = batch, 0

    def seed(self) -> int:
        """The next seed, of 31 bits."""
        text = f"{self._key}/{self._batch}/{self._drawn}"
        self._drawn += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
