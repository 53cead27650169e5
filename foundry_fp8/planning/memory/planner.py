"""The planner: from a memory budget to what each block checkpoints and compresses, measured on the model itself.

Blocks that are alike (same modules, parameters and input shapes) are measured once. Each option runs forward and backward
on the block's real input; the rest of the model is measured in one step with every block in its leanest option. A dynamic
programme (:mod:`.solver`) then picks the options with the least added time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.activations.checkpointing.apply import (
    BUDGET_ALONE,
    CheckpointingReport,
    PlannedCompression,
    switch_off_cache,
    unwrap,
    wrap_selected,
)
from foundry_fp8.activations.checkpointing.budget import check_budget, fit_bytes
from foundry_fp8.activations.checkpointing.targets import Selection
from foundry_fp8.activations.compression.apply import EXACT, apply_activation_compression
from foundry_fp8.activations.compression.saved import MARK, compresses_inside
from foundry_fp8.activations.fused_head.logits import LogitsNotComputed
from foundry_fp8.compat.checkpoint_wrapper import CheckpointWrapper, keywords_of
from foundry_fp8.config import ConfigError, format_bytes, parse_bytes
from foundry_fp8.layers.gemm_layer import Choice
from foundry_fp8.layers.state import FP8State
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.model_structure.wrappers import (
    checkpoint_wrappers,
    is_sharded,
    modules_by_clean_name,
    own_class,
)
from foundry_fp8.planning.memory.cost_model import CostModel
from foundry_fp8.planning.memory.dry_runs import left_out, repeated
from foundry_fp8.planning.memory.head_option import fused_head_applied, head_seconds
from foundry_fp8.planning.memory.host_link import host_link_of, moved_boundaries, moved_whole, offloaded
from foundry_fp8.planning.memory.measure import BlockRun, Call, capture_calls, held_bytes, measure_frame
from foundry_fp8.planning.memory.measure_sharded import ShardedBlockRun
from foundry_fp8.planning.memory.options import BlockOption, options_of
from foundry_fp8.planning.memory.plan import Measurements, MemoryPlan
from foundry_fp8.planning.memory.solver import Cost, Frame, predict_peak, solve

__all__ = ["apply_plan", "choose", "device_capacity", "measure", "measure_as_it_is", "plan_memory", "plan_of"]

PLAN = "_foundry_memory_plan"
"""What :func:`apply_plan` leaves on a model."""

KEY = "algorithms.activation_checkpointing.budget"

ROUNDS = 12
"""Timed runs of each option; the fastest counts."""

ROUNDS_SHARDED = 4
"""The same under FSDP, where each is a step of the whole model."""


def plan_memory(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    budget: float | str,
    offload: bool = False,
    compression: PlannedCompression = "exact",
    optimizer_bytes: int = 0,
    accumulates: bool = False,
    cost_model: CostModel | None = None,
) -> MemoryPlan:
    """Measure ``model`` on a microbatch and choose what to checkpoint and compress.

    The model is as before afterwards: parameters, gradients, random state. Delayed scales have seen the microbatch, and
    under FSDP the residuals of compressed gradients are those of the last step measured. Every rank gets the same plan,
    made from the largest bytes and the mean seconds of all ranks.

    Args:
        model: Plain, inside DDP (pass the inner module) or wrapped in FSDP, where every rank must call this and bytes
            are those of a rank.
        loss_fn: Runs the microbatch through ``model``, with autocast where training has it, and returns the loss.
        budget: Peak bytes of a step with everything in it (``20GiB``), a fraction of what no checkpointing needs
            (``0.4``), or ``fit``: what the GPU has.
        offload: Checkpoint inputs go to host memory.
        compression: What to use beside checkpoints: nothing, what rounds nothing, or a format of ``activation_compression``.
        optimizer_bytes: Optimizer state, allocated or not.
        accumulates: Whether a step has several microbatches, and so gradients of the whole model from the second on.
        cost_model: Seconds from a model instead of a clock, for a dry run: build the model and call this inside torch's
            ``FakeTensorMode``.

    Raises:
        ConfigError: Nothing meets the budget (says what would), or the model is checkpointed or compressed already.
    """
    check_budget(budget, KEY)
    capacity = device_capacity(next(model.parameters()).device) if budget == "fit" else None
    measured = measure(
        model,
        loss_fn,
        compression=compression,
        optimizer_bytes=optimizer_bytes,
        accumulates=accumulates,
        cost_model=cost_model,
    )
    return choose(measured, budget, offload=offload, capacity=capacity)


def choose(
    measured: Measurements, budget: float | str, *, offload: bool = False, capacity: int | None = None
) -> MemoryPlan:
    """The plan for ``budget`` from measurements already taken: a pure function of its arguments.

    ``capacity`` are the bytes that ``fit`` stands for (:func:`device_capacity`).
    """
    limit = _limit(measured, budget, capacity)
    fits = measured.peak("none") <= limit
    frame = measured.frame if fits or measured.lean is None else measured.lean
    chosen: list[str] | None = ["none"] * len(measured.names)
    if not fits:
        costs = measured.by_kind(offload)
        chosen = solve([costs[kind] for kind in measured.kind], frame, limit)
    if chosen is None:
        smallest, how = _smallest(measured, offload)
        raise ConfigError(
            f"{KEY}: nothing meets {budget!r} ({format_bytes(limit)}). The smallest peak that can be met is "
            f"{format_bytes(smallest)} ({smallest} B), of which {format_bytes(measured.frame.static)} are parameters and "
            f"optimizer state, with {', '.join(sorted(set(how)))}. Lower the microbatch size, shard, or raise the budget."
        )
    return MemoryPlan(measured, tuple(chosen), frame, limit, offload)


def _smallest(measured: Measurements, offload: bool) -> tuple[int, list[str]]:
    """The smallest peak that some plan reaches, and that plan."""
    costs = measured.by_kind(offload)
    options = [costs[kind] for kind in measured.kind]
    frame = measured.lean or measured.frame
    low, high = frame.static, measured.peak("none")
    best = solve(options, frame, high)
    while high - low > max(high // 2000, 1):
        middle = (low + high) // 2
        found = solve(options, frame, middle)
        if found is None:
            low = middle
        else:
            best, high = found, predict_peak(measured.costs_of(found, offload), frame)
    assert best is not None
    return predict_peak(measured.costs_of(best, offload), frame), best


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
    share = torch.tensor(
        [fit_bytes(free, torch.cuda.memory_reserved(device))], dtype=torch.int64, device=device
    )
    if dist.is_initialized():
        dist.all_reduce(share, dist.ReduceOp.MIN)
    return int(share)


def measure(
    model: nn.Module,
    loss_fn: Callable[[], Tensor],
    *,
    compression: PlannedCompression = "exact",
    optimizer_bytes: int = 0,
    accumulates: bool = False,
    cost_model: CostModel | None = None,
    rounds: int | None = None,
) -> Measurements:
    """What :func:`plan_memory` measures; see there. ``rounds``: how often each option is timed, more on a noisy machine."""
    sharded = is_sharded(model)
    innermost = modules_by_clean_name(model)
    blocks = [(clean_name(name), innermost[clean_name(name)][1]) for name, _ in transformer_blocks(model)]
    _check_plannable(model, blocks, sharded)
    # A block called again with the cache that it filled would attend to its own keys twice.
    switch_off_cache(model)
    device = next(model.parameters()).device
    rounds = rounds or (ROUNDS_SHARDED if sharded else ROUNDS)
    link = None
    if not sharded and (cost_model or device.type == "cuda"):
        link = host_link_of(cost_model.gpu if cost_model else torch.cuda.get_device_name(device))
    formats = [] if compression == "none" else list(dict.fromkeys((EXACT, compression)))
    run = _Measuring(model, loss_fn, blocks, device, sharded, rounds, cost_model, formats, link)
    with _where_most_is_kept(model, device):
        kind_of, calls = run.kinds()
        measured = [run.kind(kind, kind_of, calls) for kind in range(max(kind_of) + 1)]
        options, costs, boundaries = zip(*measured, strict=True)
        block = next(o for o in options[0] if o.name == "block")
        frame, lean, fused, again = run.frames(block, kind_of, costs, optimizer_bytes, accumulates)
    bytes_from = "the CUDA allocator" if device.type == "cuda" else "every live storage (LiveBytes)"
    runs = "whole steps" if sharded else "runs of a block"
    seconds_from = "a cost model" if cost_model else f"the fastest of {rounds} {runs}"
    return Measurements(
        tuple(name for name, _ in blocks),
        tuple(kind_of),
        options,
        costs,
        frame,
        lean,
        f"bytes: {bytes_from} on {device.type}; seconds: {seconds_from}; {len(options)} kind(s) of block",
        tuple(own_class(module).__name__ for _, module in blocks),
        fused,
        again or 0.0,
        link,
        boundaries,
    )


def measure_as_it_is(model: nn.Module, loss_fn: Callable[[], Tensor], cost_model: CostModel) -> Measurements:
    """A dry run of ``model`` with the checkpoints and the compression that it has: :func:`measure` of one option, ``none``.

    Of a step of one microbatch, without optimizer states: :func:`~.cluster.on_cluster` adds the rest.
    """
    names = tuple(name for name, _ in transformer_blocks(model))
    device = next(model.parameters()).device
    run = _Measuring(model, loss_fn, transformer_blocks(model), device, False, 1, cost_model, [], None)
    with _where_most_is_kept(model, device):
        kind_of, calls = run.kinds()
        costs = []
        for kind in range(max(kind_of) + 1):
            alone = run._run(kind_of.index(kind), calls)
            costs.append(dataclasses.replace(alone.bytes(), seconds=alone.seconds()))
        with run.few(kind_of):
            frame = run.frame(kind_of, costs, 0, False)
    by_name = tuple({"none": cost} for cost in costs)
    options = ((BlockOption("none"),),) * len(costs)
    return Measurements(names, tuple(kind_of), options, by_name, frame, None, "a dry run", names)


@contextlib.contextmanager
def _where_most_is_kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it FP8 layers whose recipes change run what keeps most for backward, since a plan is for the whole run."""

    def keeps_hp_input(turn: Choice) -> bool:
        return turn.recipe is None or turn.beside.get("wgrad") == "high_precision"

    with contextlib.ExitStack() as undo:
        for _, state in FP8State.each(model):
            undo.callback(state.turn_to(keeps_hp_input, device))
        yield


