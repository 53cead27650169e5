"""The check of values against annotations."""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

from foundry_fp8.config.errors import ConfigError, nearest
from foundry_fp8.config.rules import Parse, one_of

__all__ = ["Config", "accept", "check_arguments", "check_choice", "from_mapping"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_FLOAT32_MAX = 3.4e38  # a number ends up in a float32 tensor; comparing refuses NaN too


class Config:
    """Base of the frozen dataclasses that a YAML fills: every field is what its annotation says, or a :class:`ConfigError`.

    Lists come out as tuples, times and sizes as numbers. A key that is a keyword of Python names a field with ``_`` behind it. What several fields must satisfy together goes into the
    subclass's ``__post_init__``, after ``super().__post_init__()``.
    """

    key: ClassVar[str] = ""
    """Where it stands in a YAML. :func:`from_mapping` may be given another place."""
    deprecated: ClassVar[Mapping[str, Callable[[Any], dict[str, Any]]]] = {}
    """Options of earlier versions, and what a value of one is in today's, whose mappings it adds to."""

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = accept(
                hints[field.name], getattr(self, field.name), _join(self.key, field.name.removesuffix("_"))
            )
            object.__setattr__(self, field.name, value)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults: the options that make this again."""
        fields = {field.name: field for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        plain = {
            name: field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
            for name, field in fields.items()
        }
        return {name: getattr(self, name) for name in fields if getattr(self, name) != plain[name]}


def from_mapping(cls: type[T], values: Mapping[str, Any], key: str, owner: str = "") -> T:
    """Build the dataclass ``cls`` from a YAML mapping.

    Args:
        cls: A subclass of :class:`Config`.
        values: The mapping as the YAML has it.
        key: The YAML key under which it stands, for messages.
        owner: Who takes the options, where the key does not say it.

    Raises:
        ConfigError: No mapping, a key that ``cls`` does not have, a key that is missing, or a value that is not what the
            annotation says.
    """
    fields = {field.name.removesuffix("_"): field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}: {values!r} is not a mapping. It takes {', '.join(fields)}.")
    old: Mapping[str, Callable[[Any], dict[str, Any]]] = getattr(cls, "deprecated", {})
    for name in [name for name in old if name in values]:
        newer = old[name](values[name])
        log.warning("%s: deprecated. Write %s instead.", _join(key, name), newer or "nothing")
        rest = {k: v for k, v in values.items() if k != name}
        values = rest | {
            k: {**rest.get(k, {}), **v} if isinstance(v, Mapping) else v for k, v in newer.items()
        }
    for name in values:
        if name not in fields:
            raise ConfigError(
                f"{_join(key, name)}: unknown key. {owner or key} takes {', '.join(fields)}.{nearest(name, fields)}"
            )
    for name, field in fields.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        if name not in values and not optional:
            raise ConfigError(f"{_join(key, name)}: missing.")
    hints = _hints(cls)
    own = {name: fields[name].name for name in values}
    return cls(**{own[name]: accept(hints[own[name]], v, _join(key, name)) for name, v in values.items()})


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], key: str) -> None:
    """Check arguments by the annotations of the function that takes them: what a registry calls with a YAML's values.

    ``function`` may be a class, whose ``__init__`` counts; parameters without an annotation are passed over.

    Raises:
        ConfigError: A value that is not what the annotation says.
    """
    hints = _hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    for name, value in arguments.items():
        if name in hints:
            accept(hints[name], value, _join(key, name))


def check_choice(key: str, value: object, allowed: Sequence[str]) -> None:
    """Raise unless ``value`` is one of ``allowed``.

    Raises:
        ConfigError: Names the key, the value, the valid values and the nearest one.
    """
    accept(Annotated[str, one_of(*allowed)], value, key)


def accept(hint: Any, value: Any, key: str) -> Any:
    """``value`` as ``hint`` has it: lists as tuples, parsed where ``hint`` says how.

    Raises:
        ConfigError: It is something else; names ``key``, the value and what is allowed.
    """
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _accept_narrowed(hint, arguments[0], arguments[1:], value, key)
    if origin in (Union, types.UnionType):
        return _accept_any_of(hint, arguments, value, key)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in arguments):
            return value
    elif origin is not None and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {
                accept(arguments[0], name, _join(key, name)): accept(arguments[1], item, _join(key, name))
                for name, item in value.items()
            }
    elif origin is not None and issubclass(origin, Sequence):
        if isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return tuple(accept(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    elif hint in (None, types.NoneType):
        if value is None:
            return value
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _FLOAT32_MAX:
            return value
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_mapping(hint, value, key)  # type: ignore[arg-type]
    elif isinstance(value, hint):
        return value
    raise _mismatch(hint, value, key)


def _accept_narrowed(hint: Any, base: Any, rules: Sequence[Any], value: Any, key: str) -> Any:
    for parser in _parsers(hint):
        return parser.function(value, key)
    try:
        value = accept(base, value, key)
    except ConfigError as error:
        raise (error if _is_deeper(error, key) else _mismatch(hint, value, key)) from None
    if not all(rule.holds(value) for rule in rules):
        raise _mismatch(hint, value, key)
    return value


def _accept_any_of(hint: Any, alternatives: Sequence[Any], value: Any, key: str) -> Any:
    inside: list[str] = []
    for alternative in alternatives:
        try:
            return accept(alternative, value, key)
        except ConfigError as error:
            if _is_deeper(error, key) or _parsers(alternative):
                inside.append(str(error))  # of the value's own kind, and wrong deeper inside
    if not inside or isinstance(value, str | bytes) or not isinstance(value, Mapping | Sequence):
        raise _mismatch(hint, value, key)
    raise ConfigError(max(inside, key=lambda said: len(said.partition(": ")[0])))


def _is_deeper(error: ConfigError, key: str) -> bool:
    """Whether ``error`` is of something inside the value of ``key``."""
    return not str(error).startswith(f"{key}: ")


def _parsers(hint: Any) -> list[Parse]:
    return [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Parse)]


def _mismatch(hint: Any, value: Any, key: str) -> ConfigError:
    close = nearest(value, _choices(hint)) if isinstance(value, str) else ""
    return ConfigError(f"{key}: {value!r} is not {_words(hint)}.{close}")


def _words(hint: Any) -> str:
    """What a hint allows, to follow "is not"."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        for parser in _parsers(hint):
            return parser.words
        if any(rule.choices for rule in arguments[1:]):
            return " and ".join(rule.words for rule in arguments[1:])
        return f"{_words(arguments[0])} {' and '.join(rule.words for rule in arguments[1:])}"
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(_words(alternative) for alternative in arguments))
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    if origin is not None and issubclass(origin, Sequence):
        item = (
            typing.get_args(arguments[0])[0] if typing.get_origin(arguments[0]) is Annotated else arguments[0]
        )
        of = {str: ' of strings, such as ["a", "b"]'}.get(item, "")
        return "a list" + (" of mappings" if dataclasses.is_dataclass(arguments[0]) else of)
    if dataclasses.is_dataclass(hint):
        return f"a mapping with {', '.join(field.name for field in dataclasses.fields(hint))}"
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        types.NoneType: "null",
    }
    return names.get(hint, f"a {hint.__name__}")


def _choices(hint: Any) -> list[str]:
    if typing.get_origin(hint) is Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    found = [choice for rule in getattr(hint, "__metadata__", ()) for choice in getattr(rule, "choices", ())]
    return found + [choice for part in typing.get_args(hint) for choice in _choices(part)]


def _join(key: str, name: object) -> str:
    """``key.name``; for the options of a command (``--``) the name alone follows."""
    return f"{key}.{name}" if key and not key.endswith(("-", " ")) else f"{key}{name}"


_hints: Callable[[Any], dict[str, Any]] = functools.cache(
    functools.partial(typing.get_type_hints, include_extras=True)
)
