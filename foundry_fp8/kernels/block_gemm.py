"""The block-scaled GEMM: FP8 products on tensor cores, one float32 scale per 128 elements along K applied outside of them.

``out[m, n] = sum over blocks b of  a_scale[b, m] * b_scale[b, n] * sum over k in b of  a[m, k] b[n, k]``

The inner sum runs on the FP8 tensor core. Hopper's accumulates in fewer bits than float32; each inner sum is only 128
long and starts from zero, and the outer sum is float32 on the ordinary cores ("promotion", DeepSeek-V3, arXiv:2412.19437,
section 3.3.2). So the scales cost no extra pass and the accumulation error does not grow with K.

All three GEMMs of a linear are this one, with both operands contiguous along what they contract:

====== ==================== ====================== ==============================
GEMM   a                    b                      scales of b
====== ==================== ====================== ==============================
fprop  x, rows              w, rows                one per 128 x 128
dgrad  dy, rows             w, transposed          one per 128 x 128
wgrad  dy, transposed       x, transposed          one per 1 x 128
====== ==================== ====================== ==============================
"""

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from foundry_fp8.kernels.launch import BoundedCache, Launch, aligned, alignments, interpreting, tiles

__all__ = ["CONFIGS", "GROUP", "block_gemm"]

GROUP = 128
"""Elements along K that share a scale."""


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """One way to tile the product. All give the same bits: the order along K does not depend on it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


CONFIGS = (
    GemmConfig(128, 128, 8, 3),
    GemmConfig(128, 128, 8, 4),
    GemmConfig(64, 128, 4, 4),
    GemmConfig(128, 64, 4, 4),
    GemmConfig(64, 64, 4, 4),
)
"""What is tried, once a shape, on the first call with it."""
WITHOUT_SPILLS = (
    GemmConfig(64, 128, 4, 4),
    GemmConfig(64, 128, 8, 4),
    GemmConfig(128, 64, 8, 4),
    GemmConfig(64, 64, 4, 4),
)
"""The same for wgrad on sm_100, whose tensor cores leave the product outside of the registers that it is promoted from: what holds two
scales an element besides spills in tiles of 128 x 128 (400 B with 8 warps at 2 to 4 stages, 120 B with 16) and in 128 x 64 with 4 warps."""


def configs(square_b: bool, device: torch.device) -> tuple[GemmConfig, ...]:
    """What is tried on ``device``."""
    if square_b or device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0):
        return CONFIGS
    return WITHOUT_SPILLS


_tuned: dict[tuple[object, ...], GemmConfig] = {}
_products = BoundedCache()


def block_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    *,
    m: int,
    n: int,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    square_b: bool = False,
) -> Tensor:
    """``a @ b.T`` of two block-quantised operands.

    Args:
        a: FP8 ``[M', K]``, contiguous.
        a_scale: float32 ``[ceil(K / 128), M']``, contiguous.
        b: FP8 ``[N', K]``, contiguous.
        b_scale: float32 ``[ceil(K / 128), N']``, or ``[ceil(N' / 128), ceil(K / 128)]`` for ``square_b``.
        m: Rows of the result, at most M' (what is above is padding).
        n: Columns of the result, at most N'.
        out_dtype: bfloat16, float16 or float32.
        bias: ``[n]``, hp, added in float32 before the result is rounded.
        square_b: The scales of ``b`` are one per 128 x 128.

    Returns:
        ``[m, n]``, contiguous, ``out_dtype``.

    Raises:
        ValueError: Operands that do not fit each other.
    """
    (padded_m, k), padded_n = a.shape, b.shape[0]
    key = (
        m, n, out_dtype, square_b, None if bias is None else (bias.dtype, aligned(bias)), a.device,
        a.shape, a_scale.shape, a.dtype, b.shape, b_scale.shape, b.dtype, *alignments(a, a_scale, b, b_scale),
    )  # fmt: skip
    if (known := _products.get(key)) is None:
        k_blocks = tiles(k, GROUP)
        expected = (tiles(padded_n, GROUP), k_blocks) if square_b else (k_blocks, padded_n)
        if k != b.shape[1] or a_scale.shape != (k_blocks, padded_m) or b_scale.shape != expected:
            raise ValueError(
                f"block GEMM: a {tuple(a.shape)} with scales {tuple(a_scale.shape)} and b {tuple(b.shape)} with scales "
                f"{tuple(b_scale.shape)} do not fit; expected scales {(k_blocks, padded_m)} and {expected}."
            )
        if m == 0 or n == 0:
            return torch.zeros((m, n), dtype=out_dtype, device=a.device)
    out = torch.empty((m, n), dtype=out_dtype, device=a.device)
    args = a, a_scale, b, b_scale, bias, out, m, n, k, padded_m, 1 if square_b else padded_n
    if known is not None:
        known(*args)
        return out
    launch = functools.cache(lambda config: _launch(config, k, square_b, a.device))
    # The dimension that holds tokens counts by its power of two, so that a length that was not seen before is not timed again:
    # it is what wgrad contracts (its b has no squares), and the rows of the others' results.
    sizes = (m.bit_length(), n, k) if square_b else (m, n, k.bit_length())
    kind = (*sizes, a.dtype, b.dtype, out_dtype, square_b, a.device)
    chosen = launch(_choose(lambda config: launch(config)(*args), kind, configs(square_b, a.device)))
    chosen(*args)
    if kind in _tuned:
        _products[key] = chosen
    return out


def _launch(config: GemmConfig, k: int, square_b: bool, device: torch.device) -> Launch:
    # The same for every number of tokens, as the compiler gets it; where there are fewer tiles, some have nothing to do.
    programs = _processors(device)
    return Launch(
        _block_gemm_kernel,
        programs,
        PROGRAMS=programs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        GROUP=GROUP,
        SQUARE_B=square_b,
        EVEN_K=k % GROUP == 0,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _choose(run, key: tuple[object, ...], configs: tuple[GemmConfig, ...]) -> GemmConfig:  # type: ignore[no-untyped-def]
    """The fastest of ``configs`` for ``key``, timed once; the first one where nothing can be timed."""
    if key not in _tuned:
        # Timing waits for the device, which a graph capture forbids: warm up before capturing, as graphs want anyway.
        if interpreting() or torch.cuda.is_current_stream_capturing():
            return configs[0]
        times = [_time(run, config) for config in configs]
        _tuned[key] = configs[times.index(min(times))]
    return _tuned[key]


def _time(run, config: GemmConfig) -> float:  # type: ignore[no-untyped-def]
    """Milliseconds; infinite where the device has too little shared memory for ``config`` (sm_89 for the deepest)."""
    try:
        return triton.testing.do_bench(lambda: run(config), warmup=5, rep=20)
    except OutOfResources:
        return float("inf")


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@triton.jit
def _block_gemm_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, bias_ptr, out_ptr, M, N, K, a_scale_stride, b_scale_stride,
    PROGRAMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
    SQUARE_B: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    GROUP_M: tl.constexpr = 8  # tile rows that run together, so that they share b in L2
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_offsets = tl.arange(0, GROUP)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        band = tile // (GROUP_M * tiles_n)
        band_height = tl.minimum(tiles_m - band * GROUP_M, GROUP_M)
        tile_m = band * GROUP_M + (tile % (GROUP_M * tiles_n)) % band_height
        tile_n = (tile % (GROUP_M * tiles_n)) // band_height
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows past the edge read row 0 again and are not stored: cheaper than masking every load.
        a_rows = tl.where(rows < M, rows, 0)
        b_rows = tl.where(columns < N, columns, 0)
        a_ptrs = a_ptr + a_rows.to(tl.int64)[:, None] * K + k_offsets[None, :]
        b_ptrs = b_ptr + b_rows.to(tl.int64)[None, :] * K + k_offsets[:, None]
        a_scale_ptrs = a_scale_ptr + a_rows
        b_scale_ptrs = b_scale_ptr + (tile_n * BLOCK_N // GROUP * tl.cdiv(K, GROUP) if SQUARE_B else b_rows)

        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for block in range(0, tl.cdiv(K, GROUP)):
            if EVEN_K:
                a = tl.load(a_ptrs)
                b = tl.load(b_ptrs)
            else:
                a = tl.load(a_ptrs, mask=k_offsets[None, :] < K - block * GROUP, other=0.0)
                b = tl.load(b_ptrs, mask=k_offsets[:, None] < K - block * GROUP, other=0.0)
            a_scale = tl.load(a_scale_ptrs)
            b_scale = tl.load(b_scale_ptrs)
            if SQUARE_B:
                accumulator += tl.dot(a, b) * (a_scale * b_scale)[:, None]
            else:
                accumulator += tl.dot(a, b) * (a_scale[:, None] * b_scale[None, :])
            a_ptrs += GROUP
            b_ptrs += GROUP
            a_scale_ptrs += a_scale_stride
            b_scale_ptrs += b_scale_stride

        if bias_ptr is not None:
            accumulator += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(
            out_ptrs,
            accumulator.to(out_ptr.dtype.element_ty),
            mask=(rows < M)[:, None] & (columns < N)[None, :],
        )
