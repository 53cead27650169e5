"""What of Trainer's and Accelerate's options does not run together with FP8 layers."""

from __future__ import annotations

from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainingArguments

from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.apply import wrapper_of
from foundry_fp8.surgery.apply import FP8Config
from foundry_fp8.surgery.rules import Measured

__all__ = ["KEY", "refuse"]

KEY = "FP8Callback"


def refuse(args: TrainingArguments, model: nn.Module, config: FP8Config, *, guarded: bool) -> None:
    """What cannot run together.

    Raises:
        ConfigError: With the reason and the way out.
    """
    if wrapper_of(model) is not None or isinstance(model, nn.DataParallel) or is_compiled(model):
        raise ConfigError(
            f"{KEY}: the model is wrapped or compiled already, and FP8 layers go in before that. Give Trainer the plain model; it wraps "
            "(fsdp=, ddp) and compiles (torch_compile=True) later."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"{KEY}: Trainer would run nn.DataParallel over {args.n_gpu} GPUs, which copies the model in every step. Launch one process "
            "a GPU (torchrun), or set CUDA_VISIBLE_DEVICES to one."
        )
    accelerate = AcceleratorState()
    plugin = getattr(accelerate, "deepspeed_plugin", None)
    if plugin is not None:
        why = (
            "ZeRO-3 keeps parameters empty outside of their layer's forward, so FP8 layers find no weight"
            if plugin.zero_stage == 3
            else f"ZeRO-{plugin.zero_stage} was never tested with FP8 layers"
        )
        raise ConfigError(f"{KEY}: DeepSpeed {why}. Use fsdp= (FSDP1 or FSDP2) or DDP.")
    if accelerate.mixed_precision == "fp8":
        raise ConfigError(
            f"{KEY}: Accelerate's mixed_precision: fp8 is on, and both would quantise. Set it to bf16 (TrainingArguments(bf16=True))."
        )
    if args.fp16 and (guarded or config.runs_unit):
        raise ConfigError(
            f"{KEY}: fp16 scales the loss by a factor that a callback does not know, which "
            + ("the guard needs" if guarded else "recipe: unit has no room for")
            + ". Set bf16=True."
        )
    if isinstance(config.recipe, Measured):
        raise ConfigError(
            f"{KEY}.recipe: measured is for Composer alone: nothing measures under Trainer, and all layers would run delayed. Give "
            "rules, or a recipe's name."
        )
    if args.fsdp and config.frozen_weights == "fp8":
        raise ConfigError(
            f"{KEY}: frozen_weights: fp8 does not run under FSDP, which shards plain parameters alone. Use DDP."
        )
