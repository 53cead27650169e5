"""FSDP1 and FSDP2 over Transformer Engine's own Python. Run by test_real_te.py."""

import pytest
import torch
import torch.distributed as dist
from real_te.models import converted, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from foundry_fp8.backends.transformer_engine.backend import te_module_of


@pytest.fixture
def gloo(monkeypatch, tmp_path):
    """One rank on the CPU; call it once the TE modules are made, because then no GPU may be pretended."""

    def start():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        return init_device_mesh("cpu", (1,))

    yield start
    dist.destroy_process_group()


def assert_same_steps(plain, wrapped):
    for seed in range(3):
        ours, theirs = step(plain, seed), step(wrapped, seed)
        for name, theirs_full in theirs.items():
            if isinstance(theirs_full, DTensor):
                theirs_full = theirs_full.full_tensor()
            ours_full = ours[name.replace("_fsdp_wrapped_module.", "")]
            assert torch.equal(ours_full, theirs_full.view_as(ours_full)), name


@pytest.mark.parametrize("wgrad", ["fp8", "high_precision"])
def test_fsdp2_shards_the_models_own_parameters(wgrad, gloo):
    plain, sharded = (converted(recipe="delayed", wgrad=wgrad) for _ in range(2))
    mesh = gloo()
    fully_shard(sharded.up, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    assert_same_steps(plain, sharded)
    for layer in (sharded.up, sharded.down):
        te_module = te_module_of(layer, layer.recipe)
        # From 2.16 on, TE asks, and then quantises the weight again in the backward instead of keeping it.
        assert getattr(te_module, "_is_fsdp2", True) is True
        assert not [name for name in layer.__dict__ if "fsdp_state" in name]


def test_fsdp1_flattens_the_models_own_parameters(gloo):
    plain, sharded = (converted(recipe="delayed") for _ in range(2))
    gloo()
    sharded = FullyShardedDataParallel(sharded, use_orig_params=True, device_id=torch.device("cpu"))
    assert_same_steps(plain, sharded)
