"""What a program does on streams, as a happens-before relation of vector clocks, and the races in it.

Every operation is a tick of its stream's clock, and knows the ticks of other streams that are over when it starts: those before an event
that its stream waited for, and those that the host had waited for when it launched it. Two accesses to one memory, one of which
writes, race unless the later one knows the earlier. Memory goes back to the stream that it was allocated on, so freeing it races with what
another stream does there, unless that stream was recorded (``Tensor.record_stream``) or waited for. Whether the wrong thing would happen on
some machine does not matter: what is not ordered is a race.

Source: Lamport, "Time, clocks, and the ordering of events in a distributed system" (1978); torch's own sanitizer
(``torch/cuda/_sanitizer.py``), which needs a GPU and does not look at what is freed.
"""

from __future__ import annotations

import dataclasses

HOST = "host"
"""The host's own order of events, as a stream."""

Clock = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Race:
    """Two things that nothing orders.

    Attributes:
        kind: ``read before written``, ``written while in use`` or ``freed while in use``.
        memory: What, and where it was allocated.
        first: The earlier access: stream and place.
        second: The later one.
    """

    kind: str
    memory: str
    first: str
    second: str


@dataclasses.dataclass
class Memory:
    """One storage: on which stream it was allocated (``HOST``: in host memory), and its latest accesses by stream."""

    name: str
    home: str
    writes: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    reads: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    recorded: set[str] = dataclasses.field(default_factory=set)


class Graph:
    """The clocks of all streams, and what was found.

    Attributes:
        races: In the order in which they were found, each once.
        syncs: Where the host waited for the device: ``(what, place)``.
    """

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.races: list[Race] = []
        self.syncs: list[tuple[str, str]] = []

    def clock(self, stream: str) -> Clock:
        """What has to be over before the next operation of ``stream`` starts."""
        return self.clocks.setdefault(stream, {})

    def launched(self, stream: str, reads: list[Memory], writes: list[Memory], place: str) -> None:
        """One operation."""
        clock = self.clock(stream)
        _merge(clock, self.clocks[HOST])
        now = clock[stream] = clock.get(stream, 0) + 1
        access = f"{stream}, {place}"
        for memory in reads:
            self._check("read before written", memory, memory.writes, clock, stream, access)
        for memory in writes:
            self._check("written while in use", memory, memory.writes | memory.reads, clock, stream, access)
            self._check("written while in use", memory, memory.reads, clock, stream, access)
        for memory in reads:
            memory.reads[stream] = now, access
        for memory in writes:
            memory.writes[stream] = now, access

    def event(self, stream: str) -> Clock:
        """What is over once all that ``stream`` was given is."""
        return dict(self.clock(stream)) | self._host_of(stream)

    def wait(self, stream: str, event: Clock) -> None:
        """What ``stream`` is given from here on starts after ``event``."""
        _merge(self.clock(stream), event)

    def synchronize(self, event: Clock, what: str, place: str) -> None:
        """The host waits for ``event``."""
        self.syncs.append((what, place))
        _merge(self.clocks[HOST], event)

    def reached(self, event: Clock) -> bool:
        """Whether the host knows that ``event`` is over; a GPU that is late answers no as long as it may."""
        return all(self.clocks[HOST].get(stream, 0) >= tick for stream, tick in event.items())

    def freed(self, memory: Memory) -> None:
        """It goes back to its stream, where the next operation may get it."""
        if memory.home == HOST:
            return  # pinned memory: torch's host allocator waits for the streams that copied (CachingHostAllocator)
        clock = dict(self.clock(memory.home))
        _merge(clock, self.clocks[HOST])
        unrecorded = {s: a for s, a in (memory.reads | memory.writes).items() if s not in memory.recorded}
        for accesses in (memory.reads, memory.writes):
            kept = {stream: accesses[stream] for stream in accesses if stream in unrecorded}
            self._check("freed while in use", memory, kept, clock, memory.home, f"{memory.home}, freed")

    def _host_of(self, stream: str) -> Clock:
        return {s: t for s, t in self.clocks[HOST].items() if t > self.clock(stream).get(s, 0)}

    def _check(
        self,
        kind: str,
        memory: Memory,
        accesses: dict[str, tuple[int, str]],
        clock: Clock,
        stream: str,
        access: str,
    ) -> None:
        for other, (tick, earlier) in accesses.items():
            if other != stream and clock.get(other, 0) < tick:
                race = Race(kind, memory.name, earlier, access)
                if race not in self.races:
                    self.races.append(race)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)
