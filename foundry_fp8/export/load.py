"""``load_fp8``: a folder with an FP8 checkpoint into a plain model, tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.ddp_left_out import leave_out_of_ddp
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, scaling_of
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.surgery.published import SCALES, keep_published, published_weight

__all__ = ["LoadReport", "load_fp8"]

_SCALE = re.compile(r"[._](weight_scale(_inv)?|scale_inv|(input|activation|output|[kvq])_scale)$")
_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_STACKED = {
    "gate_proj": "gate_up_proj",
    "w1": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "w3": "gate_up_proj",
}
"""Of an expert's linears, as checkpoints name them: the parameter of all experts in transformers 5; the others are in down_proj."""

Place = tuple[nn.Module, str]
"""A module and the name of its parameter or buffer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of a checkpoint's FP8 weights.

    Attributes:
        frozen: Names of the parameters that keep codes and scales as published.
        masters: Names of those that hold the values in high precision.
        others: How many parameters and buffers were not in FP8.
    """

    frozen: tuple[str, ...]
    masters: tuple[str, ...]
    others: int

    def summary(self) -> str:
        """One line."""
        return f"{len(self.frozen)} weights keep their FP8 codes, {len(self.masters)} hold the values in high precision; {self.others} other tensors"


def load_fp8(folder: str | Path, model: nn.Module) -> LoadReport:
    """Read an FP8 checkpoint (FineGrainedFP8's or compressed-tensors' ``float-quantized``) into a plain ``model``, one tensor at a time.

    A linear's weight that does not require a gradient (``model.requires_grad_(False)``, LoRA's base) keeps codes and scales as published, one
    byte an element, and is read as their product. One that trains, or is shared, holds that product in the parameter's dtype.

    Args:
        folder: With config.json and safetensors.
        model: A Hugging Face model made from that configuration, or what holds one; on the meta device too, but for buffers that the
            checkpoint does not have. Parameters stay the same objects.

    Raises:
        ConfigError: A layout that is none of these; names, shapes or scales that do not fit. Names are compared before anything is read.

    Example:
        >>> model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
        >>> print(load_fp8("Qwen3-8B-FP8", model).summary())
    """
    folder = Path(folder)
    block, files = _block_of(folder), _files_of(folder)
    inner = _pretrained(model)
    places = dict(_places(inner))
    sources = _sources(folder, inner, places, files)
    read = _reader(files)

    def weight(key: str, dtype: torch.dtype) -> Tensor:
        codes = read(key)
        if codes.element_size() > 1 or not codes.dtype.is_floating_point:
            return codes
        beside = (
            f"{key.removesuffix('weight')}{name}" for name in (*SCALES, f"{key.rpartition('.')[2]}_scale_inv")
        )
        scale = next((name for name in beside if name in files), None)
        if scale is None:
            raise ConfigError(f"{folder}: {key} is {codes.dtype}, and no {' or '.join(SCALES)} is beside it.")
        return published_weight(key, codes, read(scale), block, dtype)

    holders = [id(p) for module in model.modules() for p in module._parameters.values()]
    frozen, masters = [], []
    for name, keys in sources.items():
        module, leaf = places[name]
        old: Tensor = getattr(module, leaf)
        value = weight(keys, old.dtype) if isinstance(keys, str) else _stacked(keys, old.dtype, weight)
        if value.shape != old.shape:
            raise ConfigError(
                f"{folder}: {name} is {list(value.shape)} there and {list(old.shape)} in the model. Make the model from the folder's config.json."
            )
        if not isinstance(value, FrozenFP8Weight):
            _fill(module, leaf, [value])
        elif not old.requires_grad and holders.count(id(old)) == 1 and not isinstance(module, nn.Embedding):
            keep_published(module, leaf, value.to("cpu" if old.is_meta else old.device))  # type: ignore[arg-type]
            frozen.append(name)
        else:
            _fill(module, leaf, (one.unpacked(old.dtype) for one in (value if value.dim() == 3 else [value])))
            masters.append(name)
    unfilled = [name for name, (module, leaf) in places.items() if getattr(module, leaf).is_meta]
    if unfilled:
        raise ConfigError(
            f"{folder}: {unfilled[0]} is not in the checkpoint and on the meta device. Make the model with its buffers "
            "(accelerate's init_empty_weights(include_buffers=False))."
        )
    leave_out_of_ddp(model, [name for name, p in model.named_parameters() if isinstance(p, FrozenFP8Weight)])
    return LoadReport(
        frozen=tuple(frozen), masters=tuple(masters), others=len(sources) - len(frozen) - len(masters)
    )


def _pretrained(model: nn.Module) -> nn.Module:
    """The Hugging Face model in ``model``, whose names a checkpoint has; ``model`` itself where there is none."""
    return next(
        (
            module
            for module in model.modules()
            if hasattr(module, "save_pretrained") and hasattr(module, "config")
        ),
        model,
    )


