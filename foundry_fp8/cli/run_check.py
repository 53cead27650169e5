"""What will happen when a YAML is started, found out without starting it: for ``foundry-fp8 doctor RUN.yaml``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foundry_fp8.cli.check_model import Finding, Level, check_attached, check_conversion, check_targets
from foundry_fp8.cli.cluster import cluster_of
from foundry_fp8.cli.hardware import PER_NODE, Hardware
from foundry_fp8.cli.hf_folder import FOLDER_MODEL
from foundry_fp8.cli.selftest.verdict import warnings_for
from foundry_fp8.cli.yaml_model import build_yaml_model, build_yaml_optimizer, optimizer_bytes_of, read_yaml
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.config import ConfigError, first_line, format_bytes, nearest
from foundry_fp8.distributed.compression.routing import path_of
from foundry_fp8.distributed.sharding import degrees
from foundry_fp8.run.clashes import clashes_of
from foundry_fp8.run.settings import Run

__all__ = ["Finding", "check_run"]

ROOM = 0.6
"""Of a GPU's memory for what is sharded; the rest is activations and what is gathered."""


def check_run(path: Path, hardware: Hardware, *, trust: bool = False) -> list[Finding]:
    """Everything that can be known before the start.

    This machine needs none of ``hardware``.

    Raises:
        ConfigError: The YAML cannot be read.
    """
    config = read_yaml(path, trust=trust)
    found = [Finding("hardware", "ok", f"{hardware.devices} x {hardware.name}; --hardware names another")]
    if config["model"]["name"] == FOLDER_MODEL:
        built: dict[str, dict[str, Any]] = {"algorithms": config["algorithms"], "callbacks": {}}
    else:
        parts, built = _parts(config)
        found += parts + _unknown_keys(config)
    try:
        run = run_of({**config, "algorithms": built["algorithms"]}, hardware.devices)
    except ConfigError as error:
        return [*found, Finding("clash", "error", str(error))]
    whole = not (config.get("algorithms") or {}).keys() - built["algorithms"]
    warned = [Finding("selftest", "warning", text) for text in warnings_for(run)]
    try:
        model = build_yaml_model(config, "meta")
    except ConfigError as error:
        text = str(error).removeprefix("model: ")
        return [*found, *_clashes(run, whole=whole), *warned, Finding("model", "error", text)]
    run = dataclasses.replace(run, train_metrics=bool(model.get_metrics(is_train=True)))
    run, ranks = _ranks(config, run, model, hardware)
    kernel, later = _attention_kernel(config), [*_unit_scaling(config, run, model)]
    selected, targets = check_targets(run, model)
    run, conversion = check_conversion(config, run, model, hardware)
    memory = _memory(config, run, model, hardware)
    later += [*targets, *conversion, *check_attached(run, model, selected, built["callbacks"])]
    return [*found, *_clashes(run, whole=whole), *ranks, *warned, *kernel, *memory, *later]


def _parts(config: Mapping[str, Any]) -> tuple[list[Finding], dict[str, dict[str, Any]]]:
    """Every algorithm, callback and logger, built as LLM Foundry builds it; of each section the options of what can be built."""
    from llmfoundry import registry
    from llmfoundry.utils.builders import build_algorithm, build_callback, build_logger

    builders: tuple[tuple[str, Callable[[str, Any], Any]], ...] = (
        ("algorithms", build_algorithm),
        ("callbacks", lambda name, kwargs: build_callback(name, kwargs, train_config=dict(config))),
        ("loggers", build_logger),
    )
    found: list[Finding] = []
    options: dict[str, dict[str, Any]] = {}
    for section, build in builders:
        built = options[section] = {}
        names = {name for kind in (section, f"{section}_with_config") if hasattr(registry, kind) for name in getattr(registry, kind).get_all()}  # fmt: skip
        for name, kwargs in (config.get(section) or {}).items():
            if section == "loggers" and name in ("wandb", "mlflow", "tensorboard", "neptune", "cometml"):
                if importlib.util.find_spec(name) is None:
                    found.append(Finding(section, "error", f"{name} is not installed: pip install {name}"))
                else:
                    built[name] = kwargs
                continue  # building one would start it
            if name not in names:
                said = f"{name!r} is none of LLM Foundry's {section}, nor of this package's."
                found.append(Finding(section, "error", f"{said}{nearest(name, names)}"))
                continue
            try:
                build(name, dict(kwargs or {}))
                built[name] = kwargs
            except Exception as error:
                found.append(Finding(section, "error", f"{name}: {first_line(error)}"))
        if built:
            found.append(Finding(section, "ok", ", ".join(built)))
    return found, options


