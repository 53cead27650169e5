"""The ledger of GEMMs: what every converted linear really ran, in which precision.

MFU, the reports and the logs read this, never a trainer-wide precision flag. FLOPs are ``2 * M * N * K`` a GEMM,
counted as Python integers, so that keeping the ledger costs no synchronisation.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Literal

import torch

from foundry_fp8.numerics.recipes import Gemm

__all__ = ["Gemm", "GemmLedger", "Precision", "precision_of"]

Precision = Literal["fp4", "fp8", "bf16", "fp16", "fp32", "fp64"]

_NAMES: dict[torch.dtype, Precision] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


def precision_of(dtype: torch.dtype) -> Precision:
    """The ledger's name of a high-precision dtype; torch's of any other, which has none."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")  # type: ignore[return-value]


@dataclasses.dataclass
class GemmLedger:
    """What one linear ran since it was made.

    Attributes:
        flops: Floating point operations by ``(gemm, precision)``, recompute left out.
        recomputed_flops: The same for forwards that activation checkpointing re-ran.
        calls: GEMMs run, by ``(gemm, precision)``, recompute left out.
        shape: ``(M, N, K)`` of the latest call of each GEMM: fprop ``Y[M,N] = X[M,K] W[N,K]^T``, dgrad
            ``dX[M,N] = dY[M,K] W[K,N]``, wgrad ``dW[M,N] = dY[K,M]^T X[K,N]``.
    """

    flops: Counter[tuple[Gemm, Precision]] = dataclasses.field(default_factory=Counter)
    recomputed_flops: Counter[tuple[Gemm, Precision]] = dataclasses.field(default_factory=Counter)
    calls: Counter[tuple[Gemm, Precision]] = dataclasses.field(default_factory=Counter)
    shape: dict[Gemm, tuple[int, int, int]] = dataclasses.field(default_factory=dict)

    def record(
        self, gemm: Gemm, m: int, n: int, k: int, precision: Precision, *, recompute: bool = False
    ) -> None:
        """Count one GEMM of ``2 * m * n * k`` FLOPs."""
        if recompute:
            self.recomputed_flops[gemm, precision] += 2 * m * n * k
            return
        self.flops[gemm, precision] += 2 * m * n * k
        self.calls[gemm, precision] += 1
        self.shape[gemm] = (m, n, k)
