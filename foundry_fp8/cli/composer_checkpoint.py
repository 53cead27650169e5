"""Rebuilds from a Composer checkpoint the FP8 model that was trained."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from foundry_fp8.config import ConfigError

__all__ = ["TrainedModel", "load_checkpoint", "read_checkpoint"]

PRECISIONS = {"fp32": "float32", "amp_bf16": "bfloat16", "amp_fp16": "float16"}
OF_NO_MATTER = ("backend", "accumulation", "fuse", "cache_weights", "attention", "enabled", "announce")
"""Options of ``algorithms.fp8`` that do not change the FP8 operands of a linear's forward."""


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with the weights and the FP8 state of a checkpoint, on the CPU, for export and not to be run.

    Attributes:
        model: The converted model, in a wrapper that gives parameters their names in the checkpoint.
        dtype: The compute dtype of its training: ``float32``, ``bfloat16`` or ``float16``.
    """

    model: nn.Module
    dtype: str


def read_checkpoint(path: Path, *, trust: bool = False) -> TrainedModel:
    """Build the model of an unsharded checkpoint and convert it as ``algorithms.fp8`` did.

    Args:
        path: A file that Composer's trainer saved.
        trust: Also unpickle classes that Composer itself does not save. This runs code that the file contains.

    Raises:
        ConfigError: Sharded, other classes without ``trust``, or no Composer checkpoint of a known Hugging Face model trained in FP8.
    """
    if path.is_dir():
        raise ConfigError(
            f"{path} is a folder. If it is a sharded checkpoint, make it whole first: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} whole.pt"
        )
    content = load_checkpoint(path, trust)
    state = content.get("state") if isinstance(content, dict) else None
    if not isinstance(state, dict) or "model" not in state:
        raise ConfigError(f"{path} is not a checkpoint of Composer's trainer: it has no state of a model.")
    from foundry_fp8.run.training_state import parts_of  # slow to import: torch's FSDP

    saved = dict(state.get("algorithms") or {}).get("FP8") or {}
    fp8 = {**parts_of(saved).get("fp8", {}), "repr": saved.get("repr", "")}
    if "recipe" not in fp8:
        raise ConfigError(
            f"{path} was not trained in FP8 (it has no state of algorithms.fp8), so there are no FP8 numbers to serve it with."
        )
    precision = state["metadata"]["precision"]
    if precision not in PRECISIONS:
        raise ConfigError(f"{path} was trained in precision {precision}; known are {', '.join(PRECISIONS)}.")
    return TrainedModel(model=_convert(_build(state, path), fp8, state["model"]), dtype=PRECISIONS[precision])


def load_checkpoint(path: Path, trust: bool) -> Any:
    """What a file holds; without ``trust`` tensors and what Composer saves beside them alone, else :class:`ConfigError`."""
    try:
        with torch.serialization.safe_globals(_composers_own()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if not trust:
            try:
                found = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
            except Exception:  # the file is no checkpoint at all
                raise ConfigError(f"{path} cannot be read as a checkpoint: {error}") from error
            raise ConfigError(
                f"{path} holds more than tensors and what Composer saves beside them ({found}). Reading it runs code of who made "
                "it: if you trust them, give --trust."
            ) from error
    except Exception as error:  # torch raises many types
        raise ConfigError(f"{path} cannot be read as a checkpoint: {error}") from error
    try:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:  # torch and pickle raise many types
        raise ConfigError(f"{path} cannot be read as a checkpoint: {error}") from error


def _composers_own() -> list[Any]:
    """The classes in Composer's checkpoints beside tensors: NumPy's random state, torch's version, timedeltas."""
    array: Any = np.zeros(1).__reduce__()[0]  # functions without a public name
    scalar: Any = np.float64(0).__reduce__()[0]
    return [
        torch.torch_version.TorchVersion,
        datetime.timedelta,
        np.ndarray,
        np.dtype,
        array,
        scalar,
        (array, "numpy.core.multiarray._reconstruct"),  # NumPy 1's name, as the next
        (scalar, "numpy.core.multiarray.scalar"),
        *(type(np.dtype(name)) for name in ("uint32", "int64", "float64", "float32", "uint8", "bool")),
    ]


def _build(state: dict[str, Any], path: Path) -> nn.Module:
    """The model without weights, on the meta device."""
    import transformers

    import foundry_fp8.models.fog.modeling
    import foundry_fp8.models.mus.modeling  # noqa: F401 (both register with the Auto classes)

    found = (state.get("integrations") or {}).get("huggingface")
    if not found:
        raise ConfigError(
            f"{path} holds no Hugging Face model, whose config.json says to a server how to build it."
        )
    values = dict(found["model"]["config"]["content"])
    name = values.pop("model_type")
    with torch.device("meta"):
        if name == "mpt":  # LLM Foundry's MPT; transformers' has only some of its options
            from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

            model = MPTForCausalLM(MPTConfig(**{**values, "init_device": "meta"}))
            model.config.init_device = values.get("init_device", "cpu")
            return model
        try:
            config = transformers.CONFIG_MAPPING[name].from_dict(values)
            return transformers.AutoModelForCausalLM.from_config(config)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{path}: its model_type {name} is none that transformers builds a causal language model of. Load it yourself, "
                "convert it (apply_fp8, FP8State.load_state_dict), and call export_fp8."
            ) from error


def _convert(model: nn.Module, fp8: dict[str, Any], weights: dict[str, Any]) -> nn.Module:
    from foundry_fp8.layers.state import FP8State
    from foundry_fp8.surgery.apply import apply_fp8

    root = nn.Module()
    root.add_module("model", model)  # parameters are called as in Composer's model
    mismatch = root.load_state_dict(weights, strict=False, assign=True)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    missing = [name for name in mismatch.missing_keys if name.removeprefix("model.") not in tied]
    if missing or mismatch.unexpected_keys:
        name = [*mismatch.unexpected_keys, *missing][0]
        hint = " It has LoRA adapters: merge them first." if "lora_" in name else ""
        raise ConfigError(f"the checkpoint's weights are not those of its configuration: {name}, ....{hint}")
    options = {key: value for key, value in _options(fp8["repr"]).items() if key not in OF_NO_MATTER}
    if not isinstance(options.get("recipe"), list):  # a list of rules also says what stays in high precision
        options["recipe"] = fp8["recipe"]
    apply_fp8(root, **{**options, "backend": "emulated"})
    state = FP8State.of(root)
    assert state is not None
    state.load_state_dict({**fp8, "backend": "emulated"})  # scales do not depend on the backend
    return root


def _options(text: str) -> dict[str, Any]:
    """The options in an algorithm's ``repr``."""
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        return {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ConfigError(f"the checkpoint's algorithm is {text}, whose options cannot be read.") from error