def _keeps(module: nn.Module) -> tuple[Any, Any]:
    """What a checkpoint, and what compression, keeps of ``module``."""
    policy = keywords_of(module).get("policy") if isinstance(module, CheckpointWrapper) else None
    return policy, getattr(module.__dict__.get(MARK), "fmt", None)


@dataclasses.dataclass(frozen=True)
class _Measuring:
    """A model, its blocks by name, and how they are measured."""

    model: nn.Module
    loss_fn: Callable[[], Tensor]
    blocks: Sequence[tuple[str, nn.Module]]
    device: torch.device
    sharded: bool
    rounds: int
    cost_model: CostModel | None
    formats: Sequence[Any]
    link: Any

    def kinds(self) -> tuple[list[int], Sequence[Call]]:
        """The kind of each block, by its form and what it is called with, and the calls."""
        modules = [block for _, block in self.blocks]
        kinds: dict[tuple[Any, ...], int] = {}
        kind_of: list[int] = []
        # FSDP1 cuts each rank's parameters elsewhere, and kinds must be those of every rank.
        alike = [
            (
                repr(b),
                *((self.sharded or tuple(p.shape), p.dtype, p.requires_grad) for p in b.parameters()),
                *(_keeps(m) for m in b.modules()),
            )
            for b in modules
        ]

        def first_of_kind(index: int, call: Call) -> bool:
            kind_of.append(kinds.setdefault((alike[index], call.signature()), len(kinds)))
            return not self.sharded and kind_of.count(kind_of[-1]) == 1

        with self.few(alike):
            calls = capture_calls(modules, self.loss_fn, self.device, first_of_kind)
        return kind_of, calls

    def skipped(self, kinds: Sequence[Any]) -> frozenset[int]:
        """Without values equal blocks hold the same: deep models are planned in the time of a shallow one."""
        if self.cost_model is None or self.sharded:
            return frozenset()
        # What a frozen block keeps depends on whether anything before it is trained.
        frozen = {
            i for i, (_, b) in enumerate(self.blocks) if not any(p.requires_grad for p in b.parameters())
        }
        return repeated(kinds) - frozen

    def few(self, kinds: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """Within it those of the blocks that are :meth:`skipped` do not run."""
        return left_out([module for _, module in transformer_blocks(self.model)], kinds, self.skipped(kinds))

    def kind(
        self, kind: int, kind_of: Sequence[int], calls: Sequence[Call]
    ) -> tuple[tuple[BlockOption, ...], dict[str, Cost], dict[str, int]]:
        """What a block of a kind can do, what each option costs, and what it keeps at its boundary, in bytes."""
        of_kind = [i for i, k in enumerate(kind_of) if k == kind]
        # Under FSDP2 a block takes the place of its neighbour's gathered parameters: measured between two of its kind.
        index = of_kind[len(of_kind) // 2 if self.sharded else 0]
        name, block = self.blocks[index]
        # Under FSDP the model runs as a whole, with as little memory as the rest of it can take.
        rest = [other for other, _ in self.blocks if other != name] if self.sharded else []
        candidates = options_of(block, formats=self.formats)
        bytes_of: dict[str, Cost] = {}
        taken: dict[str, list[float]] = {option.name: [] for option in candidates}
        moved: dict[str, int] = {}
        whole = 0
        # In rounds, so that a slow moment of the machine does not fall on one option; the first round only warms up.
        for turn in range(1 if self.cost_model else 1 + self.rounds):
            for option in candidates:
                with _applied(self.model, [name], option, rest):
                    run = self._run(index, calls)
                    if turn == 0:
                        bytes_of[option.name] = run.bytes()
                        if self.link is not None and isinstance(run, BlockRun):
                            moved[option.name] = 0 if option.formats else moved_boundaries(run)
                            whole = whole or moved_whole(run)  # of the first: as it is
                    if turn > 0 or self.cost_model:
                        taken[option.name].append(run.seconds())
        plain = min(taken["none"])
        # Recomputing cannot be faster than not doing so: what looks faster is noise.
        seconds = {name: max(min(times), plain) for name, times in taken.items()}
        costs = _agreed({n: dataclasses.replace(bytes_of[n], seconds=s) for n, s in seconds.items()})
        if self.link is not None:
            agreed = _agreed({name: Cost(n, 0, 0, 0.0) for name, n in {**moved, "offload": whole}.items()})
            moved = {name: most.kept for name, most in agreed.items()}
            candidates.append(BlockOption("offload", (("", "offload"),)))
            whole = moved.pop("offload")
            costs["offload"] = offloaded(costs["none"], whole, costs["none"], self.link)
        return tuple(candidates), costs, moved

    def frame(
        self, kind_of: Sequence[int], costs: Sequence[Cost], optimizer_bytes: int, accumulates: bool
    ) -> Frame:
        """What is there beside the blocks as they run now, within :meth:`few`; ``costs`` are those of a block of each kind."""
        model, skipped = self.model, self.skipped(kind_of)
        held = sum(held_bytes(t) for t in (*model.parameters(), *model.buffers())) + optimizer_bytes
        nothing = Cost(0, 0, 0, 0.0)
        of_blocks = [nothing if i in skipped else costs[kind] for i, kind in enumerate(kind_of)]
        modules = [module for _, module in transformer_blocks(model)]
        frame = measure_frame(
            model, modules, of_blocks, self.loss_fn, self.device, held, accumulates=accumulates, sharded=self.sharded
        )  # fmt: skip
        return _agreed({"frame": frame})["frame"]  # type: ignore[no-any-return]

    def _run(self, index: int, calls: Sequence[Call]) -> BlockRun | ShardedBlockRun:
        configured = transformer_blocks(self.model)[index][1]
        if self.sharded:
            return ShardedBlockRun(configured, self.loss_fn, list(self.model.parameters()), self.device)
        return BlockRun(configured, calls[index], self.device, self.cost_model, model=self.model)

    def frames(
        self,
        block: BlockOption,
        kind_of: Sequence[int],
        costs: Sequence[Mapping[str, Cost]],
        optimizer_bytes: int,
        accumulates: bool,
    ) -> tuple[Frame, Frame | None, Frame | None, float | None]:
        """What is there beside the blocks: as it is, with a compressed loss, with a fused head, and the seconds that one takes."""
        model = self.model
        lean, fused, again = None, None, None
        with _applied(model, [name for name, _ in self.blocks], block), self.few(kind_of):
            measured_frame = functools.partial(
                self.frame, kind_of, [of_kind["block"] for of_kind in costs], optimizer_bytes, accumulates
            )
            frame = measured_frame()
            if self.formats:
                losses = apply_activation_compression(model, targets=[])
                try:
                    lean = measured_frame() if losses.rows else None
                finally:
                    losses.undo()
            # Not under FSDP, which would be left in the middle of a step by a model that asks for logits.
            with contextlib.suppress(LogitsNotComputed), fused_head_applied(model, skip=self.sharded) as head:
                if head is not None:
                    again = head_seconds(head, self.loss_fn, self.device, self.cost_model)
                    fused = None if again is None else measured_frame()
        return frame, lean, fused, again


@contextlib.contextmanager
def _applied(
    model: nn.Module, names: Sequence[str], option: BlockOption, rest: Sequence[str] = ()
) -> Iterator[None]:
    """Blocks configured as an option, the rest checkpointed, and all of it taken back."""
    selected = [Selection(name, "full") for name in rest]
    selected += [selection for block in names for selection in option.selections(block)]
    report = None
    try:
        wrap_selected(model, selected)
        if option.formats:
            targets = {k: v for block in names for k, v in option.targets(block).items()}
            report = apply_activation_compression(model, targets=targets, overrides={"loss": "none"})
        yield
    finally:
        if report is not None:
            report.undo()
        unwrap(model)


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


def _check_plannable(model: nn.Module, blocks: list[tuple[str, nn.Module]], sharded: bool) -> None:
    if not blocks:
        raise ConfigError(f"{KEY}: {type(model).__name__} has no list of transformer blocks.")
    if next(checkpoint_wrappers(model), None) is not None:
        raise ConfigError(
            f"{KEY}: the model is checkpointed already. Switch off activation_checkpointing in the FSDP config."
        )
    if compresses_inside(model) is not None:
        raise ConfigError(BUDGET_ALONE)
    if sharded and any(p.grad is not None for p in model.parameters()):
        raise ConfigError(
            f"{KEY}: parameters hold gradients. Under FSDP plan before the first backward of a step."
        )


def apply_plan(model: nn.Module, plan: MemoryPlan) -> CheckpointingReport:
    """Checkpoint and compress as planned. ``model``: the one planned for, changed in place."""
    report = wrap_selected(model, plan.selections(), offload=plan.offload)
    if compression := plan.compression_options():
        report = dataclasses.replace(report, compression=apply_activation_compression(model, **compression))
    setattr(model, PLAN, plan.to_config())
    return report


def plan_of(model: nn.Module) -> dict[str, Any] | None:
    """What :func:`apply_plan` pinned, as the ``algorithms`` of a YAML; ``None`` for a model without a plan."""
    return next((m.__dict__[PLAN] for m in model.modules() if PLAN in m.__dict__), None)
