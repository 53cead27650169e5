"""A small decoder and a real Composer trainer to hang the callbacks into."""

from __future__ import annotations

import pytest
import torch

VOCAB = 64


def build_llama(layers: int = 2, seed: int = 0, **over):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCAB, "attn_implementation": "eager", "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**config | over))


def batches(count: int, rows: int = 4, length: int = 16, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (count * rows, length), generator=generator)
    return [{"input_ids": row} for row in ids]


@pytest.fixture(scope="session")
def train():
    """``train(model, callbacks, ...) -> Trainer``, fitted, with its metrics in ``trainer.logged``."""
    from composer import Trainer
    from composer.loggers import InMemoryLogger
    from composer.models import ComposerModel

    class Wrapped(ComposerModel):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, batch):
            return self.model(**batch).logits

        def eval_forward(self, batch, outputs=None):
            return self.forward(batch)

        def loss(self, outputs, batch):
            flat = outputs[:, :-1].reshape(-1, VOCAB).float()
            return torch.nn.functional.cross_entropy(flat, batch["input_ids"][:, 1:].reshape(-1))

    def run(
        model,
        callbacks=(),
        *,
        steps=6,
        rows=4,
        length=16,
        data=None,
        algorithms=(),
        fit=True,
        lr=1e-2,
        **options,
    ):
        torch.manual_seed(0)
        model = model if isinstance(model, ComposerModel) else Wrapped(model)
        logger = InMemoryLogger()
        dataset = data if data is not None else batches(steps, rows, length)
        trainer = Trainer(
            model=model,
            train_dataloader=torch.utils.data.DataLoader(dataset, batch_size=rows, shuffle=False),
            max_duration=f"{steps}ba",
            optimizers=torch.optim.AdamW(model.parameters(), lr=lr),
            callbacks=list(callbacks),
            algorithms=list(algorithms),
            loggers=[logger],
            device="cpu",
            progress_bar=False,
            **options,
        )
        trainer.logged = logger
        if fit:
            trainer.fit()
        return trainer

    run.wrap = Wrapped
    return run


def series(trainer, key: str) -> list[float]:
    """Every value logged under ``key``."""
    return [float(value) for _, value in trainer.logged.data.get(key, [])]
