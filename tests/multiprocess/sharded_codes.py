"""For workers: weights that are kept in FP8 alone, sharded by FSDP2, against the same model whole on each rank."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

import foundry_fp8
from foundry_fp8.compat import cpu_stream_events
from foundry_fp8.compat.fsdp2 import units_of
from foundry_fp8.compat.wrapper_tensor import save_plain
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, gathered
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.surgery.published import published_weight
from tests.export.published import blocks_of, dequantised

KINDS = {
    "one scale": (None, False, {"name": "current", "power_2_scales": False}),
    "rows": ("rows", False, None),
    "blocks": ((128, 128), False, {"name": "block", "power_2_scales": False}),
    "powers of two": ((128, 128), True, "block"),
    "mx": ((1, 32), True, "mxfp8"),
    "experts": ((128, 128), False, None),
    "frozen_weights": ((128, 128), True, "block"),
}
"""Block, whether scales are E8M0, and the recipe that multiplies by the codes, if there is one."""


class Kept(nn.Module):
    """A frozen linear whose codes were published, and an adapter."""

    def __init__(self, columns, rows, kind, generator):
        super().__init__()
        block, e8m0, _ = KINDS[kind]
        size = {None: (rows, columns), "rows": (1, columns)}.get(block, block)
        values = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1, rows)[:, None]
        codes, grid = blocks_of(values, size, e8m0)
        self.published = dequantised(codes, grid, size)
        self.base = nn.Linear(columns, rows, bias=False)
        self.a, self.b = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)
        if kind == "frozen_weights":  # apply_fp8 makes the codes
            self.base.weight = nn.Parameter(values, requires_grad=False)
            return
        weight = published_weight(
            "base", codes, grid, block if isinstance(block, tuple) else None, torch.float32
        )
        self.base.weight = nn.Parameter(weight, requires_grad=False)
        save_plain(self.base)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Experts(nn.Module):
    """Three of them: one rank has two."""

    def __init__(self, width, generator):
        super().__init__()
        each = [
            blocks_of(torch.randn(width, width, generator=generator), (128, 128), False) for _ in range(3)
        ]
        self.published = torch.stack([dequantised(codes, grid, (128, 128)) for codes, grid in each])
        codes, grid = (torch.stack(parts) for parts in zip(*each, strict=True))
        weight = published_weight("experts", codes, grid, (128, 128), torch.float32)
        self.weight = nn.Parameter(weight, requires_grad=False)
        save_plain(self)

    def forward(self, x):
        return sum(torch.tanh(x @ self.weight[e].to(x.dtype).t()) for e in range(3))


def built(kind):
    """208 rows on two ranks: 104 and 104, within a block; 130 (of rows, where nothing multiplies in FP8) have padding on four."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    width = {"rows": 130, "mx": 224}.get(kind, 208)
    middle = Experts(64, generator) if kind == "experts" else Kept(64, width, kind, generator)
    last = nn.Identity() if kind == "experts" else Kept(width, 64, kind, generator)
    model = nn.Sequential(nn.Linear(64, 64), middle, nn.GELU(), last, nn.Linear(64, 32))
    if KINDS[kind][2] is not None:
        options = {"recipe": KINDS[kind][2], "include": ["*.base"], "backend": "emulated", "evaluate": "fp8"}
        foundry_fp8.apply_fp8(
            model, **options, **({"frozen_weights": "fp8"} if kind == "frozen_weights" else {})
        )
        assert isinstance(model[1].base, FP8Linear)
    return model


def sharded(model, mesh, reshard=True, **options):
    options |= {"mesh": mesh, "reshard_after_forward": reshard}
    for layer in (model[1], model[3]):
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    average_on_gloo(model)
    return model


def batch(step=0):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def gradients(model, x):
    """Output and gradients by name, those of a whole model averaged over the ranks."""
    model.zero_grad()
    y = model(x)
    y.float().square().mean().backward()
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            full = hasattr(p.grad, "full_tensor")
            found[name.replace("._checkpoint_wrapped_module", "")] = (
                p.grad.full_tensor() if full else p.grad.clone()
            )
            if not full:
                found[name] = p.grad.float()
                dist.all_reduce(found[name])
                found[name] /= dist.get_world_size()
    return y.detach(), found


