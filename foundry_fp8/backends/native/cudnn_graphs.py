"""cuDNN's fused FP8 attention through its Python frontend: the two graphs, their execution plans, and one call that runs them.

The frontend (``nvidia-cudnn-frontend``, a wheel without requirements) is imported where it is used. It finds the cuDNN that torch
brings. A plan is built once for each kind of call, which takes 0.3 to 3 seconds, and kept.

Source: cudnn-frontend 1.22.1, ``docs/operations/Attention.md``, "Scaled Dot Product Attention FP8"; the tensors' kinds, sizes and order are
those of its tables. What ran on an H200: these two graphs, causal, with grouped queries, one sequence a batch.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.util
import threading
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from foundry_fp8.numerics.formats import Float8Format

__all__ = ["AttentionSizes", "Kind", "Role", "backward_graph", "cudnn_version", "forward_graph", "frontend_missing", "run"]  # fmt: skip

Kind = Literal["forward", "backward"]

SINGLE = [1, 1, 1, 1]
"""Sizes, and strides, of a scale or an amax: one float32."""


class Role(enum.IntEnum):
    """What a tensor is in a graph; the number is its uid there, and its key where the graph is run.

    A scale is what cuDNN multiplies by before it rounds to FP8, a descale what it multiplies by to leave it. An amax is of what was
    rounded, before the scale.
    """

    q = 1
    k = 2
    v = 3
    o = 4
    stats = 5
    do = 6
    dq = 7
    dk = 8
    dv = 9
    descale_q = 20
    descale_k = 21
    descale_v = 22
    descale_s = 23
    scale_s = 24
    scale_o = 25
    amax_s = 26
    amax_o = 27
    descale_o = 30
    descale_do = 31
    descale_dp = 32
    scale_dq = 33
    scale_dk = 34
    scale_dv = 35
    scale_dp = 36
    amax_dq = 37
    amax_dk = 38
    amax_dv = 39
    amax_dp = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
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

    def heads_of(self, role: Role) -> int:
        """The heads of a tensor of queries or of keys."""
        return self.kv_heads if role in (Role.k, Role.v, Role.dk, Role.dv) else self.heads

    def layout(self, role: Role) -> tuple[list[int], list[int]]:
        """Sizes and strides of [b, heads, tokens, d] that lies as [b, tokens, heads, d], the rows of a linear."""
        heads = self.heads_of(role)
        row = heads * self.head_dim
        return [self.batch, heads, self.tokens, self.head_dim], [self.tokens * row, self.head_dim, row, 1]

    @property
    def statistics(self) -> tuple[list[int], list[int]]:
        """Sizes and strides of what the softmax keeps, one float32 a query: [b, heads, tokens, 1]."""
        return [self.batch, self.heads, self.tokens, 1], [self.heads * self.tokens, self.tokens, 1, 1]


def frontend_missing() -> str | None:
    """Why the frontend cannot be used, or ``None``."""
    if importlib.util.find_spec("cudnn") is None:
        return "cuDNN's Python frontend is not installed"
    return None


def cudnn_version() -> tuple[int, ...]:
    """The cuDNN that the frontend has loaded."""
    packed: int = _frontend().backend_version()  # 91900 is 9.19.0
    return packed // 10000, packed // 100 % 100, packed % 100


def _frontend() -> Any:
    return importlib.import_module("cudnn")


class _Graph:
    """A graph that is being made, in float32 between FP8 tensors."""

    def __init__(self, sizes: AttentionSizes, handle: Any) -> None:
        kinds = _frontend().data_type
        self.sizes = sizes
        self.e4m3, self.float32 = kinds.FP8_E4M3, kinds.FLOAT
        self.of_gradients = self.e4m3 if sizes.do_format.name == "e4m3" else kinds.FP8_E5M2
        # Without a GPU a graph can be made and validated, for a named architecture: that is how tests run.
        where = {"sm_version": 90} if handle is None else {"handle": handle}
        between = {"intermediate_data_type": self.float32, "compute_data_type": self.float32}
        self.graph = _frontend().pygraph(io_data_type=self.e4m3, **between, **where)

    def tensor(self, role: Role, kind: Any) -> Any:
        dim, stride = self.sizes.layout(role)
        return self.graph.tensor(uid=int(role), dim=dim, stride=stride, data_type=kind)

    def statistics(self) -> Any:
        dim, stride = self.sizes.statistics
        return self.graph.tensor(uid=int(Role.stats), dim=dim, stride=stride, data_type=self.float32)

    def numbers(self, **roles: Role) -> dict[str, Any]:
        """Scales and descales by the names of the arguments that take them."""
        return {
            name: self.graph.tensor(uid=int(role), dim=SINGLE, stride=SINGLE, data_type=self.float32)
            for name, role in roles.items()
        }

    def mask(self) -> dict[str, Any]:
        if not self.sizes.causal:
            return {}
        return {"diagonal_alignment": _frontend().diagonal_alignment.TOP_LEFT, "right_bound": 0}

    def output(self, tensor: Any, role: Role, kind: Any) -> None:
        if role is Role.stats:
            dim, stride = self.sizes.statistics
        elif role.name.startswith("amax"):
            dim, stride = SINGLE, SINGLE
        else:
            dim, stride = self.sizes.layout(role)
        tensor.set_uid(int(role)).set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)


def forward_graph(sizes: AttentionSizes, handle: Any = None) -> Any:
    """``O = softmax(softmax_scale Q K^T) V``, all four E4M3; and the statistics and amaxes. Without a handle for Hopper, to look at."""
    made = _Graph(sizes, handle)
    q, k, v = (made.tensor(role, made.e4m3) for role in (Role.q, Role.k, Role.v))
    numbers = made.numbers(
        descale_q=Role.descale_q,
        descale_k=Role.descale_k,
        descale_v=Role.descale_v,
        descale_s=Role.descale_s,
        scale_s=Role.scale_s,
        scale_o=Role.scale_o,
    )
    scale = {"attn_scale": sizes.softmax_scale, "generate_stats": True}
    o, stats, amax_s, amax_o = made.graph.sdpa_fp8(q=q, k=k, v=v, **numbers, **scale, **made.mask())
    made.output(o, Role.o, made.e4m3)
    for tensor, role in ((stats, Role.stats), (amax_s, Role.amax_s), (amax_o, Role.amax_o)):
        made.output(tensor, role, made.float32)
    return made.graph


def backward_graph(sizes: AttentionSizes, handle: Any = None) -> Any:
    """dQ, dK and dV in the format of dO, and the amaxes. Without a handle for Hopper, to look at."""
    made = _Graph(sizes, handle)
    q, k, v, o = (made.tensor(role, made.e4m3) for role in (Role.q, Role.k, Role.v, Role.o))
    numbers = made.numbers(
        descale_q=Role.descale_q,
        descale_k=Role.descale_k,
        descale_v=Role.descale_v,
        descale_o=Role.descale_o,
        descale_dO=Role.descale_do,
        descale_s=Role.descale_s,
        descale_dP=Role.descale_dp,
        scale_s=Role.scale_s,
        scale_dQ=Role.scale_dq,
        scale_dK=Role.scale_dk,
        scale_dV=Role.scale_dv,
        scale_dP=Role.scale_dp,
    )
    dq, dk, dv, *amaxes = made.graph.sdpa_fp8_backward(
        q=q,
        k=k,
        v=v,
        o=o,
        dO=made.tensor(Role.do, made.of_gradients),
        stats=made.statistics(),
        attn_scale=sizes.softmax_scale,
        use_deterministic_algorithm=sizes.deterministic,
        **numbers,
        **made.mask(),
    )
    for tensor, role in ((dq, Role.dq), (dk, Role.dk), (dv, Role.dv)):
        made.output(tensor, role, made.of_gradients)
    order = (Role.amax_dq, Role.amax_dk, Role.amax_dv, Role.amax_dp)
    for tensor, role in zip(amaxes, order, strict=True):
        made.output(tensor, role, made.float32)
    return made.graph


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
            f"cuDNN {'.'.join(map(str, cudnn_version()))} has no FP8 attention, {kind}, for {sizes}: {error}. "
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
