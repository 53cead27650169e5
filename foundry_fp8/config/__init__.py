"""Configuration: what a YAML may hold is what annotations say, checked in one place.

A dataclass that a YAML fills derives from :class:`Config`; functions that a registry calls with a YAML's values use
:func:`check_arguments`. Their annotations are plain types (``bool``, ``int``, ``float``, ``str``, ``None``, ``Literal``,
unions, sequences, mappings, other ``Config`` classes), narrowed by ``Annotated``::

    interval: Positive = 10                                     # Annotated[int, at_least(1)]
    state_fraction: Annotated[float, above(0), at_most(1)] = 0.6
    warmup: Batches = 100                                       # Annotated[int, Parse(...)]: "100ba" becomes 100

A bool is no number, a string is no list, and NaN, infinity and what float32 cannot hold are no numbers. Every message begins with the whole path of
the YAML key and says what is allowed there.
"""

from foundry_fp8.config import check, errors, rules
from foundry_fp8.config.check import *  # noqa: F403 - what each of these modules says is public
from foundry_fp8.config.errors import *  # noqa: F403
from foundry_fp8.config.rules import *  # noqa: F403

__all__ = [*check.__all__, *errors.__all__, *rules.__all__]
