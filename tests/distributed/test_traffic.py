"""Clocks of what is on a GPU, with stand-ins for its events: they are let go of as the GPU reaches them."""

import torch

from foundry_fp8.distributed.traffic import Traffic

CUDA = torch.device("cuda")


MADE = []


class Event:
    """Reached when set so. One millisecond lies between any two."""

    def __init__(self, enable_timing):
        self.reached = False
        MADE.append(self)

    def record(self):
        pass

    def query(self):
        return self.reached

    def synchronize(self):
        self.reached = True

    def elapsed_time(self, end):
        assert end.reached
        return 1.0


def test_events_do_not_pile_up_where_nobody_logs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    traffic = Traffic()
    for step in range(100):
        with traffic.timed("collective", CUDA):
            pass
        if step >= 3:  # the GPU is three steps behind
            MADE[2 * (step - 3) + 1].reached = True
    assert len(traffic._events) <= 5
    assert traffic.seconds["collective"] > 0.09
    traffic.settle()
    assert not traffic._events and abs(traffic.seconds["collective"] - 0.1) < 1e-9
