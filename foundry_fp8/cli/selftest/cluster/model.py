"""A small Llama, under every wrapper, and its gradients whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import foundry_fp8
from foundry_fp8.backends import load_backend
from foundry_fp8.cli.selftest.cluster.ranks import CannotRunError, Ranks
from foundry_fp8.compat import cpu_stream_events
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.numerics.recipes import RECIPES

__all__ = ["batch", "converted", "llama", "loss_of", "recipes", "step", "warmed", "wrap"]

SMALL = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
DRY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def llama(ranks: Ranks) -> Any:
    """A causal model of transformers, the same on every rank."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise CannotRunError(f"transformers cannot be imported: {error}") from error

    torch.manual_seed(0)
    sizes = DRY if ranks.dry else SMALL
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False))
    return model.to(ranks.device, ranks.dtype).train()


def recipes(ranks: Ranks) -> list[str]:
    """Those that run here."""
    backend, names = load_backend(_backend(ranks)), ("delayed", "current", "block", "mxfp8")
    return [name for name in names if backend.availability(RECIPES[name](), ranks.device).ok]


def converted(ranks: Ranks, recipe: Any) -> Any:
    """The model with its linears in FP8."""
    model = llama(ranks)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend=_backend(ranks))
    return model


def _backend(ranks: Ranks) -> str:
    return "emulated" if ranks.dry else "native"


def batch(ranks: Ranks, step: int) -> Tensor:
    """Token ids of this rank's part of a step, ``[4, tokens]``."""
    generator = torch.Generator().manual_seed(1000 * step + ranks.rank)
    high, tokens = (256, 32) if ranks.dry else (2048, 512)
    return torch.randint(0, high, (4, tokens), generator=generator).to(ranks.device)


def loss_of(model: Callable[..., Any], ids: Tensor) -> Tensor:
    """Of the next token."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def warmed(model: Any, ids: Tensor) -> Any:
    """``model`` after one pass, which gives delayed scaling its first amaxes."""
    loss_of(model, ids).backward()
    model.zero_grad(set_to_none=True)
    return model


def step(model: nn.Module, ids: Tensor) -> Tensor:
    """One forward and backward; returns all gradients (:func:`flat_gradients`)."""
    loss_of(model, ids).backward()
    return flat_gradients(model)


def wrap(kind: str, model: Any, ranks: Ranks) -> nn.Module:
    """``model`` under ``ddp``, ``fsdp1``, ``fsdp2`` or ``hsdp``."""
    if kind == "ddp":
        return DistributedDataParallel(
            model, device_ids=None if ranks.device.type == "cpu" else [ranks.device]
        )
    blocks: Sequence[nn.Module] = list(model.model.layers)
    if kind == "fsdp1":
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            device_id=ranks.device,
            auto_wrap_policy=ModuleWrapPolicy({type(blocks[0])}),
            use_orig_params=True,
        )
    shape = (ranks.world,)
    if kind == "hsdp":
        if ranks.world % 2:
            raise CannotRunError(
                f"two replicas of a shard need an even number of ranks; there are {ranks.world}"
            )
        shape = (2, ranks.world // 2)  # type: ignore[assignment]
        if ranks.device.type == "cpu":
            cpu_stream_events.apply()
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    average_on_gloo(model)
    return model


def flat_gradients(model: nn.Module) -> Tensor:
    """All gradients by name in one float32 vector on the CPU, whatever shards them."""

    def found() -> dict[str, Tensor]:
        return {
            clean_name(name.removeprefix("module.")): p.grad.detach()
            for name, p in model.named_parameters()
            if p.grad is not None
        }

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            gradients = {name: grad.clone() for name, grad in found().items()}
    else:
        gradients = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found().items()}
    return torch.cat([gradients[name].flatten().float().cpu() for name in sorted(gradients)])
