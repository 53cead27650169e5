"""The cross-entropy of each row, of logits that are made a chunk of rows at a time, in the forward and again in the backward.

For a head of ``V`` words, ``N`` rows of width ``D``, and chunks of ``C`` rows, beside what the head's parameters take:

=====================  ==========================================  ===========================
bytes                  logits and ``F.cross_entropy``              here
=====================  ==========================================  ===========================
kept for backward      logits and their log-softmax, ``N x V``     the rows, ``N x D``
peak                   3 (float32) to 8 (bfloat16) ``N x V``       3 ``C x V``, dW in float32
=====================  ==========================================  ===========================

It is the head's own forward that runs on every chunk, under the autocast of the call, with what the model does to its logits
behind it, so that each row's loss and gradient are those of the whole product but for the order in which a matrix product adds up. A
gradient of a parameter is a sum over chunks in float32 (float64 for float64): each chunk's part is rounded to what the product gives,
u |dW_c|, and the sum once more to the parameter's dtype. The backward makes the logits once more, ``2 N D V`` operations.

Source:
    Chunks of rows: Liger Kernel (arXiv:2410.10989), which keeps the gradients of its forward and so needs the loss to be a mean; making
    the logits again instead takes any reduction and any factor: Cut Your Losses (arXiv:2411.09009).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_fp8.layers.autocast import autocast_now, autocast_type, without_autocast
from foundry_fp8.model_structure.unchanged import random_state

__all__ = ["IGNORE", "HeadCall", "row_losses"]

IGNORE = -100
"""The target of rows without loss: LLM Foundry's and transformers'."""

CHUNK = 2**22
"""Elements of a chunk of logits, at least a row: 16 MiB in float32."""

CHUNK_CUDA = 2**26
"""The same on CUDA: 512 rows of 128k words, 256 MiB in float32, which a GEMM of that height still runs well. Not measured."""


class HeadCall:
    """One call of a head, to be repeated on chunks of its rows.

    Args:
        head: The module.
        logits: From rows to what the loss reads: the head's own forward, and what the model does behind it.
        rows: What it is called with, ``[N, D]``.
    """

    def __init__(self, head: nn.Module, logits: Callable[[Tensor], Tensor], rows: Tensor) -> None:
        self.logits, self.slots = logits, list(_slots(head))
        self.type, self.autocast = autocast_type(rows.device), autocast_now(rows.device)
        dropout = any(isinstance(m, nn.Dropout) and m.p and m.training for m in head.modules())
        self.random = random_state(rows.device) if dropout else None

    @property
    def tensors(self) -> list[Tensor]:
        """The head's parameters: under FSDP1 tensors that it gathered."""
        return [getattr(module, name) for module, name in self.slots]

    @contextlib.contextmanager
    def on(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Within it ``logits`` runs on leaves of its own with the values of ``tensors``, under the autocast of the call."""
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        # An attribute is found before the parameter of its name, and FSDP1 puts either there as it goes.
        before = [vars(module).get(name) for module, name in self.slots]
        try:
            for (module, name), leaf in zip(self.slots, leaves, strict=True):
                vars(module)[name] = leaf
            with self.autocast():
                yield leaves
        finally:
            for (module, name), tensor in zip(self.slots, before, strict=True):
                vars(module).pop(name)
                if tensor is not None:
                    vars(module)[name] = tensor


def _slots(head: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The parameters of a head and of what it holds; gathered ones are plain attributes under FSDP1."""
    for module in head.modules():
        for name, value in {**vars(module), **module._parameters}.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield module, name


def row_losses(
    call: HeadCall, rows: Tensor, targets: Tensor, chunk: int | None = None
) -> tuple[Tensor, int, torch.dtype]:
    """``F.cross_entropy(logits, targets, reduction="none")`` in float32, and the width and type of the logits that never were.

    Args:
        call: Of the head on ``rows``.
        rows: ``[N, D]``.
        targets: int64 ``[N]``, -100 for rows without loss.
        chunk: Rows at a time; by default as many as make :data:`CHUNK` elements.
    """
    made: list[Tensor] = []
    losses: Tensor = _RowLosses.apply(rows, targets, call, chunk, made, *call.tensors)
    return losses, made[0].shape[1], made[0].dtype


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        targets: Tensor,
        call: HeadCall,
        chunk: int | None,
        made: list[Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(rows, targets, *tensors)
        ctx.call = call
        losses: Tensor | None = None
        buffer: Tensor | None = None
        words = max(t.shape[0] for t in tensors if t.dim() == 2)  # of a weight [V, D]; LoRA's B has as many
        ctx.step = chunk or max(1, (CHUNK_CUDA if rows.is_cuda else CHUNK) // words)
        with call.on(tensors):
            for some in _chunks(rows, ctx.step):
                x = call.logits(rows[some])
                with without_autocast(call.type):
                    if losses is None or buffer is None:
                        wide = torch.promote_types(x.dtype, torch.float32)
                        losses = x.new_empty(rows.shape[0], dtype=wide)
                        buffer = torch.empty_like(x, dtype=wide)
                    log_p = torch.log_softmax(x, 1, dtype=losses.dtype, out=buffer[: x.shape[0]])
                    losses[some] = F.nll_loss(log_p, targets[some], ignore_index=IGNORE, reduction="none")
        assert losses is not None and buffer is not None
        made.append(x[:0])
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused_head has no second derivative. Call backward without create_graph=True, or take it off."
            )
        rows, targets, *tensors = ctx.saved_tensors
        call, wants = ctx.call, [ctx.needs_input_grad[0], *ctx.needs_input_grad[5:]]
        ignored = targets == IGNORE
        # Ignored rows are scaled by 0 instead of left out: a NaN in them stays one, as in torch.
        scale = dlosses.masked_fill(ignored, 0.0).unsqueeze(1)
        index = targets.masked_fill(ignored, 0).unsqueeze(1)
        drows = torch.empty_like(rows) if wants[0] else None
        sums: list[Tensor | None] = [None] * len(tensors)
        devices = [rows.device] if call.random and rows.is_cuda else []
        with (
            torch.random.fork_rng(devices, call.random is not None),
            torch.enable_grad(),
            call.on(tensors) as leaves,
        ):
            if call.random is not None:  # dropout draws the same again
                call.random()
            for some in _chunks(rows, ctx.step):
                h = rows[some].detach().requires_grad_(wants[0])
                x = call.logits(h)
                wanted = [t for t, wants_it in zip([h, *leaves], wants, strict=True) if wants_it]
                dx = _dlogits(x.detach(), scale[some], index[some])
                found = iter(torch.autograd.grad(x, wanted, dx))
                del x, dx
                with torch.no_grad():
                    if drows is not None:
                        drows[some] = next(found)
                    for i, wants_it in enumerate(wants[1:]):
                        if wants_it:
                            part, total = next(found), sums[i]
                            if total is None:
                                sums[i] = part.to(torch.promote_types(part.dtype, torch.float32))
                            else:
                                total.add_(part)
        dtensors = [s if s is None else s.to(t.dtype) for s, t in zip(sums, tensors, strict=True)]
        return drows, None, None, None, None, *dtensors


def _dlogits(x: Tensor, scale: Tensor, index: Tensor) -> Tensor:
    with torch.no_grad(), without_autocast(autocast_type(x.device)):
        p = torch.softmax(x, 1, dtype=scale.dtype)
        return p.mul_(scale).scatter_add_(1, index, -scale).to(x.dtype)


def _chunks(rows: Tensor, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))
