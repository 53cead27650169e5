"""A memory plan: the measurements it was made from, what each block does, and both as a table and as YAML."""

from __future__ import annotations

import dataclasses
import io
from collections import Counter
from collections.abc import Mapping
from typing import Any

from foundry_fp8.activations.checkpointing.policy import policy_name
from foundry_fp8.activations.checkpointing.targets import Selection
from foundry_fp8.activations.compression.apply import LOSSY
from foundry_fp8.config import format_bytes
from foundry_fp8.model_structure.block_numbers import format_blocks
from foundry_fp8.planning.memory.host_link import HostLink, offloaded
from foundry_fp8.planning.memory.options import BlockOption
from foundry_fp8.planning.memory.solver import Cost, Frame, predict_peak

__all__ = ["Measurements", "MemoryPlan"]

PLANNED = ("activation_checkpointing", "activation_compression")
"""The algorithms that a plan is made of."""


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
        fused: The frame with ``fused_head``; ``None`` where the model has no head for it, or has it fused already.
        fused_seconds: What that adds to a microbatch: the head's forward once more.
        link: Bandwidth to host memory; ``None`` on a CPU, under FSDP (not measured), or where there is nothing to move.
        boundaries: For each kind, by option, the bytes that ``offload: true`` moves.
    """

    names: tuple[str, ...]
    kind: tuple[int, ...]
    options: tuple[tuple[BlockOption, ...], ...]
    costs: tuple[dict[str, Cost], ...]
    frame: Frame
    lean: Frame | None
    source: str
    classes: tuple[str, ...]
    fused: Frame | None = None
    fused_seconds: float = 0.0
    link: HostLink | None = None
    boundaries: tuple[dict[str, int], ...] = ()

    def by_kind(self, offload: bool) -> list[dict[str, Cost]]:
        """For each kind the costs of its options, with the inputs of checkpoints in host memory or not."""
        if not offload or self.link is None:
            return list(self.costs)
        return [
            {
                name: offloaded(cost, moved[name], costs["none"], self.link) if moved.get(name) else cost
                for name, cost in costs.items()
            }
            for costs, moved in zip(self.costs, self.boundaries, strict=True)
        ]

    def costs_of(self, chosen: list[str], offload: bool = False) -> list[Cost]:
        """The cost of each block under ``chosen``."""
        costs = self.by_kind(offload)
        return [costs[kind][name] for kind, name in zip(self.kind, chosen, strict=True)]

    def peak(self, option: str) -> int:
        """Predicted peak bytes with one option in every block and an unchanged loss."""
        return predict_peak(self.costs_of([option] * len(self.names)), self.frame)

    def seconds(self, option: str) -> float:
        """Seconds of the blocks in a microbatch with one option in every block."""
        return sum(cost.seconds for cost in self.costs_of([option] * len(self.names)))


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The option that each block takes.

    Attributes:
        measurements: What it was made from.
        chosen: One option name a block.
        frame: What is held outside the blocks: ``measurements.frame`` or ``measurements.lean``.
        budget: Bytes that the peak may take.
        offload: Whether checkpoint inputs go to host memory.
    """

    measurements: Measurements
    chosen: tuple[str, ...]
    frame: Frame
    budget: int
    offload: bool

    @property
    def predicted_peak(self) -> int:
        """Peak bytes of a step, parameters, gradients and optimizer state included."""
        return predict_peak(self.costs(), self.frame)

    def costs(self, offload: bool | None = None) -> list[Cost]:
        """The cost of each block; ``offload`` overrides the plan's own."""
        return self.measurements.costs_of(list(self.chosen), self.offload if offload is None else offload)

    @property
    def added_seconds(self) -> float:
        """Seconds that the blocks take longer in a microbatch than without checkpoints and compression."""
        return sum(c.seconds for c in self.costs()) - self.measurements.seconds("none")

    def option(self, index: int) -> BlockOption:
        """The option of block ``index``."""
        kind = self.measurements.kind[index]
        return next(o for o in self.measurements.options[kind] if o.name == self.chosen[index])

    def selections(self) -> list[Selection]:
        """The modules to checkpoint."""
        return [
            s for i, block in enumerate(self.measurements.names) for s in self.option(i).selections(block)
        ]

    def formats(self) -> dict[str, str]:
        """``{module: format}``: the ``targets`` of ``activation_compression``."""
        return {
            module: form
            for i, block in enumerate(self.measurements.names)
            for module, form in self.option(i).targets(block).items()
        }

    def compression_options(self) -> dict[str, Any]:
        """Options of ``activation_compression``; empty where the plan does not use it."""
        formats = self.formats()
        if not formats and self.frame is self.measurements.frame:
            return {}
        return {"targets": formats or []}

    @property
    def lossy(self) -> tuple[str, ...]:
        """The formats in the plan that round activations, and so gradients."""
        return tuple(sorted(set(self.formats().values()) & LOSSY))

    def to_config(self) -> dict[str, Any]:
        """The ``algorithms`` section of a YAML that runs exactly this plan."""
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
        if compression := self.compression_options():
            config["activation_compression"] = compression
        return config

    def to_yaml(self, algorithms: Mapping[str, Any] | None = None) -> str:
        """:meth:`to_config` as YAML text, after the other ``algorithms`` of the run, which it leaves as they are."""
        from ruamel.yaml import YAML

        plan, out, writer = self.to_config(), io.StringIO(), YAML(typ="safe", pure=True)
        writer.default_flow_style, writer.width = None, 4096
        writer.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
        kept = {name: options for name, options in (algorithms or {}).items() if name not in PLANNED}
        writer.dump({"algorithms": {**kept, **plan}}, out)
        return out.getvalue().rstrip() + ("" if plan else "  # everything fits as it is")

    def __str__(self) -> str:
        return self.text()

    def text(self, algorithms: Mapping[str, Any] | None = None) -> str:
        """The table, the plan and its :meth:`to_yaml`."""
        m = self.measurements
        count = Counter(zip(m.kind, self.chosen, strict=True))
        rows = [("blocks", "option", "keeps", "in host memory", "backward peak", "seconds", "added")]
        for kind, costs in enumerate(m.by_kind(self.offload)):
            for name, cost in costs.items():
                rows.append(
                    (
                        str(count[kind, name] or ""),
                        name,
                        format_bytes(cost.kept),
                        format_bytes(cost.moved) if cost.moved else "",
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
            f"memory plan ({'rounds to ' + ', '.join(self.lossy) if self.lossy else 'rounds nothing'}): "
            f"predicted peak {format_bytes(self.predicted_peak)} of {format_bytes(self.budget)}, "
            f"{self.added_seconds:+.4g} s a microbatch in the blocks "
            f"(no checkpointing: {format_bytes(m.peak('none'))}; every block: {format_bytes(m.peak('block'))}, "
            f"{m.seconds('block') - m.seconds('none'):+.4g} s)\n{table}\n{self._host()}{self._fused_head()}{m.source}\n{self.to_yaml(algorithms)}"
        )

    def _host(self) -> str:
        """The lines on host memory: what the plan moves there, and what ``offload: true`` would add."""
        link = self.measurements.link
        if link is None:
            uncounted = "offload: true is not in these figures: what it moves is known on a GPU without FSDP and in dry runs\n"
            return uncounted if self.offload else ""
        text = ""
        as_is, moving = self.costs(), self.costs(offload=True)
        if moved := sum(cost.moved for cost in as_is):
            text = f"{format_bytes(moved)} a microbatch go to host memory and back ({link.source})\n"
        if more := sum(cost.moved for cost in moving) - moved:
            seconds = sum(cost.seconds for cost in moving) - sum(cost.seconds for cost in as_is)
            text += (
                f"option offload: true (exact): {format_bytes(more)} a microbatch to host memory and back, {seconds:+.2g} s that nothing "
                f"hides; this plan's peak is then {format_bytes(predict_peak(moving, self.frame))} ({link.source})\n"
            )
        return text

    def _fused_head(self) -> str:
        fused = self.measurements.fused
        if fused is None:
            return ""
        now, after = (max(f.head_peak, f.head_backward_peak) for f in (self.frame, fused))
        peak = predict_peak(self.costs(), fused)
        return (
            f"option fused_head: {{}} (exact; needs model.use_train_metrics: false): head and loss take {format_bytes(after)} instead of "
            f"{format_bytes(now)}, {self.measurements.fused_seconds:+.2g} s; this plan's peak is then {format_bytes(peak)}\n"
        )
