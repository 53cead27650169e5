"""Worker: who wraps under Composer's Trainer, on two gloo ranks. FSDP1 needs its CUDA device faked."""

import json
import os

import torch
from composer import Trainer
from composer.models import ComposerModel
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from foundry_fp8.activations.compression.saved import compresses_inside
from foundry_fp8.algorithms.activation_checkpointing import ActivationCheckpointing
from foundry_fp8.algorithms.activation_compression import ActivationCompression
from foundry_fp8.model_structure.wrappers import checkpoint_wrappers

torch.cuda.current_device = lambda: torch.device("cpu")
RESULT = os.environ["RESULT_FILE"]


class Model(ComposerModel):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=64
        )
        self.inner = LlamaForCausalLM(config)
        self.inner.fsdp_wrap_fn = lambda module: isinstance(module, LlamaDecoderLayer)
        # As Foundry sets it on Hugging Face models: every block.
        self.inner.activation_checkpointing_fn = lambda module: isinstance(module, LlamaDecoderLayer)

    def forward(self, batch):
        return self.inner(input_ids=batch[0]).logits

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch[0].flatten())


def fit(parallelism, algorithms):
    data = TensorDataset(torch.randint(0, 64, (16, 32), generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=False))
    model = Model()
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=algorithms,
        parallelism_config=parallelism,
        max_duration="2ba",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return trainer


def train(parallelism, algorithms):
    trainer = fit(parallelism, algorithms)
    wrapped = {name: type(w.checkpoint_fn).__name__ for name, w in checkpoint_wrappers(trainer.state.model)}
    keywords = [w.checkpoint_fn.keywords for _, w in checkpoint_wrappers(trainer.state.model)]
    with torch.no_grad():
        total = sum(float(p.detach().double().abs().sum()) for p in trainer.state.model.parameters())
    loss = float(trainer.state.loss)
    trainer.close()
    return sorted(wrapped), [k.get("use_reentrant") for k in keywords], loss, total


def plan(parallelism):
    trainer = fit(parallelism, [ActivationCheckpointing(budget=0.8)])
    model, loss = trainer.state.model, float(trainer.state.loss)
    changed = any(True for _ in checkpoint_wrappers(model)) or compresses_inside(model) is not None
    trainer.close()
    return changed, loss


TARGETS = {"LlamaDecoderLayer": "first-1", "LlamaMLP": "last-1"}


def main():
    results = {}
    fsdp1 = {"sharding_strategy": "FULL_SHARD", "use_orig_params": True}
    for name, make in {
        "ddp": lambda ac: None,
        "fsdp1": lambda ac: {"fsdp": {**fsdp1, "activation_checkpointing": ac}},
        "fsdp2": lambda ac: {"fsdp": FSDP2Config(activation_checkpointing=ac)},
    }.items():
        plain = train(make(False), [])
        for composer_wraps in (False, True) if name != "ddp" else (False,):
            for label, options in {
                "full": {"targets": TARGETS},
                "selective": {"targets": TARGETS, "policy": "selective"},
            }.items():
                ours = train(make(composer_wraps), [ActivationCheckpointing(**options)])
                results[f"{name} {label} composer={composer_wraps}"] = [ours, plain]
        both = train(
            make(False), [ActivationCompression(min_numel=512), ActivationCheckpointing(targets=TARGETS)]
        )
        results[f"{name} compressed"] = [both, plain]
        results[f"{name} budget"] = [plan(make(False)), plain]
    if dist.get_global_rank() == 0:
        with open(RESULT, "w") as file:
            json.dump(results, file)


main()
