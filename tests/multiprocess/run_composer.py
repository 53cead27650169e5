"""Worker: the algorithms under Composer's Trainer, on four gloo ranks. FSDP1 needs its CUDA device faked."""

import json
import os
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
        self.first, self.last = None, None

    def after_train_batch(self, state, logger):
        if self.first is None and not any(isinstance(m, FSDP1) for m in state.model.modules()):
            self.first = torch.cat(
                [
                    (p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad).flatten().double()
                    for p in state.model.parameters()
                ]
            )

    def batch_end(self, state, logger):
        self.last = [
            (p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in state.model.parameters()
        ]


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
}

results = {}
reference = train(None, [], "reference")[0].first
for name in sys.argv[2].split(",") if len(sys.argv) > 2 else CASES:
    parallelism, algorithms = CASES[name]
    through, logged = train(parallelism(), algorithms(), name, twice=name == "ddp", microbatch=4)
    checkpoint = f"{FOLDER}/{name}/" + ("ba2.pt" if parallelism() is None else "ep0-ba2")
    assert os.path.exists(checkpoint), os.listdir(f"{FOLDER}/{name}")
    resumed, _ = train(parallelism(), algorithms(), name, load=checkpoint, twice=name == "ddp", microbatch=4)
    equal = all(torch.equal(a, b) for a, b in zip(through.last, resumed.last, strict=True))
    everywhere = dist.all_gather_object(equal)
    cell = results[name] = {"bit_exact": all(everywhere)}
    if through.first is not None:
        cell["ratio"] = float(through.first.norm() / reference.norm())
        cell["direction"] = float(
            (through.first / through.first.norm() - reference / reference.norm()).norm()
        )
    cell["logged"] = {key: values[-1][1] for key, values in logged.items() if key.startswith("comm/")}
    print(name, cell, flush=True)

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
