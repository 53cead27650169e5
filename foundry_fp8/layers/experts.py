"""Modules of experts whose weights are one parameter, in the forms that models have, with their products in FP8.

A form takes the place of a module's class; the parameters and their names stay. In training it sorts the tokens by expert and hands
each product to a :class:`~foundry_fp8.layers.grouped_linear.FP8GroupedLinear`; an evaluation in high precision is the module's own forward.
Which module has which form :mod:`foundry_fp8.surgery.experts` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.compat.routed_experts import gated, is_decorated, run_own_forward
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
from foundry_fp8.model_structure.names import BESIDE_PARAMETERS

__all__ = ["FORMS", "ExpertsForm", "Routed", "routed"]


class Routed(NamedTuple):
    """Rows of a batch in the order of their experts."""

    token: Tensor
    """``[rows]``: which token."""
    choice: Tensor
    """``[rows]``: which of its choices the expert was."""
    sizes: list[int]
    """Rows of each expert."""

    def summed(self, made: Tensor, weights: Tensor, tokens: Tensor) -> Tensor:
        """``made`` ``[rows, hidden]`` times ``weights`` ``[tokens, choices]``, added up by token; shape and dtype of ``tokens``."""
        made = made * weights[self.token, self.choice, None]
        return torch.zeros_like(tokens).index_add_(0, self.token, made.to(tokens.dtype))


def routed(top_experts: Tensor, experts: int) -> Routed:
    """Sort by expert, then by choice, then by token.

    Args:
        top_experts: ``[tokens, choices]``, integers; ``experts`` and above are choices of nobody.
        experts: How many there are.
    """
    chosen = top_experts.t().flatten()
    order = torch.argsort(chosen, stable=True)
    if isinstance(chosen, FakeTensor):  # a dry run has no values: equal shares
        sizes = [len(chosen) // experts + (e < len(chosen) % experts) for e in range(experts)]
    else:
        sizes = torch.bincount(chosen, minlength=experts)[:experts].tolist()
    order = order[: sum(sizes)]
    return Routed(order % len(top_experts), order // len(top_experts), sizes)


class ExpertsForm(nn.Module):
    """What the forms have in common."""

    parts: ClassVar[tuple[tuple[str, ...], ...]]
    """The sets of parameters by which it is recognised. Those that end in ``_bias`` hold a bias of each expert."""

    @classmethod
    def holder(cls, module: nn.Module) -> nn.Module:
        """The module that has the parameters: ``module``, or one inside."""
        return module

    @classmethod
    def count(cls, module: nn.Module) -> int | None:
        """How many experts ``module`` has, if it is of this form as far as attributes and shapes show."""
        raise NotImplementedError

    @classmethod
    def prepare(cls, module: nn.Module) -> None:
        """Make ``module``, a copy of one of this form, run in float64."""

    @classmethod
    def matrices(cls, module: nn.Module, part: str) -> Tensor:
        """The weights of ``part`` as ``[experts, out_features, in_features]``, a view."""
        raise NotImplementedError

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own, with its products in FP8."""
        layers = getattr(self.holder(self), BESIDE_PARAMETERS).values()
        if self.training or any(layer.runs_fp8 for layer in layers):
            return self.grouped(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def grouped(self, *args: Any, **kwargs: Any) -> Any:
        """The forward by grouped products."""
        raise NotImplementedError

    def product(self, part: str, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """``x_e W_e^T`` for the weights of ``part``."""
        layer: FP8GroupedLinear = getattr(self.holder(self), BESIDE_PARAMETERS)[part]
        y: Tensor = layer(x, self.matrices(self, part), sizes)
        return y


class StackedRows(ExpertsForm):
    """LLM Foundry's ``torch_dmoe`` and DBRX: ``w1``, ``w2`` and for a GLU ``v1`` of a child ``mlp``, all ``[experts * ffn, hidden]``."""

    parts = (("w1", "w2"), ("w1", "v1", "w2"))
    mlp: Any

    @classmethod
    def holder(cls, module: nn.Module) -> nn.Module:
        """Its child ``mlp``."""
        return module._modules.get("mlp") or module

    @classmethod
    def count(cls, module: nn.Module) -> int | None:
        """See :meth:`ExpertsForm.count`."""
        mlp = cls.holder(module)
        experts = getattr(mlp, "moe_num_experts", None)
        shapes = {tuple(p.shape) for p in mlp._parameters.values() if p is not None}
        if not isinstance(experts, int) or len(shapes) != 1 or not hasattr(mlp, "activation_fn"):
            return None
        shape = shapes.pop()
        return experts if len(shape) == 2 and shape[0] % experts == 0 else None

    @classmethod
    def matrices(cls, module: Any, part: str) -> Tensor:
        """See :meth:`ExpertsForm.matrices`."""
        mlp: Any = cls.holder(module)
        weight: Tensor = getattr(mlp, part)
        found = weight.view(mlp.moe_num_experts, -1, weight.shape[1])
        return found.transpose(1, 2) if part == "w2" else found

    def grouped(self, x: Tensor, scores: Tensor, top_weights: Tensor, top_experts: Tensor) -> Tensor:
        """Args are those of the model's own forward; ``scores`` are not read."""
        return self._of_tokens(x.reshape(-1, x.shape[-1]), top_experts, top_weights).view(x.shape)

    def _of_tokens(self, tokens: Tensor, top_experts: Tensor, top_weights: Tensor) -> Tensor:
        rows = routed(top_experts, self.mlp.moe_num_experts)
        inputs = tokens[rows.token]
        hidden = self.mlp.activation_fn(self.product("w1", inputs, rows.sizes))
        if "v1" in self.mlp._parameters:
            hidden = hidden * self.product("v1", inputs, rows.sizes)
        return rows.summed(self.product("w2", hidden, rows.sizes), top_weights, tokens)


class RoutedStackedRows(StackedRows):
    """DBRX of transformers 5: the same parameters, with the arguments of :class:`RoutedGateUp`."""

    def grouped(  # type: ignore[override]  # another class's arguments
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """``hidden_states``: ``[..., hidden]``; the choices and their weights: ``[tokens, choices]``."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        y = self._of_tokens(tokens, top_k_index, top_k_weights)
        return y.view(len(hidden_states), -1, hidden_states.shape[-1])


class SortedGateUp(ExpertsForm):
    """Llama 4: ``gate_up_proj`` ``[experts, hidden, 2 * ffn]`` and ``down_proj``; every expert gets all tokens, sorted already."""

    parts = (("gate_up_proj", "down_proj"),)
    num_experts: int
    act_fn: Any

    @classmethod
    def count(cls, module: nn.Module) -> int | None:
        """See :meth:`ExpertsForm.count`."""
        experts = getattr(module, "num_experts", None)
        up, down = (tuple(module._parameters[part].shape) for part in cls.parts[0])  # type: ignore[union-attr]
        fits = len(up) == len(down) == 3 and hasattr(module, "act_fn") and isinstance(experts, int)
        return experts if fits and up == (experts, down[2], 2 * down[1]) else None

    @classmethod
    def matrices(cls, module: nn.Module, part: str) -> Tensor:
        """See :meth:`ExpertsForm.matrices`."""
        weight: Tensor = getattr(module, part)
        return weight.transpose(1, 2)

    def grouped(self, hidden_states: Tensor) -> Tensor:
        """``hidden_states``: ``[experts * tokens, hidden]``."""
        sizes = [len(hidden_states) // self.num_experts] * self.num_experts
        gate, up = self.product("gate_up_proj", hidden_states, sizes).chunk(2, dim=-1)
        return self.product("down_proj", up * self.act_fn(gate), sizes)


class RoutedGateUp(ExpertsForm):
    """transformers 5: ``gate_up_proj`` ``[experts, 2 * ffn, hidden]`` and ``down_proj``, transposed and with biases in GPT-OSS."""

    parts = (
        ("gate_up_proj", "down_proj"),
        ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"),
    )
    num_experts: int

    @classmethod
    def count(cls, module: nn.Module) -> int | None:
        """See :meth:`ExpertsForm.count`."""
        experts = getattr(module, "num_experts", None)
        if not isinstance(experts, int) or not is_decorated(module):
            return None
        up, down = (tuple(cls.matrices(module, part).shape) for part in cls.parts[0])
        return experts if up == (experts, 2 * down[2], down[1]) else None

    @classmethod
    def prepare(cls, module: nn.Module) -> None:
        """See :meth:`ExpertsForm.prepare`."""
        run_own_forward(module)

    @classmethod
    def matrices(cls, module: nn.Module, part: str) -> Tensor:
        """See :meth:`ExpertsForm.matrices`."""
        weight: Tensor = getattr(module, part)
        return weight.transpose(1, 2) if module.is_transposed else weight

    def grouped(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden_states``: ``[tokens, hidden]``; the choices and their weights: ``[tokens, choices]``."""
        rows = routed(top_k_index, self.num_experts)
        gate_up = self._biased("gate_up_proj", hidden_states[rows.token], top_k_index, rows)
        made = self._biased("down_proj", gated(self, gate_up), top_k_index, rows)
        return rows.summed(made, top_k_weights, hidden_states)

    def _biased(self, part: str, x: Tensor, chosen: Tensor, rows: Routed) -> Tensor:
        y, bias = self.product(part, x, rows.sizes), self._parameters.get(f"{part}_bias")
        return y if bias is None else y + bias[chosen[rows.token, rows.choice]].to(y.dtype)


class ParallelExperts(ExpertsForm):
    """GraniteMoE and JetMoE: one ``weight`` ``[experts, out, in]``, called with sorted rows and their number for each expert."""

    parts = (("weight",),)

    @classmethod
    def count(cls, module: nn.Module) -> int | None:
        """See :meth:`ExpertsForm.count`."""
        experts, weight = getattr(module, "num_experts", None), module._parameters.get("weight")
        fits = isinstance(experts, int) and weight is not None and weight.dim() == 3
        return experts if fits and weight.shape[0] == experts else None  # type: ignore[union-attr]

    @classmethod
    def matrices(cls, module: nn.Module, part: str) -> Tensor:
        """See :meth:`ExpertsForm.matrices`."""
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight

    def grouped(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        """Args are those of the model's own forward."""
        return self.product("weight", inputs, list(expert_size))


FORMS: tuple[type[ExpertsForm], ...] = (
    StackedRows,
    RoutedStackedRows,
    SortedGateUp,
    RoutedGateUp,
    ParallelExperts,
)
"""In the order in which they are tried."""
