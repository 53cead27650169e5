"""Two ranks under DDP, each with a ``run_log`` on the same path; started by test_run_log.py."""

import sys

import torch
from composer import Callback, Trainer
from composer.models import ComposerModel
from torch.utils.data import DataLoader

from foundry_fp8.callbacks.run_log import RunLog


class Regression(ComposerModel):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.linear(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])


class LogsItsRank(Callback):
    def batch_end(self, state, logger):
        logger.log_metrics({"rank": torch.distributed.get_rank()})


def main() -> None:
    torch.manual_seed(0)
    rows = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    from composer.utils import dist

    dist.initialize_dist("cpu")
    trainer = Trainer(
        model=Regression(),
        train_dataloader=DataLoader(rows, batch_size=4, sampler=dist.get_sampler(rows)),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        loggers=[RunLog(sys.argv[1])],
        callbacks=[LogsItsRank()],
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main()
