"""FSDP2 (``fully_shard``) and its HSDP: both legs of every unit through a compressing process group.

The groups of each unit's mesh are replaced: torch has a setter for the reduce-scatter alone (``set_custom_reduce_scatter``, 2.9), and for
a whole module, whose parameters may be on several meshes.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from foundry_fp8.compat import cpu_stream_events
from foundry_fp8.compat.fsdp2 import Unit, lazy_init, units_of
from foundry_fp8.config import refuse
from foundry_fp8.distributed.compressed_group import CompressedGroup, Leg
from foundry_fp8.distributed.compression.config import KEY
from foundry_fp8.distributed.compression.fsdp2_fp8_weights import share_amaxes
from foundry_fp8.distributed.compression.fsdp2_parameters import BlockCodec, GatheredParameter
from foundry_fp8.distributed.compression.legs import LEG_CLASHES, Legs, replicate_leg, shard_leg
from foundry_fp8.distributed.compression.runtime import Compression
from foundry_fp8.distributed.rows import Row
from foundry_fp8.distributed.traffic import CountingGroup, inner_group
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.wire_format import WireFormat

__all__ = ["attach_fsdp2"]

log = logging.getLogger(__name__)


def attach_fsdp2(model: nn.Module, compression: Compression) -> None:
    """Compress the units' reduce-scatters, their all-reduces if the mesh is 2-D, and their all-gathers.

    Raises:
        ConfigError: What was asked for cannot run on this mesh; see the messages.
    """
    units = units_of(model)
    lazy_init(model)
    fewer, copies = any(unit.reshards_to_fewer for unit in units), units[0].replicate_group is not None
    legs = Legs(config=compression.config, shards=True, replicates=copies, reshards_to_fewer=fewer)
    refuse(LEG_CLASHES, legs)
    for unit in units:
        _attach_unit(unit, compression)
    if compression.config.parameters != "none":
        _attach_parameters(model, units, compression)


def _attach_unit(unit: Unit, compression: Compression) -> None:
    if unit.replicate_group is not None and unit.device.type == "cpu":
        cpu_stream_events.apply()
    row = _RowOf(unit, compression)

    shard = inner_group(unit.shard_group)
    ranks = shard.size()

    def rows(numel: int) -> list[Row] | None:
        known = row(numel // ranks)
        return None if known is None else [known] * ranks

    leg = shard_leg(compression, shard, rows, name=unit.name, device=unit.device, nbytes=unit.nbytes)
    wrapped = _UnitGroup(shard, unit, compression, leg)
    scatter = None
    if unit.scatter_group is not None:
        own = inner_group(unit.scatter_group)
        scatter = CompressedGroup(own, compression.traffic, compression.switch, leg)

    compressed_replicate = None
    if unit.replicate_group is not None:
        replicate = inner_group(unit.replicate_group)
        leg = replicate_leg(
            compression,
            replicate,
            row,
            name=unit.name,
            device=unit.device,
            numel=row.of_trained().numel,
            nbytes=unit.nbytes // ranks,
        )
        compressed_replicate = CompressedGroup(replicate, compression.traffic, compression.switch, leg)
    unit.replace_groups(wrapped, compressed_replicate, scatter)


class _UnitGroup(CompressedGroup):
    """The shard leg's group of one unit; also counts what its gather would take."""

    def __init__(
        self, inner: dist.ProcessGroup, unit: Unit, compression: Compression, leg: Leg | None
    ) -> None:
        super().__init__(inner, compression.traffic, compression.switch, leg)
        self.gathered_bytes = sum(p.padded_numel * p.gathered_dtype.itemsize for p in unit.parameters)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        if opts is not None:  # FSDP2's gather of the unit, and not a leg of ours
            self.traffic.count_logical(self.gathered_bytes * (self.size() - 1))
        return super()._allgather_base(output, input, opts)


class _RowOf:
    """What a rank's shard of a unit's gradients is made of: the padded rows of one parameter after the other.

    FSDP2 leaves out parameters without a gradient and does not say which. Those that train are known; a message of another size is
    left as it is, with a warning.
    """

    def __init__(self, unit: Unit, compression: Compression) -> None:
        self.unit = unit
        self.config = compression.config
        self._warned = False

    def of_trained(self) -> Row:
        """The row of all parameters that train."""
        sections = [
            (
                parameter.padded_numel,
                self.config.why_exact(parameter.size, parameter.dtype.itemsize) is not None,
            )
            for parameter in self.unit.parameters
            if parameter.trains
        ]
        return Row.join(sections, self.config.block_size)

    def __call__(self, numel: int) -> Row | None:
        """The row of a shard of ``numel`` elements, or ``None``."""
        row = self.of_trained()
        if row.numel == numel:
            return row
        if not self._warned:
            self._warned = True
            log.warning(
                "%s: a gradient of the FSDP2 unit %r has %d elements a rank and its trainable parameters have %d: some got no "
                "gradient. Such messages travel uncompressed.",
                KEY,
                self.unit.name,
                numel,
                row.numel,
            )
        return None


def _attach_parameters(model: nn.Module, units: list[Unit], compression: Compression) -> None:
    """Compress the all-gathers of the units' matrices."""
    wire = compression.config.wire(compression.config.parameters)
    assert wire is not None
    fp8_weights: dict[dist.ProcessGroup, list[tuple[GatheredParameter, FP8Linear]]] = defaultdict(list)
    for unit in units:
        group = inner_group(unit.shard_group)
        for gathered in _gathered_of(unit, compression, wire):
            found = gathered.parameter
            own_weight = found.name == "weight" and not found.shared
            if wire.name == "e4m3" and own_weight and isinstance(found.module, FP8Linear):
                fp8_weights[group].append((gathered, found.module))
    for group, weights in fp8_weights.items():
        share_amaxes(model, weights, wire, CountingGroup(group, compression.traffic))


def _gathered_of(unit: Unit, compression: Compression, wire: WireFormat) -> list[GatheredParameter]:
    """Bind the extension to the unit's matrices."""
    config = compression.config
    path = compression.path(inner_group(unit.shard_group))
    gathered = []
    for parameter in unit.parameters:
        name = f"{unit.name}.{parameter.name}".lstrip(".")
        embedding = "an embedding" if isinstance(parameter.module, nn.Embedding) else None
        reason = path.why_not or embedding or parameter.unsupported_reason
        reason = reason or config.why_exact(parameter.size, parameter.dtype.itemsize)
        compression.note(name, "parameters", config.parameters, "FSDP2 all-gather", reason)
        if not reason:
            gathered.append(GatheredParameter(parameter, BlockCodec(wire), compression.traffic))

    def bind(*_: Any) -> None:
        for parameter in gathered:
            parameter.bind()

    bind()
    # reset_sharded_param (load_state_dict, module.to) makes new local tensors, on ranks with padding only: without
    # this the ranks would disagree on the size of the next message.
    unit.module.register_forward_pre_hook(bind, prepend=True)
    return gathered
