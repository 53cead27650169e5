"""Rules with ``from`` and ``until`` beside wrappers, recompute, LoRA and torch.compile: a run by times is the one by hand."""

import pytest

from tests.multiprocess import launch, times

FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("how", "ranks", "parts"),
    [
        ("fsdp2", 2, ("lora", "recompute")),
        pytest.param("fsdp1", 2, (), marks=FULL),
        pytest.param("tp", 2, (), marks=FULL),
        pytest.param("ddp", 2, ("lora",), marks=FULL),
        pytest.param("fsdp2", 2, ("compile",), marks=FULL),
        pytest.param("fsdp1", 4, ("recompute",), marks=FULL),
        pytest.param("tp", 4, ("recompute",), marks=FULL),
    ],
    ids=str,
)
def test_a_run_by_times_is_the_one_by_hand(how, ranks, parts):
    if "lora" in parts:
        pytest.importorskip("peft")
    for by_hand, constant, same_flops in launch.call(times.alike, ranks, how, *parts):
        assert all(by_hand) and same_flops
        assert not any(constant)