def _places(model: nn.Module) -> Iterator[tuple[str, Place]]:
    """Parameters and buffers, by their names in a checkpoint: without adapters, and what PEFT adds to names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = ".".join(
                part for part in clean_name(f"{prefix}.{leaf}").split(".") if part not in ("", "base_layer")
            )
            if tensor is not None and "lora_" not in name:
                yield name, (module, leaf)


def _block_of(folder: Path) -> tuple[int, int] | None:
    """Rows and columns of a block; ``None`` for scales of rows or tensors."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder}: there is no config.json. Give the folder of a Hugging Face model."
        ) from error
    found = (
        config.get("quantization_config") or config.get("text_config", {}).get("quantization_config") or {}
    )
    method = found.get("quant_method")
    if method == "fp8":
        block = found.get("weight_block_size")
        return tuple(block) if block else None  # type: ignore[return-value]
    if method == "compressed-tensors" and found.get("format") in ("float-quantized", "naive-quantized"):
        blocks = {
            str((group.get("weights") or {}).get("block_structure"))
            for group in found["config_groups"].values()
        }
        if len(blocks) == 1:
            numbers = [int(n) for n in re.findall(r"\d+", blocks.pop())]
            return (numbers[0], numbers[1]) if numbers else None
    raise ConfigError(
        f"{folder}: its quantization_config is {found.get('quant_method')!r} {found.get('format', '')}; fp8 (FineGrainedFP8) and compressed-tensors "
        "(float-quantized, one block size) are read. Load others with transformers, dequantised."
    )


def _files_of(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    from safetensors import safe_open

    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    if not found:
        raise ConfigError(f"{folder}: there is no .safetensors file.")
    return found


def _reader(files: Mapping[str, Path]) -> Callable[[str], Tensor]:
    from safetensors import safe_open

    opened: dict[Path, Any] = {}

    def read(key: str) -> Tensor:
        file = files[key]
        if file not in opened:
            opened[file] = safe_open(file, "pt").__enter__()
        found: Tensor = opened[file].get_tensor(key)
        return found

    return read


def _sources(
    folder: Path, model: nn.Module, places: Mapping[str, Place], files: Mapping[str, Path]
) -> dict[str, str | list[list[str]]]:
    """Of each parameter the key that holds it, or for all experts in one the keys of each expert's parts.

    Raises:
        ConfigError: A tensor has no place, or a parameter no tensor.
    """
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []]
    found: dict[str, Any] = {}
    stacked: dict[str, dict[int, list[str]]] = {}
    for key in sorted(
        files, key=lambda key: ("up_proj" in key or ".w3." in key, key)
    ):  # the gate before what it gates
        if _SCALE.search(key):
            continue
        names = [key, key.replace(".block_sparse_moe.", ".mlp."), f"model.{key}", key.removeprefix("model.")]
        name = next((name for name in names if name in places), None)
        expert = _EXPERT.match(names[1])
        experts = f"{expert[1]}.{_STACKED.get(expert[3], 'down_proj')}" if expert else ""
        if name is not None:
            found[name] = key
        elif expert and experts in places:
            stacked.setdefault(experts, {}).setdefault(int(expert[2]), []).append(key)
        elif not any(pattern.search(key) for pattern in ignored):
            raise ConfigError(
                f"{folder}: the model has no place for {key}. Make it from the folder's config.json, before adapters are merged."
            )
    found |= {name: [keys for _, keys in sorted(parts.items())] for name, parts in stacked.items()}
    filled = {id(getattr(*places[name])) for name in found}
    for name, (module, leaf) in places.items():
        if id(getattr(module, leaf)) not in filled and leaf not in module._non_persistent_buffers_set:
            raise ConfigError(
                f"{folder}: no tensor there is for {name}. Make the model from the folder's config.json."
            )
    return found


def _stacked(
    experts: list[list[str]], dtype: torch.dtype, weight: Callable[[str, torch.dtype], Tensor]
) -> Tensor:
    """The weights of all experts in one, ``[experts, out_features, in_features]``: an expert's gate and what it gates one under the other."""
    all_codes = all_scales = None
    size, columns = 1, 0
    for i, keys in enumerate(experts):
        parts = [weight(key, dtype) for key in keys]
        codes, scales = torch.cat([getattr(part, "codes", part) for part in parts]), []
        for part in parts:
            if isinstance(part, FrozenFP8Weight):
                columns = part.shape[1] if part.block is None else part.block[1]
                # Blocks that end within a part: a scale a row, the same for each of a block.
                size = (
                    1
                    if part.block is None or (part.shape[0] % part.block[0] and len(parts) > 1)
                    else part.block[0]
                )
                scale = part.scale.reshape(1, 1) if part.block is None else part.scale
                repeats = part.shape[0] if part.block is None else part.block[0] // size
                scales.append(scale.float().repeat_interleave(repeats, 0)[: -(-part.shape[0] // size)])
        if all_codes is None:
            all_codes = codes.new_empty(len(experts), *codes.shape)
            all_scales = scales and scales[0].new_empty(len(experts), *torch.cat(scales).shape)
        all_codes[i] = codes
        if isinstance(all_scales, Tensor):
            all_scales[i] = torch.cat(scales)
    assert all_codes is not None
    if not isinstance(all_scales, Tensor):
        return all_codes
    block = (size, columns)
    return FrozenFP8Weight(
        all_codes, all_scales, block, scaling_of(all_scales, block, all_codes.shape[2]), dtype
    )


def _fill(module: nn.Module, leaf: str, values: Iterable[Tensor]) -> None:
    """Write ``values``, those of each expert where there are several, into a parameter or buffer; the object stays."""
    old: Tensor = getattr(module, leaf)
    if old.is_meta:
        new = torch.empty_like(old, device="cpu")
        if isinstance(old, nn.Parameter):
            torch.utils.swap_tensors(old, nn.Parameter(new, requires_grad=old.requires_grad))
        else:
            module._buffers[leaf] = old = new
    with torch.no_grad():
        for i, value in enumerate(values):
            (old[i] if value.dim() < old.dim() else old).copy_(value)
