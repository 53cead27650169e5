"""Composer's mixed precision on a CPU, which it refuses there, and its automatic microbatches: for workers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import composer.trainer.trainer as trainer_module
import torch
import torch.distributed as dist
from composer import Trainer
from composer.core import Callback
from composer.utils import dist as composer_dist
from composer.utils.parallelism import FSDP2Config
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import foundry_fp8
from foundry_fp8.algorithms.compressed_communication import CompressedCommunication
from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.layers.linear import FP8Linear
from tests.combinations.composing import Causal, Tokens
from tests.combinations.models import blocks_of
from tests.combinations.wrapping import gradients_of, parameters_of, with_amaxes_of_all_ranks

ROWS, BATCHES = 4, 2
"""Sequences of a rank's batch."""
WRAPPERS = {
    "ddp": lambda: None,
    "fsdp1": lambda: {
        "sharding_strategy": "FULL_SHARD",
        "mixed_precision": "DEFAULT",
        "use_orig_params": True,
    },
    "fsdp1-flat": lambda: {
        "sharding_strategy": "FULL_SHARD",
        "mixed_precision": "DEFAULT",
        "use_orig_params": False,
    },
    "fsdp2": lambda: FSDP2Config(mixed_precision="DEFAULT"),
}


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Composer's checks and its autocast, as they would be on a device that it takes for one with mixed precision."""

    def autocast(precision: Any, precision_config: Any = None, fp8_autocast_enabled: bool = True) -> Any:
        low = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}.get(precision.value)
        return torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None)

    shims = {
        "get_precision_context": autocast,
        "_is_auto_microbatching": lambda size, device: size == "auto",
    }
    found = {name: getattr(trainer_module, name) for name in shims}
    checks = [
        m for n, m in sys.modules.items() if n.startswith("composer.") and "_validate_precision" in vars(m)
    ]
    check, current = trainer_module._validate_precision, torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")
    vars(trainer_module).update(shims)
    for module in checks:
        module._validate_precision = lambda precision, device: None
    try:
        yield
    finally:
        vars(trainer_module).update(found)
        for module in checks:
            module._validate_precision = check
        torch.cuda.current_device = current


class Gradients(Callback):
    """Of every batch, before the optimizer's step; gradients come through gloo as means."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []
        self.microbatches: list[int] = []

    def after_load(self, state, logger):
        if isinstance(state.fsdp_config, FSDP2Config):
            average_on_gloo(state.model)

    def batch_start(self, state, logger):
        self.before = parameters_of(state.model)

    def after_train_batch(self, state, logger):
        self.microbatches.append(state.device_train_microbatch_size)
        if state.optimizers[0].param_groups[0]["lr"] == 0:
            self.found.append(gradients_of(state.model))

    def batch_end(self, state, logger):
        lr = state.optimizers[0].param_groups[0]["lr"]
        if lr:  # FSDP1's flat parameter shows its gradient in its step alone
            after = parameters_of(state.model)
            self.found.append({name: (self.before[name].double() - after[name]) / lr for name in after})


def train(wrapper: str, algorithms: list[Any], *, model: nn.Module | None = None, **options: Any):
    """:data:`BATCHES` batches without a step of any length: gradients by batch, and the trainer."""
    composer_dist.initialize_dist("cpu")
    model, watch, fsdp = model or Causal(), Gradients(), WRAPPERS[wrapper]()
    data = Tokens(BATCHES * ROWS * dist.get_world_size())
    settings = {
        "precision": "amp_bf16",
        "device_train_microbatch_size": 2,
        "max_duration": f"{BATCHES}ba",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.0),
        **options,
    }
    with as_on_a_gpu():
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data, ROWS, sampler=DistributedSampler(data, shuffle=False)),
            algorithms=algorithms,
            callbacks=[watch],
            device="cpu",
            parallelism_config=None if fsdp is None else {"fsdp": fsdp},
            progress_bar=False,
            **settings,
        )
        trainer.fit()
        trainer.close()
    return watch, trainer


def functional(fp8: dict[str, Any] | None, wrapper: str = "ddp") -> list[dict[str, Tensor]]:
    """The same gradients by the functional form on a plain model, under torch's own autocast.

    FSDP computes with parameters in bf16, FSDP1 with buffers in bf16 too; both add the gradients of microbatches in float32.
    """
    model, found = Causal(), []
    if fp8 is not None:
        foundry_fp8.apply_fp8(model, **fp8)
        with_amaxes_of_all_ranks(model)
    if wrapper != "ddp":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    if wrapper.startswith("fsdp1"):
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.bfloat16() if buffer.is_floating_point() else buffer
    rank, world, data = dist.get_rank(), dist.get_world_size(), Tokens(BATCHES * ROWS * dist.get_world_size())
    for batch in range(BATCHES):
        gradients = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
        for first in range(0, ROWS, 2):
            rows = [data.rows[(batch * ROWS + first + i) * world + rank] for i in range(2)]
            inputs = {"input_ids": torch.stack(rows)}
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs)
                loss = model.loss(outputs, inputs)
            (loss * 2 / ROWS).backward()
            for name, parameter in model.named_parameters():
                gradients[name] += parameter.grad.double()
            model.zero_grad()
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient.div_(world)
        found.append(gradients)
    return found


def off_by(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest error of a parameter's gradient, of its norm or a hundredth of all gradients'."""
    total = sum(float(w.norm()) ** 2 for w in wanted.values()) ** 0.5
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    return max(float((got[n] - w).norm()) / max(float(w.norm()), 1e-2 * total) for n, w in wanted.items())


