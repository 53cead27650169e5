"""What becomes of a YAML's model: converted and wrapped as a trainer does it, on ``meta``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from foundry_fp8.activations.checkpointing.targets import Selection, select
from foundry_fp8.backends import AUTO_ORDER, load_backend
from foundry_fp8.cli.hardware import Hardware
from foundry_fp8.cli.hf_folder import FOLDER_MODEL
from foundry_fp8.cli.predicted import PlannedRun, gains, needs_newer, on_paper, prediction
from foundry_fp8.config import ConfigError
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.run.settings import Run

if TYPE_CHECKING:
    from foundry_fp8.surgery.fp8_config import FP8Config
    from foundry_fp8.surgery.report import SurgeryReport

__all__ = ["Finding", "Level", "check_attached", "check_conversion", "check_targets"]

Level = Literal["ok", "warning", "error"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that will happen."""

    topic: str
    level: Level
    text: str


def check_targets(run: Run, model: Any) -> tuple[list[Selection], list[Finding]]:
    """What is checkpointed, and what to say of it."""
    from foundry_fp8.activations.checkpointing.apply import KEY

    options = run.activation_checkpointing
    if options is None or options.budget is not None:
        return [], []
    try:
        chosen = select(model, options.targets, options.policy, f"{KEY}.targets")
    except ConfigError as error:
        return [], [Finding("checkpointing", "error", str(error))]
    level: Level = "ok" if chosen else "warning"
    return chosen, [Finding("checkpointing", level, f"{len(chosen)} modules are run again in backward")]


def check_attached(
    run: Run, model: Any, selected: list[Selection], callbacks: Mapping[str, Any]
) -> list[Finding]:
    """What is refused when the converted model is there, in the order of a trainer's events."""
    from foundry_fp8.activations.checkpointing.apply import wrap_selected
    from foundry_fp8.activations.compression.apply import apply_activation_compression
    from foundry_fp8.activations.fused_head.apply import apply_fused_head
    from foundry_fp8.observe.kurtosis_meter import KurtosisMeter

    def kurtosis() -> None:
        options = {k: v for k, v in (callbacks["kurtosis_monitor"] or {}).items() if k != "details"}
        KurtosisMeter(model, **options)

    steps: list[tuple[str, Callable[[], object]]] = []
    if "kurtosis_monitor" in callbacks:
        steps.append(("callbacks", kurtosis))
    if run.activation_checkpointing is not None:
        offload = run.activation_checkpointing.offload
        steps.append(("checkpointing", lambda: wrap_selected(model, selected, offload=offload)))
    if (compression := run.activation_compression) is not None:
        steps.append(("compression", lambda: apply_activation_compression(model, **compression.given)))
    if (head := run.fused_head) is not None:
        steps.append(("fused head", lambda: apply_fused_head(model, **head.given)))
    found = []
    for topic, step in steps:
        try:
            step()
        except ConfigError as error:
            found.append(Finding(topic, "error", str(error)))
    return found


