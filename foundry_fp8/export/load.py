"""``load_fp8``: a folder with an FP8 checkpoint into a plain model, tensor by tensor."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.checkpoint_form import renamed_by
from foundry_fp8.compat.wrapper_tensor import save_plain
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight, row_scales, scaling_of
from foundry_fp8.model_structure.names import plain_name
from foundry_fp8.surgery.published import SCALES, leave_frozen_out_of_ddp, published_weight, share_scalings

__all__ = ["load_fp8"]

_SCALE = re.compile(r"[._](weight_scale(_inv)?|scale_inv|(input|activation|output|[kvq])_scale)$")
_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_HELD_BY = {"down_proj": ("down_proj",), "w2": ("down_proj",)}
"""The parameter of all experts that has such a part; of others one with gate and up, or, where nothing is gated, the part's own."""


def load_fp8(folder: str | Path, model: nn.Module) -> list[str]:
    """Read an FP8 checkpoint (FineGrainedFP8's or compressed-tensors' ``float-quantized``) into a plain ``model``, one tensor at a time.

    A linear's weight that does not require a gradient (``model.requires_grad_(False)``, LoRA's base) keeps codes and scales as published, one
    byte an element, and is read as their product. One that trains, or is shared, holds that product in the parameter's dtype.

    Args:
        folder: With config.json and safetensors.
        model: A Hugging Face model made from that configuration, or what holds one; on the meta device too, but for buffers that the
            checkpoint does not have. Parameters stay the same objects.

    Returns:
        The names of the parameters that keep published codes.

    Raises:
        ConfigError: A sharded model; a layout that is none of these; names, shapes or scales that do not fit. Names are compared before anything is read.

    Example:
        >>> model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
        >>> load_fp8("Qwen3-8B-FP8", model)
    """
    folder = Path(folder)
    if any(map(is_dtensor, model.parameters())):
        raise ConfigError(f"{folder}: the model is sharded already. Load first, then fully_shard.")
    block = _block_of(folder)
    files = _files(folder)
    inner: Any = next((m for m in model.modules() if hasattr(type(m), "config_class")), model)
    if hasattr(inner, "tie_weights") and any(p.is_meta for p in inner.parameters()):
        inner.tie_weights()  # which accelerate's init_empty_weights parts
    names = {n: n.rpartition(".") for n in inner.state_dict(keep_vars=True) if "lora_" not in n}
    places = {plain_name(n): (inner.get_submodule(at), leaf) for n, (at, _, leaf) in names.items()}
    sources = _sources(folder, inner, places, files)

    def weight(key: str, dtype: torch.dtype) -> Tensor:
        codes: Tensor = files[key].get_tensor(key)
        beside = (f"{key.removesuffix('weight')}{name}" for name in (*SCALES, "_scale_inv"))
        scale = next((name for name in beside if name in files), None)
        if scale is None and codes.element_size() > 1:
            return codes
        if scale is None:
            raise ConfigError(f"{folder}: {key} is {codes.dtype}, and no {' or '.join(SCALES)} is beside it.")
        return published_weight(key, codes, files[scale].get_tensor(scale), block, dtype)

    holders = [id(p) for module in model.modules() for p in module._parameters.values()]
    kept = []
    for name, keys in sources.items():
        module, leaf = places[name]
        old: Tensor = getattr(module, leaf)
        value = weight(keys, old.dtype) if isinstance(keys, str) else _stacked(keys, old.dtype, weight)
        if value.shape != old.shape:
            raise ConfigError(
                f"{folder}: {name} is {[*value.shape]} there, {[*old.shape]} in the model. Make it from config.json there."
            )
        if not isinstance(value, FrozenFP8Weight):
            _fill(module, leaf, [value])
        elif old.requires_grad or holders.count(id(old)) > 1 or isinstance(module, nn.Embedding):
            _fill(module, leaf, (one.unpacked(old.dtype) for one in (value if value.dim() == 3 else [value])))
        else:
            value = value.to("cpu" if old.is_meta else old.device)
            torch.utils.swap_tensors(old, nn.Parameter(value, requires_grad=False))
            save_plain(module)
            kept.append(name)
    if left := [n for n, t in (*inner.named_parameters(), *inner.named_buffers()) if t.is_meta]:
        raise ConfigError(
            f"{folder}: {left[0]} is not there, and on the meta device in the model. Make the model with its buffers (accelerate's "
            "init_empty_weights(include_buffers=False))."
        )
    share_scalings(model)
    leave_frozen_out_of_ddp(model)
    return kept


