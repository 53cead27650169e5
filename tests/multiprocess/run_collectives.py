"""Worker: the quantised collectives against float64, on every rank. Writes what the test asserts."""

import json
import os

import torch
import torch.distributed as dist

from foundry_fp8.distributed import collectives
from foundry_fp8.distributed.background_collectives import CollectiveQueue
from foundry_fp8.distributed.rows import Row, share
from foundry_fp8.distributed.traffic import CountingGroup, Traffic
from foundry_fp8.distributed.two_hop import (
    make_two_hop,
    own_numel,
    reduce_scatter_two_hop,
    two_hop_all_reduce,
)
from foundry_fp8.numerics.wire_format import WireFormat

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
traffic = Traffic()
group = CountingGroup(dist.group.WORLD, traffic)
results = {}


def data(numel, seed=0):
    """Every rank's tensor, [world, numel], the same on all ranks."""
    generator = torch.Generator().manual_seed(seed + numel)
    scale = torch.logspace(-3, 2, max(numel, 1))[:numel]
    return torch.randn(world, numel, generator=generator) * scale


def error(got, wanted):
    wanted = wanted.double()
    return float((got.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def same_everywhere(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(gathered, tensor)
    return all(torch.equal(gathered[0].nan_to_num(7), other.nan_to_num(7)) for other in gathered)


for name in ("fp32", "bf16", "int8", "e4m3", "int4"):
    wire = WireFormat(name=name)
    cell = results[name] = {}
    # even, an odd number of elements per rank
    x = data(world * 1001)
    before = traffic.wire_bytes
    out = collectives.reduce_scatter(x[rank].clone(), group, wire)
    cell["reduce_scatter_bytes"] = traffic.wire_bytes - before
    cell["reduce_scatter_wanted_bytes"] = (world - 1) * wire.row_bytes(1001)
    cell["reduce_scatter"] = error(out, x.double().mean(0).view(world, -1)[rank])
    # uneven and empty shards
    splits = [5, 0, 300, 1][:world] if world > 2 else [300, 0]
    x = data(sum(splits), seed=1)
    out = collectives.reduce_scatter(x[rank].clone(), group, wire, rows=list(map(Row.of, splits)), mean=False)
    start = sum(splits[:rank])
    cell["uneven_shape"] = out.numel() == splits[rank]
    cell["uneven"] = error(out, x.double().sum(0)[start : start + splits[rank]]) if splits[rank] else 0.0
    # all-gather, uneven
    shard = data(splits[rank], seed=2)[rank]
    out = collectives.all_gather(shard, group, wire, rows=list(map(Row.of, splits)))
    wanted = torch.cat([data(n, seed=2)[r] for r, n in enumerate(splits)])
    cell["all_gather"] = error(out, wanted)
    cell["all_gather_same"] = same_everywhere(out)
    # all-reduce: fewer blocks than ranks, a block edge, and many
    for numel in (1, 128, 40_001):
        x = data(numel, seed=3)
        out = collectives.all_reduce(x[rank].clone(), group, wire)
        cell[f"all_reduce_{numel}"] = error(out, x.double().mean(0))
        cell[f"all_reduce_{numel}_same"] = same_everywhere(out)
    # a bf16 tensor keeps its dtype
    x = data(999).bfloat16()
    out = collectives.all_reduce(x[rank].clone(), group, wire)
    cell["bf16_dtype"] = str(out.dtype)
    # one rank's NaN and Inf arrive everywhere, and stay within their block
    x = data(1024)
    x[0, 130], x[world - 1, 700] = float("nan"), float("inf")
    out = collectives.all_reduce(x[rank].clone(), group, wire)
    bad = (~out.isfinite()).nonzero().flatten()
    cell["bad_blocks"] = sorted({int(i) // 128 for i in bad})
    cell["all_zero"] = float(collectives.all_reduce(torch.zeros(300), group, wire).abs().max())

# Error feedback: over many steps of one sparse gradient the mean of what arrives converges to it.
x = torch.zeros(world, 1280)
x[:, ::97] = data(1280)[:, ::97]
x += 0.01 * data(1280, seed=9)
wire = WireFormat(name="int4")
for fed in (False, True):
    residual = torch.zeros(1280) if fed else None
    total = torch.zeros(1280, dtype=torch.float64)
    for _ in range(60):
        total += collectives.all_reduce(x[rank].clone(), group, wire, residual=residual).double()
    results[f"accumulated_fed_{fed}"] = error(total / 60, x.double().mean(0))
    if fed:  # what was sent and what is kept add up to what was meant, exactly but for float32 rounding
        kept = residual.double()
        dist.all_reduce(kept)
        results["conservation"] = error(total + kept / world, 60 * x.double().mean(0))
# A residual that is forgotten twice, as at two checkpoints: a step's rounding is lost each time.
residual, total = torch.zeros(1280), torch.zeros(1280, dtype=torch.float64)
for step in range(60):
    total += collectives.all_reduce(x[rank].clone(), group, wire, residual=residual).double()
    if step in (19, 39):
        residual.zero_()
results["accumulated_forgotten"] = error(total / 60, x.double().mean(0))
nan = x[rank].clone()
nan[5] = float("nan")
collectives.all_reduce(nan, group, wire, residual=residual)
results["residual_finite_after_nan"] = bool(residual.isfinite().all())

# The size of the pieces in which a tensor travels on a CPU leaves no trace: values, residuals and bytes.
for name in ("bf16", "int8", "int4"):
    wire, found = WireFormat(name=name), []
    for piece in (512, collectives.PIECE_ON_CPU):
        size, collectives.PIECE_ON_CPU = collectives.PIECE_ON_CPU, piece
        residual, before = 0.01 * data(9_001, seed=5)[rank], traffic.wire_bytes
        reduced = collectives.all_reduce(data(9_001, seed=4)[rank], group, wire, residual=residual)
        scattered = collectives.reduce_scatter(data(world * 3_001)[rank], group, wire)
        gathered = collectives.all_gather(
            data(2_000 + rank)[rank], group, wire, rows=[Row.of(2_000 + r) for r in range(world)]
        )
        found.append(([reduced, residual, scattered, gathered], traffic.wire_bytes - before))
        collectives.PIECE_ON_CPU = size
    (small, small_bytes), (whole, whole_bytes) = found
    results[f"pieces_{name}"] = small_bytes == whole_bytes and all(map(torch.equal, small, whole))

# In the background: two queues with their own groups, many chains, in order.
queues = [CollectiveQueue(CountingGroup(dist.new_group(), traffic), torch.device("cpu")) for _ in range(2)]
tensors = [data(5000 + 17 * i, seed=i)[rank].clone() for i in range(12)]
wire = WireFormat(name="int8")
futures = [
    queues[i % 2].submit(lambda t=t, i=i: collectives.all_reduce(t, queues[i % 2].group, wire))
    for i, t in enumerate(tensors)
]
results["queues"] = max(
    error(f.wait(), data(5000 + 17 * i, seed=i).double().mean(0)) for i, f in enumerate(futures)
)


def fails():
    raise ValueError("chain failed")


try:
    queues[0].submit(fails).wait()
    results["queue_error"] = "none"
except Exception as failure:
    results["queue_error"] = str(failure)

# Two hops on nodes of two ranks.
if world == 4:
    for inside in (None, WireFormat(name="int8")):
        key = "two_hop_int8" if inside else "two_hop"
        hop = make_two_hop(range(4), 2, traffic, inside)
        x = data(3001, seed=4)
        out = two_hop_all_reduce(
            x[rank].clone(), hop, WireFormat(name="int4"), second_leg=WireFormat(name="int8")
        )
        results[key] = error(out, x.double().mean(0))
        results[key + "_same"] = same_everywhere(out)
        x = data(4 * 333, seed=5)
        out = reduce_scatter_two_hop(x[rank].clone(), hop, WireFormat(name="fp32"))
        results[key + "_scatter_exact"] = error(out, x.double().mean(0).view(4, -1)[rank])
    # BF16 travels as it is, and is summed in float32: nothing is lost, and half the bytes of float32 are sent.
    counted = Traffic()
    hop = make_two_hop(range(4), 2, counted)
    rows = x.bfloat16()
    out = reduce_scatter_two_hop(rows[rank].clone(), hop, WireFormat(name="fp32"))
    results["two_hop_bf16_exact"] = error(out, rows.double().mean(0).view(4, -1)[rank])
    results["two_hop_bf16_bytes"] = counted.wire_bytes / 333  # 2 parts of 2 bytes inside, 1 of 4 across
    residual = torch.zeros(own_numel(share(Row.of(3001), world, 128), hop))
    two_hop_all_reduce(data(3001)[rank].clone(), hop, WireFormat(name="int4"), residual=residual)
    results["two_hop_residual"] = float(residual.abs().sum()) > 0

try:
    collectives.reduce_scatter(torch.ones(world + 1), group, wire)
except ValueError as failure:
    results["not_divisible"] = str(failure)

gathered = [None] * world
dist.all_gather_object(gathered, results)
if rank == 0:
    with open(os.environ["RESULT_FILE"], "w") as file:
        json.dump(gathered, file)
dist.barrier()
