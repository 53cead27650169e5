"""What is a wrapper, and what only looks like one."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foundry_fp8.model_structure.wrappers import without_ddp
from tests.one_rank import one_rank


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
    one_rank()
    assert without_ddp(DistributedDataParallel(model)) is model
