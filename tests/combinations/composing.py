"""The combinations' Llama and its data, as Composer takes them."""

from __future__ import annotations

import torch
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.combinations.models import LENGTH, VOCAB, blocks_of, build


class Causal(ComposerModel):
    """Its blocks are the units of FSDP."""

    def __init__(self, name: str = "llama", *, tied: bool = False) -> None:
        super().__init__()
        self.inner = build(name, tied=tied)
        for block in blocks_of(self):
            block._fsdp_wrap = True

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(batch["input_ids"])

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        targets = nn.functional.pad(batch["input_ids"], (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())


class Tokens(Dataset):
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows = torch.randint(0, VOCAB, (count, LENGTH + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
