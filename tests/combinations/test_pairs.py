"""Every pair of features once, on gloo ranks: exact ones change no gradient, lossy ones by no more than their rounding."""

import re

import pytest

from tests.combinations import bounds
from tests.combinations.running import LEARNING_RATE, run
from tests.combinations.space import Case, beside_frozen_weights, covering, pairs
from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess
IMPORTS = ",".join(
    (
        launch.FSDP,
        "transformers.models.llama.modeling_llama",
        "peft",
        "tests.kernels.interpreter",
        "tests.combinations.running",
    )
)
SAMPLE = (
    Case(
        wrapper="hsdp2", dtype="float16", fp8="mxfp8", attention="delayed", checkpoint="targets", parameters="int8",
        lora=True, tied=True, wrapped="last",
    ),
    Case(
        wrapper="fsdp1-flat", dtype="float16", fp8="current", attention=True, checkpoint="full", gradients="int8",
        accumulation="two-forwards", init="mixed",
    ),
    Case(wrapper="ddp", fp8="delayed", attention=True, accumulation="two-forwards"),
    Case(fp8="native-delayed"),
)  # fmt: skip
"""Rows of the default tier."""


def wrong(case: Case, ranks: list[dict]) -> list[str]:
    """What is not as it should be, in words."""
    found = []
    replicas = [[step["digest"] for step in rank["steps"]] for rank in ranks]
    if case.wrapper != "none" and any(other != replicas[0] for other in replicas):
        found.append("replicas differ")
    for number, rank in enumerate(ranks):
        found += [
            f"rank {number}: {name} did nothing" for name, active in rank["active"].items() if not active
        ]
        found += [f"rank {number}: {text}" for text in rank["kept"]]
        for index, step in enumerate(rank["steps"]):
            before = rank["steps"][index - 1]["errors"] if index else {}
            found += [
                f"rank {number}, step {index}: {text}" for text in _beyond(case, step["errors"], before)
            ]
            found += [
                f"rank {number}, step {index}: {name} was gathered as another weight"
                for name in step["weights"]
            ]
            if not step["update"] <= bounds.update(LEARNING_RATE):
                found.append(f"rank {number}, step {index}: weights moved otherwise by {step['update']:.1e}")
        found += _numerics(case, rank["numerics"])
    return found


def _beyond(case: Case, errors: dict[str, tuple[float, float, float]], before: dict) -> list[str]:
    total = sum(norm**2 for _, norm, _ in errors.values()) ** 0.5
    found = []
    for name, (error, _, local) in errors.items():
        allowed = bounds.relative(case) * local + bounds.absolute(case) * total
        allowed += bounds.carried(case) * before.get(name, (0.0, 0.0, 0.0))[2]
        if not error <= allowed:
            found.append(
                f"{name} is off by {error / max(local, 1e-30):.1e} of its norm, allowed {allowed / max(local, 1e-30):.1e}"
            )
    return found


def _numerics(case: Case, measured: dict) -> list[str]:
    allowed = bounds.numerics(case)
    found = []
    if not measured["direction"] <= allowed["direction"]:
        found.append(f"the number formats turn the gradient by {measured['direction']:.2f}")
    if not abs(measured["ratio"] - 1) <= allowed["ratio"]:
        found.append(f"the number formats scale the gradient by {measured['ratio']:.2f}")
    found += [
        f"the number formats move {name} by {error / max(local, 1e-30):.2f}"
        for name, (error, _, local) in measured["errors"].items()
        if not error <= allowed["parameter"] * local + allowed["parameter"] * 0.05 * _total(measured)
    ]
    return found


def _total(measured: dict) -> float:
    return sum(norm**2 for _, norm, _ in measured["errors"].values()) ** 0.5


def world_of(case: Case) -> int:
    return 4 if case.wrapper.startswith("hsdp") else 2


def pytest_generate_tests(metafunc):
    """Every pair of values, a sample of it by default; every triple with ``-m matrix_full``, which takes seconds to list."""
    if "case" not in metafunc.fixturenames:
        return
    if re.search(r"(?<!not )\bmatrix_full\b", metafunc.config.option.markexpr):
        rows = [pytest.param(case, marks=pytest.mark.matrix_full) for case in covering(3)]
    else:
        rows = pairs(SAMPLE, metafunc.config.option.markexpr)
    metafunc.parametrize("case", rows, ids=str)


@pytest.mark.parametrize(
    "beside",
    [pytest.param(c, marks=[pytest.mark.full] if n else []) for n, c in enumerate(beside_frozen_weights())],
    ids=str,
)
def test_frozen_weights_in_fp8_change_nothing(beside):
    test_features_hold_together(beside)


def test_features_hold_together(case):
    results = launch.call(run, world_of(case), case, imports=IMPORTS, timeout=300)
    problems = wrong(case, results)
    assert not problems, "\n".join([str(case), *problems[:12]])


@pytest.mark.parametrize("wrapper", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_a_backward_has_the_weights_of_its_forward(wrapper):
    """Gathered again as the same codes. Beside nothing that rounds on its way, so that other weights show."""
    test_features_hold_together(Case(wrapper=wrapper, parameters="int8"))
