"""The native backend under FSDP2 over nccl: one rank in this process, and two on two GPUs against one."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import foundry_fp8

pytestmark = pytest.mark.gpu
every_recipe = pytest.mark.parametrize("recipe", ["delayed", "current", "block"])


@pytest.fixture(autouse=True)
def _needs_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no FP8 tensor cores")


def make(recipe, cache_weights=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda")
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native", cache_weights=cache_weights)
    return model


def shard(model):
    mesh = dist.init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def train(model, rank=0, ranks=1, steps=4):
    """The loss of every microbatch of 64 tokens, two of them a step, over all ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(2):
            x = torch.randn(64, 256, device="cuda", generator=generator)
            mine = x.chunk(ranks)[rank].bfloat16()
            loss = (model(mine).float() - mine.flip(1).float()).square().mean()
            loss.backward()
            total = loss.detach().clone()
            if ranks > 1:
                dist.all_reduce(total, op=dist.ReduceOp.AVG)
            losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return [float(loss) for loss in losses]


@pytest.fixture
def one_rank():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@every_recipe
def test_one_rank_trains(recipe, one_rank):
    """As with cached weights, bit for bit; near high precision in FSDP2; and it learns."""
    losses = train(shard(make(recipe)))
    assert train(shard(make(recipe, cache_weights=True))) == losses
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda")
    assert losses == pytest.approx(train(shard(plain)), rel=0.03)
    assert losses[-1] < losses[0]


def test_a_sharded_checkpoint_resumes_bit_for_bit(one_rank, tmp_path):
    models = [shard(make("delayed")) for _ in range(2)]
    train(models[0])
    state = {"model": models[0].state_dict(), "fp8": foundry_fp8.training_state(models[0])}
    dcp.save(state, checkpoint_id=tmp_path)
    state = {"model": models[1].state_dict(), "fp8": foundry_fp8.training_state(models[1])}
    dcp.load(state, checkpoint_id=tmp_path)
    models[1].load_state_dict(state["model"])
    assert train(models[1]) == train(models[0])


def worker(rank, recipe, port, path):
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=2)
    losses = train(shard(make(recipe)), rank, 2)
    if rank == 0:
        torch.save(losses, path)
    dist.destroy_process_group()


@every_recipe
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_train_as_one(recipe, one_rank, tmp_path, unused_port):
    """Scales of half a batch differ under current scaling, and sums have another order: near, not equal."""
    mp.spawn(worker, (recipe, unused_port, tmp_path / "losses.pt"), nprocs=2)
    assert torch.load(tmp_path / "losses.pt") == pytest.approx(train(shard(make(recipe))), rel=0.02)


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
