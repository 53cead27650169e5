"""Before a model is converted: attention's kernels, run once on this machine and compared with their definitions (see :mod:`.self_check`)."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foundry_fp8.backends.native.plan import plan_of
from foundry_fp8.backends.native.self_check import kernel_error
from foundry_fp8.layers.attention import AttentionRecipe, GradScores, attention_format
from foundry_fp8.numerics.formats import Float8Format

if TYPE_CHECKING:
    from foundry_fp8.kernels.attention import AttentionShape  # Triton is imported where it is used

__all__ = ["check_attention_kernels"]

TOKENS = 144
"""Ends inside a tile."""
TOLERANCE = 2.0**-7
"""Of the norm: results in the model's dtype, products in Hopper's short accumulator, and values next to a rounding edge that take the other side."""


DP_SCALES = (2.0**10, 2.0**18)
"""What dP is multiplied by: to a part of the gradients' range, as a delayed scale would, and far beyond it, so that it saturates."""


@functools.cache
def check_attention_kernels(
    recipe: AttentionRecipe,
    grad_scores: GradScores,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run forward and backward of attention of one head size, with documents and without, and compare them. Once a process.

    Documents mask every block of keys. Without, blocks that are seen whole are not masked, and dP saturates.

    Args:
        recipe: What the model will run.
        grad_scores: What the gradient of its logits is rounded to.
        head_dim: Its head size.
        dtype: Its compute dtype.
        device: Where; a CUDA device, or the CPU under Triton's interpreter.

    Raises:
        RuntimeError: A kernel gives something else than its definition, or something else the second time.
    """
    from foundry_fp8.kernels.attention import AttentionShape

    shape = AttentionShape(
        batch=1,
        heads=2,
        kv_heads=1,
        queries=TOKENS,
        keys=TOKENS,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5,
        right=0,
    )
    operands = {
        name: _quantized(name, 1 if name in "kv" else 2, shape, recipe, dtype, device)
        for name in ("q", "k", "v", "do")
    }
    of_documents = (torch.arange(TOKENS, device=device) // 50)[None].to(torch.int32)
    for documents, dp_scale in zip((of_documents, None), DP_SCALES, strict=True):
        scale = torch.tensor(dp_scale, dtype=torch.float32, device=device) if grad_scores == "fp8" else None
        _check_case(shape, operands, documents, scale, attention_format(recipe, "do"), dtype)


def _check_case(
    shape: AttentionShape,
    operands: dict[str, Any],
    documents: Tensor | None,
    dp_scale: Tensor | None,
    do_format: Float8Format,
    dtype: torch.dtype,
) -> None:
    """Twice, with one kind of masks; compare."""
    from foundry_fp8.kernels.attention import attention_forward_reference
    from foundry_fp8.kernels.attention_backward import attention_backward_reference

    head_dim, device = shape.head_dim, operands["q"].data.device
    scales = tuple(operands[name].stats.select(0, 1) for name in ("q", "k", "v", "do"))
    first, second = (_run(shape, operands, scales, documents, dp_scale, dtype) for _ in range(2))

    place = torch.arange(TOKENS, device=device)
    seen = place[:, None] >= place
    if documents is not None:
        seen = seen & (documents[0][:, None] == documents[0])
    q, k, v, do = (
        operands[name]
        .data[:TOKENS]
        .unflatten(1, (-1, head_dim))
        .transpose(0, 1)[None]
        .float()
        .expand(1, 2, -1, -1)
        for name in ("q", "k", "v", "do")
    )
    block = _tile_keys(shape)
    out, lse = attention_forward_reference(shape, q, k, v, scales[:3], seen, block=block)
    of_kernel = first["output"].transpose(1, 2)
    dq, dk, dv, *_ = attention_backward_reference(
        shape,
        q,
        k,
        v,
        do,
        scales,
        seen,
        of_kernel,
        dp_scale=dp_scale,
        do_format=do_format,
    )
    expected = {"output": out, "logarithm": lse, "dQ": dq, "dK": dk, "dV": dv}
    for name, reference in expected.items():
        found = first[name].double()
        found = found if name == "logarithm" else found.transpose(1, 2)
        error = float((found - reference).norm() / reference.norm())
        kernel = "attention_forward" if name in ("output", "logarithm") else "attention_backward"
        if not error < TOLERANCE:
            raise kernel_error(
                kernel, f"{name} for a head size of {head_dim} is {error:.2g} of its norm away", device
            )
        if not torch.equal(first[name], second[name]):
            raise kernel_error(
                kernel, f"{name} for a head size of {head_dim} is not the same in two runs", device
            )


def _tile_keys(shape: AttentionShape) -> int:
    from foundry_fp8.kernels.attention import TILES

    return TILES[shape.block_d].keys


def _quantized(
    name: str,
    heads: int,
    shape: AttentionShape,
    recipe: AttentionRecipe,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    from foundry_fp8.kernels.producers import Producer
    from foundry_fp8.kernels.tensorwise import quantize_tensorwise

    generator = torch.Generator().manual_seed(ord(name[0]))
    x = torch.randn(
        TOKENS, heads * shape.head_dim, generator=generator, dtype=torch.float32, device="cpu"
    ) * math.exp(ord(name[0]) % 3 - 1)
    return quantize_tensorwise(
        Producer.identity(x.to(dtype).to(device)),
        attention_format(recipe, "do" if name == "do" else "qkv"),
        power_2=plan_of(recipe).power_2,
    )


def _run(
    shape: AttentionShape,
    operands: dict[str, Any],
    scales: tuple[Tensor, ...],
    documents: Tensor | None,
    dp_scale: Tensor | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    from foundry_fp8.backends.native import attention_ops

    sizes = [shape.batch, shape.heads, shape.kv_heads, shape.queries, shape.keys, shape.head_dim]
    positions = (shape.softmax_scale, shape.left, shape.right)
    q, k, v, do = (operands[name] for name in ("q", "k", "v", "do"))
    out, lse = attention_ops.attention_forward(
        q.data, k.data, v.data_t, *scales[:3], documents, documents, None, sizes, *positions, dtype
    )
    amax = torch.zeros((), dtype=torch.float32, device=out.device)
    dq, dk, dv = attention_ops.attention_backward(
        q.data, k.data, v.data, *scales[:3], out, lse, documents, documents, do.data, do.data_t, scales[3], dp_scale, amax, sizes, *positions
    )  # fmt: skip
    return {"output": out, "logarithm": lse, "dQ": dq, "dK": dk, "dV": dv}
