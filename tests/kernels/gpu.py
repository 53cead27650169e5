"""The rates that compiled code is held against. From data sheets, not measured."""

ISSUED = 128
"""Instructions of a thread that a multiprocessor issues in a cycle (four warps)."""
COPY = {90: (132, 1.7e9, 3.0e12), 100: (148, 1.86e9, 7.2e12)}
"""Multiprocessors, clock in Hz, and bytes a second of a copy, 0.9 of the data sheet's: H100, B200."""
READ_AND_WRITTEN = {"amax": 2, "rows": 3, "columns": 3, "swiglu": 6}
"""Bytes an element of bf16; where no word of the case is here, 4: read, and both layouts written."""


def issue_cap(case, arch, instructions):
    """At how much of a copy's bandwidth a multiprocessor can issue the instructions of a kernel."""
    words = case.replace("_", " ").replace(",", " ").split()
    known = [READ_AND_WRITTEN[word] for word in words if word in READ_AND_WRITTEN]
    moved = 4 if {"rows", "columns"} <= set(words) and "swiglu" not in words else max(known, default=4)
    processors, clock, copy = COPY[arch]
    return processors * clock * ISSUED / instructions * moved / copy
