"""cuDNN's fused FP8 attention through its Python frontend: the two graphs, their execution plans, and one call that runs them.

The frontend (``nvidia-cudnn-frontend``, a wheel without requirements) is imported where it is used. It finds the cuDNN that torch
brings. A plan is built once for each kind of call, which takes 0.3 to 3 seconds, and kept.

Source: cudnn-frontend 1.22.1, ``docs/operations/Attention.md``, "Scaled Dot Product Attention FP8"; the tensors' kinds, sizes and order are
those of its tables. What ran on an H200: these two graphs, causal, with grouped queries, one and two sequences a batch.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from foundry_fp8.config.versions import dotted, unpacked
from foundry_fp8.numerics.formats import Float8Format

__all__ = ["AttentionSizes", "Kind", "Role", "backward_graph", "cudnn_version", "forward_graph", "frontend_missing", "run"]  # fmt: skip

Kind = Literal["forward", "backward"]

Role = enum.IntEnum(
    "Role",
    "q k v o stats do dq dk dv descale_q descale_k descale_v descale_s descale_o descale_do descale_dp "
    "scale_s scale_o scale_dp scale_dq scale_dk scale_dv amax_s amax_o amax_dp amax_dq amax_dk amax_dv",
)
"""What a tensor is in a graph; the number is its uid there, and its key where the graph is run.

A scale is what cuDNN multiplies by before it rounds to FP8, a descale what it multiplies by to leave it. An amax is of what was rounded,
before the scale.
"""


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """What a plan is built for."""

    batch: int
    heads: int
    kv_heads: int
    tokens: int
    """Of a sequence: as many queries as keys."""
    head_dim: int
    softmax_scale: float
    causal: bool
    do_format: Float8Format
    """Of dO, dQ, dK and dV."""
    deterministic: bool = True
    """The backward gives the same bits at every run."""

    def layout(self, role: Role) -> tuple[list[int], list[int]]:
        """Sizes and strides: of [b, heads, tokens, d] that lies as [b, tokens, heads, d], the rows of a linear; of one float32 a query; of one."""
        if role == Role.stats:
            return [self.batch, self.heads, self.tokens, 1], [self.heads * self.tokens, self.tokens, 1, 1]
        if role > Role.dv:
            return [1] * 4, [1] * 4
        heads = self.kv_heads if role in (Role.k, Role.v, Role.dk, Role.dv) else self.heads
        row = heads * self.head_dim
        return [self.batch, heads, self.tokens, self.head_dim], [self.tokens * row, self.head_dim, row, 1]


def frontend_missing() -> str | None:
    """Why the frontend cannot be used, or ``None``."""
    found = importlib.util.find_spec("cudnn")
    return None if found is not None else "cuDNN's Python frontend is not installed"


def cudnn_version() -> tuple[int, ...]:
    """The cuDNN that the frontend has loaded."""
    return unpacked(_frontend().backend_version())


def _frontend() -> Any:
    return importlib.import_module("cudnn")


class _Graph:
    """A graph that is being made, in float32 between FP8 tensors."""

    def __init__(self, sizes: AttentionSizes, handle: Any) -> None:
        self.sizes = sizes
        kinds = _frontend().data_type
        # Without a GPU a graph can be made and validated, for a named architecture: that is how tests run.
        where = {"sm_version": 90} if handle is None else {"handle": handle}
        between = {"intermediate_data_type": kinds.FLOAT, "compute_data_type": kinds.FLOAT}
        self.graph = _frontend().pygraph(io_data_type=kinds.FP8_E4M3, **between, **where)
        self.options: dict[str, Any] = {"attn_scale": sizes.softmax_scale}
        if sizes.causal:
            self.options |= {"diagonal_alignment": _frontend().diagonal_alignment.TOP_LEFT, "right_bound": 0}

    def kind(self, role: Role) -> Any:
        kinds = _frontend().data_type
        if role == Role.stats or role > Role.dv:
            return kinds.FLOAT
        e5m2 = role >= Role.do and self.sizes.do_format.name == "e5m2"
        return kinds.FP8_E5M2 if e5m2 else kinds.FP8_E4M3

    def inputs(self, names: str) -> dict[str, Any]:
        """By the frontend's names of arguments, which are ours but for capitals."""
        found = {}
        for name in names.split():
            role = Role[name.lower()]
            dim, stride = self.sizes.layout(role)
            found[name] = self.graph.tensor(uid=int(role), dim=dim, stride=stride, data_type=self.kind(role))
        return found

    def outputs(self, names: str, tensors: Sequence[Any]) -> Any:
        """In the order of the frontend's results. Returns the graph, which is complete."""
        for name, tensor in zip(names.split(), tensors, strict=True):
            role = Role[name]
            dim, stride = self.sizes.layout(role)
            tensor.set_uid(int(role)).set_output(True).set_dim(dim).set_stride(stride)
            tensor.set_data_type(self.kind(role))
        return self.graph


