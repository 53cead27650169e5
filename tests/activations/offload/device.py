"""A device whose copies run as late as they may, or at any moment before, and a trace of what happened; and what must hold of any trace."""

from __future__ import annotations

import weakref

import torch


class LateQueue:
    """Stands for a GPU's copy stream. Of the tensors that it is given it holds none, as a stream does not.

    A copy runs when the computation waits for it or for one after it, or when ``rush`` says so. What a copy back will fill is
    full of NaN until then.

    Attributes:
        trace: ``("out" | "back", copy, buffer, memory)``, ``("wait", copy)``, ``("free", memory)`` and what the test adds.
    """

    def __init__(self, rush=lambda: False):
        self.rush = rush
        self.trace = []
        self.queue = []
        self.buffers = []
        self.copies = 0
        self._names = {}

    def buffer(self, nbytes):
        host = torch.full((nbytes,), 255, dtype=torch.uint8)
        self.buffers.append(host.untyped_storage())
        return host

    def copy(self, target, source):
        number, self.copies = self.copies, self.copies + 1
        out = self._is_buffer(target)
        host, memory = (target, source) if out else (source, target)
        if not out:
            memory.fill_(255)  # NaN in every float
        self.trace.append(
            ("out" if out else "back", number, host.untyped_storage()._cdata, self._name(memory))
        )
        storage, offset, size = weakref.ref(memory.untyped_storage()), memory.storage_offset(), memory.numel()
        host_ref = host.untyped_storage(), host.numel()
        self.queue.append((number, out, host_ref, storage, offset, size))
        while self.queue and self.rush():
            self._run()
        return number

    def wait(self, number):
        self.trace.append(("wait", number))
        while self.queue and self.queue[0][0] <= number:
            self._run()

    def _run(self):
        _, out, (host, n), storage, offset, size = self.queue.pop(0)
        assert storage() is not None, "device memory was let go of while a copy was to use it"
        memory = torch.empty(0, dtype=torch.uint8).set_(storage(), offset, (size,), (1,))
        host = torch.empty(0, dtype=torch.uint8).set_(host, 0, (n,), (1,))
        host.copy_(memory) if out else memory.copy_(host)

    def _is_buffer(self, x):
        return any(x.untyped_storage() is b for b in self.buffers)

    def _name(self, memory):
        storage = memory.untyped_storage()
        key = storage._cdata
        if key not in self._names:
            name = f"memory of copy {self.copies - 1}"

            def freed(_):
                self._names.pop(key)
                self.trace.append(("free", name))

            self._names[key] = (name, weakref.ref(storage, freed))
        return self._names[key][0]


def check(trace):
    """What must hold, whatever the schedule: judged from the order of events alone.

    No device memory is freed before the computation has waited for every copy that touches it, and no buffer is read that was never filled.
    (That it was not filled with something else meanwhile, the gradients show: these copies run as late as they may.)
    """
    waited, touching, filled = -1, {}, set()
    for event in trace:
        kind = event[0]
        if kind in ("out", "back"):
            _, number, buffer, memory = event
            assert kind == "out" or buffer in filled, event
            filled.add(buffer)
            touching.setdefault(memory, []).append(number)
        elif kind == "wait":
            waited = max(waited, event[1])
        elif kind == "free":
            assert all(number <= waited for number in touching.get(event[1], [])), event


def order_of_units(trace, units):
    """How one forward and one backward of ``units`` checkpoints in a row went, from a trace with ``("enter"|"leave", unit)`` marks.

    The copy out of a unit begins before its forward's work, and is waited for by the next unit at the earliest; that of the last is never
    fetched back; the copy back of a unit begins before the unit after it recomputes, and is waited for only when it is its turn.
    """
    at = {}
    for i, event in enumerate(trace):
        at.setdefault(event[:2], []).append(i)
    outs = [e for e in trace if e[0] == "out"]
    backs = [e for e in trace if e[0] == "back"]
    assert len(outs) == units and len(backs) == units - 1
    for unit in range(units):
        forward, recompute = at["enter", unit]
        out = trace.index(outs[unit])
        assert out < forward
        wait = next(i for i, e in enumerate(trace) if e[0] == "wait" and e[1] >= outs[unit][1])
        if unit < units - 1:
            assert at["leave", unit][0] < wait < at["enter", unit + 1][0]
            back = backs[units - 2 - unit]
            assert back[2] == outs[unit][2]  # of its own buffer
            began = trace.index(back)
            assert began < at["enter", unit + 1][1]  # while the unit after it is still to recompute
            waited = next(i for i, e in enumerate(trace) if e[0] == "wait" and e[1] >= back[1])
            assert at["enter", unit + 1][1] < waited < recompute
            if unit == 0:
                continue  # who calls the model holds what it is called with
            freed = trace.index(("free", outs[unit][3]))
            assert wait < freed < at["enter", unit + 1][0]  # the device holds one unit's at a time
