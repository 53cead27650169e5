"""The model of a Hugging Face folder, as planning asks an LLM Foundry model: where Trainer trains, Composer may be missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from foundry_fp8.config import ConfigError, first_line

__all__ = ["FolderModel", "build_folder_model"]


class FolderModel(nn.Module):
    """A causal language model that is called with a batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        """The model's outputs."""
        return self.model(**batch)

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """The model's own, of the labels in ``batch``."""
        found: Tensor = outputs["loss"]
        return found

    def get_metrics(self, is_train: bool = False) -> dict[str, Any]:
        """None: Trainer computes them itself."""
        return {}


def build_folder_model(section: Mapping[str, Any], init_device: str) -> FolderModel:
    """The causal language model of the folder in :func:`~foundry_fp8.cli.hf_folder.read_folder`'s ``model``, with fresh weights.

    Raises:
        ConfigError: transformers knows no such model.
    """
    path, trust = section["path"], section.get("trust_remote_code", True)
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust)
        with torch.device(init_device):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    except Exception as error:  # transformers raises what it likes
        raise ConfigError(
            f"{path}: no causal language model can be built of it: {first_line(error)}."
        ) from error
    return FolderModel(model)
