"""What will happen when a YAML is started, found out without starting it: for ``foundry-fp8 doctor RUN.yaml``."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foundry_fp8.cli.clashes import clashes_of
from foundry_fp8.cli.hardware import PER_NODE, Hardware
from foundry_fp8.cli.hf_folder import FOLDER_MODEL
from foundry_fp8.cli.selftest.verdict import warnings_for
from foundry_fp8.cli.yaml_model import build_yaml_model, read_yaml
from foundry_fp8.config import ConfigError, first_line, format_bytes, nearest

if TYPE_CHECKING:
    from foundry_fp8.surgery.report import SurgeryReport

__all__ = ["Finding", "check_run"]

STATE_BYTES = 16
"""A trained parameter in float32: itself, its gradient, two moments of Adam."""
FROZEN_BYTES = 4
ROOM = 0.6
"""Of a GPU's memory for what is sharded; the rest is activations and what is gathered."""

Level = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that will happen."""

    topic: str
    level: Level
    text: str


def check_run(path: Path, hardware: Hardware) -> list[Finding]:
    """Everything that can be known before the start.

    Args:
        path: An LLM Foundry training YAML.
        hardware: What it will run on; this machine needs none of it.

    Raises:
        ConfigError: The YAML cannot be read.
    """
    config = read_yaml(path)
    found = [*_parts(config), *_clashes(config), *_ranks(config, hardware)]
    found += [Finding("selftest", "warning", text) for text in warnings_for(config)]
    try:
        model = build_yaml_model(config, "meta")
    except ConfigError as error:
        found.append(Finding("model", "error", str(error).removeprefix("model: ")))
        return found
    found += _attention_kernel(config)
    found += _memory(config, model, hardware)
    found += _unit_scaling(config, model)
    found += _targets(config, model)
    found += _conversion(config, model, hardware)
    return found


def _parts(config: Mapping[str, Any]) -> list[Finding]:
    """Every algorithm, callback and logger, built as LLM Foundry builds it."""
    from llmfoundry.utils.builders import build_algorithm, build_callback, build_logger

    builders: tuple[tuple[str, Callable[[str, Any], Any]], ...] = (
        ("algorithms", build_algorithm),
        ("callbacks", lambda name, kwargs: build_callback(name, kwargs, train_config=dict(config))),
        ("loggers", build_logger),
    )
    found = []
    for section, build in builders:
        built = []
        for name, kwargs in (config.get(section) or {}).items():
            if section == "loggers" and name in ("wandb", "mlflow", "tensorboard", "neptune", "cometml"):
                missing = importlib.util.find_spec(name) is None
                if missing:
                    found.append(Finding(section, "error", f"{name} is not installed: pip install {name}"))
                else:
                    built.append(name)
                continue  # building one would start it
            try:
                build(name, dict(kwargs or {}))
                built.append(name)
            except Exception as error:
                found.append(Finding(section, "error", f"{name}: {first_line(error)}"))
        if built:
            found.append(Finding(section, "ok", ", ".join(built)))
    return found


def _clashes(config: Mapping[str, Any]) -> list[Finding]:
    from llmfoundry.utils.config_utils import TRAIN_CONFIG_KEYS

    unknown = [
        Finding("clash", "error", f"LLM Foundry has no key {key!r}.{nearest(key, TRAIN_CONFIG_KEYS)} Your own values go under variables:")
        for key in sorted(set(config) - TRAIN_CONFIG_KEYS)
    ]  # fmt: skip
    return unknown + [Finding("clash", "error" if c.error else "warning", c.text) for c in clashes_of(config)]


def _ranks(config: Mapping[str, Any], hardware: Hardware) -> list[Finding]:
    devices, found = hardware.devices, []
    total, micro = config.get("global_train_batch_size"), config.get("device_train_microbatch_size")
    if isinstance(total, int):
        if total % devices:
            found.append(
                Finding(
                    "ranks",
                    "error",
                    f"global_train_batch_size: {total} is not a multiple of {devices} devices; the nearest that is: "
                    f"{max(1, round(total / devices)) * devices}",
                )
            )
        elif isinstance(micro, int) and total // devices < micro:
            found.append(
                Finding("ranks", "warning", f"{total // devices} sequences a device and step, less than device_train_microbatch_size: {micro}")
            )  # fmt: skip
        else:
            each = total // devices
            steps = f", in {each // micro} microbatches of {micro}" if isinstance(micro, int) else ""
            found.append(
                Finding(
                    "ranks",
                    "ok",
                    f"{devices} devices on {hardware.nodes} nodes, {each} sequences each{steps}",
                )
            )
    algorithms = config.get("algorithms") or {}
    if devices > 1 and "hybrid_sharding" in algorithms:
        if not config.get("fsdp_config"):
            found.append(Finding("ranks", "error", "algorithms.hybrid_sharding needs an fsdp_config"))
        shard = _shard(config, hardware)
        if devices % shard:
            found.append(
                Finding(
                    "ranks", "error", f"hybrid_sharding: shards of {shard} do not divide {devices} devices"
                )
            )
    if devices == 1 and {"hybrid_sharding", "compressed_communication"} & set(algorithms):
        found.append(
            Finding("ranks", "warning", "one device: hybrid_sharding and compressed_communication do nothing")
        )
    return found


def _shard(config: Mapping[str, Any], hardware: Hardware) -> int:
    """Ranks that share one copy of the model."""
    if not config.get("fsdp_config"):
        return 1
    wanted = ((config.get("algorithms") or {}).get("hybrid_sharding") or {}).get("shard")
    if isinstance(wanted, int):
        return wanted
    return min(PER_NODE, hardware.devices) if wanted == "node" else hardware.devices


def _memory(config: Mapping[str, Any], model: Any, hardware: Hardware) -> list[Finding]:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    shard = _shard(config, hardware)
    each = (STATE_BYTES * trained + FROZEN_BYTES * frozen) / shard
    total = trained + frozen
    size = f"{total / 1e9:.2f} B parameters" if total >= 1e8 else f"{total / 1e6:.2f} M parameters"
    if frozen:
        size += f", {trained / 1e6:.0f} M of them trained"
    text = (
        f"{size}: {format_bytes(int(each))} a GPU of {format_bytes(int(hardware.gpu.memory_bytes))} for parameters, gradients and "
        f"Adam's moments in float32 over {shard} rank{'s' if shard > 1 else ''}; activations: foundry-fp8 plan memory"
    )
    fits = each <= ROOM * hardware.gpu.memory_bytes
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
        found.append(
            Finding(
                "attention",
                "warning",
                "packing_ratio without attn_uses_sequence_id: tokens attend other documents",
            )
        )
    if flash and importlib.util.find_spec("flash_attn") is None:
        found.append(
            Finding("attention", "warning", f"flash, {masks}; flash-attn is not installed on this machine")
        )
    else:
        found.append(
            Finding("attention", "ok", f"{'flash' if flash else attention.get('attn_impl', 'sdpa')}, {masks}")
        )
    return found


def _unit_scaling(config: Mapping[str, Any], model: Any) -> list[Finding]:
    """What a µnit-scaled run lacks: the norm at its end, and weight decay."""
    from foundry_fp8.layers.unit_linear import UnitLinear
    from foundry_fp8.models.mus.structure import unit_scaled

    if not any(isinstance(module, UnitLinear) for module in model.modules()):
        return []
    try:
        described = unit_scaled(model, "algorithms.unit_scaling")
    except ConfigError as error:
        return [Finding("unit scaling", "error", str(error))]
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


def _targets(config: Mapping[str, Any], model: Any) -> list[Finding]:
    from foundry_fp8.activations.checkpointing.targets import select

    options = (config.get("algorithms") or {}).get("activation_checkpointing")
    if options is None or options.get("budget") is not None:
        return []
    key = "algorithms.activation_checkpointing.targets"
    try:
        chosen = select(model, options.get("targets"), options.get("policy", "full"), key)
    except ConfigError as error:
        return [Finding("checkpointing", "error", str(error))]
    return [
        Finding(
            "checkpointing", "ok" if chosen else "error", f"{len(chosen)} modules are run again in backward"
        )
    ]


def _conversion(config: Mapping[str, Any], model: Any, hardware: Hardware) -> list[Finding]:
    from foundry_fp8.callbacks.run_log import RunLog
    from foundry_fp8.surgery.announcement import announcement, notices
    from foundry_fp8.surgery.apply import apply_fp8

    options = dict((config.get("algorithms") or {}).get("fp8") or {})
    if "fp8" not in (config.get("algorithms") or {}) or options.get("enabled") is False:
        return []
    recipe = options.get("recipe", "auto")
    chosen = hardware.gpu.recipe if recipe == "auto" else recipe
    if hardware.gpu.recipe is None and options.get("backend") != "emulated":
        return [
            Finding(
                "conversion",
                "error",
                f"{hardware.name} does not multiply FP8; backend: emulated shows its losses alone",
            )
        ]
    listed = [rule.get("recipe") for rule in chosen] if isinstance(chosen, list) else [chosen]
    named = [one.get("name") if isinstance(one, Mapping) else one for one in listed]
    found = []
    if "mxfp8" in named and hardware.gpu.recipe != "mxfp8" and options.get("backend") != "emulated":
        found.append(
            Finding(
                "conversion",
                "error",
                f"mxfp8 needs Blackwell; {hardware.name} runs current, delayed and block",
            )
        )
    # What is converted is a matter of the model; who multiplies, of the machine: there it is asked again.
    here = {**options, "recipe": chosen, "backend": "emulated"} | dict.fromkeys(
        ("cache_weights", "fuse"), False
    )
    try:
        report = apply_fp8(model, device="cpu", **here)
    except (ConfigError, RuntimeError) as error:
        return [*found, Finding("conversion", "error", str(error))]
    asked = options.get("backend", "auto")
    backend = "transformer_engine if installed there, else native" if asked == "auto" else asked
    report = dataclasses.replace(report, backend=backend)
    callbacks = [_CLASSES.get(name, name) for name in config.get("callbacks") or {}]
    precision = str(config.get("precision", "amp_bf16"))
    log = RunLog((config.get("loggers") or {}).get("run_log", {}).get("path"))
    of_trainer = config["model"]["name"] == FOLDER_MODEL  # which writes no run log
    where = None if of_trainer else str(log.path_of(str(config.get("run_name") or "{run_name}")))
    notes = notices(report, precision=precision, device="cuda", callbacks=callbacks)
    head, *lines = announcement(
        report, around=precision.removeprefix("amp_"), log=where, notes=notes
    ).splitlines()
    level: Level = "warning" if any(line.strip().startswith("Warning") for line in lines) else "ok"
    found.append(Finding("conversion", level, "\n".join([head, *lines])))
    if recipe == "auto" and asked != "emulated":
        found += _left_by_auto(report, hardware)
    grouped = [row.name for row in report.rows if row.action == "converted" and len(row.shape) == 3]
    only_where_faster = recipe == "auto" or "measured" in named
    if grouped and asked != "emulated" and (asked != "native" or only_where_faster):
        found.append(
            Finding(
                "conversion",
                "warning",
                f"{grouped[0]} holds experts in one parameter ({len(grouped)} do): they run in FP8 with backend: native and a named recipe",
            )
        )
    found += [
        Finding(
            "attention",
            "ok" if row.action == "converted" else "warning",
            f"{row.name}: {row.action}: {row.reason}",
        )
        for row in report.attention[:1]
        + tuple(r for r in report.attention[1:] if r.reason != report.attention[0].reason)
    ]
    return found


def _left_by_auto(report: SurgeryReport, hardware: Hardware) -> list[Finding]:
    """What a GPU's backends leave in high precision under ``recipe: auto``, because FP8 makes it no faster there."""
    from foundry_fp8.backends.size_rule import size_reason

    linears = [row for row in report.rows if row.action == "converted" and len(row.shape) == 2]
    reasons = {row.name: size_reason(report.recipe, row.shape[1], row.shape[0]) for row in linears}
    left = {name: reason for name, reason in reasons.items() if reason is not None}
    if not left:
        return []
    name, reason = next(iter(left.items()))
    said = f"on {hardware.name} auto leaves {len(left)} of these {len(linears)} linears in high precision; {name}: {reason}"
    if len(left) < len(linears):
        return [Finding("conversion", "warning", said)]
    return [Finding("conversion", "error", f"{said}. Nothing is left to convert, which ends the run")]


_CLASSES = {"divergence_guard": "DivergenceGuard", "speed_monitor": "SpeedMonitor"}
