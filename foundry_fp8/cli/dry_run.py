"""A YAML's step without a machine to run it on: its model on fake tensors, converted, on random tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foundry_fp8.compat.fake_tensor import NEEDS_VALUES, FakeTensor, FakeTensorMode
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.autocast import autocast_type

if TYPE_CHECKING:
    from foundry_fp8.run.settings import Run

__all__ = ["convert", "fake", "step_of", "without_flash"]


@contextlib.contextmanager
def fake(model: Any) -> Iterator[None]:
    """Fake tensors in place of a model's on ``meta``: nothing is allocated."""
    from foundry_fp8.planning.memory.routing import EqualShares

    with FakeTensorMode(allow_non_fake_inputs=True), EqualShares(model):
        try:
            model.to_empty(device="cpu")
            for module in model.modules():
                if hasattr(module, "tie_weights"):
                    module.tie_weights()
            yield
        except NEEDS_VALUES as error:
            raise ConfigError(
                f"model: its forward depends on values ({error}), which a plan that allocates nothing does not have. Give --device cpu, "
                "without --world-size."
            ) from error


def without_flash(config: dict[str, Any]) -> bool:
    """Let ``config`` build its model without flash attention, which runs on a GPU alone; whether that is a change."""
    model = config["model"]
    attention = model.get("attn_config") or {}
    if model["name"] == "mpt_causal_lm" and attention.get("attn_impl", "flash") == "flash":
        config["model"] = {**model, "attn_config": {**attention, "attn_impl": "torch"}}
        return True
    if model.get("use_flash_attention_2"):
        config["model"] = {**model, "use_flash_attention_2": False}
        return True
    return False


def convert(model: Any, run: Run, config: dict[str, Any], microbatch: int, device: torch.device) -> None:
    """Apply the YAML's fp8 and fused_head algorithms to ``model``."""
    model.train()
    if run.converts is not None:
        from foundry_fp8.layers.state import FP8State
        from foundry_fp8.layers.unit_linear import choose_gradient_scale
        from foundry_fp8.surgery.apply import apply_fp8

        apply_fp8(model, device=device, **run.converts.given)
        for _, state in FP8State.each(model):  # as at the start of the run
            state.held = ()
        choose_gradient_scale(model.modules(), microbatch * config["max_seq_len"])
    if run.fused_head is not None:
        from foundry_fp8.activations.fused_head.apply import apply_fused_head

        fused = apply_fused_head(model, **run.fused_head.given)
        fused.expect(None)  # random tokens have no labels of their own


def step_of(
    model: Any,
    config: dict[str, Any],
    microbatch: int,
    device: torch.device,
    loss: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.cross_entropy,
) -> Callable[[], Tensor]:
    """A step of ``model`` on random tokens; on fake ones with ``loss`` of logits and labels."""
    from foundry_fp8.activations.fused_head.apply import fused_head_of

    tokens = torch.randint(0, 100, (microbatch, config["max_seq_len"]), device=device)
    batch = {"input_ids": tokens}
    dry = isinstance(tokens, FakeTensor)  # models look into masks and labels, and fake ones hold no values
    if not dry:
        batch |= {"labels": tokens, "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}
    half = config.get("precision") in ("amp_bf16", "amp_fp16")
    held: list[Any] = [None]  # the trainer holds its outputs through backward

    def loss_fn() -> Tensor:
        held[0] = None
        if dry and (fused := fused_head_of(model)) is not None:
            fused.expect(tokens)
        with torch.autocast(autocast_type(device), dtype=torch.bfloat16, enabled=half):
            held[0] = model(batch)
            if dry:
                return loss(held[0].logits.flatten(0, 1), tokens.flatten())
            return model.loss(held[0], batch)

    return loss_fn
