"""The linears of all experts in one: the weights are one parameter, which stays where the model has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["FP8GroupedLinear", "by_expert"]

Product = Callable[[Tensor, Tensor], Tensor]


class FP8GroupedLinear(FP8GemmLayer):
    """``y_e = x_e W_e^T`` for each expert ``e``, in FP8.

    It has no parameter: the experts' own module hands it the weights at each call. Each expert's x, weight and dy have scales of their
    own, as if its linear were a module; only the delayed recipe, whose histories are kept for a layer, has one scale for all experts.

    Args:
        fqn: The parameter's name in the model.
        shape: Experts, out_features, in_features.
        backend: Who runs the GEMMs.
        recipe: What to run; ``None`` is high precision for good.
        wgrad: Whether the weight gradient's GEMM runs in FP8.
        evaluate: What a forward in ``eval()`` mode runs in.
    """

    def __init__(
        self,
        *,
        fqn: str,
        shape: tuple[int, ...],
        backend: Backend,
        recipe: Recipe | None,
        wgrad: Literal["fp8", "high_precision"],
        evaluate: Literal["fp8", "high_precision"],
    ) -> None:
        super().__init__()
        self.experts, self.out_features, self.in_features = shape
        self._begin(fqn, backend, recipe, evaluate)
        self.wgrad = wgrad

    def forward(self, x: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
        """The products of all experts.

        Args:
            x: ``[rows, in_features]``, hp, sorted by expert.
            weights: ``[experts, out_features, in_features]``, a view of the parameter.
            sizes: Rows of each expert.

        Returns:
            ``[rows, out_features]`` in the compute dtype.
        """
        return self.recorded(x, weights, weights, sizes)

    def _compute(self, x: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
        if self.runs_fp8 and x.numel():
            return self.backend.grouped_linear(self, x, weights, sizes)
        return by_expert(F.linear, x, weights, sizes)

    def extra_repr(self) -> str:
        """Shape, and what it runs."""
        shape = f"experts={self.experts}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, {super().extra_repr()}"


def by_expert(product: Product, x: Tensor, weights: Tensor, sizes: Sequence[int]) -> Tensor:
    """``product(x_e, W_e)`` of each expert that has rows, one under the other.

    Args:
        product: Of one expert.
        x: ``[rows, in_features]``, sorted by expert.
        weights: ``[experts, out_features, in_features]``.
        sizes: Rows of each expert.

    Raises:
        ValueError: ``sizes`` are not those of ``x`` or of ``weights``.
    """
    if sum(sizes) != len(x) or len(sizes) != len(weights):
        raise ValueError(
            f"{len(x)} rows and {len(weights)} experts do not fit the sizes {list(sizes)}: one of each expert, which add up to the rows"
        )
    # unbind, and not an index for each: its backward writes the gradient of all experts once.
    of_expert = zip(x.split(list(sizes)), weights.unbind(), strict=True)
    parts = [product(rows, weight) for rows, weight in of_expert if len(rows)]
    return torch.cat(parts) if parts else product(x, weights[0])
