"""For workers: what the ``fp8`` algorithm says where its layers are in a tensor-parallel plan."""

import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from foundry_fp8.algorithms.fp8 import FP8


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32)

    def forward(self, batch):
        return self.last(self.down(self.up(batch)))

    def loss(self, outputs, batch):
        return outputs.square().mean()


def refusals(*options):
    """The error of each set of options, or ``None``, and what was converted."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.initialize_dist("cpu")
    found = []
    for option in options:
        algorithm, error = FP8(recipe="current", **option), None
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        try:
            Trainer(
                model=Model(),
                algorithms=[algorithm],
                device="cpu",
                precision="fp32",
                parallelism_config={
                    "fsdp": {"data_parallel_shard_degree": 1, "mixed_precision": "PURE"},
                    "tp": {"tensor_parallel_degree": 2, "layer_plan": plan},
                },
                progress_bar=False,
            )
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found.append((error, None if algorithm.report is None else algorithm.report.converted))
    return found
