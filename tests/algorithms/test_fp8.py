"""The Composer algorithm: what the first batch ran is in the log, the report and the hyperparameters."""

import logging

import torch
import torch.nn.functional as F
from composer import Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from torch import nn

from foundry_fp8.algorithms.fp8 import FP8


class Bypassing(ComposerModel):
    """Multiplies by the weight of ``inner`` without calling it."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, batch):
        return F.linear(self.outer(batch), self.inner.weight, self.inner.bias)

    def loss(self, outputs, batch):
        return outputs.pow(2).mean()


def test_a_layer_that_nobody_calls_is_a_warning_after_the_first_batch(caplog):
    algorithm, memory = FP8(recipe="delayed"), InMemoryLogger()
    trainer = Trainer(
        model=Bypassing(),
        train_dataloader=torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=16),
        device_train_microbatch_size=8,
        max_duration="2ba",
        algorithms=[algorithm],
        loggers=[memory],
        device="cpu",
        progress_bar=False,
    )
    assert algorithm.report.converted == ["outer", "inner"]
    with caplog.at_level(logging.WARNING, "foundry_fp8"):
        trainer.fit()
    said = [record.message for record in caplog.records if "converted to FP8" in record.message]
    assert said == [
        "inner: converted to FP8, but in the first batch Bypassing multiplies by its weight itself. It does not run in FP8."
    ]
    assert algorithm.report.converted == ["outer"] and algorithm.report.converted_share == 0.5
    assert memory.hyperparameters["fp8"]["converted"] == 2
    assert memory.hyperparameters["fp8_as_run"]["converted"] == 1
    trainer.close()
