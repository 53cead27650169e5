"""The functional form: a head and its cross-entropy without the logits between them."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_fp8.activations.fused_head.logits import DeferredLogits, LogitsNotComputed, Step, run_steps
from foundry_fp8.activations.fused_head.row_losses import IGNORE, HeadCall, row_losses
from foundry_fp8.config import Config, ConfigError, NoEffect, Positive, Text, from_mapping, nearest
from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.applied import applied, forget, remember
from foundry_fp8.model_structure.fused_classes import fuse, unfuse
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.model_structure.wrappers import is_sharded, modules_by_clean_name, own_class
from foundry_fp8.numerics.packed import PackFormat
from foundry_fp8.surgery.left_out import output_heads

__all__ = ["FusedHead", "FusedHeadConfig", "apply_fused_head", "fused_head_of"]

KEY = "algorithms.fused_head"
FLASH_LOSS = (
    f"{KEY}: the model's loss is flash-attention's cross-entropy, which wants whole logits. Set model.loss_fn: torch_crossentropy; this "
    "algorithm takes its place."
)
MARK = "_fused_head"
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedHeadConfig(Config):
    """What ``algorithms.fused_head`` takes."""

    key = KEY

    head: Text | None = None
    """Name of the head; ``null`` for the output embeddings of the model."""
    chunk_tokens: Positive | None = None
    """Tokens whose logits there are at a time; ``null`` for 256 MiB of them in float32 (512 tokens of 128k words)."""


class FusedHead:
    """A head that gives the losses of its rows, while it trains and the targets are known.

    Args:
        name: Of the head.
        head: The module.
        steps: What the model does to its logits.
        chunk: Rows at a time; ``None`` for the default.

    Attributes:
        undo: Takes it off again.
    """

    def __init__(self, name: str, head: nn.Module, steps: tuple[Step, ...], chunk: int | None) -> None:
        self.name, self.steps, self.chunk = name, steps, chunk
        self.undo: Callable[[], None] = lambda: None
        self._head = [head]  # no submodule of anything
        self._targets: Tensor | None = None
        self._trusted = False
        self._running = self._warned = False

    def __str__(self) -> str:
        behind = "".join(f", {name} {number:g}" if number else f", {name}" for name, number in self.steps)
        size = "a chunk" if self.chunk is None else f"{self.chunk} tokens"
        return f"fused head: {self.name}{behind}, logits of {size} at a time; exact"

    def expect(self, targets: Tensor | None) -> None:
        """The targets of the next forward, for a model that is not given its labels.

        Args:
            targets: int64, one for each row that the head is called with, -100 for those without loss; not shifted here. ``None``: whole
                logits again.
        """
        self._targets, self._trusted = targets, True

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Before the model's forward: take the labels, shifted by one."""
        self._running, labels = True, _labels(model, args, kwargs)
        if labels is not None:
            self._targets = F.pad(labels, (0, 1), value=IGNORE)[..., 1:]

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """After it: forget them."""
        self._running, self._targets = False, None

    @torch.compiler.disable  # a graph ends before the head
    def run(self, forward: Callable[..., Tensor], x: Tensor, *more: Any, **keywords: Any) -> Any:
        """The head on ``x``, ``[..., D]``: logits, or what stands for them."""
        (head,) = self._head
        if not head.training:
            return forward(head, x, *more, **keywords)
        if self._targets is None:
            if self._running and torch.is_grad_enabled() and not self._warned:
                log.warning("%s: a training forward was given no labels, so its logits are whole.", KEY)
                self._warned = True
            return forward(head, x, *more, **keywords)
        targets = self._targets.reshape(-1).to(x.device)
        rows = x.flatten(0, -2)
        if rows.shape[0] != targets.shape[0]:
            raise LogitsNotComputed(
                f"{KEY}: {self.name} is called on {rows.shape[0]} tokens, and there are {targets.shape[0]} labels. It takes a model that "
                "makes logits of every token."
            )
        call = HeadCall(
            head, lambda part: run_steps(forward(head, part, *more, **keywords), self.steps), rows
        )
        if any(is_dtensor(t) for t in call.tensors):
            raise RuntimeError(
                f"{KEY}: {self.name} is split by tensor parallelism, which it does not take. Take one of them off."
            )
        losses, words, dtype = row_losses(call, rows, targets, self.chunk)
        shape = torch.Size((*x.shape[:-1], words))
        return DeferredLogits(losses, shape, dtype, targets, self.steps, (), self._check)

    def _check(self, expected: Tensor, targets: Tensor) -> None:
        """Whether the loss has the targets that were expected; once, as comparing waits for a GPU."""
        if not self._trusted and not torch.equal(expected, targets.to(expected.device)):
            raise LogitsNotComputed(
                f"{KEY}: the targets of the loss are not the batch's labels shifted by one. It takes causal language models; take it off."
            )
        self._trusted = True


