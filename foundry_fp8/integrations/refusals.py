"""What of Trainer's and Accelerate's options does not run together with FP8 layers."""

from __future__ import annotations

from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainingArguments

from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.apply import wrapper_of
from foundry_fp8.run import clashes
from foundry_fp8.run.settings import Run
from foundry_fp8.surgery.apply import FP8Config

__all__ = ["KEY", "refuse"]

KEY = clashes.CALLBACK


def refuse(args: TrainingArguments, model: nn.Module, config: FP8Config, *, guarded: bool) -> None:
    """Raise :class:`ConfigError` for what cannot run together, with the reason and the way out."""
    if wrapper_of(model) is not None or isinstance(model, nn.DataParallel) or is_compiled(model):
        raise ConfigError(
            f"{KEY}: the model is wrapped or compiled already, and FP8 layers go in before that. Give Trainer the plain model; it wraps "
            "(fsdp=, ddp) and compiles (torch_compile=True) later."
        )
    accelerate = AcceleratorState()
    plugin = getattr(accelerate, "deepspeed_plugin", None)
    half = "amp_fp16" if args.fp16 else "amp_bf16"
    run = Run(
        trainer="transformers",
        precision="amp_fp8" if accelerate.mixed_precision == "fp8" else half,
        fsdp=args.fsdp or None,
        guarded=guarded,
        zero_stage=getattr(plugin, "zero_stage", None),
        copied_to=args.n_gpu,
        fp8=config,
    )
    clashes.refuse(run)