def mixed_precision(recipes: list[str | None], wrappers: list[str]) -> dict[tuple[str, str | None], Any]:
    """How far the trainer's gradients are from the functional ones, and in what its layers ran."""
    composer_dist.initialize_dist("cpu")
    found = {}
    for recipe in recipes:
        fp8 = None if recipe is None else {"recipe": recipe}
        for wrapper in wrappers:
            wanted, model, more = functional(fp8, wrapper), Causal(), {}
            if wrapper == "fsdp1-flat":
                more = {"optimizers": torch.optim.SGD(model.parameters(), lr=0.5), "max_duration": "1ba"}
            watch, trainer = train(wrapper, [] if fp8 is None else [FP8(**fp8)], model=model, **more)
            ran = {
                key[1]
                for m in trainer.state.model.modules()
                if isinstance(m, FP8Linear)
                for key, flops in m.ledger.flops.items()
                if flops
            }
            errors = [off_by(*pair) for pair in zip(watch.found, wanted, strict=not more)]
            found[wrapper, recipe] = (errors, sorted(ran), off_by(wanted[0], wanted[1]))
    return found


class OutOfMemory(torch.autograd.Function):
    """Fails in backward as CUDA does, once, on one rank."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        if OutOfMemory.left and dist.get_rank() == 1:
            OutOfMemory.left -= 1
            raise RuntimeError("CUDA out of memory. On purpose.")
        return dy


class Crowded(Causal):
    """The backward of its last block does not fit on rank 1 at first."""

    def __init__(self) -> None:
        super().__init__()
        blocks_of(self)[-1].mlp.register_forward_hook(lambda m, args, out: OutOfMemory.apply(out))


def out_of_memory(algorithms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``device_train_microbatch_size: auto`` under FSDP1, with the first backward failing on one rank, against the fixed size."""
    made = {"fp8": FP8, "compressed_communication": CompressedCommunication}
    found = {}
    composer_dist.initialize_dist("cpu")
    OutOfMemory.left = 0
    exact, _ = train("fsdp1", [], model=Crowded(), precision="fp32")
    for name, options in algorithms.items():
        runs = []
        for size, failures in ((2, 0), ("auto", 1)):
            OutOfMemory.left = failures
            kinds = [made[kind](**given) for kind, given in options.items()]
            watch, trainer = train(
                "fsdp1", kinds, model=Crowded(), device_train_microbatch_size=size, precision="fp32"
            )
            runs.append((watch, parameters_of(trainer.state.model)))
        (fixed, _), (auto, parameters) = runs
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, {n: float(p.double().sum()) for n, p in parameters.items()})
        found[name] = {
            "microbatches": auto.microbatches,
            "errors": [off_by(*pair) for pair in zip(auto.found, fixed.found, strict=True)],
            "from_exact": [
                [off_by(*p) for p in zip(w.found, exact.found, strict=True)] for w in (auto, fixed)
            ],
            "replicas": all(d == digests[0] for d in digests),
        }
    return found
