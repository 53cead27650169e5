"""How a YAML's run is spread: the batch and the copies of the model, whether it fits, and the routes of compressed collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from foundry_fp8.cli.cluster import cluster_of
from foundry_fp8.cli.finding import Finding
from foundry_fp8.cli.hardware import PER_NODE, Hardware
from foundry_fp8.cli.yaml_model import optimizer_bytes_of
from foundry_fp8.config import ConfigError, format_bytes
from foundry_fp8.distributed.compression.routing import path_of
from foundry_fp8.distributed.fsdp_settings import degrees
from foundry_fp8.run.settings import Run

__all__ = ["check_memory", "check_ranks"]

ROOM = 0.6
"""Of a GPU's memory for what is sharded; the rest is activations and what is gathered."""


def check_ranks(
    config: Mapping[str, Any], run: Run, model: Any, hardware: Hardware
) -> tuple[Run, list[Finding]]:
    """The steps of a rank, and the run with the number of its copies."""
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
    try:
        copies = degrees(
            run.fsdp,
            run.hybrid_sharding,
            model,
            world=devices,
            per_node=min(PER_NODE, devices),
            device_bytes=hardware.gpu.memory_bytes,
        )
        run = dataclasses.replace(run, replicate=copies[0], shard=copies[1])
        _check_routes(run)
    except ConfigError as error:
        found.append(Finding("ranks", "error", str(error)))
    return run, found


def _check_routes(run: Run) -> None:
    """Raise what ``compressed_communication`` raises about the places of the ranks that it sends among."""
    if run.compressed_communication is not None and run.ranks > 1:
        for ranks in (range(run.shard), range(0, run.ranks, run.shard)):
            path_of(ranks, world=run.ranks, per_node=min(PER_NODE, run.ranks), scope=run.compressed_communication.scope)  # fmt: skip


def check_memory(config: Mapping[str, Any], run: Run, model: Any, hardware: Hardware) -> list[Finding]:
    """What a rank holds all the time, and whether it leaves room for the rest."""
    from foundry_fp8.planning.memory.cluster import static_bytes

    if run.replicate * run.shard != run.ranks:
        return []  # said already
    memory = hardware.gpu.memory_bytes
    try:
        cluster = cluster_of(config, run.ranks, None, model, memory)
        state = optimizer_bytes_of(model, config)
    except ConfigError as error:
        return [Finding("memory", "warning" if run.tensor_parallel else "error", str(error))]
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    buffers = sum(
        b.numel() * (min(cluster.gathered, b.element_size()) if b.is_floating_point() else b.element_size())
        for b in model.buffers()
    )
    each = static_bytes(model, cluster, buffers=buffers, optimizer_bytes=state, accumulates=True)
    total = trained + frozen
    size = f"{total / 1e9:.2f} B parameters" if total >= 1e8 else f"{total / 1e6:.2f} M parameters"
    if frozen:
        size += f", {trained / 1e6:.0f} M of them trained"
    text = (
        f"{size}: {format_bytes(each)} a GPU of {format_bytes(int(memory))} for parameters, gradients and optimizer states over "
        f"{run.shard} rank{'s' if run.shard > 1 else ''}; activations: foundry-fp8 plan memory"
    )
    fits = each <= ROOM * memory
    more = "" if fits else ". That leaves too little: shard over more ranks"
    return [Finding("memory", "ok" if fits else "error", text + more)]
