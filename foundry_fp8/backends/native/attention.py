"""FP8 attention through cuDNN's fused kernels (:mod:`.cudnn_graphs`), without Transformer Engine: our casts before and after, our scales.

Q, K, V and dO are rounded by the quantise kernels, one launch each, which record their amaxes. cuDNN measures those of S, O, dP, dQ, dK and dV;
the launch that takes its outputs out of FP8 records them. So the delayed-scaling state is that of the other backends, and a run can change its
backend.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_fp8.backends.attention_requirements import (
    AttentionMachine,
    AttentionShape,
    attention_requirement,
    call_requirement,
    cudnn_recipe_reason,
)
from foundry_fp8.backends.native import cudnn_graphs
from foundry_fp8.backends.native.plan import plan_of, quantized_view
from foundry_fp8.backends.native.source import BY_ROWS, Source
from foundry_fp8.compat.dynamo_names import renamed_for_dynamo
from foundry_fp8.compat.fake_tensor import dry_run
from foundry_fp8.layers.attention import (
    SLOTS,
    AttentionBackend,
    AttentionInputs,
    AttentionProbe,
    AttentionRecipe,
    FP8DotProductAttention,
    GradScores,
    attention_format,
    attention_slots,
    by_tokens,
)
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.recipes import Operand, Recipe

__all__ = ["NativeAttention", "native_attention_requirement"]

REPEATS_BITS = (9, 19)
"""From this cuDNN on its FP8 backward has a deterministic algorithm, which took the time of the other on an H200."""
PLANNED = AttentionMachine(capability=(10, 0), cudnn=(9, 21, 0))
"""What a dry run plans for: nobody knows the GPU yet."""


@functools.cache
def _machine(device: torch.device | None, deterministic: bool) -> AttentionMachine | Availability:
    """The facts of a CUDA device (``None``: there is none) and of this process, or why cuDNN's frontend cannot run there."""
    otherwise = "Set attention: false, or backend: emulated to check numerics."
    if device is None or torch.version.hip is not None:
        return Availability(False, "native FP8 attention is cuDNN's and runs on NVIDIA GPUs", otherwise)
    missing = cudnn_graphs.frontend_missing()
    if missing is not None:
        return Availability(False, missing, f"pip install 'foundry-fp8[cudnn]'. {otherwise}")
    return AttentionMachine(
        capability=torch.cuda.get_device_capability(device),
        cudnn=cudnn_graphs.cudnn_version(),
        deterministic=deterministic,
    )


def machine_here() -> AttentionMachine | Availability:
    """The current device, or why it cannot run cuDNN's frontend."""
    if dry_run():
        return PLANNED
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return _machine(device, torch.are_deterministic_algorithms_enabled())


def native_attention_requirement(recipe: Recipe, shape: AttentionShape) -> Availability:
    """Whether this machine trains such an attention through cuDNN's frontend; if not, why, and what would change that."""
    machine = machine_here()
    return machine if isinstance(machine, Availability) else attention_requirement(recipe, shape, machine)


