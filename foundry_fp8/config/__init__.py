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

from foundry_fp8.config.check import Config, accept, check_arguments, check_choice, from_mapping
from foundry_fp8.config.clash import Clash, refuse
from foundry_fp8.config.errors import ConfigError, NoEffect, first_line, nearest
from foundry_fp8.config.rules import (
    Batches,
    Bytes,
    Fraction,
    Names,
    Natural,
    Parse,
    Positive,
    PositiveNumber,
    Rule,
    Text,
    above,
    at_least,
    at_most,
    below,
    format_bytes,
    not_empty,
    one_of,
    parse_bytes,
    power_of_two,
    printable,
    template,
)

__all__ = [
    "Batches",
    "Bytes",
    "Clash",
    "Config",
    "ConfigError",
    "Fraction",
    "Names",
    "Natural",
    "NoEffect",
    "Parse",
    "Positive",
    "PositiveNumber",
    "Rule",
    "Text",
    "above",
    "accept",
    "at_least",
    "at_most",
    "below",
    "check_arguments",
    "check_choice",
    "first_line",
    "format_bytes",
    "from_mapping",
    "nearest",
    "not_empty",
    "one_of",
    "parse_bytes",
    "power_of_two",
    "printable",
    "refuse",
    "template",
]
