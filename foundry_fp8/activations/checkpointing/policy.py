"""What a checkpoint keeps: nothing (full), the outputs of matmuls and attention (selective), a list of ops, or all, in host memory (offload)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import torch

from foundry_fp8.compat.selective_checkpoint import selective_contexts
from foundry_fp8.config import ConfigError, Parse, nearest
from foundry_fp8.layers.product_operators import ATTENTION, LINEAR

__all__ = ["SELECTIVE_OPS", "CheckedPolicy", "Policy", "check_policy", "context_fn_for", "policy_name"]

Policy = Literal["full", "selective", "offload"] | Sequence[str]
NAMED = ("full", "selective", "offload")

SELECTIVE_OPS = (*LINEAR, *ATTENTION, "aten.convolution")
"""What ``selective`` keeps: the ops that cost the most to run again for the bytes they return.

Source: ``torch._functorch.partitioners.get_default_op_list().compute_intensive_ops``, without the ops no decoder has,
and with every GEMM and attention op of torch, flash-attn and this package. Those not installed are passed over.
"""


def check_policy(policy: Any, key: str) -> Policy:
    """``policy``; raises :class:`ConfigError` unless it is ``full``, ``selective``, ``offload`` or a list of ops that exist."""
    if policy in NAMED:
        return policy
    if isinstance(policy, str) or not isinstance(policy, Sequence) or not policy:
        raise ConfigError(
            f"{key}: {policy!r} is not full, selective, offload or a list of ops.{nearest(policy, NAMED)}"
        )
    for index, op in enumerate(policy):
        if not isinstance(op, str) or not _overloads(op):
            close = nearest(op, SELECTIVE_OPS)
            raise ConfigError(
                f"{key}[{index}]: {op!r} is not an op of torch.ops. Write it as namespace.name, such as aten.mm.{close}"
            )
    return policy


CheckedPolicy = Annotated[Policy, Parse(check_policy, "full, selective, offload or a list of ops")]


def policy_name(policy: Policy) -> str:
    """As a table shows it."""
    return policy if isinstance(policy, str) else "save " + ", ".join(policy)


def context_fn_for(policy: Policy) -> Callable[[], tuple[Any, Any]] | None:
    """The ``context_fn`` that :func:`torch.utils.checkpoint.checkpoint` takes; ``None`` for full checkpoints.

    Those get none, not even torch's own that does nothing: ``torch.compile`` cannot trace it.
    """
    if policy == "full":
        return None
    return functools.partial(_selective_contexts, SELECTIVE_OPS if policy == "selective" else tuple(policy))


def _selective_contexts(names: Sequence[str]) -> tuple[Any, Any]:
    # Operators are looked up here, because they cannot be pickled and names can.
    return selective_contexts([op for name in names for op in _overloads(name)])


def _overloads(name: str) -> list[Any]:
    """Every overload of ``namespace.name``, or the one of ``namespace.name.overload``; empty if there is none."""
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    # Any namespace comes into being when it is asked for; an operator does not.
    packet: Any = (
        getattr(getattr(torch.ops, namespace), packet_name, None) if namespace and packet_name else None
    )
    if not hasattr(packet, "overloads"):
        return []
    # out= variants write into their argument; there is no output of theirs to keep.
    found = [found for found in packet.overloads() if "out" not in found and overload in ("", found)]
    return [getattr(packet, found) for found in found]
