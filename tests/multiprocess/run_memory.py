"""Worker of test_memory.py: checkpointing and compression under DDP, FSDP1 (on a CPU device) and FSDP2, two gloo ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.compression.apply import apply_activation_compression


def build(width: int = 64) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 5 // 2,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=2 * width,
        use_cache=False,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def batch(rank: int) -> torch.Tensor:
    return torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(rank))


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


def wrap(kind: str, model: LlamaForCausalLM) -> torch.nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True
        )
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def gradient(kind: str, model: torch.nn.Module) -> tuple[torch.Tensor, int]:
    """The mean gradient over the ranks, of two accumulated microbatches, and the all-gathers they took."""
    with Gathers() as gathers:
        for step in range(2):
            x = batch(dist.get_rank() + 2 * step)
            model(input_ids=x, labels=x).loss.backward()
    if kind == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            grads = [p.grad.flatten().clone() for p in model.parameters()]
    elif kind == "fsdp2":
        # gloo's reduce-scatter sums where NCCL's takes the mean, on older torch.
        ones = torch.ones(dist.get_world_size())
        dist.reduce_scatter_tensor(mean_of_ones := torch.empty(1), ones, op=dist.ReduceOp.AVG)
        grads = [p.grad.full_tensor().flatten() / mean_of_ones for p in model.parameters()]
    else:
        grads = [p.grad.flatten() for p in model.parameters()]
    return torch.cat(grads), gathers.count


def reference() -> torch.Tensor:
    model = build()
    for seed in range(4):
        x = batch(seed)
        (model(input_ids=x, labels=x).loss / 2).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


CHECKPOINTS = (
    {"targets": {"LlamaDecoderLayer": "first-2", "*.mlp": "last-2"}},
    {"policy": "selective"},
    {"offload": True},
    {"policy": "offload"},
)


def main() -> None:
    dist.init_process_group("gloo")
    exact = reference()

    def error(x: torch.Tensor) -> float:
        return ((x - exact).norm() / exact.norm()).item()

    for kind in ("ddp", "fsdp1", "fsdp2"):
        plain, plain_gathers = gradient(kind, wrap(kind, build()))
        assert error(plain) < 1e-5, (kind, error(plain))
        for options in CHECKPOINTS:
            model = wrap(kind, build())
            inner = model.module if kind == "ddp" else model
            apply_activation_checkpointing(inner, **options)
            checkpointed, gathers = gradient(kind, model)
            assert torch.equal(checkpointed, plain), (kind, options, error(checkpointed))
            assert gathers == plain_gathers, (kind, options, gathers, plain_gathers)
            print(kind, options, "bit-identical,", gathers, "all-gathers")
        for options in ({}, {"targets": None}, {"targets": {"LlamaDecoderLayer": "every-2"}}):
            for before in (True, False) if kind != "fsdp1" else (False,):
                model = build()
                if not before:
                    model = wrap(kind, model)
                inner = model.module if kind == "ddp" and not before else model
                if options:
                    apply_activation_checkpointing(inner, **options)
                apply_activation_compression(inner, min_numel=1024)
                if before:
                    model = wrap(kind, model)
                compressed, gathers = gradient(kind, model)
                assert error(compressed) < 1e-2, (kind, options, error(compressed))
                assert error(compressed) > 1e-4, "nothing was compressed"
                assert gathers == plain_gathers, (kind, options, gathers, plain_gathers)
                both = [torch.empty_like(compressed) for _ in range(2)]
                dist.all_gather(both, compressed)
                assert torch.equal(both[0], both[1])
                print(kind, options, "compressed", f"{error(compressed):.1e}")
    dist.barrier()
    print("all good")


if __name__ == "__main__":
    main()
