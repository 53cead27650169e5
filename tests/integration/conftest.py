"""What several runs start from, made once for all of them."""

from typing import Any, NamedTuple

import pytest
from torch import Tensor

from tests.integration.foundry_runs import config, make_data, train, weights


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("foundry"))


class Run(NamedTuple):
    trainer: Any
    weights: dict[str, Tensor]
    checkpoint: str
    """After two of its four batches."""


@pytest.fixture(scope="session")
def delayed_run(root, tmp_path_factory):
    """Four batches in the delayed recipe, which nothing interrupted."""
    folder = tmp_path_factory.mktemp("delayed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trainer = train(config(root, save_folder=str(folder), save_interval="2ba"))
    return Run(trainer, weights(trainer), str(folder / "ep0-ba2-rank0.pt"))