def trains_alike(kind, option):
    """Two forwards and backwards, bit for bit; and the state's plain values."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    alone = built(kind)
    model, options = copy.deepcopy(alone), {}
    mesh = init_device_mesh("cpu", (world,))
    if option == "hsdp":
        cpu_stream_events.apply()
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "shards"))
    if option == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if option == "checkpointed":
        model[1] = checkpoint_wrapper(model[1])
    before = sum(t.nbytes for p in alone.parameters() for t in held(p))
    if option == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    sharded(model, mesh, option != "keeps", **options)
    if option == "cast":
        model.to(torch.bfloat16)
    if world == 2 and kind != "experts":
        after = sum(t.untyped_storage().nbytes() for p in model.parameters() for t in held(p))
        assert after < 0.53 * before, (after, before)
    if option in ("bf16", "cast"):
        alone.to(torch.bfloat16)
    for step in range(2):
        x = batch(step).to(alone[0].weight.dtype)
        y, found = gradients(model, x)
        expected, exact = gradients(alone, x)
        assert torch.equal(y, expected)
        assert found.keys() == exact.keys() and len(found) >= 4
        for name, gradient in found.items():
            tolerance = 0.0 if world == 2 else 1e-6  # the order of a sum
            tolerance = 2**-8 if option == "cast" else tolerance  # a sum in bfloat16
            tolerance *= float(exact[name].abs().max())
            assert float((gradient - exact[name]).abs().max()) <= tolerance, name
    for layer, name in ((model[1], "base.weight"), (model[3], "base.weight"), (model[1], "weight")):
        state = {n.replace("_checkpoint_wrapped_module.", ""): v for n, v in layer.state_dict().items()}
        if name in state:
            published = getattr(layer, "_checkpoint_wrapped_module", layer).published
            assert torch.equal(state[name].full_tensor(), published.to(state[name].dtype))
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        if isinstance(theirs, FrozenFP8Weight):
            assert torch.equal(gathered(ours).codes.view(torch.uint8), theirs.codes.view(torch.uint8))
    sent = [unit.shard_group.traffic for unit in units_of(model)]
    sizes = [
        sum(p.padded_numel * (p.gathered_dtype.itemsize if p.trains else 1) for p in u.parameters)
        for u in units_of(model)
    ]
    ranks = units_of(model)[0].shard_group.size() - 1
    return [t.sent["all_gather"] for t in sent] == [
        t.calls["all_gather"] * n * ranks for t, n in zip(sent, sizes, strict=True)
    ]


def held(parameter):
    """The tensors that a parameter of FP8 codes holds; none of another."""
    local = getattr(parameter, "_local_tensor", parameter)
    return [getattr(local, part) for part in getattr(local, "parts", ())]


def resumes(folder, full):
    """Whether a run that is saved and resumed goes on as the one that was not, bit for bit."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))

    def made():
        model = sharded(built("blocks"), mesh)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def step(model, optimizer, n):
        model(batch(n)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer, 0)
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)
    saved = get_state_dict(model, optimizer, options=options)
    if full:
        state = [copy.deepcopy(saved) if dist.get_rank() == 0 else ({}, {})]
        dist.broadcast_object_list(state)
        loaded = state[0]
    else:
        dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)
    step(model, optimizer, 1)
    again, optimizer = made()
    with torch.no_grad():
        again[0].weight.add_(1.0)
    if not full:
        loaded = get_state_dict(again, optimizer)
        dcp.load({"model": loaded[0], "optimizer": loaded[1]}, checkpoint_id=folder)
    set_state_dict(again, optimizer, model_state_dict=loaded[0], optim_state_dict=loaded[1], options=options)
    step(again, optimizer, 1)
    ours, theirs = model.state_dict(), again.state_dict()
    assert ours.keys() == built("blocks").state_dict().keys()
    assert torch.equal(ours["1.base.weight"].full_tensor(), model[1].published)
    return all(torch.equal(ours[n].full_tensor(), theirs[n].full_tensor()) for n in ours)


def refusals():
    """What would lose the codes says so, and an adapter's checkpoint has nothing of them."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    whole = built("blocks")
    trained = get_model_state_dict(
        sharded(copy.deepcopy(whole), mesh), options=StateDictOptions(ignore_frozen_params=True)
    )
    assert set(trained) == {n for n, p in whole.named_parameters() if p.requires_grad}
    model = sharded(copy.deepcopy(whole), mesh)
    other = {n: v * 2 if "base" in n else v for n, v in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"other values cannot be written.*before fully_shard"):
        model.load_state_dict(other)
    model.load_state_dict(model.state_dict(), assign=True)
    model[1].base.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="cannot train"):
        model(batch())
    with pytest.raises(RuntimeError, match=r"dim 0.*ignored_params"):
        fully_shard(
            copy.deepcopy(whole)[1].base,
            mesh=mesh,
            shard_placement_fn=lambda p: torch.distributed.tensor.Shard(1),
        )
    with pytest.raises(RuntimeError, match="kept in FP8 alone"):
        FullyShardedDataParallel(copy.deepcopy(whole), use_orig_params=True, device_id=torch.device("cpu"))
    model = whole
    fully_shard(model, mesh=mesh)
    compression = foundry_fp8.apply_compressed_communication(
        model, gradients="none", parameters="e4m3", min_bytes=0, warmup=0, adapt=False, scope="all"
    )
    assert [row.reason for row in compression.rows].count("kept in FP8 alone") == 2
    return True
