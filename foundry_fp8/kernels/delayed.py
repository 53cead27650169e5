"""The delayed-scaling update of a whole model in one launch.

Reference: :meth:`foundry_fp8.layers.delayed_scaling.DelayedScalingState.update`, after its all-reduce. In plain torch that is a
dozen small kernels over a ``[L, T]`` history; here one program owns a column, so that the roll happens in place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_fp8.kernels.launch import launch, on_its_device
from foundry_fp8.kernels.scales import FLOAT32_MAX, INF

__all__ = ["update_delayed_"]

COLUMNS = 32
CHUNK = 64
"""History entries a program holds at once: a history of 1024 is 16 round trips to memory, not 1024."""


@on_its_device
def update_delayed_(scale: Tensor, amax_history: Tensor, scaled_max: Tensor, *, use_max: bool) -> None:
    """Roll the histories and set the scales, both in place.

    Args:
        scale: ``[T]`` float32. Written in place: a captured graph that reads it sees the new values.
        amax_history: ``[L, T]`` float32, contiguous; entry 0 holds the pass that ends now and becomes 0.
        scaled_max: ``[T]`` float32: the format's maximum over ``2 ** margin``.
        use_max: The amax is the largest of the history, otherwise that of the pass that ends now.
    """
    length, tensors = amax_history.shape
    given = scale, amax_history, scaled_max, length, tensors
    constants = {"USE_MAX": use_max, "COLUMNS": COLUMNS, "CHUNK": CHUNK, "num_warps": 4}
    launch(_update_kernel, triton.cdiv(tensors, COLUMNS), *given, **constants)
    torch.autograd.graph.increment_version((scale, amax_history))  # torch does not see what a kernel writes


@triton.jit
def _update_kernel(
    scale_ptr, history_ptr, scaled_max_ptr, L, T,
    USE_MAX: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < T
    current = tl.load(history_ptr + columns, mask=inside, other=0.0)
    seen = inside & (current != 0)
    amax = current
    # Entry i takes entry i + 1. A chunk is read whole before any of it is written.
    for first in range(1, L, CHUNK):
        entries = first + tl.arange(0, CHUNK)
        pointers = history_ptr + entries[:, None] * T + columns[None, :]
        values = tl.load(pointers, mask=(entries < L)[:, None] & inside[None, :], other=0.0)
        if USE_MAX:
            amax = tl.maximum(amax, tl.max(values, axis=0))
        tl.debug_barrier()
        tl.store(pointers - T, values, mask=(entries < L)[:, None] & seen[None, :])
    tl.debug_barrier()
    if L > 1:
        tl.store(history_ptr + (L - 1) * T + columns, current, mask=seen)
    tl.store(history_ptr + columns, tl.zeros_like(current), mask=inside)

    scaled_max = tl.load(scaled_max_ptr + columns, mask=inside, other=1.0)
    scale = tl.div_rn(scaled_max, tl.where(seen, amax, 1.0))
    scale = tl.where(scale == INF, FLOAT32_MAX, scale)
    tl.store(scale_ptr + columns, scale, mask=seen & (amax < INF))
