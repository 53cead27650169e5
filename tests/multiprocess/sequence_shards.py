"""For workers: a model whose sequence shards are gathered as FP8 codes, beside the same model with torch's gather."""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from foundry_fp8 import FP8State, apply_compressed_communication, apply_fp8
from foundry_fp8.distributed.traffic import average_on_gloo
from tests.multiprocess.tensor_parallel import composer_losses, two_by_two

ALONE = {"gradients": "none", "activations": "fp8"}
WIDTH, BATCH, TOKENS = 64, 2, 16  # tokens of a rank
STEPS = ["random", "outliers", "tiny", "zeros", "random", "outliers"]


class Block(nn.Module):
    """A gated MLP with a residual, on this rank's tokens."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Body(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.blocks, self.recompute = nn.ModuleList(Block() for _ in range(2)), recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


class Model(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = Body(recompute)

    def forward(self, x):
        return self.body(x)


def made(recipe, options, mesh, codes):
    """A model on ``mesh`` (data, tensor), and what compresses it."""
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    model = Model(options.get("recompute", False)).to(dtype)
    apply_fp8(model, recipe=recipe, backend="emulated", evaluate=options.get("evaluate", "high_precision"))
    tokens = Shard(options.get("dim", 1))
    columns = ColwiseParallel(input_layouts=tokens)
    plan = {"gate": columns, "up": columns, "down": RowwiseParallel(output_layouts=tokens)}
    for block in model.body.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    if mesh["data"].size() > 1:
        for module in (*model.body.blocks, model):
            fully_shard(module, mesh=mesh["data"])
        average_on_gloo(model)
    return model, apply_compressed_communication(model, **ALONE) if codes else None


def shard(kind, step, dtype):
    """This rank's tokens."""
    x = torch.randn(
        BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())
    )
    if kind == "outliers":
        x[:, dist.get_rank(), 5] *= 1000
        x[:, 3:6] *= 1e-5
        x[:, 8:12] = 0
    if kind in ("inf", "nan") and dist.get_rank() == 1:
        x[1, 2, 3] = float(kind)
    return (x * {"tiny": 1e-38, "zeros": 0.0}.get(kind, 1.0)).to(dtype)


def trained(model, options, kinds):
    """All outputs and gradients of some steps."""
    seen, dtype = {}, next(model.parameters()).dtype
    autocast = torch.autocast("cpu", torch.bfloat16) if options.get("autocast") else contextlib.nullcontext()
    for step, kind in enumerate(kinds):
        x = shard(kind, step, dtype).requires_grad_()
        for part in range(options.get("parts", 1)):
            with autocast:
                y = (model.body if options.get("part_of_the_model") else model)(x * (1 + part))
            y.backward(shard("random", 50 + step, y.dtype))
            seen[f"{step} {part} y"] = y.detach()
        seen[f"{step} dx"] = x.grad
        for name, parameter in model.named_parameters():
            seen[f"{step} {name}"] = parameter.grad.to_local()
        model.zero_grad()
    return seen


def differences(one, other):
    """The names of what is not the same bit for bit, NaN being NaN."""
    return [n for n in one if not torch.equal(one[n].nan_to_num(7.0), other[n].nan_to_num(7.0)) or not torch.equal(one[n].isnan(), other[n].isnan())]  # fmt: skip


def histories(model):
    return {f"{n} {k}": e[k] for n, e in FP8State.of(model).state_dict()["modules"].items() for k in ("scale", "amax_history")}  # fmt: skip


def grid():
    dist.init_process_group("gloo")
    world = int(os.environ["WORLD_SIZE"])
    return init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))


def with_and_without(recipe, options):
    """What differs between a gather of codes and torch's: outputs, gradients, histories. Bytes sent in training, and those of torch's gather."""
    mesh, kinds = grid(), options.get("kinds", STEPS)
    plain, coded = (made(recipe, options, mesh, codes) for codes in (False, True))
    (model, _), (other, compression) = plain, coded
    found = differences(trained(model, options, kinds), trained(other, options, kinds))
    found += differences(histories(model), histories(other))
    traffic = compression.traffic
    return found, dict(traffic.sent), traffic.wire_bytes, traffic.logical, compression.summary()


