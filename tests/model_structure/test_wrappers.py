"""What is a wrapper, and what only looks like one."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.model_structure.wrappers import without_ddp


class Classifier(nn.Module):
    """As ``ComposerClassifier``: what it holds is called as DDP calls what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_a_submodule_called_module_is_the_model_s_own():
    model = Classifier()
    assert without_ddp(model) is model
    began = not dist.is_initialized()
    if began:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert without_ddp(DistributedDataParallel(model)) is model
    finally:
        if began:
            dist.destroy_process_group()