def check_conversion(
    config: Mapping[str, Any], run: Run, model: Any, hardware: Hardware
) -> tuple[Run, list[Finding]]:
    """What is converted, and the run with those layers that tensor parallelism would split."""
    from foundry_fp8.surgery.announcement import announcement, notices
    from foundry_fp8.surgery.apply import apply_fp8
    from foundry_fp8.surgery.published import as_if_published

    fp8 = run.converts
    if fp8 is None:
        if run.keeps_codes:
            as_if_published(model, [])
        return run, []
    if hardware.gpu.recipe is None and fp8.backend != "emulated":
        text = f"{hardware.name} does not multiply FP8; backend: emulated shows its losses alone"
        return run, [Finding("conversion", "error", text)]
    auto, emulated = fp8.recipe == "auto", fp8.backend == "emulated"
    there: Any = hardware.gpu.recipe or "auto" if auto else fp8.recipe
    chosen = dataclasses.replace(fp8, recipe=there)
    recipes = chosen.policy(torch.device("cpu")).recipes
    found = [Finding("conversion", "error", text) for text in _refused_by_backends(fp8, recipes)]
    if not emulated and (newer := needs_newer(recipes, hardware.name, hardware.gpu)) is not None:
        found.append(Finding("conversion", "error", newer))
    if run.keeps_codes:
        as_if_published(model, recipes)
    try:
        report = apply_fp8(model, device="cpu", **(chosen.given if emulated else on_paper(fp8, hardware.gpu)))
    except (ConfigError, RuntimeError) as error:
        return run, [*found, Finding("conversion", "error", str(error))]
    names = AUTO_ORDER["cuda"] if fp8.backend == "auto" else (fp8.backend,)
    backend = " or ".join(n for n in names if not any(map(load_backend(n).recipe_reason, recipes)))
    report = dataclasses.replace(report, backend=backend)
    callbacks = [_CLASSES.get(name, name) for name in config.get("callbacks") or {}]
    precision = str(config.get("precision", "amp_bf16"))
    where = None
    if config["model"]["name"] != FOLDER_MODEL:  # Trainer writes no run log
        from foundry_fp8.callbacks.run_log import RunLog

        log = RunLog(((config.get("loggers") or {}).get("run_log") or {}).get("path"))
        where = str(log.path_of(str(config.get("run_name") or "{run_name}")))
    notes = notices(report, precision=precision, device="cuda", callbacks=callbacks)
    head, *lines = announcement(
        report, around=precision.removeprefix("amp_"), log=where, notes=notes
    ).splitlines()
    level: Level = "warning" if any(line.strip().startswith("Warning") for line in lines) else "ok"
    if not found:  # a run that cannot start converts nothing
        found.append(Finding("conversion", level, "\n".join([head, *lines])))
    if auto and not emulated:
        found += _left_by_auto(report, hardware)
    grouped = [row.name for row in report.rows if row.action == "converted" and len(row.shape) == 3]
    if grouped and not emulated and (fp8.backend != "native" or fp8.of_backend.only_where_faster):
        text = f"{grouped[0]} holds experts in one parameter ({len(grouped)} do): they run in FP8 with backend: native and a named recipe"
        found.append(Finding("conversion", "warning", text))
    for i, row in enumerate(report.attention):
        if not i or row.reason != report.attention[0].reason:
            level = "ok" if row.action == "converted" else "warning"
            found.append(Finding("attention", level, f"{row.name}: {row.action}: {row.reason}"))
    if not emulated and not any(finding.level == "error" for finding in found):
        faster = prediction(PlannedRun(config, hardware.name, model, fp8, report), run, hardware)
        found += [] if faster is None else [Finding("speed", "ok", faster)]
    return run, found


def _refused_by_backends(fp8: FP8Config, recipes: Sequence[Recipe]) -> list[str]:
    """What the backend that is asked for refuses; under ``auto`` what each refuses that a GPU may have."""
    from foundry_fp8.surgery.apply import refuse_by_backend
    from foundry_fp8.surgery.attention import check_attention_recipe

    said = []
    names = AUTO_ORDER["cuda"] if fp8.backend == "auto" else (fp8.backend,)
    for name in names:
        backend = load_backend(name)
        try:
            refuse_by_backend(fp8, backend)
            if unwritten := next(filter(None, map(backend.recipe_reason, recipes)), None):
                raise ConfigError(f"algorithms.fp8.backend: {name}: {unwritten}. Set backend: emulated.")
            if fp8.attention and fp8.backend != "auto":  # which leaves attention in high precision
                check_attention_recipe(backend.attention(), fp8.attention.recipe or recipes[0], fp8.attention.grad_scores)  # fmt: skip
        except ConfigError as error:
            said.append(str(error))
    return said[-1:] if len(said) == len(names) else []


def _left_by_auto(report: SurgeryReport, hardware: Hardware) -> list[Finding]:
    """What a GPU's backends leave in high precision under ``recipe: auto``, because FP8 makes it no faster there."""
    linears, left = gains(report, hardware.gpu)
    if not left:
        return []
    name, reason = next(iter(left.items()))
    said = f"on {hardware.name} auto leaves {len(left)} of these {linears} linears in high precision; {name}: {reason}"
    if len(left) < linears:
        return [Finding("conversion", "warning", said)]
    return [Finding("conversion", "error", f"{said}. Nothing is left to convert, which ends the run")]


_CLASSES = {"divergence_guard": "DivergenceGuard", "speed_monitor": "SpeedMonitor"}
