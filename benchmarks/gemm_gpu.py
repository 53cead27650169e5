"""The GEMMs of training's linears: BF16, ``torch._scaled_mm``, the block-scaled Triton kernel, and torch's own block mode.

    python benchmarks/gemm_gpu.py [--models llama3-8b] [--tokens 8192] [--save gemm_h100_2026-11-21]

For each linear the three GEMMs of training. Figures are TFLOPS; "share" is of this machine's own FP8 GEMM ceiling, measured
first on 8192 x 8192 x 8192 random data. Needs torch 2.7 or later and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_common import DEVICE, TOLERANCE, ceilings, finish, linears, machine, parser, require_device, timed

from foundry_fp8.backends.native.scaling.tensor import tensorwise_mm
from foundry_fp8.compat.block_scaled_mm import block_mode_missing, block_scaled_mm, fits_block_mode
from foundry_fp8.kernels.block_gemm import block_gemm
from foundry_fp8.kernels.blockwise import quantize_blockwise
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.tensorwise import quantize_tensorwise
from foundry_fp8.numerics.formats import E4M3, E5M2


def cases(m: int, n: int, k: int, *, weight: bool, gradient: bool) -> dict[str, Callable[[], Any]]:
    """One GEMM ``[m, k] x [k, n]``: ``weight`` says that b is one, ``gradient`` that a is (hence E5M2, full accumulation)."""
    a = torch.randn(m, k, device=DEVICE).bfloat16()
    b = torch.randn(n, k, device=DEVICE).bfloat16()
    fmt = E5M2 if gradient else E4M3
    qa = quantize_tensorwise(Producer.identity(a), fmt, columns=False)
    qb = quantize_tensorwise(Producer.identity(b), E4M3, columns=False)
    ba = quantize_blockwise(Producer.identity(a), E4M3, columns=False)
    bb = quantize_blockwise(Producer.identity(b), E4M3, square=weight, columns=False)
    assert qa.data is not None and qb.data is not None and ba.data is not None and bb.data is not None
    assert ba.gemm_scale is not None and bb.gemm_scale is not None
    a_data, b_data, a_block, b_block = qa.data, qb.data, ba.data, bb.data
    a_scale, b_scale, a_scales, b_scales = qa.stats[1], qb.stats[1], ba.gemm_scale, bb.gemm_scale

    def tensorwise() -> torch.Tensor:
        return tensorwise_mm(
            a_data,
            a_scale,
            b_data,
            b_scale,
            m=m,
            n=n,
            out_dtype=torch.bfloat16,
            fast_accumulation=not gradient,
        )

    def block() -> torch.Tensor:
        return block_gemm(
            a_block, a_scales, b_block, b_scales, m=m, n=n, out_dtype=torch.bfloat16, square_b=weight
        )

    exact = a.double() @ b.double().t() if m * n * k < 2**31 else a.float() @ b.float().t()
    for name, run in (("tensorwise", tensorwise), ("block", block)):
        error = float((run().to(exact.dtype) - exact).norm() / exact.norm())
        assert error < 0.1 + TOLERANCE, f"{name} is wrong before it is timed: relative error {error:.3f}"
    made = {"bf16": lambda: a @ b.t(), "tensorwise": tensorwise, "block": block}
    missing = block_mode_missing(torch.cuda.current_device()) if DEVICE == "cuda" else "there is no GPU"
    if missing is None and fits_block_mode(n, k, torch.bfloat16, square_b=weight):
        made["torch block"] = lambda: block_scaled_mm(
            a_block, a_scales, b_block, b_scales, torch.bfloat16, square_b=weight
        )
    elif DEVICE == "cuda":
        print(f"torch's block mode is left out at {m} x {n} x {k}: {missing or 'its scales do not fit'}")
    return made


def main() -> None:
    """Measure and print."""
    options = parser(__doc__).parse_args()
    require_device()
    limits = ceilings(options.repeats)
    rows = []
    for label, k, n in linears(options.models):
        tokens = options.tokens
        for gemm, shape, weight in (
            ("fprop", (tokens, n, k), True),
            ("dgrad", (tokens, k, n), True),
            ("wgrad", (n, k, tokens), False),
        ):
            found = timed(cases(*shape, weight=weight, gradient=gemm != "fprop"), options.repeats)
            flops = 2 * shape[0] * shape[1] * shape[2]
            row: dict[str, Any] = {"layer": label, "gemm": gemm, "M,N,K": "{} {} {}".format(*shape)}
            for name, time in found.items():
                row[f"{name} TFLOPS"] = flops / time.seconds / 1e12
            for name in [name for name in found if name != "bf16"]:
                row[f"{name}/bf16"] = found["bf16"].seconds / found[name].seconds
                if "fp8_flops" in limits:
                    row[f"{name} share"] = flops / found[name].seconds / limits["fp8_flops"]
            row["spread"] = max(time.spread for time in found.values())
            rows.append(row)
    finish(options.save, {"machine": machine(), "ceilings": limits, "tokens": options.tokens, "rows": rows})


if __name__ == "__main__":
    main()