def _block_of(folder: Path) -> tuple[int, int] | None:
    """Rows and columns of a block; ``None`` for scales of rows or tensors."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder}: no config.json can be read ({error}). load_fp8 takes a folder on this disk, as snapshot_download of "
            "huggingface_hub makes one."
        ) from error
    found = config.get("quantization_config") or {}
    said = {str(found.get("weight_block_size"))} if found.get("quant_method") == "fp8" else set()
    if found.get("quant_method") == "compressed-tensors" and found.get("format") in (
        "float-quantized",
        "naive-quantized",
    ):
        groups = found["config_groups"].values()
        said = {str((group.get("weights") or {}).get("block_structure")) for group in groups}
    numbers = [int(n) for n in re.findall(r"\d+", next(iter(said), ""))]
    if len(said) != 1 or len(numbers) not in (0, 2) or 0 in numbers:
        raise ConfigError(
            f"{folder}: its quantization_config is {found.get('quant_method')!r} {found.get('format', '')}; fp8 (FineGrainedFP8) and "
            "compressed-tensors (float-quantized, one block size) are read. Load others with transformers, dequantised."
        )
    return (numbers[0], numbers[1]) if numbers else None


def _files(folder: Path) -> dict[str, Any]:
    """By key the open file that holds it: those that the index names, where there is one."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"].values() if index.exists() else ()
    found: dict[str, Any] = {}
    for path in sorted({folder / name for name in named} or folder.glob("*.safetensors")):
        try:
            file: Any = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read ({error}). Download it again.") from error
        found |= dict.fromkeys(file.keys(), file)
    return found


def _sources(
    folder: Path, model: nn.Module, places: Mapping[str, Any], files: Mapping[str, Any]
) -> dict[str, Any]:
    """Of each parameter the key that holds it, or, where it holds all experts (transformers 5), for each the keys of its parts."""
    further = f"model.layers.{getattr(getattr(model, 'config', None), 'num_hidden_layers', None)}."  # predicts more tokens
    found: dict[str, Any] = {}
    stacked: dict[str, dict[str, dict[str, str]]] = {}
    renamed = renamed_by(model)
    for key in files:
        spellings = key, renamed(key)
        names = [name for k in spellings for name in (k, f"model.{k}", k.removeprefix("model."))]
        name = next((name for name in names if name in places), None)
        experts = [m for k in spellings if (m := _EXPERT.match(k.replace(".block_sparse_moe.", ".mlp.")))]
        held = [(m, f"{m[1]}.{part}") for m in experts for part in _HELD_BY.get(m[3], ("gate_up_proj", m[3]))]
        if name is not None:
            found[name] = key
        elif at := next(((m, whole) for m, whole in held if whole in places), None):
            expert, whole = at
            stacked.setdefault(whole, {}).setdefault(expert[2], {})[expert[3]] = key
        elif not _SCALE.search(key) and not key.startswith(further):
            raise ConfigError(f"{folder}: the model has no place for {key}. Make it from config.json there.")
    for name, parts in stacked.items():  # gate_proj before up_proj, w1 before w3
        found[name] = [[parts[i][part] for part in sorted(parts[i])] for i in sorted(parts, key=int)]
    filled = {id(getattr(module, leaf)) for module, leaf in map(places.__getitem__, found)}
    for name, (module, leaf) in places.items():
        if id(getattr(module, leaf)) not in filled:
            raise ConfigError(f"{folder}: no tensor there is for {name}. Make it from config.json there.")
    return {name: found[name] for name in places if name in found}


def _stacked(experts: list[list[str]], dtype: torch.dtype, weight: Callable[..., Tensor]) -> Tensor:
    """``[experts, out_features, in_features]``: an expert's parts one under the other. Where blocks end within a part, a scale a row."""
    codes = scales = torch.empty(0, dtype=dtype, device="cpu")
    block = None
    for i, keys in enumerate(experts):
        parts: list[Any] = [weight(key, dtype) for key in keys]
        mine = torch.cat([getattr(part, "codes", part) for part in parts])
        codes = codes if i else mine.new_empty(len(experts), *mine.shape)
        codes[i] = mine
        if isinstance(parts[0], FrozenFP8Weight):
            block = parts[0].block or (1, mine.shape[1])
            if any(len(part) % block[0] for part in parts[:-1]):
                block = (1, block[1])
            grid = torch.cat([row_scales(part.scale, part.block, len(part))[:: block[0]] for part in parts])
            scales = scales if i else grid.new_empty(len(experts), *grid.shape)
            scales[i] = grid
    if block is None:
        return codes
    return FrozenFP8Weight(codes, scales, block, scaling_of(scales, block, codes.shape[2]), dtype)


def _fill(module: nn.Module, leaf: str, values: Iterable[Tensor]) -> None:
    """Write ``values``, those of each expert where there are several, into a parameter or buffer; the object stays."""
    old: Tensor = getattr(module, leaf)
    if old.is_meta and isinstance(old, nn.Parameter):
        new = nn.Parameter(torch.empty_like(old, device="cpu"), requires_grad=old.requires_grad)
        torch.utils.swap_tensors(old, new)
    elif old.is_meta:
        module._buffers[leaf] = old = torch.empty_like(old, device="cpu")
    with torch.no_grad():
        for i, value in enumerate(values):
            (old[i] if value.dim() < old.dim() else old).copy_(value)
