"""A YAML for eight GPUs on one: the distributed algorithms warn and do nothing."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.integration


def test_one_rank_is_warned_about_and_trains_as_without(caplog):
    from composer import Trainer
    from composer.models import ComposerModel
    from torch.utils.data import DataLoader, TensorDataset

    from foundry_fp8.algorithms.compressed_communication import CompressedCommunication
    from foundry_fp8.algorithms.hybrid_sharding import HybridSharding

    class Model(ComposerModel):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, batch):
            return self.inner(batch[0])

        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch[1])

    def train(algorithms):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(16, 4), torch.randint(0, 3, (16,)))
        model = Model()
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data, batch_size=4),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            algorithms=algorithms,
            max_duration="3ba",
            device="cpu",
            progress_bar=False,
        )
        keys = [algorithm.state_dict().keys() for algorithm in trainer.state.algorithms]
        trainer.fit()
        assert keys == [algorithm.state_dict().keys() for algorithm in trainer.state.algorithms]
        trainer.close()
        return model.inner.weight.detach().clone()

    plain = train([])
    assert torch.equal(train([HybridSharding(shard=8), CompressedCommunication(gradients="int8")]), plain)
    assert "hybrid_sharding: this job has one rank" in caplog.text
    assert "compressed_communication: this job has one rank" in caplog.text
