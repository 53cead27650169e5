"""What of Trainer's and Accelerate's options does not run together with FP8 layers."""

from __future__ import annotations

from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainingArguments

from foundry_fp8.compat.compiled_model import is_compiled
from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.apply import wrapper_of
from foundry_fp8.distributed.fsdp_settings import FSDPSettings
from foundry_fp8.run.clashes import CALLBACK
from foundry_fp8.run.clashes import refuse as refuse_run
from foundry_fp8.run.settings import Run
from foundry_fp8.surgery.apply import FP8Config

__all__ = ["KEY", "refuse"]

KEY = CALLBACK


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
    accelerate = AcceleratorState()
    plugin = getattr(accelerate, "deepspeed_plugin", None)
    fp8 = accelerate.mixed_precision == "fp8"
    run = Run(
        trainer="transformers",
        precision="amp_fp8" if fp8 else "amp_fp16" if args.fp16 else "amp_bf16",
        fsdp=FSDPSettings() if args.fsdp else None,
        guarded=guarded,
        zero_stage=None if plugin is None else plugin.zero_stage,
        copied_to=args.n_gpu,
        fp8=config,
    )
    refuse_run(run)
