"""One run of a case: high precision, FP8 alone, or FP8 under the guard."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
import transformers
from case import Case
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from torch import Tensor, nn

from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.callbacks.divergence_guard import DivergenceGuard
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.models.fog import FogConfig, FogForCausalLM

VOCAB, LENGTH, HIDDEN, LAYERS = 64, 32, 64, 2
GUARD: dict[str, Any] = {"interval": 5, "rows": 64, "quiet_batches": 60}
"""The guard's settings in every case: shorter times than its defaults, because the runs are short."""

Variant = Literal["high", "fp8", "guarded"]


@dataclasses.dataclass
class Run:
    """What one run gave."""

    losses: list[float]
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    linears_in_fp8: list[float] = dataclasses.field(default_factory=list)
    """By step: the share of the linears that FP8 was asked for that ran in FP8."""
    attention_in_fp8: list[float] = dataclasses.field(default_factory=list)
    gaps: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    """By measurement: batch, gap of the loss, largest error of a gradient."""


class Model(ComposerModel):
    """A causal language model on ``[rows, LENGTH]`` tokens."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(case.seed)
        fields = dict(case.model)
        self.model = HOSTS[fields.pop("kind", "llama")](fields)

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, use_cache=False).logits

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return F.cross_entropy(outputs[:, :-1].reshape(-1, VOCAB), batch[:, 1:].reshape(-1))


def _llama(fields: dict[str, Any]) -> nn.Module:
    defaults = {
        "variant": "llama3", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    return FogForCausalLM(FogConfig(**{**defaults, **fields}))


def _mixture(fields: dict[str, Any]) -> nn.Module:
    defaults = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**defaults, **fields}))


def _opt(fields: dict[str, Any]) -> nn.Module:
    """GPT-2's block (layer norms with biases, learned positions) with ReLU."""
    defaults = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "ffn_dim": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "word_embed_proj_dim": fields.get("hidden_size", HIDDEN), "max_position_embeddings": LENGTH, "dropout": 0.0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return transformers.OPTForCausalLM(transformers.OPTConfig(**{**defaults, **fields}))


def _mpt(fields: dict[str, Any]) -> nn.Module:
    """LLM Foundry's MPT: layer norms without biases, learned positions, GELU, tied embeddings."""
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    defaults = {
        "d_model": HIDDEN, "n_heads": 4, "n_layers": LAYERS, "expansion_ratio": 2, "vocab_size": VOCAB, "max_seq_len": LENGTH,
        "no_bias": True, "attn_config": {"attn_impl": "torch"},
    }  # fmt: skip
    return MPTForCausalLM(MPTConfig(**{**defaults, **fields}))


HOSTS = {"llama": _llama, "mixture": _mixture, "opt": _opt, "mpt": _mpt}


def tokens(case: Case) -> Tensor:
    """``[steps * rows, LENGTH]``: each token is a function of the last two, but for a share of random ones."""
    generator = torch.Generator().manual_seed(1000 + case.seed)
    table = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(1234))
    ids = torch.randint(0, VOCAB, (case.steps, case.rows, LENGTH), generator=generator)
    noise = torch.tensor([case.noise(step) for step in range(case.steps)])[:, None, None]
    random = torch.rand(ids.shape, generator=generator) < noise
    for t in range(2, LENGTH):
        follows = table[ids[..., t - 1], ids[..., t - 2] % 4]
        ids[..., t] = torch.where(random[..., t], ids[..., t], follows)
    return ids.flatten(0, 1)


def saved(part: Any) -> Callable[[], None]:
    """What puts a mechanism, and what it is made of, back as it is now: numbers, tensors and random numbers."""
    own, inside = dict(vars(part)), []
    for name, value in own.items():
        if isinstance(value, Tensor | list | dict):
            own[name] = value.clone() if isinstance(value, Tensor) else value.copy()
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Generator):
                inside.append(functools.partial(item.set_state, item.get_state()))
            elif type(item).__module__.startswith("mechanisms"):
                inside.append(saved(item))

    def restore() -> None:
        vars(part).update({n: v.copy() if isinstance(v, list | dict) else v for n, v in own.items()})
        for one in inside:
            one()

    return restore


class Happens(Callback):
    """Lets the mechanism act, sets the learning rate, and notes what ran in FP8."""

    def __init__(self, case: Case, model: Model, run: Run) -> None:
        self.case, self.model, self.run = case, model, run
        self.mechanism = case.mechanism()
        self.mechanism.install(model.model)
        self.restore: Callable[[], None] | None = None
        """While the guard measures: what is at work in one of its passes is so in the other, and in the step."""
        model.register_forward_pre_hook(lambda *_: self.restore() if self.restore else None)

    def after_dataloader(self, state: Any, logger: Any) -> None:
        step = state.timestamp.batch.value
        for group in state.optimizers[0].param_groups:
            group["lr"] = self.case.lr(step)
        self.mechanism.step(step, self.model.model)
        self.mechanism.train(step, state)
        linears, attention = self.run.linears_in_fp8, self.run.attention_in_fp8
        for kind, shares in ((FP8Linear, linears), (FP8DotProductAttention, attention)):
            found = [module.recipe is not None for module in self.model.modules() if isinstance(module, kind)]
            shares.append(sum(found) / len(found) if found else 0.0)
        self.restore = saved(self.mechanism)

    def batch_start(self, state: Any, logger: Any) -> None:
        assert self.restore is not None
        self.restore()
        self.restore = None


def train(case: Case, variant: Variant, guard: dict[str, Any] | None = None) -> Run:
    """Train ``case``; ``guarded`` has the divergence guard, with the options ``guard`` instead of ``GUARD``."""
    run = Run(losses=[])
    model = Model(case)
    callbacks: list[Callback] = [Happens(case, model, run)]
    watcher = DivergenceGuard(**(GUARD if guard is None else guard)) if variant == "guarded" else None
    if watcher is not None:
        callbacks.append(watcher)
    algorithms: list[Any] = []
    if case.clip is not None:
        algorithms.append(GradientClipping(clipping_type="norm", clipping_threshold=case.clip))
    if variant != "high":
        fp8 = FP8(recipe=case.recipe, attention=case.attention, backend="emulated", announce=False)
        algorithms.append(fp8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr(0), betas=(0.9, 0.95), weight_decay=0.0)
    logger = InMemoryLogger()
    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
        trainer = Trainer(
            model=model,
            train_dataloader=torch.utils.data.DataLoader(tokens(case), batch_size=case.rows),
            max_duration=f"{case.steps}ba",
            optimizers=optimizer,
            algorithms=algorithms,
            callbacks=callbacks,
            loggers=[logger],
            device="cpu",
            progress_bar=False,
            seed=case.seed,
        )
        trainer.fit()
        trainer.close()
    run.losses = [float(value) for _, value in logger.data["loss/train/total"]]
    if watcher is not None:
        if watcher.failed is not None:
            raise RuntimeError(f"{case.name}: the guard failed: {watcher.failed}")
        run.events = list(watcher.guard.events)
        names = ("fp8_error/loss_gap", "fp8_error/gradient/worst")
        gaps, errors = (logger.data.get(name, []) for name in names)  # none in a short run
        measured = zip(gaps, errors, strict=True)
        run.gaps = [(time.batch.value, float(gap), float(worst)) for (time, gap), (_, worst) in measured]
    return run
