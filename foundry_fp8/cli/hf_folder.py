"""A Hugging Face model's folder in the place of an LLM Foundry YAML, for commands that plan with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from foundry_fp8.config import ConfigError

__all__ = ["FOLDER_MODEL", "PUBLISHED_MODEL", "read_folder"]

FOLDER_MODEL = "hugging_face_folder"
"""``model.name`` of the configuration of such a folder."""
PUBLISHED_MODEL = "hf_fp8_causal_lm"
"""That of an LLM Foundry YAML whose folder holds FP8 codes."""
ARGUMENTS = "training_args.json"
"""Trainer's arguments, as ``TrainingArguments.to_json_string`` gives them; beside ``config.json``, if at all."""
LENGTH = 2048
"""Tokens of a sequence where the model's configuration has no limit."""


def read_folder(folder: Path) -> dict[str, Any]:
    """What a YAML would say of the model in ``folder`` and of Trainer's arguments beside it, with FP8 on.

    Raises:
        ConfigError: There is no ``config.json``, or a file cannot be read.
    """
    model = _read(folder / "config.json", "It holds the model's configuration (save_pretrained writes it).")
    found: dict[str, Any] = {
        "run_name": folder.resolve().name,
        "model": {"name": FOLDER_MODEL, "path": str(folder)},
        "max_seq_len": model.get("max_position_embeddings") or LENGTH,
        "precision": "amp_bf16",
        "algorithms": {"fp8": {}},
    }
    if (folder / ARGUMENTS).exists():
        arguments = _read(folder / ARGUMENTS, "")
        found["device_train_microbatch_size"] = arguments.get("per_device_train_batch_size", 8)
        found["precision"] = (
            "amp_bf16" if arguments.get("bf16") else "amp_fp16" if arguments.get("fp16") else "fp32"
        )
        if arguments.get("fsdp"):
            found["fsdp_config"] = {"sharding_strategy": "FULL_SHARD"}
        if arguments.get("deepspeed"):
            raise ConfigError(
                f"{folder / ARGUMENTS}: deepspeed: FP8 layers do not run under it. Use fsdp or DDP."
            )
    return found


def _read(file: Path, otherwise: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file.parent} has no {file.name}. {otherwise}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} is no mapping.")
    return found
