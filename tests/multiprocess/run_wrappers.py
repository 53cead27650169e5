"""Worker: every wrapper with gradients and parameters compressed, against the float64 mean of all ranks' gradients."""

import contextlib
import copy
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from foundry_fp8.algorithms.compressed_communication import apply_compressed_communication
from foundry_fp8.compat import cpu_stream_events

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 24)
        self.blocks = nn.ModuleList([Block(24, 50), Block(24, 70)])  # 50 rows do not divide by 4
        self.head = nn.Linear(24, 7)  # fewer rows than would fill 4 ranks evenly; one rank holds a single row

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(1)
ORIGINAL = Model()


def batch(step, who, part):
    generator = torch.Generator().manual_seed(1000 * step + 10 * who + part)
    return torch.randint(0, 13, (6, 5), generator=generator), torch.randint(0, 7, (6, 5), generator=generator)


def loss_of(model, step, who, part):
    tokens, labels = batch(step, who, part)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def wrap(kind):
    model = copy.deepcopy(ORIGINAL)
    if kind == "ddp":
        return DDP(model, bucket_cap_mb=0.01)
    if kind.startswith("fsdp1"):
        strategy = getattr(ShardingStrategy, kind.split("-")[1])
        mesh = {"device_mesh": MESH} if strategy == ShardingStrategy.HYBRID_SHARD else {}
        return FSDP1(
            model,
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            **mesh,
        )
    mesh = MESH if kind == "hsdp2" else init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gradients(model):
    """Full gradients by name, from whatever the wrapper keeps."""
    if isinstance(model, FSDP1):
        with FSDP1.summon_full_params(model, with_grads=True, writeback=False):
            return {
                clean(n): p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None
            }
    return {
        clean(n): (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).double().clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def clean(name):
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def backward(model, step, parts):
    for part in range(parts):
        last = part == parts - 1
        no_sync = model.no_sync() if isinstance(model, DDP) and not last else contextlib.nullcontext()
        with no_sync:
            (loss_of(model, step, rank, part) / parts).backward()


def reference(step, parts):
    model = copy.deepcopy(ORIGINAL).double()
    for who in range(world):
        for part in range(parts):
            (loss_of(model, step, who, part) / parts / world).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def compare(got, wanted):
    """Ratio of norms and direction error, over all parameters; and whether all ranks hold the same bits."""
    assert got.keys() == wanted.keys(), (sorted(got), sorted(wanted))
    g = torch.cat([got[n].flatten() for n in wanted])
    w = torch.cat([wanted[n].flatten() for n in wanted])
    others = [torch.empty_like(g) for _ in range(world)]
    dist.all_gather(others, g)
    return {
        "ratio": float(g.norm() / w.norm()),
        "direction": float((g / g.norm() - w / w.norm()).norm()),
        "same": all(torch.equal(g, other) for other in others),
    }


def save(model, optimizer, compression, folder):
    """A sharded checkpoint, and what an Algorithm adds to it."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    state = compression.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/compression")
    dist.barrier()


def load(model, optimizer, compression, folder):
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    compression.load_state_dict(torch.load(f"{folder}/compression", weights_only=True))


def train(model, optimizer, compression, steps):
    for step in steps:
        compression.start_batch(step)
        backward(model, step, 1)
        optimizer.step()
        optimizer.zero_grad()


def parameters_of(model):
    return [
        (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
        if p.numel()
    ]


def resume(kind, options):
    """Four steps at once against two, a checkpoint, a new model, and two more."""
    model = wrap(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compression = apply_compressed_communication(model, **options)
    train(model, optimizer, compression, range(2))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    save(model, optimizer, compression, folder[0])
    saved = compression.state_dict()
    train(model, optimizer, compression, range(2, 4))

    again = wrap(kind)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    compression = apply_compressed_communication(again, **options)
    load(again, optimizer, compression, folder[0])
    train(again, optimizer, compression, range(2, 4))
    equal = all(torch.equal(a, b) for a, b in zip(parameters_of(model), parameters_of(again), strict=True))
    everywhere = [None] * world
    dist.all_gather_object(everywhere, equal)
    residuals = sum(float(t.abs().sum()) > 0 for t in saved["residuals"].values())
    return {"bit_exact": all(everywhere), "residuals": residuals}


results = {}
KINDS = [
    "ddp",
    "fsdp1-FULL_SHARD",
    "fsdp1-SHARD_GRAD_OP",
    "fsdp1-NO_SHARD",
    "fsdp1-HYBRID_SHARD",
    "fsdp2",
    "hsdp2",
]
if len(sys.argv) > 1:
    KINDS = sys.argv[1].split(",")
COMMON = {"warmup": 0, "min_bytes": 0, "scope": "all", "block_size": 32}
if "hsdp2" in KINDS:
    cpu_stream_events.apply()

for kind in KINDS:
    cells = results[kind] = {}
    for name, options in {
        "none": {"gradients": "bf16", "warmup": 100},
        "gradients": {"gradients": "int8", "second_leg": "int8"},
        "parameters": {"gradients": "bf16", "warmup": 100, "parameters": "int8"},
        "both": {"gradients": "e4m3", "parameters": "e4m3"},
    }.items():
        if options.get("parameters") and kind in ("ddp", "fsdp1-NO_SHARD"):
            continue
        options = COMMON | options
        for parts, label in ((1, "fp32"), (2, "accumulation")):
            model = wrap(kind)
            compression = apply_compressed_communication(model, **options)
            assert apply_compressed_communication(model, **options) is compression
            compression.start_batch(0)
            if kind == "ddp":  # buckets are rebuilt after the first backward
                backward(model, 7, 1)
                model.zero_grad()
            before = compression.traffic.wire_bytes, compression.traffic.logical
            backward(model, 3, parts)
            sent = compression.traffic.wire_bytes - before[0]
            logical = compression.traffic.logical - before[1]
            cells[f"{name}/{label}"] = compare(gradients(model), reference(3, parts))
            cells[f"{name}/{label}"] |= {"sent": sent, "logical": logical, "calls": compression.calls}
            if name == "parameters":
                with torch.no_grad():
                    model(batch(0, 0, 0)[0])  # evaluation gathers too
            if kind.startswith("fsdp1"):
                with FSDP1.summon_full_params(model, writeback=False):
                    full = {clean(n): p for n, p in model.named_parameters()}
                    cells[f"{name}/{label}"]["state_exact"] = all(
                        torch.equal(full[n], p) for n, p in ORIGINAL.named_parameters()
                    )
        if name != "none":
            cells[f"{name}/resume"] = resume(kind, options)
    print(kind, json.dumps(cells, indent=1), flush=True)

if rank == 0:
    with open(os.environ["RESULT_FILE"], "w") as file:
        json.dump(results, file)
dist.barrier()
dist.destroy_process_group()
