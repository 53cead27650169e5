"""A power of two for 32 elements along what a product contracts, as Blackwell's tensor cores multiply it: ``mxfp8``."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.native.plan import Layout, Plan
from foundry_fp8.backends.native.products import mx_product, mx_scales, without_padding
from foundry_fp8.backends.native.scaling.base import Output, bias_inside, with_bias
from foundry_fp8.backends.native.scaling.block import BlockKernels
from foundry_fp8.config.versions import dotted, release
from foundry_fp8.layers.backend import Availability
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.numerics.recipes import Gemm

__all__ = ["MXKernels"]


SM_MX = (10, 0)
TORCH_MX = (2, 8)
CUDA_MX = (12, 8)


class MXKernels(BlockKernels):
    """Its GEMM needs sm_100 and torch 2.8 with CUDA 12.8. Scales are E8M0 bytes, as :mod:`foundry_fp8.numerics.mx_layout` has them."""

    kind: ClassVar[str] = "mx"
    product: ClassVar[str] = "torch._scaled_mm"
    group: ClassVar[int] = 32
    squares: ClassVar[bool] = False

    def availability(self, device: torch.device, capability: tuple[int, int]) -> Availability:
        """See :meth:`NativeScaling.availability`."""
        here, remedy = dotted(capability), "Use recipe: block or current."
        if capability < SM_MX:
            return Availability(
                False, f"mxfp8 needs compute capability {dotted(SM_MX)}, this GPU has {here}", remedy
            )
        # 12.x: FP8 tensor cores of another kind, which nobody has tried this on.
        if capability[0] != SM_MX[0]:
            reason = f"mxfp8 is written for compute capability 10.x, this GPU has {here}"
            return Availability(False, reason, "Use recipe: current.")
        if release(torch.__version__) < TORCH_MX or release(torch.version.cuda or "") < CUDA_MX:
            needed = f"torch {dotted(TORCH_MX)} built with CUDA {dotted(CUDA_MX)}"
            return Availability(False, f"mxfp8 needs {needed}, this is torch {torch.__version__}", remedy)
        return Availability(True)

    def multiply(
        self, which: Gemm, a: Layout, b: Layout, plan: Plan, out: Output, bias: Tensor | None = None, *, direct: bool
    ) -> Tensor:  # fmt: skip
        """See :meth:`NativeScaling.multiply`."""
        (m, n, out_dtype), inside = out, None
        if bias is not None and out_dtype == torch.bfloat16:
            inside = bias_inside(bias, b[0].shape[0], out_dtype)
        y = without_padding(in_dtype(mx_product(*a, *b, inside), out_dtype), m, n)
        return y if bias is None or inside is not None else with_bias(y, bias)

    def scales(self, layout: Layout, *, square: bool) -> Tensor:
        """See :meth:`NativeScaling.scales`."""
        return mx_scales(*layout).double()