def _unknown_keys(config: Mapping[str, Any]) -> list[Finding]:
    from llmfoundry.utils.config_utils import TRAIN_CONFIG_KEYS

    return [
        Finding("clash", "error", f"LLM Foundry has no key {key!r}.{nearest(key, TRAIN_CONFIG_KEYS)} Your own values go under variables:")
        for key in sorted(set(config) - TRAIN_CONFIG_KEYS)
    ]  # fmt: skip


def _clashes(run: Run, *, whole: bool) -> list[Finding]:
    """``whole``: nothing of ours could not be built; what is left then says nothing of what is missing."""
    return [
        Finding("clash", "error" if c.error else "warning", c.text.format(run=run))
        for c in clashes_of(run)
        if c.error or whole
    ]


def _ranks(config: Mapping[str, Any], run: Run, model: Any, hardware: Hardware) -> tuple[Run, list[Finding]]:
    """The steps of a rank, and the run with the number of its copies."""
    devices, found = hardware.devices, []
    total, micro = config.get("global_train_batch_size"), config.get("device_train_microbatch_size")
    if isinstance(total, int):
        each = total // devices
        level: Level = "ok"
        if total % devices:
            nearest_total = max(1, round(total / devices)) * devices
            level, text = "error", f"global_train_batch_size: {total} is not a multiple of {devices} devices; the nearest that is: {nearest_total}"  # fmt: skip
        elif isinstance(micro, int) and each < micro:
            level, text = "warning", f"{each} sequences a device and step, less than device_train_microbatch_size: {micro}"  # fmt: skip
        else:
            steps = f", in {each // micro} microbatches of {micro}" if isinstance(micro, int) else ""
            text = f"{devices} devices on {hardware.nodes} nodes, {each} sequences each{steps}"
        found.append(Finding("ranks", level, text))
    where = {"world": devices, "per_node": min(PER_NODE, devices)}
    try:
        copies = degrees(
            run.fsdp, run.hybrid_sharding, model, device_bytes=hardware.gpu.memory_bytes, **where
        )
        run = dataclasses.replace(run, replicate=copies[0], shard=copies[1])
        if (sends := run.compressed_communication) is not None and devices > 1:
            for ranks in (range(run.shard), range(0, devices, run.shard)):  # raises as training does
                path_of(ranks, scope=sends.scope, **where)
    except ConfigError as error:
        found.append(Finding("ranks", "error", str(error)))
    return run, found


def _memory(config: Mapping[str, Any], run: Run, model: Any, hardware: Hardware) -> list[Finding]:
    """What a rank holds all the time, and whether it leaves room for the rest."""
    from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
    from foundry_fp8.planning.memory.cluster import elements, static_bytes
    from foundry_fp8.planning.memory.measure import held_bytes

    if run.replicate * run.shard != run.ranks:
        return []  # said already
    memory = hardware.gpu.memory_bytes
    try:
        cluster = cluster_of(run, model, memory)
        state = optimizer_bytes_of(model, config)
    except ConfigError as error:
        return [Finding("memory", "warning" if run.tensor_parallel else "error", str(error))]
    trained, total = elements(model, trained=True), sum(p.numel() for p in model.parameters())
    buffers = sum(
        b.numel() * (min(cluster.gathered, b.element_size()) if b.is_floating_point() else b.element_size())
        for b in model.buffers()
    )
    buffers += sum(held_bytes(p) for p in model.parameters() if isinstance(p, FrozenFP8Weight))
    each = static_bytes(model, cluster, buffers=buffers, optimizer_bytes=state, accumulates=True)
    size = f"{total / 1e9:.2f} B parameters" if total >= 1e8 else f"{total / 1e6:.2f} M parameters"
    if total > trained:
        size += f", {trained / 1e6:.0f} M of them trained"
    text = (
        f"{size}: {format_bytes(each)} a GPU of {format_bytes(int(memory))} for parameters, gradients and optimizer states over "
        f"{run.shard} rank{'s' if run.shard > 1 else ''}; activations: foundry-fp8 plan memory"
    )
    fits = each <= ROOM * memory
    more = "" if fits else ". That leaves too little: shard over more ranks"
    return [Finding("memory", "ok" if fits else "error", text + more)]