def step_by_step(_):
    """Bytes that each of some forwards sends, and whether outputs are those of torch's gather, while what layers run changes."""
    mesh, kinds = grid(), ["random"]
    (model, _), (other, compression) = (made("current", {}, mesh, codes) for codes in (False, True))
    layers = [[m.body.blocks[i].up for i in (0, 1)] for m in (model, other)]
    configured, found = layers[0][0].recipe, []

    def compare(change):
        for first, second in layers:
            change(first, second)
        before = compression.traffic.wire_bytes
        same = not differences(trained(model, {}, kinds), trained(other, {}, kinds))
        found.append((compression.traffic.wire_bytes - before, same))

    compare(lambda first, second: None)
    compare(lambda first, second: first.set_recipe(None))  # as the guard demotes
    compare(lambda first, second: second.set_recipe(configured.finer))
    compare(lambda first, second: (first.set_recipe(configured), second.set_recipe(configured)))
    compare(lambda first, second: setattr(second, "probe", lambda *_: None))
    compare(lambda first, second: setattr(first, "wgrad", "high_precision"))
    compare(lambda first, second: (setattr(first, "wgrad", "fp8"), setattr(second, "probe", None)))
    for evaluate in ("high_precision", "fp8"):
        for m in (model, other):
            m.eval()
            for block in m.body.blocks:
                block.gate.evaluate = block.up.evaluate = evaluate
        x, before = shard("outliers", 0, torch.bfloat16), compression.traffic.wire_bytes
        with torch.no_grad():
            same = torch.equal(model(x), other(x))
        found.append((compression.traffic.wire_bytes - before, same))
    return found


def uneven(recipe):
    """What differs for DTensors whose shards are not alike: 33 tokens on two ranks."""
    mesh = grid()["tensor"]
    seen = []
    for codes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 32))
        apply_fp8(model, recipe=recipe, backend="emulated", include=["*"])
        parallelize_module(model, mesh, {"0": ColwiseParallel(input_layouts=Shard(1))})
        if codes:
            apply_compressed_communication(model, **ALONE)
        for _ in range(2):
            x = distribute_tensor(torch.randn(2, 33, WIDTH), mesh, [Shard(1)]).detach().requires_grad_()
            y = model(x)
            y.backward(torch.randn_like(y))
        grads = {name: p.grad.to_local() for name, p in model.named_parameters()}
        assert isinstance(x.grad, DTensor)
        seen.append({"y": y.detach(), "dx": x.grad.to_local(), **grads})
    return differences(*seen)


def refused(what):
    """The error, or the first words of what was logged."""
    mesh = grid()
    model = Model()
    if what != "not converted":
        apply_fp8(model, recipe="block" if what == "blocks" else "current", backend="emulated")
    if what != "no plan":
        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        if what == "a parent gathers":
            inputs = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
            plan = {"": inputs, "up": ColwiseParallel(), "down": plan["down"]}
        parallelize_module(model.body.blocks[0], mesh["tensor"], plan)
    try:
        apply_compressed_communication(
            model, **(ALONE | ({"gradients": "int8"} if what == "wrapper" else {}))
        )
    except Exception as error:
        dist.barrier()  # the store ends with rank 0
        return f"{type(error).__name__}: {error}"


def with_composer():
    """Losses of runs with codes and without under FSDP1 and tensor parallelism, and what was logged of the bytes."""
    from composer.loggers import InMemoryLogger

    from foundry_fp8.algorithms.compressed_communication import CompressedCommunication
    from foundry_fp8.algorithms.fp8 import FP8

    rows = Shard(0)
    plan = {"up": ColwiseParallel(input_layouts=rows), "down": RowwiseParallel(output_layouts=rows)}
    seen, wire, sizes = [], InMemoryLogger(), {"up": (32, 64), "down": (64, 32)}
    for more in ([], [CompressedCommunication(**ALONE)]):
        algorithms = FP8(recipe="delayed", backend="emulated"), *more
        seen.append(composer_losses(sizes, two_by_two(plan), "4ba", *algorithms, loggers=wire))
    return *seen, [int(value) for _, value in wire.data["comm/wire_bytes"]]
