"""A fixed sample of the gradient of every weight, and how far two samples are apart."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.tensor import DTensor

from foundry_fp8.compat.fsdp1 import whole_shapes
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.observe.sampling import spread

__all__ = ["FLOOR", "SAMPLE", "Weight", "gradient_errors", "sample", "squares", "weights_of"]

SAMPLE = 4096
"""Elements of each parameter (of each shard of it) whose gradients are compared."""
SMALLEST = 1024
"""Matrices of fewer elements are left out beside larger ones: the error of so few is chance."""
FLOOR = 0.05
"""Share of the root mean square of all gradients. A weight whose own gradient is smaller is compared with that."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter whose gradient is compared: this rank's, whole, a shard of FSDP1, or a DTensor."""

    parameter: nn.Parameter
    name: str
    """With ``*`` for the number of an expert. The experts of a mixture count together: a rounding of the router's input moves
    tokens between them, and few tokens are a large share of one expert's."""


def weights_of(model: nn.Module) -> list[Weight]:
    """The trainable matrices of ``model``, without small ones where there are larger; FSDP1's flat parameters (``use_orig_params=False``) as one weight each."""
    shapes = whole_shapes(model)
    small: list[Weight] = []
    large: list[Weight] = []
    for name, parameter in model.named_parameters():
        shape = shapes.get(parameter, parameter.shape)
        matrix = len(shape) >= 2 or isinstance(parameter, FlatParameter)
        if parameter.requires_grad and matrix:
            weight = Weight(parameter, re.sub(r"(?<=experts\.)\d+", "*", clean_name(name)))
            (large if math.prod(shape) >= SMALLEST else small).append(weight)
    return large or small


def sample(weights: Sequence[Weight]) -> list[Tensor]:
    """The same at most ``SAMPLE`` elements of each gradient on this rank every time, float32; zeros of an expert without tokens."""
    return [_of_one(weight.parameter) for weight in weights]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _of_one(parameter: nn.Parameter) -> Tensor:
    flat = _local(parameter if parameter.grad is None else parameter.grad).detach().reshape(-1)
    if flat.numel() > SAMPLE:
        flat = flat[spread(flat.numel(), SAMPLE, flat.device)]
    return torch.zeros_like(flat, dtype=torch.float32) if parameter.grad is None else flat.float().clone()


def squares(weights: Sequence[Weight], ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Tensor:
    """What :func:`gradient_errors` needs of two samples of this rank.

    Returns:
        float64 ``[3, weights]``, to be summed over ranks: the estimated squared norm of ``ours - theirs`` and of ``theirs``, and the
        number of elements.
    """
    totals = torch.zeros(3, len(weights), dtype=torch.float64, device=theirs[0].device if theirs else None)
    for i, (weight, a, b) in enumerate(zip(weights, ours, theirs, strict=True)):
        sums = torch.stack([(a - b).double().square().sum(), b.double().square().sum()])
        numel = _local(weight.parameter).numel()
        totals[:2, i], totals[2, i] = sums * (numel / max(len(b), 1)), numel
    return totals


def gradient_errors(totals: Tensor, weights: Sequence[Weight]) -> Iterator[tuple[str, float, float]]:
    """From the sums of :func:`squares` over ranks: each weight's name, ``|g - g_hp|``, and ``max(|g_hp|, FLOOR * rms * sqrt(numel))``
    by which it is divided; ``rms`` is that of all of ``g_hp``.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for weight, *values in zip(weights, *totals.tolist(), strict=True):
        sums[weight.name] = [a + b for a, b in zip(sums[weight.name], values, strict=True)]
    _, square, elements = totals.sum(1).tolist()
    floor = FLOOR**2 * square / max(elements, 1.0)
    for name, (error, own, numel) in sums.items():
        yield name, math.sqrt(error), math.sqrt(max(own, floor * numel))
