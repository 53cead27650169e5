"""What a quantise kernel reads, as the host has it; :mod:`foundry_fp8.kernels.producers` computes it. Needs no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from foundry_fp8.kernels.launch import aligned, as_rows, check_hp

__all__ = ["ACTIVATIONS", "GRADIENT", "GRADIENT_OF_UP", "NORM", "ROUNDED_NORM", "Producer"]

NORM = 1
ROUNDED_NORM = 6
"""A norm whose normalised value is rounded before the gain multiplies it, as transformers' RMSNorms do."""
GRADIENT = 8
"""Added to an activation's code: the gradient of its input (of the gate), from ``weight``, that of its output ``[R, C]``, contiguous."""
GRADIENT_OF_UP = 16
"""The same of what a gated activation multiplies with."""

ACTIVATIONS = {"silu": 2, "gelu": 3, "gelu_tanh": 4}
"""Activation name to the kernels' code. With ``up`` given, silu is SwiGLU and gelu is GeGLU."""


class Producer(NamedTuple):
    """The inputs of one tile producer. The class methods check them, and so do kernels the first time that they get such ones."""

    x: Tensor
    """``[R, C]``, hp: the tensor, the norm's input, or the activation's (the gate of a gated one)."""
    up: Tensor | None = None
    """``[R, C]``, dtype of ``x``: what a gated activation multiplies with."""
    mean: Tensor | None = None
    """``[R]`` float32: LayerNorm; ``None`` makes it RMSNorm."""
    rstd: Tensor | None = None
    """``[R]`` float32: reciprocal of the standard deviation, or of the root mean square."""
    weight: Tensor | None = None
    """``[C]``: the norm's gain; of a gradient ``[R, C]``: that of the activation's output."""
    bias: Tensor | None = None
    """``[C]``: LayerNorm's bias."""
    kind: int = 0
    """0: ``x`` as it lies in memory."""

    def checked(self) -> "Producer":
        """What kernels can read: itself, or a copy of what has no unit strides along its rows.

        Raises:
            TypeError: ``x`` is of a dtype that kernels do not read.
            ValueError: ``x`` is not on a CUDA device or not two-dimensional, or what belongs to it does not fit it.
        """
        x = self.x
        check_hp("x", x)
        rows = as_rows(x)
        found = self if rows is x else self._replace(x=rows)
        if found.kind == 0:
            return found
        for name in ("up", "mean", "rstd", "weight", "bias"):
            given = getattr(found, name)
            if given is not None and given.device != x.device:
                raise ValueError(f"{name} is on {given.device}, x on {x.device}; they must share a device.")
        if found.up is None:
            return found
        if found.up.shape != x.shape or found.up.dtype != x.dtype:
            raise ValueError(
                f"up is {tuple(found.up.shape)} {found.up.dtype}, x {tuple(x.shape)} {x.dtype}; "
                "a gated activation needs two alike."
            )
        up = as_rows(found.up)
        return found if up is found.up else found._replace(up=up)

    @classmethod
    def identity(cls, x: Tensor) -> "Producer":
        """The tensor ``x`` as it is."""
        return cls(x).checked()

    @classmethod
    def norm(
        cls,
        x: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        *,
        mean: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> "Producer":
        """RMSNorm, or LayerNorm if ``mean`` is given; the statistics come from :mod:`foundry_fp8.kernels.norms`."""
        return cls(x, None, mean, rstd, weight, bias, 1).checked()

    @classmethod
    def activation(cls, name: str, x: Tensor, *, up: Tensor | None = None) -> "Producer":
        """One of :data:`ACTIVATIONS`, gated if ``up`` is given."""
        if name not in ACTIVATIONS:
            raise ValueError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}.")
        return cls(x, up, kind=ACTIVATIONS[name]).checked()

    @property
    def pointers(self) -> tuple[object, ...]:
        """The arguments that every kernel's signature begins with."""
        x, up, mean, rstd, weight, bias, _ = self
        return x, x.stride(0), up, 0 if up is None else up.stride(0), mean, rstd, weight, bias

    @property
    def strides(self) -> tuple[int, ...]:
        """From one row to the next, of all that is read as a matrix."""
        return (self.x.stride(0),) if self.up is None else (self.x.stride(0), self.up.stride(0))

    @property
    def is_like(self) -> tuple[object, ...]:
        """Equal for two of which :meth:`checked` says the same and on whose :attr:`pointers` Triton specialises alike."""
        x, kind = self.x, self.kind
        key = (x.shape, x.stride(), x.dtype, x.device, aligned(x), kind)
        if kind == 0:
            return key
        return (
            *key,
            *(t if t is None else (t.shape, t.stride(), t.dtype, t.device, aligned(t)) for t in self[1:6]),
        )

    def reference(self) -> Tensor:
        """What the kernels quantise, in torch: ``[R, C]`` in the dtype of ``x``."""
        x = self.x.float()
        if self.kind == 0:
            return self.x
        if self.kind in (1, ROUNDED_NORM):
            assert self.rstd is not None
            y = (x if self.mean is None else x - self.mean[:, None]) * self.rstd[:, None]
            y = y if self.kind == 1 else y.to(self.x.dtype).float()
            y = y if self.weight is None else y * self.weight.float()
            return (y if self.bias is None else y + self.bias.float()).to(self.x.dtype)
        if self.kind > GRADIENT:
            return self._gradient()
        if self.kind == ACTIVATIONS["silu"]:
            y = torch.nn.functional.silu(x)
        else:
            approximate = "tanh" if self.kind == ACTIVATIONS["gelu_tanh"] else "none"
            y = torch.nn.functional.gelu(x, approximate=approximate)
        y = y.to(self.x.dtype)
        return y if self.up is None else y * self.up

    def _gradient(self) -> Tensor:
        dy, of_up = self.weight, self.kind > GRADIENT_OF_UP
        assert dy is not None
        plain = self._replace(up=None, weight=None, kind=self.kind - (GRADIENT_OF_UP if of_up else GRADIENT))
        if of_up:
            return dy * plain.reference()
        x = self.x.detach().float().requires_grad_()
        with torch.enable_grad():
            y = plain._replace(x=x).reference()
        return torch.autograd.grad(y, x, (dy if self.up is None else dy * self.up).float())[0].to(dy.dtype)
