"""What moving to host memory and back takes: bytes over the host link, and the seconds of it that nothing hides.

The store (``foundry_fp8/activations/offload/store.py``) copies what a unit saves beside that unit's forward, and back beside the backward of the
unit after it; the computation waits for what is left. With units alike, ``b`` bytes each, a unit then takes longer by::

    max(0, b / out - forward) + max(0, b / back - backward)

where ``forward`` is a third of what the block takes without checkpoints (a backward has two products for each of the forward's) and ``backward`` the
rest, recompute included. Left out: what copies take of the device's memory bandwidth (a twentieth at 55 GB/s beside 3.35 TB/s), and GPUs that
share a host's memory or a PCIe switch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from foundry_fp8.activations.offload.store import moves
from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.compat.storages import storage_number
from foundry_fp8.model_structure.wrappers import checkpoint_wrappers
from foundry_fp8.planning.memory.measure import BlockRun
from foundry_fp8.planning.memory.solver import Cost

__all__ = ["HOST_LINKS", "HostLink", "host_link_of", "moved_boundaries", "moved_whole", "offloaded"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostLink:
    """Between a GPU and its host's memory, bytes a second in each direction by itself, measured by others."""

    out: float
    back: float
    source: str


HOST_LINKS = {
    "pcie4": HostLink(
        out=24e9, back=24.8e9, source="nvbandwidth, A100, PCIe 4 x16 (forums.developer.nvidia.com/t/352186)"
    ),
    "pcie5": HostLink(
        out=55e9,
        back=55.6e9,
        source="nvbandwidth, PCIe 5 x16 (developer.nvidia.com/blog/?p=115566: 55.6 GB/s to the device; out taken as the same)",
    ),
    "c2c": HostLink(
        out=297e9,
        back=375e9,
        source="GH200, NVLink-C2C (Schieffer et al. 2024, Harnessing Integrated CPU-GPU System Memory for HPC)",
    ),
}

PCIE4 = ("A10", "A30", "A40", "L4", "RTX 40", "ADA")
"""In names of Ampere's and Ada's GPUs: A10 and A100, L4, L40 and L40S, RTX 6000 Ada."""


def host_link_of(gpu: str) -> HostLink:
    """The link of a GPU of this name: C2C beside Grace, PCIe 4 on Ampere and Ada, PCIe 5 else."""
    name = gpu.upper()
    if any(word in name for word in ("GH200", "GB200", "GB300")):
        return HOST_LINKS["c2c"]
    return HOST_LINKS["pcie4" if any(word in name for word in PCIE4) else "pcie5"]


def moved_whole(run: BlockRun) -> int:
    """Bytes that the store takes of all that a block saves."""
    storages: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if moves(x):
            storages[storage_number(x.untyped_storage())] = x.untyped_storage().nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        out = run.forward()  # holds every storage, so that none has another's address
    del out
    return sum(storages.values())


def moved_boundaries(run: BlockRun) -> int:
    """Bytes that the store takes of the inputs of the block's checkpoints; what two of them read, as in a parallel block, stays."""
    storages: dict[int, tuple[Any, set[int]]] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        for x in tree_iter((args, kwargs)):
            if isinstance(x, torch.Tensor) and x.requires_grad and moves(x):
                storage = x.untyped_storage()  # held: no other gets its address
                storages.setdefault(storage_number(storage), (storage, set()))[1].add(id(module))

    with contextlib.ExitStack() as hooks:
        for _, wrapper in checkpoint_wrappers(run.block):
            hooks.enter_context(wrapper.register_forward_pre_hook(note, with_kwargs=True))
        run.forward()
    return sum(storage.nbytes() for storage, readers in storages.values() if len(readers) == 1)


def offloaded(cost: Cost, moved: int, plain: Cost, link: HostLink) -> Cost:
    """``cost`` with ``moved`` bytes of what it keeps in host memory.

    ``plain`` is the block's without checkpoints.
    """
    forward = plain.seconds / 3
    exposed = max(0.0, moved / link.out - forward) + max(0.0, moved / link.back - (cost.seconds - forward))
    moved = min(moved, cost.kept)
    return dataclasses.replace(cost, kept=cost.kept - moved, moved=moved, seconds=cost.seconds + exposed)
