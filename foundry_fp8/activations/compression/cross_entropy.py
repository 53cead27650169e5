"""Cross-entropy that keeps nothing but its inputs and never holds a second tensor of the logits' size in the forward.

=====================  ==========================================  ===============================================
peak beyond logits     eager, ``F.cross_entropy(logits.float())``  here
=====================  ==========================================  ===============================================
float32                3 times the logits                          once (their gradient) and a chunk
bfloat16, float16      6 times                                     once and two chunks in float32
=====================  ==========================================  ===============================================

Eager keeps the log-softmax, to which backward adds the dense gradient of ``nll_loss`` and that of ``log_softmax``, all
in float32. Here forward and backward each run torch's own kernels on a chunk of rows at a time: ``log_softmax`` and
``nll_loss``, whose row losses are torch's bit for bit (CPU), then ``softmax``, straight into the gradient. No
log-sum-exp is kept: ``softmax``, which computes it again, takes half the time of the elementwise passes that would use
it (CPU), and ``logits - logsumexp`` loses the digits that the two share where logits are large.

A row that torch would make NaN is NaN here, in loss and gradient: one that holds NaN or +Inf, or nothing but -Inf. That
includes the gradient of a row whose target is ignored, whose loss is 0 all the same.

Source:
    Recomputing the softmax by chunks: Cut Your Losses (arXiv:2411.09009), Liger Kernel (arXiv:2410.10989); both go on
    to fuse the projection that makes the logits, which here stays a layer of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_fp8.activations.compression.packing import packable
from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.layers.autocast import autocast_type

__all__ = ["lean_cross_entropy"]

CHUNK = 2**20
"""Elements of a chunk, at least a row: 4 MiB in float32. From 2**18 to 2**20 a CPU takes equally long; where other
processes have its cores, every chunk waits for its threads, and few chunks are better."""

CHUNK_CUDA = 2**24
"""The same on CUDA, 64 MiB, where a chunk costs launches. Not measured."""


def lean_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["none", "mean", "sum"] = "mean",
) -> Tensor:
    """``F.cross_entropy(logits.float(), targets, ignore_index=..., reduction=...)``, in float32.

    What this does not take goes to that function itself, float64 as float64: logits that are not a plain ``[N, V]`` in
    float32, bfloat16 or float16, targets that are not int64 ``[N]`` (probabilities among them), empty ones, and calls
    without gradients. A second derivative is an error.

    Args:
        logits: ``[N, V]``; kept for backward, so not to be modified in place before it.
        targets: int64 ``[N]``. Outside of ``[0, V)`` an IndexError, on CUDA a device assert.
        ignore_index: The target of rows that do not count.
        reduction: ``none`` gives float32 ``[N]``, 0 where ignored; the others a scalar. The mean is over the rows that
            count, NaN if none does.
    """
    if not _takes(logits, targets) or reduction not in ("none", "mean", "sum"):
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        return F.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)
    return _LeanCrossEntropy.apply(logits, targets, ignore_index, reduction)


def _takes(logits: Tensor, targets: Tensor) -> bool:
    return (
        torch.is_grad_enabled()
        and packable(logits)
        and type(targets) in (Tensor, FakeTensor)
        and targets.dtype == torch.int64
        and logits.dim() == 2
        and logits.numel() > 0
        and targets.shape == logits.shape[:1]
        and targets.device == logits.device
    )


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = _chunk_rows(logits)
    return (slice(start, start + step) for start in range(0, logits.shape[0], step))


def _chunk_rows(logits: Tensor) -> int:
    chunk = CHUNK_CUDA if logits.is_cuda or isinstance(logits, FakeTensor) else CHUNK
    return min(max(1, chunk // logits.shape[1]), logits.shape[0])


def _chunk_buffer(logits: Tensor) -> Tensor:
    return logits.new_empty((_chunk_rows(logits), logits.shape[1]), dtype=torch.float32)


class _LeanCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.ignore_index, ctx.reduction = ignore_index, reduction
        losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
        buffer = _chunk_buffer(logits)
        with torch.autocast(autocast_type(logits.device), enabled=False):
            for rows in _chunks(logits):
                x, target = logits[rows], targets[rows]
                log_p = torch.log_softmax(x, 1, dtype=torch.float32, out=buffer[: x.shape[0]])
                losses[rows] = F.nll_loss(log_p, target, ignore_index=ignore_index, reduction="none")
            # One column and torch's own reduction: the sum has its order of additions, and the loss its bits.
            column = torch.zeros_like(targets).masked_fill_(targets == ignore_index, -1)
            return F.nll_loss(-losses[:, None], column, ignore_index=-1, reduction=reduction)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # once_differentiable would return a constant here: dloss of a loss that is the root requires no gradient.
            raise RuntimeError(
                "lean_cross_entropy has no second derivative (create_graph); use F.cross_entropy."
            )
        logits, targets = ctx.saved_tensors
        with torch.autocast(autocast_type(logits.device), enabled=False):
            ignored = targets == ctx.ignore_index
            if ctx.reduction == "mean":
                dloss = dloss / (~ignored).sum()
            # Ignored rows are scaled by 0 instead of left out: a NaN in them stays one, as in torch.
            scale = dloss.expand(targets.shape).masked_fill(ignored, 0.0).unsqueeze(1)
            index = targets.masked_fill(ignored, 0).unsqueeze(1)
            dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
            buffer = None if logits.dtype == torch.float32 else _chunk_buffer(logits)
            for rows in _chunks(logits):
                x, dx = logits[rows], dlogits[rows]
                p = dx if buffer is None else buffer[: x.shape[0]]
                torch.softmax(x, 1, dtype=torch.float32, out=p)
                p.mul_(scale[rows]).scatter_add_(1, index[rows], -scale[rows])
                if buffer is not None:
                    dx.copy_(p)
        return dlogits, None, None, None
