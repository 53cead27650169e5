"""The algorithm fp8 with recipe: measured, in a trainer."""

import pytest
import torch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel

from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.layers.state import FP8State
from tests.surgery.test_policy import Model

pytestmark = pytest.mark.integration


class Composed(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, batch):
        return self.model(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).pow(2).mean()


class Watch(Callback):
    """What layers run in each batch; in batch 5 one is demoted, as the guard does."""

    def __init__(self):
        self.runs = []

    def after_dataloader(self, state, logger):
        if state.timestamp.batch.value == 5:
            next(iter(FP8State.of(state.model).modules.values())).set_recipe(None)

    def before_forward(self, state, logger):
        layers = FP8State.of(state.model).modules.values()
        self.runs.append({None if layer.recipe is None else layer.recipe.name for layer in layers})


def train(fp8, batches=8, **options):
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 64), torch.randn(64, 32))
    model, watch, logger = Composed(), Watch(), InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=8),
        max_duration=f"{batches}ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        algorithms=[fp8],
        callbacks=[watch],
        loggers=[logger],
        device="cpu",
        progress_bar=False,
        **options,
    )
    trainer.fit()
    trainer.close()
    return model, watch, logger


def test_it_warms_up_in_high_precision_then_chooses_and_again_where_a_layer_was_demoted(capsys):
    fp8 = FP8(recipe={"name": "measured", "error": 0.3, "warmup": 3, "rows": 8, "recipes": ["current", "delayed"]})  # fmt: skip
    _, watch, logger = train(fp8)
    assert watch.runs == [{None}] * 3 + [{"delayed"}] * 5
    said = capsys.readouterr().err
    assert (
        said.count("limit 30%") == 2 and "for 3 batches" in said
    )  # once after the warm-up, once after the demotion
    assert {row.precision for row in fp8.report.rows if row.action == "converted"} == {"fp8"}
    (table,) = [key for key in logger.tables if "fp8_policy" in key]
    assert "layer_000 mlp" in str(logger.tables[table])


def test_every_recipe_above_the_limit_is_said_once(caplog):
    fp8 = FP8(recipe={"name": "measured", "error": 1e-5, "warmup": 1, "rows": 8}, announce=False)
    _, watch, _ = train(fp8, batches=4)
    assert watch.runs == [{None}] * 4
    assert caplog.text.count("algorithms.fp8.recipe: measured: every recipe is off by more than 0%") == 1
    assert fp8.report.converted == [] and "measured, not" in fp8.report.skipped["model.blocks.0.up"]


def test_resume_keeps_the_choice_and_the_report(tmp_path):
    recipe = {"name": "measured", "error": 0.3, "warmup": 2, "rows": 8}
    options = {"save_folder": str(tmp_path), "save_interval": "4ba", "save_overwrite": True}
    whole, _, _ = train(FP8(recipe=recipe, announce=False), batches=5, **options)
    fp8 = FP8(recipe=recipe, announce=False)
    resumed, watch, _ = train(fp8, batches=5, load_path=str(tmp_path / "ep0-ba4-rank0.pt"))
    assert watch.runs == [{"delayed"}]
    assert all("measured" in row.reason for row in fp8.report.rows if row.action == "converted")
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
