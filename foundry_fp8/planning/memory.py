"""The planner: from a memory budget to what each block checkpoints and compresses, measured on the model itself.

Blocks that are alike (same modules, parameters and input shapes) are measured once. Each option runs forward and backward
on the block's real input; the rest of the model is measured in one step with every block in its leanest option. A dynamic
programme (:mod:`.solver`) then picks the options with the least added time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.activations.saved import compresses_inside
from foundry_fp8.activations.wrapping import checkpoint_wrappers, clean_name, modules_by_clean_name, own_class
from foundry_fp8.algorithms.activation_checkpointing.apply import CheckpointingReport, unwrap, wrap_selected
from foundry_fp8.algorithms.activation_checkpointing.blocks import format_blocks
from foundry_fp8.algorithms.activation_checkpointing.policy import policy_name
from foundry_fp8.algorithms.activation_checkpointing.targets import Selection
from foundry_fp8.algorithms.activation_compression import apply_activation_compression
from foundry_fp8.algorithms.activation_compression.apply import EXACT
from foundry_fp8.config import ConfigError
from foundry_fp8.planning.budget import check_budget, fit_bytes, format_bytes, parse_bytes
from foundry_fp8.planning.measure import (
    BlockRun,
    Call,
    CostModel,
    capture_calls,
    measure_frame,
)
from foundry_fp8.planning.options import BlockOption, options_of
from foundry_fp8.planning.solver import Cost, Frame, predict_peak, solve
from foundry_fp8.selection import transformer_blocks

__all__ = ["Measurements", "MemoryPlan", "apply_plan", "choose", "device_capacity", "measure", "plan_memory"]

KEY = "algorithms.activation_checkpointing.budget"

ROUNDS = 12
"""Timed runs of each option; the fastest counts."""


@dataclasses.dataclass(frozen=True)
class Measurements:
    """Everything a plan is made from.

    Attributes:
        names: The blocks, in forward order.
        kind: For each block, the index of its kind.
        options: For each kind, its options.
        costs: For each kind, ``{option name: cost}``.
        frame: What is held outside the blocks.
        lean: The same with cross-entropies that recompute their softmax; ``None`` where there is none to change.
        source: How bytes and seconds were found, for the report.
        classes: The class name of each block.
    """

    names: tuple[str, ...]
    kind: tuple[int, ...]
    options: tuple[tuple[BlockOption, ...], ...]
    costs: tuple[dict[str, Cost], ...]
    frame: Frame
    lean: Frame | None
    source: str
    classes: tuple[str, ...]

    def costs_of(self, chosen: list[str]) -> list[Cost]:
        """The cost of each block under ``chosen``."""
        return [self.costs[kind][name] for kind, name in zip(self.kind, chosen, strict=True)]

    def peak(self, option: str) -> int:
        """The predicted peak with one option in every block, and the loss as it is."""
        return predict_peak(self.costs_of([option] * len(self.names)), self.frame)

    def seconds(self, option: str) -> float:
        """Seconds that the blocks take with one option in every block."""
        return sum(cost.seconds for cost in self.costs_of([option] * len(self.names)))


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """What each block does.

    Attributes:
        measurements: What it was made from.
        chosen: One option name a block.
        frame: What is held outside the blocks: one of the measurements' two.
        budget: Bytes it had to meet.
        offload: Whether checkpoint inputs go to host memory.
        compression: Options of ``activation_compression`` for the compressed blocks.
    """

    measurements: Measurements
    chosen: tuple[str, ...]
    frame: Frame
    budget: int
    offload: bool
    compression: dict[str, Any]

    @property
    def predicted_peak(self) -> int:
        """Peak bytes of a step, parameters, gradients and optimizer state included."""
        return predict_peak(self.measurements.costs_of(list(self.chosen)), self.frame)

    @property
    def added_seconds(self) -> float:
        """Seconds a step takes more than without checkpoints and compression."""
        return sum(
            c.seconds for c in self.measurements.costs_of(list(self.chosen))
        ) - self.measurements.seconds("none")

    def option(self, index: int) -> BlockOption:
        """The option of block ``index``."""
        kind = self.measurements.kind[index]
        return next(o for o in self.measurements.options[kind] if o.name == self.chosen[index])

    def selections(self) -> list[Selection]:
        """The modules to checkpoint."""
        return [
            Selection(f"{block}.{name}" if name else block, policy)
            for i, block in enumerate(self.measurements.names)
            for name, policy in self.option(i).checkpoints
        ]

    def formats(self) -> dict[str, str]:
        """``{module: format}`` to keep packed, or without what can be made again."""
        return {
            f"{block}.{name}" if name else block: form
            for i, block in enumerate(self.measurements.names)
            for name, form in self.option(i).formats
        }

    def compression_options(self) -> dict[str, Any]:
        """Options of ``activation_compression``; empty where the plan does without."""
        formats = self.formats()
        if not formats and self.frame is self.measurements.frame:
            return {}
        return {**self.compression, "targets": formats or []}

    def to_config(self) -> dict[str, Any]:
        """The ``algorithms`` of a YAML that pin this plan."""
        groups: dict[tuple[str, str], list[int]] = {}
        for i in range(len(self.chosen)):
            for name, policy in self.option(i).checkpoints:
                target = f"*.{name}" if name else self.measurements.classes[i]
                groups.setdefault((target, policy_name(policy)), []).append(i)
        config: dict[str, Any] = {}
        if groups:
            targets = [
                {"target": target, "blocks": format_blocks(blocks), "policy": policy}
                for (target, policy), blocks in groups.items()
            ]
            config["activation_checkpointing"] = {"targets": targets}
            if self.offload:
                config["activation_checkpointing"]["offload"] = True
        if self.compression_options():
            config["activation_compression"] = self.compression_options()
        return config

    def to_yaml(self) -> str:
        """:meth:`to_config` as YAML text."""
        lines = ["algorithms:"]
        for name, options in self.to_config().items():
            lines.append(f"  {name}:")
            for key, value in options.items():
                if key == "targets" and value:
                    lines.append("    targets:")
                    lines += [f"    - {_flow(entry)}" for entry in value] if isinstance(value, list) else []
                    lines += [f"      {k}: {v}" for k, v in value.items()] if isinstance(value, dict) else []
                else:
                    lines.append(f"    {key}: {_flow(value)}")
        return "\n".join(lines) if len(lines) > 1 else "algorithms: {}  # everything fits as it is"

    def __str__(self) -> str:
        m = self.measurements
        count: dict[tuple[int, str], int] = {}
        for kind, name in zip(m.kind, self.chosen, strict=True):
            count[kind, name] = count.get((kind, name), 0) + 1
        rows = [("blocks", "option", "keeps", "backward peak", "seconds", "added")]
        for kind, costs in enumerate(m.costs):
            for name, cost in costs.items():
                rows.append(
                    (
                        str(count.get((kind, name), "")),
                        name,
                        format_bytes(cost.kept),
                        format_bytes(cost.backward_peak),
                        f"{cost.seconds:.4g}",
                        f"{cost.seconds - costs['none'].seconds:+.2g}",
                    )
                )
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = "\n".join(
            "  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows
        )
        return (
            f"memory plan: predicted peak {format_bytes(self.predicted_peak)} of {format_bytes(self.budget)}, "
            f"{self.added_seconds:+.4g} s a microbatch in the blocks "
            f"(no checkpointing: {format_bytes(m.peak('none'))}; every block: {format_bytes(m.peak('block'))}, "
            f"{m.seconds('block') - m.seconds('none'):+.4g} s)\n{table}\n{m.source}\n{self.to_yaml()}"
        )


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    return (
        f'"{value}"'
        if isinstance(value, str) and (set(value) & set("*,:[]{}") or " " in value)
        else str(value)
    )


def plan_memory(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    budget: float | str,
    offload: bool = False,
    compress: bool = True,
    compression: dict[str, Any] | None = None,
    optimizer_bytes: int = 0,
    cost_model: CostModel | None = None,
) -> MemoryPlan:
    """Measure ``model`` on a microbatch and choose what to checkpoint and compress.

    The model is as before afterwards: parameters, gradients, random state. Every rank gets the same plan, made from the
    largest bytes and the mean seconds of all ranks.

    Args:
        model: Plain or inside DDP (pass the inner module); not FSDP, whose units cannot run alone.
        loss_fn: Runs the microbatch through ``model``, with autocast where training has it, and returns the loss.
        budget: Peak bytes of a step with everything in it (``20GiB``), a fraction of what no checkpointing needs
            (``0.4``), or ``fit``: what the GPU has.
        offload: Checkpoint inputs go to host memory.
        compress: Offer compression.
        compression: Options of ``activation_compression`` for it.
        optimizer_bytes: Optimizer state that is not allocated yet.
        cost_model: Seconds from a model instead of a clock, for a dry run: build the model and call this inside torch's
            ``FakeTensorMode``, with ``compression={"format": "exact"}``, as packing looks at values.

    Raises:
        ConfigError: Nothing meets the budget (says what would), or the model is wrapped, checkpointed or compressed.
    """
    check_budget(budget, KEY)
    capacity = device_capacity(_device_of(model)) if budget == "fit" else None
    measured = measure(
        model,
        loss_fn,
        offload=offload,
        compress=compress,
        compression=compression,
        optimizer_bytes=optimizer_bytes,
        cost_model=cost_model,
    )
    return choose(measured, budget, offload=offload, compression=compression, capacity=capacity)


def choose(
    measured: Measurements,
    budget: float | str,
    *,
    offload: bool = False,
    compression: dict[str, Any] | None = None,
    capacity: int | None = None,
) -> MemoryPlan:
    """The plan for ``budget`` from measurements already taken: a pure function of its arguments.

    Args:
        measured: From :func:`measure`.
        budget: See :func:`plan_memory`.
        offload: What the measurements were taken with.
        compression: The same.
        capacity: The bytes that ``fit`` stands for, from :func:`device_capacity`.
    """
    limit = _limit(measured, budget, capacity)
    fits = measured.peak("none") <= limit
    frame = measured.frame if fits or measured.lean is None else measured.lean
    chosen: list[str] | None = ["none"] * len(measured.names)
    if not fits:
        chosen = solve([measured.costs[kind] for kind in measured.kind], frame, limit)
    if chosen is None:
        smallest, how = _smallest(measured)
        raise ConfigError(
            f"{KEY}: nothing meets {budget!r} ({format_bytes(limit)}). The smallest peak that can be met is "
            f"{format_bytes(smallest)} ({smallest} B), of which {format_bytes(measured.frame.static)} are parameters and "
            f"optimizer state, with {', '.join(sorted(set(how)))}. Lower the microbatch size, shard, or raise the budget."
        )
    return MemoryPlan(measured, tuple(chosen), frame, limit, offload, dict(compression or {}))


def _smallest(measured: Measurements) -> tuple[int, list[str]]:
    """The smallest peak that some plan reaches, and that plan."""
    options = [measured.costs[kind] for kind in measured.kind]
    frame = measured.lean or measured.frame
    low, high = frame.static, measured.peak("none")
    best = solve(options, frame, high)
    while high - low > max(high // 2000, 1):
        middle = (low + high) // 2
        found = solve(options, frame, middle)
        if found is None:
            low = middle
        else:
            best, high = found, predict_peak(measured.costs_of(found), frame)
    assert best is not None
    return predict_peak(measured.costs_of(best), frame), best


def _limit(measured: Measurements, budget: float | str, capacity: int | None) -> int:
    if isinstance(budget, float):
        return int(budget * measured.peak("none"))
    if budget != "fit":
        return parse_bytes(budget, KEY)
    if capacity is None:
        raise ConfigError(f"{KEY}: fit needs the bytes that the device has; pass capacity, or give a size.")
    return capacity


def device_capacity(device: torch.device) -> int:
    """The bytes that ``fit`` stands for on ``device``, the smallest of all ranks.

    Raises:
        ConfigError: Not a GPU.
    """
    if device.type != "cuda":
        raise ConfigError(
            f"{KEY}: fit asks a GPU how much memory it has; on {device} give a size, such as 20GiB."
        )
    free, _ = torch.cuda.mem_get_info(device)
    share = torch.tensor([fit_bytes(free, torch.cuda.memory_reserved(device))], device=device)
    if dist.is_initialized():
        dist.all_reduce(share, dist.ReduceOp.MIN)
    return int(share)


def measure(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    offload: bool = False,
    compress: bool = True,
    compression: dict[str, Any] | None = None,
    optimizer_bytes: int = 0,
    cost_model: CostModel | None = None,
    rounds: int = ROUNDS,
) -> Measurements:
    """What :func:`plan_memory` measures; see there. ``rounds``: how often each option is timed, more on a noisy machine."""
    blocks = [(clean_name(name), block) for name, block in transformer_blocks(model)]
    _check_plannable(model, blocks)
    device = _device_of(model)
    modules = [block for _, block in blocks]
    kinds: dict[tuple[Any, ...], int] = {}
    kind_of: list[int] = []

    def first_of_kind(index: int, call: Call) -> bool:
        block = modules[index]
        shapes = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in block.parameters())
        key = (repr(block), shapes, call.signature())
        kind_of.append(kinds.setdefault(key, len(kinds)))
        return kind_of[-1] == len(kinds) - 1 and kind_of.count(kind_of[-1]) == 1

    calls = capture_calls(modules, loss_fn, device, first_of_kind)
    compression = compression or {}
    formats = list(dict.fromkeys((EXACT, compression.get("format", "int8")))) if compress else []
    options, costs = [], []
    for kind in range(len(kinds)):
        index = kind_of.index(kind)
        name = blocks[index][0]
        candidates = options_of(modules[index], formats=formats)
        sizes: dict[str, tuple[int, int, int]] = {}
        taken: dict[str, list[float]] = {option.name: [] for option in candidates}
        # In rounds, so that a slow moment of the machine does not fall on one option; the first round only warms up.
        for turn in range(1 if cost_model else 1 + rounds):
            for option in candidates:
                with _applied(model, [name], option, offload, compression) as configured:
                    run = BlockRun(configured(), calls[index], device)
                    if turn == 0:
                        sizes[option.name] = run.bytes()
                    if turn > 0 or cost_model:
                        taken[option.name].append(run.seconds(cost_model))
        plain = min(taken["none"])
        options.append(tuple(candidates))
        # Recomputing cannot be faster than not doing so: what looks faster is noise.
        costs.append(
            _agreed({name: Cost(*sizes[name], max(min(times), plain)) for name, times in taken.items()})
        )
    block = next(o for o in options[0] if o.name == "block")
    lean = None
    with _applied(model, [name for name, _ in blocks], block, offload, {}):
        outer = [module for _, module in transformer_blocks(model)]
        static = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        kept = [costs[kind]["block"].kept for kind in kind_of]

        def measured_frame() -> Frame:
            parameters = list(model.parameters())
            frame = measure_frame(outer, kept, loss_fn, parameters, device, static + optimizer_bytes)
            return _agreed({"frame": frame})["frame"]

        frame = measured_frame()
        if compress and compression.get("overrides", {}).get("loss") != "none":
            losses = apply_activation_compression(model, targets=[])
            try:
                lean = measured_frame() if losses.rows else None
            finally:
                losses.undo()
    bytes_from = "the CUDA allocator" if device.type == "cuda" else "every live storage (LiveBytes)"
    seconds_from = "a cost model" if cost_model else f"the fastest of {rounds} runs of a block"
    return Measurements(
        tuple(name for name, _ in blocks),
        tuple(kind_of),
        tuple(options),
        tuple(costs),
        frame,
        lean,
        f"bytes: {bytes_from} on {device.type}; seconds: {seconds_from}; {len(kinds)} kind(s) of block",
        tuple(own_class(module).__name__ for module in modules),
    )


class _applied:
    """Blocks configured as an option, and taken back."""

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        option: BlockOption,
        offload: bool,
        compression: dict[str, Any],
    ) -> None:
        self.model, self.names, self.option = model, names, option
        self.offload, self.compression = offload, compression

    def __enter__(self) -> Callable[[], nn.Module]:
        selected = [
            Selection(f"{block}.{name}" if name else block, policy)
            for block in self.names
            for name, policy in self.option.checkpoints
        ]
        wrap_selected(self.model, selected, offload=self.offload)
        self.report = None
        if self.option.formats:
            targets = {
                f"{block}.{name}" if name else block: form
                for block in self.names
                for name, form in self.option.formats
            }
            overrides = {**self.compression.get("overrides", {}), "loss": "none"}
            self.report = apply_activation_compression(
                self.model, **{**self.compression, "targets": targets, "overrides": overrides}
            )
        first = self.names[0]
        return lambda: (
            dict(checkpoint_wrappers(self.model)).get(first) or modules_by_clean_name(self.model)[first][1]
        )

    def __exit__(self, *exc: Any) -> None:
        if self.report is not None:
            self.report.undo()
        unwrap(self.model)


def _agreed(of_rank: dict[str, Any]) -> dict[str, Any]:
    """The same on every rank: the largest bytes, the mean seconds, rank by rank in order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return of_rank
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, of_rank)

    def join(name: str, field: str) -> Any:
        values = [getattr(rank[name], field) for rank in gathered]
        if isinstance(values[0], tuple):
            return tuple(max(v) for v in zip(*values, strict=True))
        return sum(values) / len(values) if isinstance(values[0], float) else max(values)

    return {
        name: type(value)(**{f.name: join(name, f.name) for f in dataclasses.fields(value)})
        for name, value in of_rank.items()
    }


def _check_plannable(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> None:
    if not blocks:
        raise ConfigError(f"{KEY}: {type(model).__name__} has no list of transformer blocks.")
    if next(checkpoint_wrappers(model), None) is not None:
        raise ConfigError(
            f"{KEY}: the model is checkpointed already. Switch off activation_checkpointing in the FSDP config."
        )
    if compresses_inside(model) is not None:
        raise ConfigError(
            f"{KEY}: the budget plans compression itself. Remove activation_compression from the algorithms."
        )
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            f"{KEY}: a plan runs blocks alone, which FSDP units cannot. Plan without training (foundry-fp8 plan memory "
            "run.yaml) and put the YAML that it prints into the run."
        )


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def apply_plan(model: nn.Module, plan: MemoryPlan) -> CheckpointingReport:
    """Checkpoint and compress as planned. ``model``: the one planned for, changed in place."""
    report = wrap_selected(model, plan.selections(), offload=plan.offload)
    if plan.compression_options():
        apply_activation_compression(model, **plan.compression_options())
    return report
