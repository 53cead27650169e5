"""A YAML's run on paper: converted as a GPU would have it, and how fast it is then."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from foundry_fp8.activations.checkpointing.policy import policy_name
from foundry_fp8.activations.checkpointing.targets import select
from foundry_fp8.cli.cluster import shard_of
from foundry_fp8.cli.hardware import Hardware
from foundry_fp8.cli.plan_communication import workload_of
from foundry_fp8.cli.selftest.verdict import gpu_here
from foundry_fp8.cli.yaml_model import build_yaml_model
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.config import ConfigError
from foundry_fp8.gpus import GPUS, Gpu
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.planning.communication.machines import NETWORKS
from foundry_fp8.planning.communication.step import Workload

if TYPE_CHECKING:
    from foundry_fp8.numerics.recipes import Recipe
    from foundry_fp8.planning.speed import Speed, Step
    from foundry_fp8.run.settings import Run
    from foundry_fp8.surgery.fp8_config import FP8Config
    from foundry_fp8.surgery.report import SurgeryReport

__all__ = ["NETWORK_OF", "PlannedRun", "gains", "needs_newer", "on_paper", "planned", "prediction"]

NETWORK_OF = {"b200": "b200-3200g", "b300": "b300-6400g", "gb200": "gb200-nvl72"}
"""Between the nodes of a GPU; of others that of H100s."""


def on_paper(fp8: FP8Config, gpu: Gpu) -> dict[str, Any]:
    """The options with which this machine converts what ``gpu`` would: what is converted is a matter of the model."""
    from foundry_fp8.numerics.recipes import RECIPES

    chosen = {"recipe": RECIPES[gpu.recipe]()} if fp8.recipe == "auto" and gpu.recipe else {}
    elsewhere = {"backend": "emulated", "accumulation": "float32", "cache_weights": False, "fuse": False}
    return {**fp8.given, **elsewhere, "enabled": True, **chosen}


def needs_newer(recipes: Iterable[Recipe], name: str, gpu: Gpu) -> str | None:
    """Why one of ``recipes`` does not run on ``gpu``, which is called ``name``; ``None`` if all do."""
    from foundry_fp8.numerics.recipes import RECIPES

    if gpu.recipe and not RECIPES[gpu.recipe].runs_on_hopper:
        return None
    newer = next((recipe.name for recipe in recipes if not recipe.runs_on_hopper), None)
    return newer and f"{newer} needs Blackwell; {name} runs current, delayed and block"


def gains(report: SurgeryReport, gpu: Gpu) -> tuple[int, dict[str, str]]:
    """The number of converted linears, and by name why FP8 makes some of them no faster on ``gpu``."""
    from foundry_fp8.backends.size_rule import rates_of, size_reason

    rates = rates_of(gpu)
    rows = [row for row in report.rows if row.action == "converted" and len(row.shape) == 2]
    reasons = {row.name: size_reason(report.recipe, row.shape[1], row.shape[0], rates) for row in rows}
    return len(rows), {name: reason for name, reason in reasons.items() if reason is not None}


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A YAML's run on one kind of GPU, its model converted on paper."""

    config: Mapping[str, Any]
    name: str
    """Of the GPU."""
    model: Any
    fp8: FP8Config
    report: SurgeryReport

    @functools.cached_property
    def gpu(self) -> Gpu:
        """As this machine measured it, if it did."""
        return gpu_here(self.name)

    @functools.cached_property
    def checkpoints(self) -> tuple[dict[str, str], str]:
        """The modules whose forward checkpoints repeat, ``full`` or ``selective``, and what of them is not known on paper."""
        run, model, names = run_of(self.config), self.model, ("full", "selective", "offload")
        own = run.activation_checkpointing
        if own is None:
            if not getattr(run.fsdp, "activation_checkpointing", False):
                return {}, ""
            # As Composer asks: the model inside its own.
            asked = next((m for m in model.modules() if hasattr(m, "activation_checkpointing_fn")), None)
            wraps = getattr(asked, "activation_checkpointing_fn", lambda module: False)
            return {clean_name(n): "full" for n, m in model.named_modules() if wraps(m)}, ""
        if own.budget is not None:
            return {}, f"{own.key}.budget; give the targets that foundry-fp8 plan memory prints"
        chosen = select(model, own.targets, own.policy, f"{own.key}.targets")
        unknown = next((policy_name(one.policy) for one in chosen if one.policy not in names), None)
        known = {one.name: str(one.policy) for one in chosen if one.policy in names[:2]}
        return known, f"{own.key}.policy: what runs again beside {unknown}" if unknown else ""

    @functools.cached_property
    def step(self) -> Step:
        """What a step does; under ``auto`` without what gains nothing."""
        from foundry_fp8.layers.linear import FP8Linear
        from foundry_fp8.planning.speed import model_step
        from foundry_fp8.surgery.fusion import FusionPlan, plan_fusion

        left = gains(self.report, self.gpu)[1] if self.fp8.of_backend.only_where_faster else {}
        runs = {row.name for row in self.report.rows if row.action == "converted" and row.name not in left}
        converted = {n: m for n, m in self.model.named_modules() if isinstance(m, FP8Linear) and n in runs}
        fusion = FusionPlan() if self.fp8.fuse is False else plan_fusion(self.model, converted)
        length, again = self.config["max_seq_len"], self.checkpoints[0]
        return model_step(self.model, runs, set(fusion.norms), set(fusion.mlps), length, again)

    def speed(
        self, micro: Workload, gpus: int, recipe: Recipe | None, *, network: str | None = None, mfu: float | None = None,
    ) -> tuple[float, Speed]:  # fmt: skip
        """Tokens a second of a GPU, and the step, whose microbatch is ``micro``."""
        from foundry_fp8.planning.speed import predict

        config, run, step, gpu = self.config, run_of(self.config, gpus), self.step, self.gpu
        if run.fsdp is None and run.activation_checkpointing is None:  # one GPU: there are none of FSDP's
            step = dataclasses.replace(step, again=None)
        shard = shard_of(run, self.model, gpu.memory_bytes)
        total, size = config.get("global_train_batch_size"), config.get("device_train_microbatch_size")
        count = max(1, total // gpus // size) if isinstance(total, int) and isinstance(size, int) else 1
        work = dataclasses.replace(micro, tokens=count * micro.tokens, microbatches=count)
        wires = NETWORKS[network or NETWORK_OF.get(self.name, "h100-3200g")]
        found = predict(step, work, recipe, gpus, shard, gpu, wires, mfu)
        return work.tokens / found.seconds, found


def planned(config: dict[str, Any], name: str) -> PlannedRun:
    """The run of ``config`` on GPUs called ``name``; where it has no FP8, as ``recipe: auto`` would have it."""
    from foundry_fp8.surgery.apply import apply_fp8
    from foundry_fp8.surgery.fp8_config import FP8Config

    model, fp8 = build_yaml_model(config, "meta"), run_of(config).fp8 or FP8Config(recipe="auto")
    return PlannedRun(config, name, model, fp8, apply_fp8(model, device="cpu", **on_paper(fp8, GPUS[name])))


def prediction(planned: PlannedRun, run: Run, hardware: Hardware) -> str | None:
    """How much faster ``run`` is on ``hardware``, in one line; ``None`` where it runs several recipes, or the lines on ranks refuse it."""
    report, gpu = planned.report, planned.gpu
    if len(report.recipes) != 1 or run.tensor_parallel:
        return None
    try:
        work = workload_of(planned.config, planned.model)
    except ConfigError as error:  # a microbatch that Composer finds
        return f"not predicted: {error} to foundry-fp8 plan speed"
    try:
        _, found = planned.speed(work, hardware.devices, report.recipe)
    except ConfigError:
        return None
    linears, left = gains(report, gpu)
    left_out = planned.checkpoints[1] and f"left out: {planned.checkpoints[1]}"
    return "; ".join(filter(None, (
        f"predicted on {hardware.name}x{hardware.devices}: {found.estimate:.2f} x BF16, {found.low:.2f} to {found.high:.2f}",
        gpu.measured, left_out, f"{linears - len(left)} of {linears} layers gain", "foundry-fp8 plan speed says more",
    )))  # fmt: skip
