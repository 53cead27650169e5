"""The MLPs: one projection up and an activation (xIELU, GELU, ReLU), or a gate (SwiGLU and two smooth forms of it)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from foundry_fp8.layers.tensor_parallel import summed_in_backward

__all__ = ["MLP", "XIELU", "GatedMLP", "smooth_swiglu", "smooth_swiglu_fog"]

XIELU_BETA = 0.5
XIELU_EPS = -1e-6
XIELU_SLOPE = 0.8  # of both sides, initially


class XIELU(nn.Module):
    """The xIELU activation, with two trainable scalars ``p`` and ``n``.

    With ``ap = softplus(p)`` and ``an = beta + softplus(n)``, beta = 0.5::

        x > 0:   f(x) = ap x^2 + beta x
        x <= 0:  f(x) = an (expm1(min(x, eps)) - x) + beta x        eps = -1e-6

    Both slopes start at 0.8. The parameters stay float32 whatever the activations' dtype; they take no weight decay.

    Attributes:
        shared_by: Under tensor parallelism the mesh whose ranks each have some of the columns
            (:mod:`foundry_fp8.models.fog.tensor_parallel`).

    Source:
        Huang and Schlag, "Deriving Activation Functions via Integration" (arXiv 2411.13010), as FOG's release
        (anonymous4375934/FOG, megatron/training/activations.py) spells it. That release keeps p, n and eps in bfloat16.
    """

    shared_by: Any = None

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.empty(1, device=device))
        self.n = nn.Parameter(torch.empty(1, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set p and n so that ap = an = 0.8."""
        nn.init.constant_(self.p, math.log(math.expm1(XIELU_SLOPE)))
        nn.init.constant_(self.n, math.log(math.expm1(XIELU_SLOPE - XIELU_BETA)))

    def slopes(self) -> Tensor:
        """``(ap, an)``, float32 ``[2]``."""
        slopes = torch.cat((F.softplus(self.p.float()), XIELU_BETA + F.softplus(self.n.float())))
        return slopes if self.shared_by is None else summed_in_backward(slopes, self.shared_by)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: any shape, hp. Returns the same shape and dtype; computed in float32."""
        wide = x.float()
        ap, an = self.slopes().unbind()
        # clamp(max=eps) has gradient 0 above eps, where only the other branch is taken or |x| < 1e-6.
        negative = an * (torch.expm1(wide.clamp(max=XIELU_EPS)) - wide) + XIELU_BETA * wide
        positive = ap * wide.square() + XIELU_BETA * wide
        return torch.where(wide > 0, positive, negative).to(x.dtype)


def smooth_swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Smooth-SwiGLU as its paper has it: one scale a channel, on the linear branch.

    ``h_i = silu(gate_i) * up_i / s_i`` with ``s_i = max |up_i|`` over the tokens; the down projection's input channel i is to be multiplied
    by ``s_i`` afterwards. ``gate`` and ``up`` are ``[..., ffn]``, hp.

    Returns:
        ``(h, s)``: [..., ffn] and [ffn].

    Source:
        Fishman et al., "Scaling FP8 training to trillion-token LLMs" (arXiv 2409.12517), section 4.4. How their
        maximum is chunked over tokens is not stated there; here it is over all tokens of the microbatch.
    """
    s = up.detach().abs().flatten(0, -2).amax(0).clamp(min=torch.finfo(torch.float32).tiny)
    return F.silu(gate) * (up / s), s


def smooth_swiglu_fog(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Smooth-SwiGLU as FOG's baseline has it: one scale a token, from the gate's side.

    ``h = silu(gate) * up / s`` with ``s = max |gate|`` over the channels; the down projection's output is to be multiplied by ``s``.
    Without rounding this changes nothing, forward and backward, because ``s`` is a constant of the token. ``gate`` and ``up`` are ``[...,
    ffn]``, hp.

    Returns:
        ``(h, s)``: [..., ffn] and [..., 1].

    Source:
        anonymous4375934/FOG, megatron/core/fusions/fused_scaled_swiglu.py, which has no guard against s = 0; here a
        token of zeros stays zero.
    """
    s = gate.detach().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return F.silu(gate) * (up / s), s


class MLP(nn.Module):
    """``W2 act(W1 x)``, without biases. FOG's: not gated, 3/2 as wide as a gated one of the same parameter count."""

    linear: type[nn.Linear] = nn.Linear

    def __init__(self, hidden: int, ffn: int, activation: Literal["xielu", "gelu", "relu", "silu"]) -> None:
        super().__init__()
        acts = {"xielu": XIELU, "gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU}
        self.up_proj = self.linear(hidden, ffn, bias=False)
        self.act: nn.Module = acts[activation]()
        self.down_proj = self.linear(ffn, hidden, bias=False)
        self.down_proj._is_residual = True  # type: ignore[assignment]  # LLM Foundry's mark for the smaller initialisation

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., hidden], hp. Returns the same shape."""
        return self.down_proj(self.act(self.up_proj(x)))


class GatedMLP(nn.Module):
    """``W2 (silu(Wg x) * (W1 x))`` with the gate and the up projection in one GEMM, without biases.

    ``smooth`` rescales the product before the down projection and undoes it after; see :func:`smooth_swiglu` (its
    scale is merged into the input channels of W2, so that an FP8 down projection quantises the smooth product and the
    merged weight) and :func:`smooth_swiglu_fog` (its scale multiplies the output).
    """

    def __init__(
        self, hidden: int, ffn: int, activation: Literal["swiglu", "smooth_swiglu", "smooth_swiglu_fog"]
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = nn.Linear(hidden, 2 * ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)
        self.down_proj._is_residual = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., hidden], hp. Returns the same shape."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.activation == "swiglu":
            return self.down_proj(F.silu(gate) * up)
        if self.activation == "smooth_swiglu_fog":
            h, per_token = smooth_swiglu_fog(gate, up)
            return self.down_proj(h) * per_token
        h, per_channel = smooth_swiglu(gate, up)
        if "weight" not in self.down_proj._parameters:
            raise RuntimeError(
                "model.activation: smooth_swiglu merges its scale into the weight of down_proj, which is wrapped in "
                f"{type(self.down_proj).__name__} (an adapter). Leave down_proj out of target_modules, or use "
                "smooth_swiglu_fog."
            )
        merged = self.down_proj.weight * per_channel.to(self.down_proj.weight.dtype)
        return functional_call(self.down_proj, {"weight": merged}, (h,), strict=True)

    def extra_repr(self) -> str:
        """The kind of gate."""
        return f"activation={self.activation}"
