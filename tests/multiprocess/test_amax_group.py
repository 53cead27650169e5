"""Whose amaxes delayed scaling takes: of the ranks that hold the model, and of no others; who does not come is named."""

import contextlib
import copy
import datetime
import os
import time
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.compat import amax_group, cpu_stream_events
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.layers.state import FP8State
from foundry_fp8.run.training_state import training_state
from foundry_fp8.surgery.apply import apply_fp8
from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess
AMAX = (1.0, 2.0, 4.0, 8.0)
"""Of each rank's input."""


def model_of(depth=2, **recipe):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.ReLU())))
    apply_fp8(model, recipe={"name": "delayed", **recipe}, backend="emulated")
    return model


def amax_seen(model, wrapped=None, steps=2):
    """The amax by which the first layer's input is scaled after some steps."""
    x = torch.linspace(-1, 1, 512).view(16, 32) * AMAX[dist.get_rank()]
    for _ in range(steps):
        (wrapped or model)(x).square().mean().backward()
    FP8State.of(model).update()
    return round(448 / FP8State.of(model).delayed.scale[0].item(), 4)


def with_a_copied_block(pair):
    model = model_of()
    model.append(copy.deepcopy(model[0]))
    wrapped = DistributedDataParallel(model, process_group=pair)
    amax_seen(model, wrapped)
    slots = model[-1].slots
    slots["x"].state.update()
    mine, there = slots["dy"].state.scale[0].clone(), slots["dy"].state.scale[0].clone()
    dist.all_reduce(there, op=dist.ReduceOp.MAX, group=pair)
    return bool(mine == there)


def every_way():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if cpu_stream_events.needed():
        cpu_stream_events.apply()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, found = pairs[rank // 2], {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def wraps(name, wrap, **recipe):
        model = model_of(**recipe)
        found[name] = amax_seen(model, wrap(model))

    wraps("ddp of all", DistributedDataParallel)
    wraps("ddp of a pair", lambda model: DistributedDataParallel(model, process_group=pair))

    def sharded(mesh, module_of=lambda model: model):
        def wrap(model):
            fully_shard(module_of(model), mesh=mesh)
            average_on_gloo(model)
            return model

        return wrap

    wraps("hsdp", sharded(mesh))
    wraps("fsdp2 of a pair", sharded(mesh["shard"]))
    wraps("fsdp2 of layers", sharded(mesh["shard"], lambda model: model[0]))
    wraps("no wrapper", lambda model: model)
    wraps("no wrapper, world", lambda model: model, amax_group="world")
    wraps("ddp, none", DistributedDataParallel, amax_group="none")
    found["layers that differ"] = amax_seen(model_of(depth=1 + rank))
    helper = model_of()
    trained = model_of()
    wrapped = DistributedDataParallel(trained)
    if rank == 0:
        amax_seen(helper)
    found["beside a helper"] = amax_seen(trained, wrapped)
    found["a copied block"] = with_a_copied_block(pair)
    dist.barrier()
    return found


def test_the_group_is_that_which_holds_the_model():
    ranks = launch.call(every_way, 4)
    pairs, own, world = [2.0, 2.0, 8.0, 8.0], list(AMAX), [8.0] * 4
    assert {name: [found[name] for found in ranks] for name in ranks[0]} == {
        "ddp of all": world, "ddp of a pair": pairs, "hsdp": world, "fsdp2 of a pair": pairs, "fsdp2 of layers": pairs,
        "no wrapper": own, "no wrapper, world": world, "ddp, none": own, "layers that differ": own, "beside a helper": world,
        "a copied block": [True] * 4,
    }  # fmt: skip


def fsdp1():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for name, group in (("world", dist.group.WORLD), ("alone", alone)):
        for known in (True, False):
            inner = model_of()
            model = FullyShardedDataParallel(
                inner, process_group=group, use_orig_params=True, device_id=torch.device("cpu")
            )
            if known:
                training_state(model)
            found[name, known] = amax_seen(inner, model)
    dist.barrier()
    return found


def test_an_fsdp1_unit_around_the_model_is_known_by_the_training_state_and_is_the_world_without():
    for rank, found in enumerate(launch.call(fsdp1, 2)):
        assert found == {
            ("world", True): 2.0,
            ("world", False): 2.0,
            ("alone", True): AMAX[rank],
            ("alone", False): 2.0,
        }


def left_alone(case):
    """Rank 0 does what rank 1 does not; returns what each said."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
    amax_group.WAIT = datetime.timedelta(seconds=2)
    amax_group.time = types.SimpleNamespace(sleep=lambda seconds: time.sleep(seconds / 10))
    said = []
    amax_group.log.error = lambda text, *args: said.append(text % args)
    model = model_of()
    ddp = DistributedDataParallel(model)
    x = torch.ones(4, 32)
    try:
        if case == "join":
            with ddp.join():
                for _ in range(1 + dist.get_rank()):
                    ddp(x).sum().backward()
        else:
            for _ in range(3):  # in its second forward DDP talks itself
                ddp(x).sum().backward()
            if dist.get_rank() == 0:
                {"ddp": ddp, "inner": model, "update": lambda _: FP8State.of(model).update()}[case](x)
    except RuntimeError as error:
        said.append(str(error))
    store = torch.distributed.distributed_c10d._get_default_store()
    if said:
        store.set("said", "yes")
    else:
        with contextlib.suppress(RuntimeError):  # rank 0, which holds the store, may be gone
            store.wait(["said"], datetime.timedelta(seconds=60))
    return said


@pytest.mark.parametrize(
    "case", [*(pytest.param(case, marks=pytest.mark.full) for case in ("inner", "update")), "ddp"]
)
def test_a_forward_that_one_rank_forgot_is_an_error_that_names_the_others(case):
    said, nothing = launch.call(left_alone, 2, case)
    assert nothing == [] and len(said) == 2
    assert all(
        "ranks [1] of [0, 1] do not come to the" in text and "amax_group: none" in text for text in said
    )


def test_a_join_is_refused_by_name():
    for said in launch.call(left_alone, 2, "join"):
        assert "ddp.join()" in said[0] and "recipe's amax_group: none" in said[0]
