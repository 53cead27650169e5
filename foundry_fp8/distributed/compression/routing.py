"""Which hops the messages of a process group take, from the places of its ranks alone: training and the planner ask the same."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.compression.config import KEY

__all__ = ["Path", "path_of"]


@dataclasses.dataclass(frozen=True)
class Path:
    """How the messages of one group travel."""

    why_not: str | None = None
    """Why they are not worth compressing; ``None`` where they are."""
    inside: int = 1
    """Ranks of a node that reduce among themselves first, exactly or coded; 1 where there is one hop."""


def path_of(ranks: Sequence[int], *, world: int, per_node: int, scope: str) -> Path:
    """How the messages among ``ranks`` are compressed.

    ``ranks`` are global and in order; nodes hold consecutive ranks.

    Raises:
        ConfigError: ``scope: inter_node`` on a single node, or a group with more ranks on one node than on another.
    """
    several = world > per_node
    if scope == "inter_node" and not several:
        raise ConfigError(
            f"{KEY}.scope: inter_node, but all {per_node} ranks are on one node: nothing crosses nodes. "
            "Use scope: all to compress inside the node."
        )
    if len(ranks) == 1:
        return Path("a group of one rank")
    if scope == "all" or not several:
        return Path()
    on_nodes = Counter(rank // per_node for rank in ranks)
    if len(on_nodes) == 1:
        return Path("all its ranks are on one node")
    inside = on_nodes[ranks[0] // per_node]
    if set(on_nodes.values()) != {inside}:
        raise ConfigError(
            f"{KEY}.scope: {scope} needs as many ranks on each node, and a group of {len(ranks)} of the {world} ranks "
            f"has {min(on_nodes.values())} to {max(on_nodes.values())}. Shard inside nodes (hybrid_sharding.shard: node), or use scope: all."
        )
    return Path(inside=inside)
