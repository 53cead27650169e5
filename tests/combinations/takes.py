"""What an option of a YAML takes: the test of a value, how to draw one, and the kinds that several options share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st


class Takes(NamedTuple):
    """What an option takes: the test of a value, and how to draw one."""

    holds: Callable[[Any], bool]
    draw: st.SearchStrategy[Any]
    judged: Callable[[Any], bool] = lambda value: True
    """Values that it may hand on to others, whose word it is, are not judged."""


def whole(low: int, high: int = 10**30, where: Callable[[int], bool] = lambda n: True) -> Takes:
    return Takes(
        lambda v: type(v) is int and low <= v <= high and where(v),
        st.integers(low, min(high, low + 300)).filter(where),
    )


def number(low: float, high: float = math.inf, *, without: tuple[float, ...] = ()) -> Takes:
    def holds(v: Any) -> bool:
        return type(v) in (int, float) and abs(v) < 3.4e38 and low <= v <= high and v not in without

    return Takes(holds, st.floats(low, min(high, 1e3)).filter(holds))


def word(*choices: str) -> Takes:
    return Takes(lambda v: isinstance(v, str) and v in choices, st.sampled_from(choices or [""]))


def only(*values: Any) -> Takes:
    return Takes(lambda v: any(type(v) is type(x) and v == x for x in values), st.sampled_from(values))


def either(*takes: Takes) -> Takes:
    return Takes(
        lambda v: any(t.holds(v) for t in takes),
        st.one_of([t.draw for t in takes]),
        lambda v: all(t.judged(v) for t in takes),
    )


def some(of: Takes, *, least: int = 0) -> Takes:
    return Takes(
        lambda v: isinstance(v, list) and len(v) >= least and all(of.holds(x) for x in v),
        st.lists(of.draw, min_size=least, max_size=3),
    )


def table(keys: Takes, values: Takes, *, least: int = 0) -> Takes:
    def holds(v: Any) -> bool:
        return (
            isinstance(v, dict)
            and len(v) >= least
            and all(keys.holds(k) and values.holds(x) for k, x in v.items())
        )

    return Takes(holds, st.dictionaries(keys.draw, values.draw, min_size=least, max_size=3))


FLAG = only(True, False)
NULL = only(None)
POSITIVE = number(0, without=(0,))
PRINTABLE = st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), min_size=1, max_size=8)
TEXT = Takes(lambda v: isinstance(v, str) and v != "" and v.isprintable(), PRINTABLE)
NAMES = some(TEXT)
FIELDS = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")


def is_path(v: Any) -> bool:
    plain = re.sub("{(" + "|".join(FIELDS) + ")}", "", v) if isinstance(v, str) else ""
    return isinstance(v, str) and v != "" and v.isprintable() and not set("{}") & set(plain)


PATH = Takes(is_path, st.sampled_from(["logs/a.jsonl", "{run_name}/x", "/tmp/x-{rank}"]),
             lambda v: not isinstance(v, str) or ("{{" not in v and "}}" not in v and "{run_name" not in v.replace("{run_name}", "")))  # fmt: skip
BATCHES = Takes(
    lambda v: (
        (type(v) is int and v >= 0) or (isinstance(v, str) and re.fullmatch("[0-9]{1,18}ba", v) is not None)
    ),
    st.sampled_from([0, 7, "0ba", "100ba"]),
)
SIZE = Takes(
    lambda v: (
        (type(v) is int and v >= 0)
        or (
            isinstance(v, str)
            and re.fullmatch(r"(?i)\s*[0-9]+(\.[0-9]+)?\s*([kmg]i?)?b?\s*", v) is not None
            and not re.search(r"(?i)[kmg]i?\s*$", v)
        )
    ),
    st.sampled_from([0, 65536, "64KiB", "1.5 MB", "7b"]),
)
TIME = Takes(
    lambda v: (
        isinstance(v, str)
        and re.fullmatch(r"[0-9]+(iter|ep|ba|sp|tok|sec)|[0-9]*\.?[0-9]+dur", v) is not None
    ),
    st.sampled_from(["5ba", "0.1dur", "1000tok", "2ep"]),
)
FORMAT = word("int8", "e4m3", "int4", "exact")


def is_blocks(v: Any) -> bool:
    """README of the algorithm: the first n, numbers, or a comma list of words with numbers."""
    if isinstance(v, list):
        return bool(v) and all(whole(0).holds(x) or (isinstance(x, str) and _is_some_blocks(x)) for x in v)
    return whole(0).holds(v) or (
        isinstance(v, str) and all(_is_some_blocks(x) for x in v.replace(" ", "").split(","))
    )


def _is_some_blocks(v: str) -> bool:
    between = re.fullmatch(r"range-([0-9]+)-([0-9]+)", v)
    if between:
        return int(between[1]) <= int(between[2])
    share = re.fullmatch(r"(?:first|last|middle)-([0-9]+)%", v)
    if share:
        return int(share[1]) <= 100
    return re.fullmatch(r"(first|last|middle)-[0-9]+|every-0*[1-9][0-9]*", v) is not None


BLOCKS = Takes(
    is_blocks,
    st.one_of(
        st.integers(0, 20),
        st.sampled_from(["first-2", "range-1-3, last-1", "every-4", "last-15%"]),
        st.lists(
            st.one_of(st.integers(0, 20), st.sampled_from(["middle-2", "last-1"])), min_size=1, max_size=3
        ),
    ),
)
POLICY = either(
    word("full", "selective", "offload"), some(word("aten.mm", "aten.addmm", "aten.mm.default"), least=1)
)
RECIPES = {
    "delayed": {
        "margin": whole(0, 16),
        "amax_history_len": whole(1),
        "amax_compute_algo": word("max", "most_recent"),
        "fast_accumulation": some(word("fprop", "dgrad", "wgrad")),
    },
    "current": {"power_2_scales": FLAG, "fast_accumulation": some(word("fprop", "dgrad", "wgrad"))},
    "block": {"power_2_scales": FLAG},
    "mxfp8": {},
    "nvfp4": {
        "fp8_format": word("e4m3"),
        "hadamard": FLAG,
        "stochastic_rounding": FLAG,
        "square_weights": FLAG,
    },
    "unit": {
        "gradient_scale": either(word("auto"), whole(1, 2**60, lambda n: not n & (n - 1))),
        "fast_accumulation": some(word("fprop", "dgrad", "wgrad")),
    },
}


def is_recipe(v: Any) -> bool:
    if not isinstance(v, dict) or not isinstance(v.get("name"), str) or v["name"] not in RECIPES:
        return False
    options = {"fp8_format": word("hybrid", "e4m3"), **RECIPES[v["name"]]}
    return all(key in options and options[key].holds(x) for key, x in v.items() if key != "name")


RECIPE = Takes(
    is_recipe,
    st.one_of(
        [
            st.builds(lambda x, name=name, key=key: {"name": name, key: x}, takes.draw)
            for name, options in RECIPES.items()
            for key, takes in {"fp8_format": word("hybrid", "e4m3"), **options}.items()
        ]
    ),
)
HIGH = "high_precision"
_OF_A_RULE = {
    "recipe": either(word(*RECIPES, HIGH), RECIPE),
    "modules": either(TEXT, NAMES),
    "blocks": either(NULL, BLOCKS),
    "roles": some(word("attention", "mlp", "expert", "shared_expert")),
    "gemms": either(
        only({}), only({"wgrad": HIGH}), only({"fprop": "fp8", "wgrad": HIGH}), only({"dgrad": "dequantized"})
    ),
}


def is_rules(v: Any) -> bool:
    """A list of rules of which one runs FP8, one at most with fields of delayed, and none of high precision names GEMMs."""
    if not isinstance(v, list) or not all(isinstance(rule, dict) and "recipe" in rule for rule in v):
        return False
    if not all(key in _OF_A_RULE and _OF_A_RULE[key].holds(x) for rule in v for key, x in rule.items()):
        return False
    fp8 = [rule["recipe"] for rule in v if rule["recipe"] != HIGH]
    delayed = [r for r in fp8 if r == "delayed" or (isinstance(r, dict) and r["name"] == "delayed")]
    return (
        bool(fp8) and len(delayed) < 2 and not any(rule["recipe"] == HIGH and rule.get("gemms") for rule in v)
    )


RULES = Takes(
    is_rules,
    st.lists(
        st.fixed_dictionaries(
            {"recipe": _OF_A_RULE["recipe"].draw},
            optional={name: takes.draw for name, takes in _OF_A_RULE.items() if name != "recipe"},
        ),
        min_size=1,
        max_size=3,
    ).filter(is_rules),
    lambda v: not isinstance(v, list) or sum("delayed" in repr(rule) for rule in v) < 2,  # alike or not
)
_OF_MEASURED = {
    "error": POSITIVE,
    "warmup": BATCHES,
    "rows": whole(1),
    "recipes": some(word("delayed", "current", "block", "mxfp8")),
}
MEASURED = Takes(
    lambda v: (
        isinstance(v, dict)
        and v.get("name") == "measured"
        and all(k == "name" or (k in _OF_MEASURED and _OF_MEASURED[k].holds(x)) for k, x in v.items())
    ),
    st.fixed_dictionaries(
        {"name": st.just("measured")}, optional={n: t.draw for n, t in _OF_MEASURED.items()}
    ),
)
_OF_ATTENTION = {
    "recipe": either(
        NULL,
        word("delayed", "current"),
        Takes(
            lambda v: is_recipe(v) and v["name"] in ("delayed", "current"),
            RECIPE.draw.filter(lambda v: v["name"] in ("delayed", "current")),
        ),
    ),
    "grad_scores": word("fp8", "bfloat16"),
    "exclude": NAMES,
}
ATTENTION = Takes(
    lambda v: (
        isinstance(v, dict) and all(k in _OF_ATTENTION and _OF_ATTENTION[k].holds(x) for k, x in v.items())
    ),
    st.fixed_dictionaries({}, optional={name: takes.draw for name, takes in _OF_ATTENTION.items()}),
)
_OF_A_TARGET = {"target": TEXT, "blocks": either(NULL, BLOCKS), "policy": either(NULL, POLICY)}
TARGET = Takes(
    lambda v: (
        isinstance(v, dict)
        and "target" in v
        and all(k in _OF_A_TARGET and _OF_A_TARGET[k].holds(x) for k, x in v.items())
    ),
    st.fixed_dictionaries(
        {"target": TEXT.draw}, optional={name: _OF_A_TARGET[name].draw for name in ("blocks", "policy")}
    ),
)

KEYS = st.one_of(
    PRINTABLE,
    st.sampled_from(["", "name", "recipe", "blocks", "bf16", "margin", "\0", "a.b"]),
    st.sampled_from([None, True, 0, 1.5]),
)


@st.composite
def invalid(draw: Any, valid: st.SearchStrategy[Any], anything: st.SearchStrategy[Any]) -> tuple[Any, str]:
    """What ``valid`` draws with one of ``anything`` at one place inside, old or new, however deep; and that place's path (``[0].blocks``)."""

    def invalidate(v: Any, path: str) -> tuple[Any, str]:
        if isinstance(v, dict):
            key = draw(KEYS if draw(st.integers(0, 4)) == 0 else st.sampled_from(list(v)))
            path = f"{path}.{key}"
        else:
            key = draw(st.integers(0, len(v) - 1))
            path = f"{path}[{key}]"
        inside = v[key] if isinstance(v, list) else v.get(key)
        deeper = isinstance(inside, dict | list) and inside and draw(st.booleans())
        new, path = invalidate(inside, path) if deeper else (draw(anything), path)
        return ({**v, key: new} if isinstance(v, dict) else [*v[:key], new, *v[key + 1 :]]), path

    return invalidate(draw(valid.filter(lambda v: isinstance(v, dict | list) and v)), "")
