"""What torch itself records of memory, for tests of what counts it."""

import torch


def most_allocated(step):
    """The most bytes above those of now that ``step()`` holds at once on a CPU, by the allocator's own record."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as seen:
        step()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most
