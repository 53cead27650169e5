"""The dynamic programme against brute force, and its determinism."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.planning.memory.solver import Cost, Frame, predict_peak, solve

size = st.integers(0, 60)
cost = st.builds(
    lambda kept, forward, backward, seconds, cached, moved: Cost(
        kept, kept + moved + forward, kept + moved + backward, seconds / 8, cached, moved
    ),
    size, size, size, st.integers(0, 40), st.sampled_from((0, 0, 7, 20)), st.sampled_from((0, 0, 5, 30)),
)  # fmt: skip


def sharded(draw, n):
    """What FSDP holds beside blocks; less than nothing where it is counted as gathered and is not yet."""

    def of_blocks(least):
        return tuple(draw(st.integers(least, 40)) for _ in range(n))

    return {
        "hidden": draw(st.integers(0, 9)),
        "beside_forward": of_blocks(-9),
        "beside_backward": of_blocks(-9),
        "reducing": of_blocks(0),
    }


@st.composite
def problems(draw):
    n = draw(st.integers(1, 5))
    options = [
        {
            name: draw(cost)
            for name in draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True))
        }
        for _ in range(n)
    ]
    frame = Frame(
        static=draw(size),
        before=draw(size),
        head_peak=draw(size),
        head_backward_peak=draw(size),
        after_head=draw(size),
        left=tuple(draw(st.integers(0, 20)) for _ in range(n)),
        end_peak=draw(size),
        **(sharded(draw, n) if draw(st.booleans()) else {}),
    )
    return options, frame, draw(st.integers(0, 500))


@pytest.mark.parametrize("moment", ["forward", "head", "head_backward", "backward", "reducing", "end"])
def test_the_peak_is_that_of_the_largest_moment(moment):
    """Two blocks; one of the six moments takes 1000 bytes by itself, on top of what is held then, counted by hand."""
    large = {
        name: 1000 if name == moment else 0
        for name in ("forward", "head", "head_backward", "backward", "reducing", "end")
    }
    costs = [
        Cost(kept=10, forward_peak=11, backward_peak=12, seconds=0.0, cached=3),
        Cost(kept=20, forward_peak=large["forward"], backward_peak=large["backward"], seconds=0.0, cached=5),
    ]
    frame = Frame(
        static=100,
        before=40,
        head_peak=large["head"],
        head_backward_peak=large["head_backward"],
        after_head=7,
        left=(2, 4),
        end_peak=large["end"],
        hidden=6,
        beside_forward=(1, 2),
        beside_backward=(3, -5),
        reducing=(0, large["reducing"]),
    )
    held = {
        "forward": 40 + 10 + 3 + 2,
        "head": 40 + 10 + 3 + 20 + 5,
        "head_backward": 40 + 10 + 20,
        "backward": 40 + 10 + 7 - 5,
        "reducing": 40 + 10 + 7 + 6,  # both of the last block, after which no other has left anything
        "end": 0,
    }
    assert predict_peak(costs, frame) == 100 + 1000 + held[moment]


@given(problems())
@settings(max_examples=300, deadline=None)
def test_what_is_moved_is_on_the_device_from_its_forward_to_the_next_and_again_from_the_next_ones_backward(
    problem,
):
    """The peak from a list of what lies on the device, event by event."""
    options, frame, _ = problem
    costs = [next(iter(o.values())) for o in options]
    device = {"before": frame.before}
    peak, last, order = frame.end_peak, None, []
    beside = list(frame.blocks())
    for i, cost in enumerate(costs):
        if cost.moved:
            device.pop(("moved", last), None)
            last = i
        peak = max(peak, sum(device.values()) + cost.forward_peak + beside[i][1])
        device |= {("kept", i): cost.kept, ("cached", i): cost.cached}
        if cost.moved:
            device["moved", i] = cost.moved
            order.append(i)
    peak = max(peak, sum(device.values()) + frame.head_peak)
    device = {key: n for key, n in device.items() if key[0] != "cached"}
    peak = max(peak, sum(device.values()) + frame.head_backward_peak)
    device["head"] = frame.after_head
    for i in reversed(range(len(costs))):
        device.pop(("kept", i))
        if costs[i].moved:
            device.pop(("moved", i))
            order.pop()
            if order:
                device["moved", order[-1]] = costs[order[-1]].moved
        own = max(costs[i].backward_peak + beside[i][2], frame.hidden + beside[i][3])
        peak = max(peak, sum(device.values()) + own)
        device["left", i] = frame.left[i]
    assert predict_peak(costs, frame) == frame.static + peak


@given(problems())
@settings(max_examples=300, deadline=None)
def test_it_is_the_best_of_all_assignments(problem):
    options, frame, budget = problem
    feasible = [
        sum(o[c].seconds for o, c in zip(options, chosen, strict=True))
        for chosen in itertools.product(*options)
        if predict_peak([o[c] for o, c in zip(options, chosen, strict=True)], frame) <= budget
    ]
    found = solve(options, frame, budget)
    if not feasible:
        assert found is None
        return
    costs = [o[c] for o, c in zip(options, found, strict=True)]
    assert predict_peak(costs, frame) <= budget
    assert sum(c.seconds for c in costs) == min(feasible)
    assert solve(options, frame, budget) == found


def test_one_hundred_unlike_blocks_are_solved():
    options = [
        {f"o{k}": Cost(1000 - 97 * k + i, 1100, 1200, 0.01 * k * (1 + i / 1000)) for k in range(10)}
        for i in range(100)
    ]
    frame = Frame(0, 10, 500, 500, 10, (7,) * 100, 900)
    chosen = solve(options, frame, 60_000)
    assert predict_peak([o[c] for o, c in zip(options, chosen, strict=True)], frame) <= 60_000