def apply_fused_head(model: nn.Module, **options: Any) -> FusedHead:
    """Let the head of a causal language model give the losses of its tokens, and its logits be made in chunks, twice.

    From then on a training forward that is given labels (in its arguments or its batch) has no logits to look at; its loss and gradients
    are those that it had. Without labels, and in ``eval()``, logits are whole. Apply it after the model is wrapped in FSDP, or before.

    Args:
        model: A Hugging Face causal model, MPT or FOG among them, or a Composer model of one; changed in place. Parameters, names and
            ``state_dict`` stay.
        **options: The fields of :class:`FusedHeadConfig`.

    Raises:
        ConfigError: Bad options, no head or several, a head in FP8 or of an unknown kind, units of FSDP inside it, a loss that is not
            torch's cross-entropy, or applied before with other options.
    """
    config = from_mapping(FusedHeadConfig, options, KEY)
    if (fused := applied(model, config, "fused")) is not None:
        return fused  # type: ignore[no-any-return]
    name, head = _head(model, config.head)
    _check_head(model, name, head)
    fused = FusedHead(name, head, _steps(model, name), config.chunk_tokens)
    fuse(head, _fused_forward, None)
    setattr(head, MARK, fused)
    handles = [
        model.register_forward_pre_hook(fused.before, with_kwargs=True),
        model.register_forward_hook(fused.after, always_call=True),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()
        if MARK in vars(head):
            delattr(head, MARK)
            unfuse(head)
        forget(model, KEY)

    fused.undo = undo
    remember(model, config, fused)
    return fused


def fused_head_of(model: nn.Module) -> FusedHead | None:
    """What :func:`apply_fused_head` made of ``model``, if anything."""
    return next((vars(module)[MARK] for module in model.modules() if MARK in vars(module)), None)


def _fused_forward(cls: type[nn.Module], fmt: PackFormat | None) -> Callable[..., Any]:
    def forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        embeds = isinstance(self, nn.Embedding) and not any((*args, *kwargs.values()))
        if embeds:  # one that is tied, at the other end of the model (LLM Foundry's SharedEmbedding)
            return cls.forward(self, input, *args, **kwargs)
        return self._fused_head.run(cls.forward, input, *args, **kwargs)

    return forward


def _labels(model: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
    """Among the arguments of a model's forward, by name, or in a batch that is one of them."""
    arguments = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    for values in (arguments, *arguments.values()):
        if isinstance(values, Mapping) and isinstance(values.get("labels"), Tensor):
            return values["labels"]
    return None


def _head(model: nn.Module, name: str | None) -> tuple[str, nn.Module]:
    modules = {clean: module for clean, (_, module) in modules_by_clean_name(model).items()}
    if name is not None:
        if name not in modules:
            raise ConfigError(f"{KEY}.head: the model has no {name}.{nearest(name, modules)}")
        return name, modules[name]
    heads = set(output_heads(model))
    found = sorted({clean_name(full) for full, module in model.named_modules() if module in heads})
    if len(found) != 1:
        said = f"has several heads: {', '.join(found)}" if found else "has no output embeddings"
        kind = ConfigError if found else NoEffect
        raise kind(f"{KEY}.head: {type(model).__name__} {said}. Name the module that makes the logits.")
    return found[0], modules[found[0]]


def _check_head(model: nn.Module, name: str, head: nn.Module) -> None:
    inside = list(head.modules())
    if MARK in vars(head):
        raise ConfigError(f"{KEY}: {name} is fused already. Apply it once.")
    if any(isinstance(module, FP8Linear) for module in inside):
        raise ConfigError(
            f"{KEY}: {name} runs in FP8, whose scales are those of whole tensors. Leave it out of algorithms.fp8.include."
        )
    adapted = isinstance(head._modules.get("base_layer"), nn.Linear)
    if not adapted and not isinstance(head, nn.Linear | nn.Embedding):
        raise ConfigError(
            f"{KEY}.head: {name} is a {own_class(head).__name__}. It takes a linear, with or without LoRA."
        )
    if any(is_sharded(part) for part in head.children()):
        raise ConfigError(
            f"{KEY}: parts of {name} are FSDP units of their own (LoRA's are), which would be gathered for every chunk. Leave the head out "
            "of the adapter's target_modules, or take fused_head off."
        )
    for module in model.modules():
        if type(module).__module__.startswith("flash_attn.") and type(module).__name__ == "CrossEntropyLoss":
            raise ConfigError(FLASH_LOSS)


def _steps(model: nn.Module, name: str) -> tuple[Step, ...]:
    """What the model that owns the head does to its logits, by what transformers and LLM Foundry call it."""
    owner: Any = model
    for full, module in model.named_modules():
        prefix = clean_name(full)
        if f"{name}.".startswith(f"{prefix}." if prefix else "") and hasattr(module, "get_output_embeddings"):
            owner = module  # of nested ones the innermost

    def number(key: str) -> float | None:
        for holder in (owner, getattr(owner, "config", None)):
            value = getattr(holder, key, None)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return value
        return None

    steps: list[Step] = []
    if (scale := number("logit_scale")) is not None:
        steps.append(("mul", scale))
    if (divisor := number("logits_scaling")) is not None:
        steps.append(("div", divisor))
    if (cap := number("final_logit_softcapping")) is not None:
        steps += [("div", cap), ("tanh", 0.0), ("mul", cap)]
    return tuple(steps)