def _attention_kernel(config: Mapping[str, Any]) -> list[Finding]:
    """Which kernel attention's mask goes to, and whether it is installed."""
    model = config["model"]
    attention = model.get("attn_config") or {}
    flash = model.get("use_flash_attention_2") or (
        model["name"] == "mpt_causal_lm" and attention.get("attn_impl", "flash") == "flash"
    )
    packed = bool(attention.get("attn_uses_sequence_id"))
    alibi = bool(attention.get("alibi"))
    masks = "causal" + (", documents apart" if packed else "") + (", ALiBi" if alibi else "")
    packing = ((config.get("train_loader") or {}).get("dataset") or {}).get("packing_ratio")
    found = []
    if packing and model["name"] == "mpt_causal_lm" and not packed:
        text = "packing_ratio without attn_uses_sequence_id: tokens attend other documents"
        found.append(Finding("attention", "warning", text))
    level: Level = "ok"
    text = f"{'flash' if flash else attention.get('attn_impl', 'sdpa')}, {masks}"
    if flash and importlib.util.find_spec("flash_attn") is None:
        level, text = "warning", f"{text}; flash-attn is not installed on this machine"
    return [*found, Finding("attention", level, text)]


def _unit_scaling(config: Mapping[str, Any], run: Run, model: Any) -> list[Finding]:
    """What a µnit-scaled run lacks: the norm at its end, and weight decay."""
    from foundry_fp8.layers.unit_linear import UnitLinear
    from foundry_fp8.models.mus.apply import apply_unit_scaling
    from foundry_fp8.models.mus.structure import unit_scaled

    if run.unit_scaling is None and not any(isinstance(module, UnitLinear) for module in model.modules()):
        return []
    built = None
    with contextlib.suppress(ConfigError):  # which the line on memory says
        built = build_yaml_optimizer(model, config)
    try:
        described = unit_scaled(model)
        if run.unit_scaling is not None and built is not None:
            apply_unit_scaling(model, built, base_width=run.unit_scaling.base_width)
    except ConfigError as error:
        return [Finding("unit scaling", "warning" if run.unit_scaling is None else "error", str(error))]
    found = []
    if not described.final_norm:
        option = "norm_type: mus_norm" if config["model"]["name"] == "mpt_causal_lm" else "final_norm: true"
        found.append(
            Finding("unit scaling", "warning", "no norm after the last block: the residual stream grows, since the head needs larger "
                    f"logits than 1/d gives, and FP8's gradients are off; set model.{option}, unless the run resumes a checkpoint without it")
        )  # fmt: skip
    optimizer = config.get("optimizer") or {}
    name = str(optimizer.get("name"))
    default = 1e-5 if name == "decoupled_adamw" else 0.0
    if not name.startswith("decoupled_") or not optimizer.get("weight_decay", default):
        found.append(
            Finding("unit scaling", "warning", "no decoupled weight decay: weights grow, and unit variance goes; the paper sweeps "
                    "it beside the learning rate. Set optimizer.weight_decay of decoupled_lionw or decoupled_adamw")
        )  # fmt: skip
    return found
