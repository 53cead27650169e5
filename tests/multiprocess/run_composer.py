"""Worker: the algorithms under Composer's Trainer, on gloo ranks: two for the sample, four for all. FSDP1 needs its CUDA device faked."""

import contextlib
import json
import os
import pickle
import sys

import torch
import torch.distributed as torch_dist
from composer import Trainer
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from foundry_fp8.algorithms.compressed_communication import CompressedCommunication
from foundry_fp8.algorithms.hybrid_sharding import HybridSharding

torch.cuda.current_device = lambda: torch.device("cpu")
FOLDER = sys.argv[1]
BATCHES = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(24, 50), nn.Linear(50, 24)
        self.up._fsdp_wrap = self.down._fsdp_wrap = False

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

    def fsdp_wrap_fn(self, module):
        return isinstance(module, Block)


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Block(), Block(), nn.Linear(24, 5))
        for module in self.inner:
            module._fsdp_wrap = isinstance(module, Block)

    def forward(self, batch):
        return self.inner(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


class Gradients(Callback):
    """Keeps the first batch's gradients, the logged metrics, and the parameters at the end."""

    def __init__(self):
        self.first, self.last, self.start = None, None, None

    def fit_start(self, state, logger):
        if self.start is None:  # the first of two fits
            self.start = whole(state.model, lambda p: p)
        self.keys = [algorithm.state_dict().keys() for algorithm in state.algorithms]
        self.size = max((len(pickle.dumps(a.state_dict())) for a in state.algorithms), default=0)

    def after_train_batch(self, state, logger):
        if self.first is None:
            self.first = whole(state.model, lambda p: p.grad)

    def batch_end(self, state, logger):
        self.last = [
            (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in state.model.parameters()
        ]

    def fit_end(self, state, logger):
        self.constant = self.keys == [algorithm.state_dict().keys() for algorithm in state.algorithms]
        self.size = max((len(pickle.dumps(a.state_dict())) for a in state.algorithms), default=0)


def whole(model, get):
    """``get(parameter)`` of all parameters of the model, unsharded, as one float64 vector."""
    root = next((m for m in model.modules() if isinstance(m, FSDP1)), None)
    summoned = contextlib.nullcontext()
    if root is not None:
        summoned = FSDP1.summon_full_params(root, with_grads=root._is_root is not None, writeback=False)
    with summoned:
        parts = [get(p) for p in model.parameters()]
        parts = [
            (p.full_tensor() if isinstance(p, DTensor) else p).detach().flatten().double() for p in parts
        ]
        return torch.cat(parts)


def train(parallelism, algorithms, name, load=None, batches=BATCHES, microbatch=8, twice=False, **options):
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(256, 24, generator=generator), torch.randint(0, 5, (256,), generator=generator)
    )
    loader = DataLoader(data, batch_size=8, sampler=dist.get_sampler(data, shuffle=False))
    model = Model()
    gradients = Gradients()
    memory = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        algorithms=algorithms,
        callbacks=[gradients],
        loggers=[memory],
        max_duration=f"{batches}ba",
        device="cpu",
        precision="fp32",
        parallelism_config=parallelism,
        device_train_microbatch_size=microbatch,
        save_folder=f"{FOLDER}/{name}" if load is None else None,
        save_interval="2ba",
        save_filename="ba{batch}" if parallelism else "ba{batch}.pt",
        load_path=load,
        progress_bar=False,
        save_overwrite=True,
        **options,
    )
    trainer.fit()
    if twice:
        trainer.fit(duration="1ba")
    trainer.close()
    return gradients, memory.data


def fsdp2():
    return {"fsdp": FSDP2Config(state_dict_type="sharded")}


def fsdp1(**more):
    return {
        "fsdp": {
            "sharding_strategy": "FULL_SHARD",
            "state_dict_type": "sharded",
            "mixed_precision": "PURE",
            **more,
        }
    }


def compress(**options):
    return CompressedCommunication(
        warmup=0, min_bytes=0, scope="all", block_size=32, sample_interval=1, **options
    )


