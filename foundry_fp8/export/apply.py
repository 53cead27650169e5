"""``export_fp8``: a converted model as a folder that servers of FP8 checkpoints read."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.compat.checkpoint_form import checkpoint_form
from foundry_fp8.compat.wrapper_tensor import packed_state
from foundry_fp8.config import ConfigError, check_arguments
from foundry_fp8.config.files import TEMPORARY, move_into, refuse_files
from foundry_fp8.export.layout import (
    FUSED,
    ServedLinear,
    check_experts,
    check_recipe,
    fused_amaxes,
    recipe_run_by,
    stored,
)
from foundry_fp8.export.quantization_config import check_library, finegrained_config, quantization_config
from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from foundry_fp8.layers.unit_linear import FP8UnitLinear
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.numerics.recipes import Recipe, most_common_recipes

__all__ = ["ExportReport", "check_target", "export_fp8"]

CONFIG_NAME = "config.json"
NO_READER = "\nno current release of vLLM or transformers reads {} as it was trained here: its own code has to be registered there"
"""MPT too: vLLM left it out in 0.29, and transformers' MptConfig refuses grouped queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What was written.

    Attributes:
        layers: The quantised linears by name, without their weights; ``moved`` is how far from training's, as a share of the norm.
        recipe: That they were trained with.
        dtype: Of everything else.
        share: Of the parameters, the part that is in them.
        bytes: On disk, of all tensors.
        reader: A warning, where no server's release has the architecture.
    """

    layers: dict[str, dict[str, float | None]]
    recipe: Recipe
    dtype: torch.dtype
    share: float
    bytes: int
    reader: str = ""

    def summary(self) -> str:
        """A few lines, the error among them."""
        if self.recipe.element_bits == 4:
            error = "weights as training multiplied them; inputs stay in high precision, which training had in nvfp4"
        elif self.recipe.scales_known and not self.recipe.uses_history:
            error = "the numbers that training multiplied, bit for bit"
        elif self.recipe.by_direction and not self.recipe.by_row:
            error = "weights and the blocks of inputs as training multiplied them"
        elif not self.recipe.uses_history:
            inputs = "vLLM gives each token of an input a scale"
            same = self.recipe.by_row and not self.recipe.powers_of_two
            error = f"weights as training multiplied them; {inputs}, {'as' if same else 'otherwise than'} training did"
        else:
            error = "the numbers that training multiplied; inputs by the scales of the last step, up to a rounding of the scale"
        worst, far = (
            max(self.layers, key=lambda name: self.layers[name][by] or 0.0) for by in ("rounding", "moved")
        )
        if self.layers[far]["moved"]:
            error += (
                "\nq, k and v, and gate and up, have one global scale, as vLLM takes it: their blocks' scales were rounded once more, by at "
                f"most {self.layers[far]['moved']:.2%} of a weight's norm ({far})"
            )
        form = "nvfp4 (E2M1)" if self.recipe.element_bits == 4 else "float8_e4m3fn"
        return (
            f"{len(self.layers)} linears ({self.share:.1%} of the parameters) in {form}, the rest in "
            f"{str(self.dtype).removeprefix('torch.')}; {self.bytes / 2**20:,.1f} MiB\n"
            f"{self.recipe.name}: {error}\n"
            f"weights are at most {self.layers[worst]['rounding']:.2%} of their norm from those in high precision ({worst})"
            f"{self.reader}"
        )


def export_fp8(
    model: nn.Module,
    folder: str | Path,
    *,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    layout: Literal["compressed-tensors", "fp8"] = "compressed-tensors",
    tokenizer: Any = None,
    overwrite: bool = False,
) -> ExportReport:
    """Write a converted Hugging Face model in an FP8 layout that vLLM and transformers read.

    The folder gets config.json with a ``quantization_config``, safetensors with ``weight`` (float8_e4m3fn), ``weight_scale`` and, where
    it is static, ``input_scale`` of each converted linear (of nvfp4 ``weight_packed``, ``weight_scale``, ``weight_global_scale``), and
    everything else in ``dtype``. Weights that keep published codes are written as they were read. The model stays as it is.

    Args:
        model: Converted by ``apply_fp8``, or read by ``load_fp8``; a ``PreTrainedModel``, or what holds one (LLM Foundry's models). Whole:
            not sharded, without adapters.
        folder: Made if it is not there. It appears when all of it is written.
        dtype: What the forward computed in during training (``amp_bf16``: bfloat16), and what is served beside FP8.
        layout: ``compressed-tensors`` (all but mxfp8), or ``fp8``: FineGrainedFP8's ``weight_scale_inv`` (block, mxfp8).
        tokenizer: Saved beside it.
        overwrite: Replace the model that ``folder`` holds; its other files stay. Otherwise a folder with files is an error.

    Raises:
        ConfigError: Not converted, a recipe that the layout has no scales for, adapters, an architecture whose multipliers are not known, parts of a
            projection that servers fuse in FP8 and others not, a folder that holds files.
        RuntimeError: A sharded model, or the package compressed-tensors is missing.

    Example:
        >>> report = export_fp8(model, "served")
        >>> print(report.summary())
    """
    check_arguments(export_fp8, {"dtype": dtype, "layout": layout}, "export")
    check_target(folder, overwrite=overwrite)
    inner = _pretrained(model)
    state: dict[str, Any] = _whole_state(inner)
    owners = {clean_name(n): m for n, m in inner.named_modules(remove_duplicate=False)}
    layers, rest, recipe = _what_ran(state, owners)
    check_recipe(recipe, layout)
    for key, layer in layers.items():
        check_experts(inner, key, state[key], layer, recipe)
    quantised, others_of = (_linear_names(inner, state, keys) for keys in (layers, rest))
    _check_fused(quantised, others_of)
    config = _serving_config(inner, layers.values())
    published = {state[key].scale.dtype for key in layers if isinstance(state[key], FrozenFP8Weight)}
    e8m0 = torch.float8_e8m0fnu in {recipe.scaling("w", 1).scale_dtype, *published}
    if layout == "fp8":
        config.quantization_config = finegrained_config(others_of, recipe, e8m0)
    else:
        config.quantization_config = quantization_config(quantised, others_of, recipe)
    hp = getattr(torch, dtype)
    served: dict[str, ServedLinear] = {}
    tensors: dict[str, Tensor] = {}
    amaxes = fused_amaxes(owners)
    # A router's bias, which servers read in float32.
    buffers = {clean_name(name) for name, _ in inner.named_buffers()}
    others: dict[int, Tensor] = {}  # by address, so that what is tied stays so
    for key, tensor in state.items():
        if key in layers:
            amax = amaxes.get(key.removesuffix(".weight"))
            for name, linear in stored(inner, key, layers[key], tensor, recipe, hp, "cpu", amax):
                scale = linear.weight_scale.to(torch.float8_e8m0fnu) if e8m0 else linear.weight_scale
                linear = dataclasses.replace(linear, weight_scale=scale)
                name = name.removesuffix("weight")
                served[name[:-1]] = linear
                tensors |= {name + part: found for part, found in linear.tensors(layout).items()}
        else:
            as_is = not tensor.is_floating_point() or key in buffers
            kept = tensor.to("cpu", tensor.dtype if as_is else hp)
            kept = others.setdefault(tensor.data_ptr(), kept) if tensor.numel() else kept
            parts = checkpoint_form(inner, {key: kept}).items()
            tensors |= {name: part if part.shape == kept.shape else part.clone() for name, part in parts}
    for key in layers:
        if state[key].data_ptr() in others:
            raise ConfigError(
                f"export: {key.removesuffix('.weight')} shares its weight with a layer in high precision (tied embeddings), and one tensor cannot be both. "
                "Train with tie_word_embeddings: false, or leave it out of FP8."
            )
    config.torch_dtype, config.use_cache = hp, True  # training keeps no cache
    _write(inner, config, tensors, Path(folder), tokenizer)
    elements = sum(layer.weight.numel() for layer in served.values())
    plain = sum(t.numel() for name, t in tensors.items() if name.rpartition(".")[0] not in served)
    return ExportReport(
        layers={
            name: {
                "weight_scale": float(layer.weight_scale.float().max()),
                "input_scale": None if layer.input_scale is None else float(layer.input_scale),
                "rounding": layer.rounding,
                "moved": layer.moved,
            }
            for name, layer in served.items()
        },
        recipe=recipe,
        dtype=hp,
        share=elements / (elements + plain),
        reader=NO_READER.format(config.model_type) * (not type(inner).__module__.startswith("transformers.")),
        bytes=sum(t.numel() * t.element_size() for t in tensors.values()),
    )


def _what_ran(state: dict[str, Any], owners: dict[str, Any]) -> tuple[dict[str, Any], list[str], Recipe]:
    """The layers whose weights the state holds, by its keys; the other keys, tables of embeddings left out; and the recipe of those layers."""
    # What a layer runs: one that the guard took out of FP8 is served in high precision.
    layers: dict[str, Any] = {}
    rest, recipes = [], []
    for key, tensor in state.items():
        layer = owners.get(key, owners.get(key.removesuffix(".weight")))
        ran = recipe_run_by(layer, tensor)
        if ran is not None or isinstance(tensor, FrozenFP8Weight):
            layers[key] = layer
            recipes += [] if ran is None else [ran]
        elif not isinstance(layer, nn.Embedding):
            rest.append(key)
        if isinstance(tensor, FrozenFP8Weight) and ran is None and tensor.dim() == 2:
            raise ConfigError(
                f"export: no recipe multiplies by the published codes of {key} with scales by {tensor.scaling}. Export the folder that "
                "they are from, or train them in full (load_fp8)."
            )
    if not recipes:
        raise ConfigError(
            "export: no layer of the model is converted to FP8, so there is nothing that was trained in it. Convert it as it was "
            "trained (apply_fp8), or serve the checkpoint in high precision."
        )
    recipe, *more = most_common_recipes(recipes)
    if more:
        raise ConfigError(
            f"export: the layers run {1 + len(more)} recipes ({', '.join(r.name for r in (recipe, *more))}), and the layout has one "
            "for all of them. Serve the checkpoint in high precision; it is that of the BF16 model."
        )
    return layers, rest, recipe


def _linear_names(model: Any, state: dict[str, Any], keys: Iterable[str]) -> list[str]:
    """A checkpoint's names of the matrices among ``keys``."""
    of_meta = {key: torch.empty(state[key].shape, dtype=state[key].dtype, device="meta") for key in keys}
    return [
        name.removesuffix(".weight")
        for name, t in checkpoint_form(model, of_meta).items()
        if name.endswith(".weight") and t.dim() == 2
    ]


def _pretrained(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None:
        raise ConfigError(
            f"export: {type(model).__name__} is and holds no Hugging Face model, whose config.json says to a server how to build it."
        )
    adapters = [name for name, _ in found.named_modules() if "lora_" in name]
    if adapters:
        raise ConfigError(
            f"export: the model has adapters ({adapters[0]}, ...). Merge them first (merge_and_unload)."
        )
    return found


def _serving_config(model: Any, layers: Iterable[Any]) -> Any:
    """A copy of the model's configuration, which says that the weights' scales hold the multipliers."""
    config = copy.deepcopy(model.config)
    if any(isinstance(layer, FP8UnitLinear) for layer in layers):
        if config.model_type == "mus":
            config.hidden_multiplier = 1.0
        elif config.model_type == "mpt" and isinstance(getattr(config, "fc_type", None), dict):
            config.fc_type = {**config.fc_type, "output_multiplier": 1.0}
        else:
            raise ConfigError(
                f"export: {type(model).__name__} has layers with an output multiplier, which becomes part of their weights' scales, "
                "and its configuration has no place to say so. mus_causal_lm and MPT have one."
            )
    return config


def _whole_state(model: Any) -> dict[str, Tensor]:
    """What ``state_dict()`` has, with weights that are kept in FP8 as they are."""
    state = {clean_name(name): tensor for name, tensor in packed_state(model).items()}
    for name, tensor in state.items():
        if is_dtensor(tensor) or tensor.is_meta or name.endswith("_flat_param"):
            raise RuntimeError(
                f"export: {name} is not here as a whole: the model is sharded, or on the meta device. Export a whole checkpoint "
                "(foundry-fp8 export), or load the gathered state (get_model_state_dict, full_state_dict=True) into a converted copy."
            )
    return {name: tensor.detach() for name, tensor in state.items()}


def _check_fused(layers: Collection[str], others: Collection[str]) -> None:
    """Raise where a server would refuse the model, before minutes of work."""
    for name in others:
        parent, _, leaf = name.rpartition(".")
        group: tuple[str, ...] = next((group for group in FUSED if leaf in group), ())
        beside = [f"{parent}.{part}" for part in group if f"{parent}.{part}" in layers]
        if ".experts." in name:  # all of them in one kernel
            held, group = name[: name.index(".experts.") + 9], ("experts.*",)
            beside = [layer for layer in layers if layer.startswith(held)][:1]
        if beside:
            globs = ", ".join(f'"*.{part}"' for part in group)
            raise ConfigError(
                f"export: {name} ran in high precision and {', '.join(beside)} in FP8. vLLM runs them as one linear and refuses a model "
                f"whose parts disagree. Train with all of them out of FP8 (algorithms.fp8.exclude: [{globs}]) or none, or serve the "
                "checkpoint in high precision."
            )


def check_target(folder: str | Path, *, overwrite: bool) -> None:
    """Raise where an export could not be written, before minutes of work.

    Raises:
        ConfigError: ``folder`` holds files, and may not be overwritten.
        RuntimeError: The package compressed-tensors is missing.
    """
    check_library()
    if not overwrite:
        way_out = "Choose another folder, or --force (overwrite=True), which replaces the model in it and keeps the rest."
        refuse_files(Path(folder), "export:", way_out)


def _write(model: Any, config: Any, tensors: dict[str, Tensor], folder: Path, tokenizer: Any) -> None:
    """Into a folder beside it, which takes its place at the end, or whose files do: config.json last, without which it is no model."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder.parent) as beside:
        made = Path(beside) / folder.name
        made.mkdir()
        _write_into(made, model, config, tensors, tokenizer)
        move_into(folder, made, CONFIG_NAME, ("*.safetensors", "*.index.json"), "export")


def _write_into(folder: Path, model: Any, config: Any, tensors: dict[str, Tensor], tokenizer: Any) -> None:
    from huggingface_hub import save_torch_state_dict

    tied = list(getattr(model, "_tied_weights_keys", None) or [])
    try:
        save_torch_state_dict(
            tensors,
            folder,
            filename_pattern="model{suffix}.safetensors",
            metadata={"format": "pt"},
            shared_tensors_to_discard=tied,
        )
    except KeyError as error:
        raise RuntimeError(
            f"export: this huggingface_hub writes no {error}. Install a newer one (2.4 does)."
        ) from error
    config.architectures = [type(model).__name__]
    config._attn_implementation_autoset = (
        False  # as save_pretrained: what this process chose is not the reader's
    )
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
