"""For workers: a small model under every wrapper, its gradients, and checkpoints. Makes the gloo group on import."""

import contextlib
import copy
import datetime

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
from torch.utils.checkpoint import checkpoint

from foundry_fp8.compat import cpu_stream_events

KINDS = [
    "ddp",
    "fsdp1-FULL_SHARD",
    "fsdp1-SHARD_GRAD_OP",
    "fsdp1-NO_SHARD",
    "fsdp1-HYBRID_SHARD",
    "fsdp2",
    "hsdp2",
]
TIMEOUT = 60.0  # seconds, of a collective
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
rank, world = dist.get_rank(), dist.get_world_size()
COMMON = {"warmup": 0, "min_bytes": 0, "scope": "all", "block_size": 32}


class Block(nn.Module):
    checkpointed = False

    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def _inner(self, x):
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x):
        inner = checkpoint(self._inner, x, use_reentrant=False) if self.checkpointed else self._inner(x)
        return x + inner


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
    hybrid = kind in ("fsdp1-HYBRID_SHARD", "hsdp2", "hsdp2-4x1")
    shape = ((4, 1) if kind == "hsdp2-4x1" else (2, 2)) if hybrid else (world,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    if kind.startswith("fsdp1"):
        return FSDP1(
            model,
            sharding_strategy=getattr(ShardingStrategy, kind.split("-")[1]),
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_mesh=mesh if hybrid else None,
        )
    if hybrid:
        cpu_stream_events.apply()
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
    """The float64 mean of all ranks' gradients."""
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
    """A sharded checkpoint, which compression adds nothing to."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    compression.forget()


def load(model, optimizer, folder):
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def train(model, optimizer, compression, steps):
    for step in steps:
        compression.start_batch(step)
        backward(model, step, 1)
        optimizer.step()
        optimizer.zero_grad()


def norm_of(residuals):
    return sum(float(residual.abs().sum()) for residual in residuals)


def parameters_of(model):
    return [
        (p.to_local() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
        if p.numel()
    ]
