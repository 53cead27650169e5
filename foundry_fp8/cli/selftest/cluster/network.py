"""What the network carries: the collectives of torch, the speed of each link, and this package's compressed collectives."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from foundry_fp8.cli.selftest.cluster.ranks import Ranks, relative
from foundry_fp8.distributed.collectives import all_gather, all_reduce, reduce_scatter
from foundry_fp8.numerics.wire_format import FormatName, WireFormat

__all__ = ["collectives", "network"]

SLOW, SLOW_DRY = 3.0, 50.0
"""A link this many times slower than the fastest of its kind is named; in a dry run the ranks share cores with whatever else runs."""
REPEATS = 3
FORMATS: tuple[FormatName, ...] = ("bf16", "int8", "e4m3")


def network(ranks: Ranks) -> None:
    """Each collective with known numbers, then bytes per second."""
    rank, world, device = ranks.rank, ranks.world, ranks.device
    total = torch.tensor([rank + 1.0], device=device)
    dist.all_reduce(total)
    ranks.check("all-reduce", total.item() == world * (world + 1) / 2, f"{total.item():g}")
    sizes = list(range(1, world + 1))  # this rank sends `to + 1` numbers to rank `to`
    sent = torch.full((sum(sizes),), rank, dtype=torch.uint8, device=device)
    received = torch.empty(world * (rank + 1), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, sent, [rank + 1] * world, sizes)
    wanted = torch.arange(world, dtype=torch.uint8).repeat_interleave(rank + 1)
    ranks.check("all-to-all of uneven parts", torch.equal(received.cpu(), wanted), f"{world} parts of bytes")
    part = torch.empty(4, device=device)
    dist.reduce_scatter_tensor(part, torch.arange(4.0 * world, device=device))
    right = torch.equal(part.cpu(), world * torch.arange(4.0 * rank, 4.0 * rank + 4))
    ranks.check("reduce-scatter", right, "sums of known numbers")
    if world > 1:
        _bandwidth(ranks)
        _links(ranks)


def _bandwidth(ranks: Ranks) -> None:
    data = torch.zeros(1 << (18 if ranks.dry else 25), dtype=ranks.dtype, device=ranks.device)
    seconds = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        ranks.wait()
        started = time.perf_counter()
        dist.all_reduce(data)
        ranks.wait()
        seconds.append(time.perf_counter() - started)
    moved = 2 * (ranks.world - 1) / ranks.world * data.nbytes
    ranks.check("bandwidth of an all-reduce", True, f"{moved / min(seconds[1:]) / 1e9:.1f} GB/s a rank")


def _links(ranks: Ranks) -> None:
    """From each rank to the next, one at a time; those inside a node and those between nodes are compared apart."""
    data = torch.zeros(1 << (18 if ranks.dry else 25), dtype=ranks.dtype, device=ranks.device)
    found: dict[str, dict[str, float]] = {"inside a node": {}, "between nodes": {}}
    for source in range(ranks.world):
        to = (source + 1) % ranks.world
        best = float("inf")
        for _ in range(REPEATS + 1):
            dist.barrier()
            started = time.perf_counter()
            if ranks.rank == source:
                dist.send(data, to)
            elif ranks.rank == to:
                dist.recv(data, source)
            ranks.wait()
            best = min(best, time.perf_counter() - started)
        times: list[float] = [0.0] * ranks.world
        dist.all_gather_object(times, best)
        kind = "inside a node" if source // ranks.per_node == to // ranks.per_node else "between nodes"
        found[kind][f"{source} to {to}"] = data.nbytes / max(times[source], times[to]) / 1e9
    for kind, links in found.items():
        if links:
            fastest = max(links.values())
            factor = SLOW_DRY if ranks.dry else SLOW
            slow = [f"{link}: {speed:.2f} GB/s" for link, speed in links.items() if speed * factor < fastest]
            figures = f"{min(links.values()):.2f} to {fastest:.2f} GB/s"
            ranks.check(f"links {kind}", not slow, f"{'; '.join(slow)} of {fastest:.2f}" if slow else figures)


def collectives(ranks: Ranks) -> None:
    """On the device, bit for bit what gloo gives on the CPU, and near the exact mean."""
    numel = 1000 * 128 * ranks.world
    x = torch.randn(numel, generator=torch.Generator().manual_seed(ranks.rank))
    exact, group = ranks.mean(x.double()), dist.group.WORLD
    assert group is not None
    for name in FORMATS:
        wire = WireFormat(name=name)
        results = []
        for device in (torch.device("cpu"), ranks.device):
            whole = all_reduce(x.to(device, copy=True), group, wire)
            part = reduce_scatter(x.to(device), group, wire)
            results.append([t.cpu() for t in (whole, part, all_gather(part, group, wire))])
        same = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        error = relative(results[1][0], exact)
        ranks.check(
            f"compressed collectives, {name}",
            same and error < 0.05,
            f"{'' if same else 'not '}the bits of gloo on the CPU; {error:.1e} from the exact mean",
        )