def forward_graph(sizes: AttentionSizes, handle: Any = None) -> Any:
    """``O = softmax(softmax_scale Q K^T) V``, all four E4M3; and the statistics and amaxes. Without a handle for Hopper, to look at."""
    made = _Graph(sizes, handle)
    given = made.inputs("q k v descale_q descale_k descale_v descale_s scale_s scale_o")
    found = made.graph.sdpa_fp8(**given, **made.options, generate_stats=True)
    return made.outputs("o stats amax_s amax_o", found)


def backward_graph(sizes: AttentionSizes, handle: Any = None) -> Any:
    """dQ, dK and dV in the format of dO, and the amaxes. Without a handle for Hopper, to look at."""
    made = _Graph(sizes, handle)
    given = made.inputs(
        "q k v o dO stats descale_q descale_k descale_v descale_o descale_dO descale_s descale_dP "
        "scale_s scale_dQ scale_dK scale_dV scale_dP"
    )
    repeats = {"use_deterministic_algorithm": sizes.deterministic}
    found = made.graph.sdpa_fp8_backward(**given, **made.options, **repeats)
    return made.outputs("dq dk dv amax_dq amax_dk amax_dv amax_dp", found)


_GRAPHS = {"forward": forward_graph, "backward": backward_graph}
_one_at_a_time = threading.Lock()
"""A handle has one stream; autograd's backward runs in a thread of its own."""


@functools.cache
def _handle(device: int) -> Any:
    """Of one device, which is the current one."""
    return _frontend().create_handle()


@functools.lru_cache(maxsize=128)
def _plan(kind: Kind, sizes: AttentionSizes, device: int) -> tuple[Any, int]:
    """A graph that is built for a device, and the bytes of its workspace."""
    cudnn = _frontend()
    graph = _GRAPHS[kind](sizes, _handle(device))
    try:
        graph.build([cudnn.heur_mode.A])
    except cudnn.cudnnGraphNotSupportedError as error:
        raise RuntimeError(
            f"cuDNN {dotted(cudnn_version())} has no FP8 attention, {kind}, for {sizes}: {error}. "
            "Set algorithms.fp8.attention: false."
        ) from error
    return graph, max(graph.get_workspace_size(), 1)


def run(kind: Kind, sizes: AttentionSizes, tensors: Mapping[Role, Tensor]) -> None:
    """Run a graph on the current stream. Waits for nothing.

    Args:
        kind: Which.
        sizes: Of what.
        tensors: Every tensor of the graph: inputs, and memory for outputs. Amaxes are zero, as they may be raised atomically.
    """
    device = tensors[Role.q].device
    with _one_at_a_time:
        handle = _handle(device.index)
        stream = torch.cuda.current_stream(device).cuda_stream
        _frontend().set_stream(handle=handle, stream=stream)
        graph, size = _plan(kind, sizes, device.index)
        # From torch's allocator, which has it at hand after the first call and knows on which stream it is free again.
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        pointers = {int(role): tensor.data_ptr() for role, tensor in tensors.items()}
        graph.execute(pointers, workspace.data_ptr(), handle=handle)
