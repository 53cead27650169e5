"""The converted linear: an ``nn.Linear`` whose three GEMMs run in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from foundry_fp8.compat.wrapper_tensor import without_function_override
from foundry_fp8.kernels.launch import HP_DTYPES
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.frozen_weight import in_high_precision
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.produced import Produced, in_memory
from foundry_fp8.layers.tensor_parallel import multiply_shards
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["FP8Linear", "FP8TransposedLinear"]


class FP8Linear(FP8GemmLayer, nn.Linear):
    """An ``nn.Linear`` that runs its GEMMs through a :class:`~foundry_fp8.layers.backend.Backend`.

    It is made from a linear by :meth:`from_linear` and keeps that module's Parameters, hooks and attributes, so that
    optimizers, FSDP, parameter initialisation and ``state_dict`` see the layer they know. What does not run in FP8
    (evaluation, demotion) is that module's own forward.

    Attributes:
        high_precision_forward: The forward of the class that it was made from.
    """

    high_precision_forward: Callable[[nn.Module, Tensor], Tensor]

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        *,
        fqn: str,
        backend: Backend,
        recipe: Recipe,
        evaluate: Literal["fp8", "high_precision"] = "high_precision",
    ) -> FP8Linear:
        """Make a converted linear that adopts everything ``linear`` holds (Parameters by identity, hooks, attributes).

        ``linear`` computes what ``nn.Linear`` does; :mod:`foundry_fp8.surgery.same_as_linear` knows.
        """
        self = cls.__new__(cls)
        self.__dict__.update(linear.__dict__)
        self.out_features, self.in_features = self.matrix.shape
        self.high_precision_forward = type(linear).forward
        self._begin(fqn, backend, recipe, evaluate)
        backend.attach(self)
        return self

    @property
    def matrix(self) -> Tensor:
        """The weight as ``[out_features, in_features]``, differentiable; not always contiguous."""
        return self.weight

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``. ``input``: ``[..., in_features]``, hp; the result has the compute dtype."""
        if self._modules:  # a parametrisation, registered since, which all who read the weight here share
            with parametrize.cached():
                return self.recorded(in_memory(input), self.weight)
        if input.__class__ is Produced:  # asked for its properties, without a function of Python for each
            with without_function_override():  # type: ignore[no-untyped-call]
                return self.recorded(input, self.weight)
        return self.recorded(input, self.weight)

    def _compute(self, input: Tensor) -> Tensor:
        if self.runs_fp8:
            weight = self.matrix
            if weight.__class__ is not nn.Parameter and is_dtensor(weight):
                return multiply_shards(self, input, weight, self.bias)
            return self.backend.linear(self, input, weight, self.bias)
        x = in_memory(input)
        dtype = compute_dtype(x)
        # As in FP8, the input says what is computed in.
        if dtype is x.dtype is not self.weight.dtype and dtype in HP_DTYPES:
            bias = None if self.bias is None else self.bias.to(dtype)
            y = F.linear(x, in_high_precision(self.matrix, dtype), bias)
            return y if self.output_multiplier == 1.0 else y * self.output_multiplier
        return self.high_precision_forward(self, x)

    def extra_repr(self) -> str:
        """The linear's own, with what it runs."""
        return f"{nn.Linear.extra_repr(self)}, {super().extra_repr()}"


class FP8TransposedLinear(FP8Linear):
    """The same for a layer that keeps its weight as ``[in_features, out_features]``: the ``Conv1D`` of transformers' GPT-2."""

    @property
    def matrix(self) -> Tensor:
        """The weight as ``[out_features, in_features]``, a view."""
        return self.weight.t()