class NativeAttention(AttentionBackend):
    """FP8 attention on CUDA through cuDNN's Python frontend.

    Attributes:
        machine: What it runs on, from the first question on.
    """

    name: ClassVar[str] = "native"

    def __init__(self) -> None:
        self.machine: AttentionMachine | None = None

    def recipe_reason(self, recipe: Recipe, grad_scores: GradScores = "fp8") -> str | None:
        """The delayed recipe alone, with every gradient in FP8."""
        return cudnn_recipe_reason(recipe, grad_scores)

    def module_reason(self, recipe: AttentionRecipe, head_dim: int | None) -> str | None:
        """What this machine refuses for every call."""
        found = self._look()
        if found is None:
            assert self.machine is not None
            shape = AttentionShape(head_dim=128 if head_dim is None else head_dim, sequence=128)
            found = attention_requirement(recipe, shape, self.machine)
        return None if found.ok else f"{found.reason}. {found.remedy}"

    def _look(self) -> Availability | None:
        """Know the machine; or why it cannot run here."""
        if self.machine is None:
            machine = machine_here()
            if isinstance(machine, Availability):
                return machine
            self.machine = machine
        return None

    def self_check(
        self, recipe: AttentionRecipe, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """See :meth:`AttentionBackend.self_check`. On CUDA devices."""
        if device.type == "cuda":
            from foundry_fp8.backends.native.attention_check import check_attention

            check_attention(type(self), recipe, head_dim, dtype, device)

    def call_reason(self, module: FP8DotProductAttention, given: AttentionInputs) -> Availability:
        """See :meth:`AttentionBackend.call_reason`. Waits for the device once a forward where there is padding or documents."""
        assert module.recipe is not None
        q, k, v, mask, _, dropout_p = given
        found = self._look()
        if found is not None:
            return found
        assert self.machine is not None
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            reason = "a captured CUDA graph replayed other results than it gave (9 % apart on an H200)"
            return Availability(False, reason, "Do not capture it, or set attention: false.")
        if dropout_p:
            remedy = "Set the model's attention dropout to 0, or attention: false."
            return Availability(False, f"there is no dropout in it (here {dropout_p:g})", remedy)
        if self.machine is PLANNED:  # where masks have no values
            mask = dataclasses.replace(mask, key_padding=None, documents=None)
        elif mask.key_padding is not None or mask.documents is not None:
            mask = mask.simplified
        return call_requirement(module.recipe, q, k, v, mask, self.machine)

    def attend(self, module: FP8DotProductAttention, given: AttentionInputs) -> Tensor:
        """See :meth:`AttentionBackend.attend`. Raises as :meth:`AttentionBackend.check_call`."""
        assert module.recipe is not None
        self.check_call(module, given)
        assert self.machine is not None
        q, k, v, mask, softmax_scale, _ = given
        b, h, tokens, d = q.shape
        call = _Call(
            recipe=module.recipe,
            options=(
                [b, h, k.shape[1], tokens, d],
                softmax_scale,
                mask.causal,
                attention_format(module.recipe, "do").name,
                self.machine.cudnn >= REPEATS_BITS,
                q.dtype,
            ),
            scales={slot: module.slots[slot].scale for slot in attention_slots(module.recipe)},
            amaxes=module.amaxes(),
            probe=module.probe,
        )
        with torch.autocast(q.device.type, enabled=False):
            out: Tensor = _Attention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Call:
    """What one forward and its backward share besides tensors with gradients."""

    recipe: AttentionRecipe
    options: tuple[Any, ...]
    """The last arguments of both operators."""
    scales: dict[str, Tensor]
    amaxes: dict[str, Tensor]
    """Where the amax of a slot goes, if anywhere."""
    probe: AttentionProbe | None

    def quantize(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [b, heads, s, d] as FP8 [b * s, heads * d], and what it is multiplied by to leave it."""
        from foundry_fp8.backends.native.ops import unnoticed  # Triton is imported there
        from foundry_fp8.backends.native.scaling import SCALINGS

        rows = by_tokens(x)
        operand: Operand = "dy" if name == "do" else "x"
        plan, slot = plan_of(self.recipe), SLOTS[name]
        amaxes = self.scales[slot], None, self.amaxes.get(slot)
        layout, _, stats, _ = SCALINGS[plan.kind].quantize(
            Source(rows), operand, plan, BY_ROWS, amaxes, direct=unnoticed()
        )
        if self.probe is not None:
            fmt = attention_format(self.recipe, slot)
            self.probe(name, rows, quantized_view(rows, operand, self.recipe, fmt, layout, stats))
        return layout


class _Attention(torch.autograd.Function):
    """Keeps Q, K, V and O in FP8, and a number a query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        from foundry_fp8.backends.native import attention_ops

        quantized, descales = zip(*(call.quantize(n, x) for n, x in (("q", q), ("k", k), ("v", v))), strict=True)  # fmt: skip
        scales, amaxes = call.scales, call.amaxes
        out, o, stats, descale_o, descale_s = attention_ops.attention_forward(
            *quantized, *descales, scales["s"], scales["o"], amaxes.get("s"), amaxes.get("o"), *call.options
        )
        ctx.save_for_backward(*renamed_for_dynamo((*quantized, o, stats, *descales, descale_o, descale_s)))
        ctx.call = call
        output: Tensor = out.transpose(1, 2)
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        from foundry_fp8.backends.native import attention_ops

        call: _Call = ctx.call
        scales, amaxes = call.scales, call.amaxes
        do8, descale_do = call.quantize("do", do)
        saved = ctx.saved_tensors
        gradients = attention_ops.attention_backward(
            *saved[:5], do8, *saved[5:], descale_do, scales["s"], scales["dp"], scales["dqkv"],
            amaxes.get("dp"), amaxes.get("dqkv"), *call.options
        )  # fmt: skip
        return (*(gradient.transpose(1, 2) for gradient in gradients), None)
