"""For workers: runs of Composer's Trainer in which one bit of one parameter changes on rank 1 alone."""

import torch
from composer import Trainer
from composer.core import Callback
from composer.models import ComposerModel
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from foundry_fp8.algorithms.compressed_communication import CompressedCommunication
from foundry_fp8.algorithms.hybrid_sharding import HybridSharding


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, batch):
        return self.inner(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


class Drift(Callback):
    """The lowest bit of one element, on rank 1: when the model is wrapped, or when the first batch is trained."""

    def __init__(self, when):
        self.when = when

    def before_load(self, state, logger):
        if self.when == "wrapped":
            self._flip(state.model)

    def after_train_batch(self, state, logger):
        if self.when == "trained" and state.timestamp.batch == 0:
            self._flip(state.model)

    def _flip(self, model):
        if dist.get_global_rank() == 1:
            weight = next(p for p in model.parameters() if p.dim() == 2).detach()
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.view(torch.int32)[0, 0] ^= 1


def ddp(**options):
    compressing = CompressedCommunication(warmup=0, min_bytes=0, scope="all", block_size=32, **options)
    return {"algorithms": [compressing]}


def fsdp2(**options):
    return {
        "algorithms": [HybridSharding(shard=1, **options)],
        "parallelism_config": {"fsdp": FSDP2Config()},
    }


def ended(when, options):
    """``(batches trained, the error or nothing)``."""
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    torch.manual_seed(1)
    model = Model()
    trainer = None
    try:
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=4, sampler=dist.get_sampler(data)),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            callbacks=[Drift(when)],
            max_duration="3ba",
            device="cpu",
            precision="fp32",
            progress_bar=False,
            **options,
        )
        trainer.fit()
        return int(trainer.state.timestamp.batch), ""
    except RuntimeError as error:
        return 0 if trainer is None else int(trainer.state.timestamp.batch), str(error)
    finally:
        if trainer is not None:
            trainer.close()


def drifts():
    """How each run ended, by ``(its wrapper, when a bit changed, whether replicas are checked)``."""
    cases = [
        (make, when, checked)
        for make, when in ((ddp, "never"), (ddp, "trained"), (fsdp2, "trained"), (fsdp2, "wrapped"))
        for checked in (True, False)
        if checked or when == "trained"
    ]
    return {
        (make.__name__, when, checked): ended(when, make(check_replicas=checked))
        for make, when, checked in cases
    }
