"""For workers: models under torch's tensor parallelism, beside the same model on one rank and in float64."""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from foundry_fp8 import FP8State, apply_fp8, precision_gap
from foundry_fp8.distributed.traffic import average_on_gloo

WIDTH, TOKENS = 128, 64


class Block(nn.Module):
    """A norm, attention's four projections and a gated MLP; what lies between is done on a rank's own columns."""

    def __init__(self, bias):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=bias)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=bias) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        h = self.norm(x)
        heads = (project(h).unflatten(-1, (-1, 32)).transpose(1, 2) for project in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    def __init__(self, bias=False, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(2))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


COLWISE, ROWWISE = ("q", "k", "v", "gate", "up"), ("o", "down")


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def split(model, mesh, sequence=False):
    """``sequence``: activations between the linears are shards of the sequence."""
    outside = {"input_layouts": Shard(1)} if sequence else {}
    plan = {name: ColwiseParallel(**outside) for name in COLWISE}
    plan |= {name: RowwiseParallel(**({"output_layouts": Shard(1)} if sequence else {})) for name in ROWWISE}
    if sequence:
        plan["norm"] = SequenceParallel(use_local_output=True)
        inside = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
        parallelize_module(model, mesh, inside)
        parallelize_module(
            model, mesh, PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        )
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def trained(model, share=slice(None), passes=3, parts=1):
    """The result and gradients of the last of some passes, each with another input."""
    for seed in range(passes):
        model.zero_grad()
        for part in range(parts):
            torch.manual_seed(10 * seed + part)
            dtype = next(model.parameters()).dtype
            x, dy = (torch.randn(2, TOKENS // 2, WIDTH).to(dtype)[share] for _ in range(2))
            y = model(x)
            y.backward(dy)
    return whole(y).detach(), {name: whole(p.grad).double() for name, p in model.named_parameters()}


def error(found, exact):
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in exact.items() if g.norm() > 0}


def alike(recipe, options):
    """Gradient errors on one rank and on several, whether bits are equal, delayed state, and FLOPs of one layer."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = {name: options.get(name, False) for name in ("bias", "recompute")}
    parts, sequence = options.get("parts", 1), options.get("sequence", False)
    one, shards = Stack(**made), Stack(**made)
    exact = copy.deepcopy(one).double()
    for model in (one, shards):
        apply_fp8(model, recipe=recipe, backend="emulated")
    split(shards, mesh, sequence=sequence)
    (y, grads), (y2, grads2) = trained(one, parts=parts), trained(shards, parts=parts)
    exact = trained(exact, parts=parts)[1]
    states = [FP8State.of(model).state_dict() for model in (one, shards)]
    same = {n: torch.equal(grads[n], grads2[n]) for n in grads}
    flops = [sum(model.blocks[0].up.ledger.flops.values()) for model in (one, shards)]
    return (
        error(grads, exact),
        error(grads2, exact),
        same | {"y": torch.equal(y, y2)},
        states,
        flops,
        replicas_agree(shards),
    )


def replicas_agree(model):
    """Whether gradients of what every rank holds whole are the same on all, but for those that are parts of a sum."""
    found = []
    for parameter in model.parameters():
        grad = parameter.grad
        if not isinstance(grad, DTensor) or grad.placements == (Replicate(),):
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            other = local.clone()
            dist.broadcast(other, 0)
            found.append(torch.equal(local, other))
    return all(found)


def with_fsdp2(recipe):
    """Two copies of two shards: the same as above for ranks (data, tensor)."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    one, shards = Stack(), Stack()
    exact = copy.deepcopy(one).double()
    for model in (one, shards) if recipe else ():
        apply_fp8(model, recipe=recipe, backend="emulated")
    split(shards, mesh["tensor"])
    for block in shards.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(shards, mesh=mesh["data"])
    average_on_gloo(shards)
    mine = mesh["data"].get_local_rank()
    grads2 = trained(shards, share=slice(mine, mine + 1))[1]
    grads = {name: g / 2 for name, g in trained(one)[1].items()}
    exact = {name: g / 2 for name, g in trained(exact)[1].items()}
    states = [FP8State.of(model).state_dict() for model in (one, shards)] if recipe else []
    return error(grads, exact), error(grads2, exact), states, sorted(get_model_state_dict(shards))


def measured(recipe):
    """What the guard's measurement says of one rank and of shards, and whether a layer that it demotes trains on."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one, shards = Stack(), Stack()
    for model in (one, shards):
        apply_fp8(model, recipe=recipe, backend="emulated")
    split(shards, mesh)
    torch.manual_seed(1)
    x = torch.randn(2, TOKENS // 2, WIDTH)
    gaps = [precision_gap(model, lambda m, batch: m(batch).square().mean(), x) for model in (one, shards)]
    shards.blocks[0].up.set_recipe(None)
    shards(x).square().mean().backward()
    return *[gap.gradient_error for gap in gaps], whole(shards.blocks[0].up.weight.grad).norm().item()


def composer_losses(sizes, config, duration, *algorithms, **options):
    """Losses of linears of ``sizes``, by name, with GELUs between them, trained to give back their input, which all ranks read alike."""
    from composer import Trainer
    from composer.models import ComposerModel
    from composer.utils import dist as composer_dist
    from torch.utils.data import DataLoader, DistributedSampler

    class Model(ComposerModel):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            for name, size in sizes.items():
                self.add_module(name, nn.Linear(*size))
            self.losses = []

        def forward(self, batch):
            first, *linears = (self.get_submodule(name) for name in sizes)
            x = first(batch)
            for linear in linears:
                x = linear(F.gelu(x))
            return x

        def loss(self, outputs, batch):
            loss = (outputs - batch).square().mean()
            self.losses.append(loss.item())
            return loss

    torch.cuda.current_device = lambda: torch.device("cpu")
    composer_dist.initialize_dist("cpu")
    data = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    same = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    model = Model()
    Trainer(
        model=model, algorithms=algorithms, device="cpu", precision="fp32", progress_bar=False,
        parallelism_config=config, max_duration=duration, optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        train_dataloader=DataLoader(data, batch_size=32, sampler=same), **options,
    ).fit()  # fmt: skip
    return model.losses


def two_by_two(plan):
    """Composer's FSDP1 over two ranks, and tensor parallelism over two.

    A degree of 1 ends in FSDP1 ("Cannot writeback when the parameter shape changes", Composer 0.32 with torch 2.7, FP8 or not).
    """
    fsdp = {"data_parallel_shard_degree": 2, "mixed_precision": "PURE"}
    return {"fsdp": fsdp, "tp": {"tensor_parallel_degree": 2, "layer_plan": plan}}


def with_composer():
    """What is converted, and losses under FSDP1 and tensor parallelism, and without."""
    from foundry_fp8.algorithms.fp8 import FP8

    sizes = {"up": (32, 64), "down": (64, 32), "last": (32, 32)}
    losses = []
    for config in (two_by_two({"up": ColwiseParallel(), "down": RowwiseParallel()}), None):
        algorithm = FP8(recipe="delayed", backend="emulated")
        losses.append(composer_losses(sizes, config, "6ba", algorithm))
    return algorithm.report.converted, *losses