CASES = {
    "ddp": (lambda: None, lambda: [compress(gradients="int8", second_leg="int8")]),
    "hsdp2": (
        fsdp2,
        lambda: [HybridSharding(shard=2), compress(gradients="int8", second_leg="int8", parameters="int8")],
    ),
    "hsdp1": (fsdp1, lambda: [HybridSharding(shard=2), compress(gradients="int8", second_leg="int8")]),
    "hsdp2-plain": (fsdp2, lambda: [HybridSharding(shard=2)]),
    # A model that fits one GPU: shard: auto gives 1.
    "hsdp1-one": (fsdp1, lambda: [HybridSharding(shard=1)]),
    "hsdp1-one-full": (lambda: fsdp1(state_dict_type="full"), lambda: [HybridSharding(shard=1)]),
    "hsdp2-one": (fsdp2, lambda: [HybridSharding(shard=1), compress(gradients="int8", second_leg="int8")]),
}
# What a checkpoint of another run is resumed with.
CHANGED = {
    "changed": ("ddp", "hsdp2", lambda: [compress(gradients="e4m3", error_feedback=False)]),
    "added": ("reference", "hsdp2-plain", lambda: [compress(gradients="int8", second_leg="int8")]),
    "removed": ("ddp", "hsdp2", list),
}


def checkpoint_of(name):
    found = [
        f"{FOLDER}/{name}/{kind}" for kind in ("ep0-ba2", "ba2.pt", "ba2")
    ]  # sharded, DDP's, FSDP's whole
    return next(path for path in found if os.path.exists(path))


def everywhere(value):
    return all(dist.all_gather_object(bool(value)))


def compared(got, wanted):
    return {
        "ratio": float(got.norm() / wanted.norm()),
        "direction": float((got / got.norm() - wanted / wanted.norm()).norm()),
    }


def resumed(source, parallelism, algorithms):
    """What a checkpoint gives to a run with other algorithms, or on other ranks."""
    wanted = torch.load(f"{FOLDER}/{source}-parameters.pt")
    found, _ = train(parallelism, algorithms, source, load=checkpoint_of(source), microbatch=4)
    return {
        "loaded": everywhere(torch.equal(found.start, wanted)),
        "trained": everywhere(not torch.equal(found.first, torch.zeros(1)) and found.first.isfinite().all()),
        "constant": found.constant,
        "size": found.size,
    }


SAMPLE = ("ddp", "hsdp1-one")
"""The cases of the default tier: compression, and the shard groups of one rank that once were never synchronised."""

results = {}
if sys.argv[2] == "elsewhere":
    # The checkpoints of the other launch, on as many ranks as there are now.
    for source, parallelism in (
        ("ddp", None),
        ("hsdp2", fsdp2()),
        ("hsdp1", fsdp1()),
        ("hsdp2-one", fsdp2()),
    ):
        hybrid = [HybridSharding(shard=1)] if parallelism else []
        results[source] = resumed(
            source, parallelism, [*hybrid, compress(gradients="int8", second_leg="int8")]
        )
else:
    plain, _ = train(None, [], "reference")
    reference = plain.first
    for name in SAMPLE if sys.argv[2] == "sample" else CASES:
        parallelism, algorithms = CASES[name]
        through, logged = train(parallelism(), algorithms(), name, twice=name == "ddp", microbatch=4)
        again, _ = train(
            parallelism(), algorithms(), name, load=checkpoint_of(name), twice=name == "ddp", microbatch=4
        )
        if dist.get_global_rank() == 0:
            torch.save(again.start, f"{FOLDER}/{name}-parameters.pt")
        equal = all(torch.equal(a, b) for a, b in zip(through.last, again.last, strict=True))
        cell = results[name] = {"bit_exact": everywhere(equal), **compared(through.first, reference)}
        cell |= {"constant": through.constant, "size": through.size}
        cell["logged"] = {key: values[-1][1] for key, values in logged.items() if key.startswith("comm/")}
        print(name, cell, flush=True)
if sys.argv[2] == "all":
    again, _ = train(None, [], "reference", load=checkpoint_of("reference"))
    if dist.get_global_rank() == 0:
        torch.save(again.start, f"{FOLDER}/reference-parameters.pt")
    torch_dist.barrier()
    for name, (whole_source, sharded_source, algorithms) in CHANGED.items():
        results[f"{name} monolithic"] = resumed(whole_source, None, algorithms())
        results[f"{name} sharded"] = resumed(
            sharded_source, fsdp2(), [HybridSharding(shard=2), *algorithms()]
        )
    try:
        train(None, [compress()], "forced", ddp_sync_strategy="forced_sync")
    except Exception as error:
        results["forced_sync"] = str(error)
    try:
        train(None, [HybridSharding(shard=2)], "no_fsdp")
    except Exception as error:
        results["no_fsdp"] = str(error)
if dist.get_global_rank() == 0:
    with open(os.environ["RESULT_FILE"], "w") as file:
        json.dump({k: v for k, v in results.items()}, file, default=float)
torch_dist.barrier()
