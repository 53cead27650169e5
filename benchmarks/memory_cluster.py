"""What two ranks hold in a step under DDP, FSDP1 and FSDP2, and what the planner says of it from one device.

    torchrun --nproc-per-node 2 benchmarks/memory_cluster.py [--save memory_cluster_cpu_DATE]

Every storage counts, by its size at the time (FSDP empties and fills them again), over the second step of a run and over the first of one
that resumes with the states of AdamW. What the optimizer's own update holds is left out, and so are gloo's own buffers. Nothing is fitted:
the planner's arithmetic is that of torch's code (``foundry_fp8/planning/memory/cluster.py``); where it was wrong was found on the Llama.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from common import environment, save
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
)

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.planning.memory.cluster import Cluster, on_cluster
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.optimizer_state import optimizer_bytes
from foundry_fp8.planning.memory.plan import Measurements
from foundry_fp8.planning.memory.planner import measure

MODELS: dict[str, PretrainedConfig] = {
    "llama, tied": LlamaConfig(
        hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=4, vocab_size=512,
        tie_word_embeddings=True,
    ),
    "qwen2": Qwen2Config(
        hidden_size=192, intermediate_size=520, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=3001, tie_word_embeddings=False,
    ),
    "gpt-neox": GPTNeoXConfig(
        hidden_size=128, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, vocab_size=1000,
        max_position_embeddings=256,
    ),
    "gpt2, tied": GPT2Config(n_embd=160, n_layer=3, n_head=4, vocab_size=700, n_positions=256, attn_pdrop=0.0),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """One of the runs."""

    model: str
    wrapper: Literal["ddp", "fsdp1", "fsdp2"]
    mixed: bool
    """Gathered in bfloat16, reduced in float32, under autocast, as Composer's ``mixed_precision: DEFAULT``."""
    option: Literal["none", "block"]
    microbatches: int
    sharding: Literal["FULL_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD"


class Bytes(TorchDispatchMode):
    """All storages that ops made since it was entered, by their size now; gloo's own buffers, which NCCL has not, left out."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0
        self._undo: list[Callable[[], None]] = []
        self._inside = False

    def __enter__(self) -> Bytes:
        for name in ("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
            plain = getattr(dist, name)
            setattr(dist, name, functools.partial(self._collective, plain))
            self._undo.append(functools.partial(setattr, dist, name, plain))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for undo in self._undo:
            undo()

    def _collective(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._inside = True
        try:
            return plain(*args, **kwargs)
        finally:
            self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and look at what is there."""
        out = func(*args, **(kwargs or {}))
        if self._inside:
            return out
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor):
                storage = (x._local_tensor if isinstance(x, DTensor) else x).untyped_storage()
                self.known.setdefault(storage._cdata, weakref.ref(storage))
        alive = {key: found for key, ref in self.known.items() if (found := ref()) is not None}
        self.known = {key: self.known[key] for key in alive}
        self.peak = max(self.peak, sum(found.nbytes() for found in alive.values()))
        return out


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = MODELS[name]
    config.use_cache = False
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def wrap(case: Case, model: nn.Module) -> nn.Module:
    blocks = [block for _, block in transformer_blocks(model)]
    half, single = torch.bfloat16, torch.float32
    if case.wrapper == "ddp":
        return DistributedDataParallel(model)
    if case.wrapper == "fsdp1":
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in blocks}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy[case.sharding],
            mixed_precision=MixedPrecision(param_dtype=half, reduce_dtype=single, buffer_dtype=single)
            if case.mixed
            else None,
        )
    policy = (
        MixedPrecisionPolicy(param_dtype=half, reduce_dtype=single) if case.mixed else MixedPrecisionPolicy()
    )
    for block in blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=case.sharding == "FULL_SHARD")
    return fully_shard(model, mp_policy=policy)


def loss_of(model: nn.Module, name: str, half: bool) -> Callable[[], Tensor]:
    """A microbatch's forward, under autocast where ``half``."""
    tokens = torch.randint(0, MODELS[name].vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return model(input_ids=tokens, labels=tokens).loss

    return run


def held(case: Case) -> dict[str, int]:
    """Peak bytes of a second step, and of the first after a resume."""
    found = {}
    with Bytes() as meter:
        model = build(case.model)
        if case.option == "block":
            apply_activation_checkpointing(model)
        model = wrap(case, model)
        loss_fn = loss_of(model, case.model, case.mixed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

        def backwards() -> None:
            for _ in range(case.microbatches):
                loss_fn().backward()

        backwards()
        optimizer.step()
        for label in ("fresh", "resumed"):
            optimizer.zero_grad(set_to_none=True)
            if label == "resumed":
                state = optimizer.state_dict()
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
                optimizer.load_state_dict(state)
                del state
            meter.peak = 0
            backwards()
            found[label] = meter.peak
    return found


@functools.cache
def measured_alone(name: str, half: bool) -> tuple[nn.Module, Measurements, int]:
    """The model on one device, its measurements and the bytes of its optimizer's states."""
    plain = build(name)
    state = optimizer_bytes([torch.optim.AdamW(plain.parameters())])
    if half:
        plain.to(torch.bfloat16)
    measured = measure(plain, loss_of(plain, name, half), compression="none", cost_model=CostModel())
    return plain, measured, state


def predicted(case: Case, world: int) -> int:
    """What the planner says of a rank."""
    sharded = case.wrapper != "ddp"
    plain, measured, state = measured_alone(case.model, case.mixed)
    cluster = Cluster(
        world_size=world,
        sharding=case.sharding if sharded else "NO_SHARD",
        shard=world if sharded else 1,
        gathered=2 if case.mixed else 4,
        reduced=4,
        fsdp=2 if case.wrapper == "fsdp2" else 1,
        overlaps=False,
    )
    there = on_cluster(measured, plain, cluster, optimizer_bytes=state, accumulates=case.microbatches > 1)
    return there.peak(case.option)


def cases() -> Iterator[Case]:
    """Those of the table."""
    for model, wrapper, mixed, option, microbatches in itertools.product(
        MODELS, ("fsdp1", "fsdp2"), (False, True), ("none", "block"), (1, 4)
    ):
        yield Case(model, wrapper, mixed, option, microbatches)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", help="name of the file in benchmarks/results")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rows: list[dict[str, Any]] = []
    first = dist.get_rank() == 0
    if first:
        print(f"{'run':48} {'predicted MiB':>13} {'fresh':>8} {'resumed':>8} {'off %':>14}")
    for case in cases():
        said, found = predicted(case, dist.get_world_size()), held(case)
        off = {label: 100 * (said / measured - 1) for label, measured in found.items()}
        rows.append({**dataclasses.asdict(case), "predicted_bytes": said, "bytes": found, "off_percent": off})
        name = f"{case.model}, {case.wrapper}, {'bf16' if case.mixed else 'fp32'}, {case.option}, {case.microbatches}"
        if first:
            print(
                f"{name:48} {said / 2**20:13.2f} {found['fresh'] / 2**20:8.2f} {found['resumed'] / 2**20:8.2f} "
                f"{off['fresh']:+7.2f} {off['resumed']:+6.2f}",
                flush=True,
            )
    if first:
        worst = max(abs(value) for row in rows for value in row["off_percent"].values())
        print(f"{len(rows)} runs, at most {worst:.2f} % off")
        if options.save:
            save(options.save, {"environment": environment(), "worst_percent": worst, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
