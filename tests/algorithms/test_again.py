"""A second Trainer on the same model goes on with what the first one made of it; a model that has nothing for an algorithm is a warning."""

import warnings

import pytest
import torch
from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning
from composer.models import ComposerClassifier
from torch import nn

from foundry_fp8.algorithms.activation_checkpointing import ActivationCheckpointing
from foundry_fp8.algorithms.activation_compression import ActivationCompression
from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from tests.combinations.composing import Causal, Tokens

pytestmark = pytest.mark.integration
AGAIN = {
    "fp8": (FP8, {"recipe": "delayed", "backend": "emulated", "announce": False}, {"recipe": "current"}),
    "measured": (FP8, {"recipe": {"name": "measured", "warmup": 1}, "announce": False}, {"recipe": "block"}),
    "compression": (ActivationCompression, {"min_numel": 1}, {"format": "int4"}),
    "checkpointing": (ActivationCheckpointing, {}, {"policy": "selective"}),
    "budget": (ActivationCheckpointing, {"budget": 0.9}, {"budget": 0.8}),
}


def fit(model, algorithm, **options):
    loader = torch.utils.data.DataLoader(Tokens(4), batch_size=2)
    trainer = Trainer(model=model, train_dataloader=loader, algorithms=[algorithm], max_duration="2ba", device="cpu", progress_bar=False,
                      optimizers=torch.optim.SGD(model.parameters(), lr=1e-2), **options)  # fmt: skip
    trainer.fit()
    trainer.close()
    return trainer


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name == "budget" else ()) for name in AGAIN]
)
def test_a_second_trainer_goes_on_and_other_settings_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, options, others = AGAIN[name]
    torch.manual_seed(0)
    model = Causal("llama")
    fit(model, made(**options))
    modules = [(n, type(m)) for n, m in model.named_modules()]
    state = FP8State.of(model)
    fit(model, made(**options))
    assert [(n, type(m)) for n, m in model.named_modules()] == modules
    assert FP8State.of(model) is state
    with pytest.raises(ConfigError, match=r"already, with other settings"):
        fit(model, made(**{**options, **others}))


class Small(ComposerClassifier):
    """Nothing here is of the sizes that FP8 takes, or a block."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), num_classes=2)


@pytest.mark.parametrize("algorithm", [FP8, ActivationCompression, ActivationCheckpointing])
def test_a_model_that_has_nothing_for_it_is_a_warning(algorithm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Small()
    data = torch.utils.data.TensorDataset(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = Trainer(model=model, train_dataloader=torch.utils.data.DataLoader(data, batch_size=2), algorithms=[algorithm()],
                          max_duration="2ba", device="cpu", progress_bar=False, save_folder=str(tmp_path / "c"))  # fmt: skip
        trainer.fit()
        trainer.close()
        again = Trainer(model=Small(), train_dataloader=torch.utils.data.DataLoader(data, batch_size=2), algorithms=[algorithm()],
                        max_duration="3ba", device="cpu", progress_bar=False, load_path=str(tmp_path / "c" / "latest-rank0.pt"))  # fmt: skip
        again.close()
    assert any(issubclass(one.category, NoEffectWarning) for one in said), [str(one.message) for one in said]
    assert trainer.state.timestamp.batch == 2


def test_what_was_asked_for_by_name_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no linear layer was converted"):
        fit(Causal("llama"), FP8(recipe="current", exclude=["*_proj"], backend="emulated"))
