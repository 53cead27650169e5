"""The decision, from times that are given: a clock that the test moves, and one rank."""

import pytest
import torch

from foundry_fp8.distributed.compression import adapt
from foundry_fp8.distributed.compression.adapt import AGAIN, BATCHES, START, Adaptation
from foundry_fp8.distributed.traffic import Traffic
from tests.one_rank import one_rank

CPU = torch.device("cpu")
FIRST = 7 + START  # after a warm-up of 7
END = FIRST + 3 * BATCHES


@pytest.fixture(autouse=True)
def group():
    one_rank()


@pytest.fixture
def run(monkeypatch):
    """``run(adaptation, batches, **milliseconds)``: the ways of ``batches``, each taking what its way takes."""
    clock = [0.0]
    monkeypatch.setattr(adapt.time, "perf_counter", lambda: clock[0])

    def through(adaptation, batches, skip=(), first=0.0, **milliseconds):
        ways, last = {}, None
        for batch in batches:
            if batch in skip:
                continue
            ways[batch], _ = adaptation.start_batch(batch, CPU)
            clock[0] += milliseconds[ways[batch]] / 1e3 + (first if ways[batch] != last else 0)
            last = ways[batch]
        return ways

    return through


def made():
    return Adaptation("int8", 7, Traffic())


@pytest.mark.parametrize(
    ("coded", "bf16", "plain", "way"),
    [
        (10.0, 15.0, 20.0, "coded"),
        (20.0, 15.0, 17.0, "bf16"),
        (20.0, 15.0, 12.0, "plain"),
        (10.0, 10.0, 10.04, "plain"),  # within a hundredth: what rounds least
        (10.0, 10.04, 12.0, "bf16"),
    ],
)
def test_the_fastest_way_is_taken(run, coded, bf16, plain, way):
    adaptation = made()
    ways = run(adaptation, range(END + 5), coded=coded, bf16=bf16, plain=plain, first=0.5)
    assert [ways[b] for b in range(FIRST)] == ["coded"] * FIRST
    tried = [ways[b] for b in range(FIRST, END)]
    assert tried == ["coded"] * BATCHES + ["bf16"] * BATCHES + ["plain"] * BATCHES
    assert {ways[b] for b in range(END, END + 5)} == {way}
    said = f"A step takes {coded:.1f} ms with int8, {bf16:.1f} in bfloat16, {plain:.1f} uncompressed"
    assert said in adaptation.verdict


def test_it_is_measured_again(run):
    adaptation = made()
    run(adaptation, range(FIRST + AGAIN), coded=20, bf16=15, plain=10)
    assert adaptation.way == "plain"
    run(adaptation, range(FIRST + AGAIN, END + AGAIN + 1), coded=5, bf16=15, plain=10)
    assert adaptation.way == "coded"


@pytest.mark.parametrize("skip", [{FIRST + 2}, {END - 1}, {FIRST}])
def test_a_measurement_that_a_jump_interrupts_decides_nothing(run, skip):
    adaptation = made()
    run(adaptation, range(END + 5), skip=skip, coded=20, bf16=15, plain=10)
    assert (adaptation.way, adaptation.verdict) == ("coded", "")


def test_the_break_even_is_what_was_saved_over_what_quantising_took(run):
    """3 MB less a step for 2 ms of quantising: 12 Gbit/s."""
    adaptation = made()
    traffic = adaptation.traffic
    step = adaptation.start_batch

    def counted(batch, device):
        way, decided = step(batch, device)
        traffic.sent["all_reduce"] += {"coded": 1_000_000, "bf16": 2_000_000, "plain": 4_000_000}[way]
        traffic.seconds["quantize"] += 0.002 if way == "coded" else 0
        return way, decided

    adaptation.start_batch = counted
    run(adaptation, range(END + 1), coded=20, bf16=15, plain=10)
    assert "break-even near 12 Gbit/s a rank" in adaptation.verdict


def test_the_decision_is_in_the_algorithms_checkpoint():
    from foundry_fp8.algorithms.compressed_communication import CompressedCommunication

    first, second = CompressedCommunication(warmup="7ba"), CompressedCommunication(warmup="7ba")
    first.compression.adaptation.way = "plain"
    second.load_state_dict(first.state_dict())
    second.compression.start_batch(FIRST - 1)
    assert second.compression.switch.way == "plain"
    kept = CompressedCommunication(warmup="7ba", adapt=False)
    kept.load_state_dict(first.state_dict())
    kept.compression.start_batch(FIRST - 1)
    assert kept.compression.switch.way == "coded"
