"""What Trainer says of a run: its settings, and the loss of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import TrainingArguments

from foundry_fp8.config import ConfigError
from foundry_fp8.run.clashes import CALLBACK
from foundry_fp8.run.settings import Run
from foundry_fp8.surgery.timing import Moment

__all__ = ["own_loss", "settings_of"]


def settings_of(args: TrainingArguments) -> Run:
    """A run as Trainer's and Accelerate's options say it, for the table of what cannot run together."""
    accelerate = AcceleratorState()
    half = "amp_bf16" if args.bf16 else "amp_fp16" if args.fp16 else "fp32"
    return Run(
        trainer="transformers",
        precision="amp_fp8" if accelerate.mixed_precision == "fp8" else half,
        fsdp=args.fsdp or None,
        compiled=bool(args.torch_compile),
        zero_stage=getattr(getattr(accelerate, "deepspeed_plugin", None), "zero_stage", None),
        copied_to=args.n_gpu,
        device=args.device,
        length=Moment(args.max_steps) if args.max_steps > 0 else None,
    )


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that the model itself gives; ``ConfigError`` where it gives none."""
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"{CALLBACK}.guard: the model gives no loss of its own (label_smoothing_factor and compute_loss_func compute another outside). "
            "Give it labels, or leave the guard out."
        )
    return loss
