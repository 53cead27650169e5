"""Where the native backend runs, which layers it takes, and its entry into a linear."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from foundry_fp8.backends.native.inputs import LinearCall, checked_dtype, shared_input
from foundry_fp8.backends.native.late import late
from foundry_fp8.backends.native.plan import QuantizedWeight
from foundry_fp8.backends.native.room import Room
from foundry_fp8.backends.size_rule import size_reason
from foundry_fp8.compat.autograd import apply_untransformed, inside_backward
from foundry_fp8.compat.fake_tensor import dry_run
from foundry_fp8.compat.fresh_view import fresh_view
from foundry_fp8.compat.fsdp2 import shard_versions
from foundry_fp8.compat.peft_merges import merged_adapters
from foundry_fp8.config.versions import dotted
from foundry_fp8.kernels.launch import compiler_missing, interpreting, triton_missing
from foundry_fp8.layers.attention import AttentionBackend
from foundry_fp8.layers.autocast import without_autocast
from foundry_fp8.layers.backend import DEFAULT_OPTIONS, Availability, Backend, BackendOptions
from foundry_fp8.layers.delayed_scaling import DelayedSlot
from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.frozen_weight import in_dtype
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear, by_expert
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.produced import Produced
from foundry_fp8.layers.shared_inputs import QuantizedInput
from foundry_fp8.numerics.recipes import Recipe

__all__ = ["NativeBackend"]

log = logging.getLogger(__name__)

SM_FP8 = (8, 9)


class NativeBackend(Backend):
    """FP8 on CUDA with torch and Triton alone.

    With ``cache_weights: auto`` a weight is quantised once for a forward and its backward, where the device has room
    (:mod:`.room`); with ``true`` once per optimizer step instead of in every forward and again in its backward. That costs two
    bytes of memory a weight element for as long as the model lives, under FSDP2 for the whole unsharded model; it saves time with
    gradient accumulation. What an optimizer changes is noticed, and so is whatever torch counts as a change
    (:attr:`Tensor._version`), of a weight or of FSDP2's shard of it, and what PEFT merges into one; another write through ``.data``
    is not: call :meth:`clear_weight_cache` after one. Quantised in every forward all the same: what FSDP1 gathered (a warning says
    so), what ``torch.compile`` traced, and what a CUDA graph captured.
    """

    name: ClassVar[str] = "native"
    lacks: ClassVar[Mapping[str, str]] = {"accumulation": Backend.lacks["accumulation"]}

    def __init__(self, options: BackendOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(options)
        self.room = Room()
        # A quantised weight with what it was made of: another value of any of these makes another weight.
        self._cache: dict[str, tuple[tuple[object, ...], QuantizedWeight]] = {}
        self._written: tuple[object, ...] = ()
        self._warned = False

    def availability(self, recipe: Recipe, device: torch.device) -> Availability:
        """See :meth:`Backend.availability`. On a CPU only in a dry run, for plans, and under Triton's interpreter, for tests."""
        missing = triton_missing() or self.recipe_reason(recipe)
        if missing is not None:
            return Availability(False, missing, "Use backend: emulated to check numerics without speed.")
        if device.type == "cpu" and (dry_run() or interpreting()):
            return Availability(True)
        if device.type != "cuda" or torch.version.hip is not None:
            where = "ROCm" if torch.version.hip is not None else f"{device.type} devices"
            return Availability(False, f"it runs on NVIDIA GPUs, not on {where}", "Use backend: emulated.")
        capability = torch.cuda.get_device_capability(device)
        if capability < SM_FP8:
            return Availability(
                False,
                f"{torch.cuda.get_device_name(device)} has compute capability {dotted(capability)}, and FP8 tensor cores "
                f"begin with {dotted(SM_FP8)}",
                "Train in BF16 on this GPU.",
            )
        unbuilt = compiler_missing()
        if unbuilt is not None:
            return Availability(
                False, unbuilt, "Install gcc and Python's development headers (apt install gcc python3-dev)."
            )
        from foundry_fp8.backends.native.scaling import SCALINGS  # Triton is imported there

        return SCALINGS[recipe.kind].availability(device, capability)

    def recipe_reason(self, recipe: Recipe) -> str | None:
        """See :meth:`Backend.recipe_reason`: it has no kernels."""
        if triton_missing() is not None:
            return None
        from foundry_fp8.backends.native.scaling import SCALINGS  # Triton is imported there

        if recipe.kind in SCALINGS:
            return None
        needed = ", which would be Blackwell's for FP4" if recipe.element_bits == 4 else ""
        return f"it has no kernels for the scales of {recipe.name} ({recipe.kind}){needed}"

    def shape_reason(self, recipe: Recipe, in_features: int, out_features: int) -> str | None:
        """As everywhere (the kernels would pad any shape); with :attr:`BackendOptions.only_where_faster`, why this layer had better not."""
        reason = super().shape_reason(recipe, in_features, out_features)
        if reason is None and self.options.only_where_faster:
            reason = size_reason(recipe, in_features, out_features)
        return reason

    def self_check(
        self, recipe: Recipe, dtype: torch.dtype, device: torch.device, *, fused: bool, experts: bool
    ) -> None:
        """See :meth:`Backend.self_check`. On CUDA devices; interpreted kernels have tests."""
        if device.type == "cuda" and torch.cuda.is_available():
            from foundry_fp8.backends.native.self_check import check_kernels

            index = torch.cuda.current_device() if device.index is None else device.index
            check_kernels(recipe, dtype, torch.device("cuda", index), fused, experts)

    def linear(self, module: FP8Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See :meth:`Backend.linear`."""
        dtype, native = checked_dtype(module, x, weight), late()
        if not weight.is_contiguous():
            weight = weight.contiguous()
        if x.numel() == 0 or weight.numel() == 0:
            return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        compiling, slots = torch.compiler.is_compiling(), module.slots
        if slots is not None and not compiling and (slots["x"].joined or type(x) is Produced):
            _follow(
                slots["x"], x if type(x) is Produced and module.recipe is slots["x"].state.recipe else None
            )
        call = LinearCall.of(module, module.probe)
        # A probe and a product in high precision read it.
        if type(x) is Produced and not (
            x.unread and x.dtype == dtype and not call.reads_hp and module.probe is None
        ):
            x = x.plain()
        x_hp = x if x.__class__ is Tensor and x.dtype is dtype else in_dtype(x, dtype)
        if compiling and x.dim() != 2:
            x_hp = x_hp.reshape(-1, x.shape[-1])
        shared: QuantizedInput | None = None
        cached = self.cached_weight(module, call, dtype) if self.options.cache_weights is True else None
        ahead = None
        if type(x) is Produced:
            shared = shared_input(x.made, call)
            if cached is None and call.x[0] is None and native.scaling.SCALINGS[call.plan.kind].joins:
                cached, ahead = native.ahead.ahead_of(module, x)
        # Delayed scaling: whether another linear's scale is the same, only the device knows.
        elif not compiling and call.x[0] is None:
            shared = self.inputs.of(x, id(call.plan), dtype)
        with without_autocast(x.device.type):
            keep_w = self.room.there is True and not compiling and self.keeps_weight(x)
            given = call, cached, shared, keep_w, torch.is_grad_enabled(), ahead
            y: Tensor = (
                native.linear.NativeLinear.apply(x_hp, weight, bias, given)
                if compiling
                else apply_untransformed(native.linear.NativeLinear, x_hp, weight, bias, given)
            )
        return fresh_view(y, *x.shape[:-1], len(weight)) if compiling and x.dim() != 2 else y

    def attention(self) -> AttentionBackend:
        """See :meth:`Backend.attention`."""
        from foundry_fp8.backends.native.attention import NativeAttention

        return NativeAttention()

    def experts_reason(self) -> str | None:
        """It runs them; with :attr:`BackendOptions.only_where_faster` it leaves them, for nobody has timed that on a GPU."""
        if self.options.only_where_faster:
            return "not known to be faster on the native backend; name a recipe to convert them"
        return None

    @torch.compiler.disable
    def grouped_linear(
        self, layer: FP8GroupedLinear, x: Tensor, weights: Tensor, sizes: Sequence[int]
    ) -> Tensor:
        """See :meth:`Backend.grouped_linear`: all experts at once where that fits, otherwise one after another; no weight is cached."""
        from foundry_fp8.backends.native.grouped import GroupedLinear, fits_grouped
        from foundry_fp8.backends.native.linear import NativeLinear

        dtype = checked_dtype(layer, x, weights)
        call, x = LinearCall.of(layer, layer.probe), in_dtype(x, dtype)
        if fits_grouped(call, x, weights):
            with without_autocast(x.device.type):
                grouped: Tensor = GroupedLinear.apply(x, weights, sizes, call)  # type: ignore[no-untyped-call]
            return grouped

        def product(x: Tensor, weight: Tensor) -> Tensor:
            y: Tensor = NativeLinear.apply(
                x, weight.contiguous(), None, (call, None, None, False, torch.is_grad_enabled(), None)
            )  # type: ignore[no-untyped-call]
            return y

        with without_autocast(x.device.type):
            return by_expert(product, x, weights, sizes)

    def clear_weight_cache(self) -> None:
        """Forget every cached weight. Optimizer steps call it."""
        self._cache.clear()

    def keeps_weight(self, x: Tensor) -> bool:
        """Whether the forward of a linear with the input ``x`` keeps the weight's transposed layout until backward: not in a recompute, whose weight is there already."""
        wanted = self.room.there is True and x.requires_grad and torch.is_grad_enabled()
        return wanted and not inside_backward()

    def before_forward(self, model: nn.Module) -> None:
        """Look for room; forget the cached weights if FSDP2's shards were written or adapters merged since the last forward."""
        if self.options.cache_weights == "auto":
            if self.room.there is None and model.training and torch.is_grad_enabled():
                _watching().add(self)
                self.room.look(model)
        elif (
            self.options.cache_weights
            and (written := (shard_versions(model), merged_adapters(model))) != self._written
        ):
            self._written = written
            self.clear_weight_cache()

    def cached_weight(
        self, module: FP8Linear, call: LinearCall, dtype: torch.dtype
    ) -> QuantizedWeight | None:
        """Both layouts and the statistics of the weight of ``module``, quantised now or before; ``None`` where not cached.

        Args:
            module: Whose weight.
            call: The recipe, and delayed scaling's state of the weight.
            dtype: The compute dtype, to which the weight is rounded first.
        """
        if self.options.cache_weights is not True or torch.compiler.is_compiling() or not module.training:
            return None
        weight = module.weight
        # A view that FSDP1 gathered, or a DTensor: no counter shows when its shard changes.
        if not isinstance(weight, nn.Parameter) or is_dtensor(weight):
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s: cache_weights has no effect here: the weight in use is not the module's own parameter, as under "
                    "FSDP1 and tensor parallelism. Use FSDP2, or set algorithms.fp8.cache_weights to false.",
                    module.fqn,
                )
            return None
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # a replay would go on reading the weight of the capture
        scale, slot = call.w
        # A delayed scale changes with every forward pass.
        key = (
            weight.data_ptr(),
            weight._version,
            weight.shape,
            dtype,
            call.plan,
            None if scale is None or module.slots is None else module.slots["w"].state.in_force().number,
        )
        found = self._cache.get(module.fqn)
        if found is None or found[0] != key:
            from foundry_fp8.backends.native.linear import quantize_weight

            with torch.no_grad():
                matrix = in_dtype(module.matrix, dtype).contiguous()
                found = self._cache[module.fqn] = (
                    key,
                    quantize_weight(matrix, call.plan, scale=scale, amax_slot=slot),
                )
            # For optimizers that write through .data, which no version counter sees (LLM Foundry's DecoupledLionW does).
            _watching().add(self)
        elif slot is not None:
            torch.fmax(slot, found[1][2][0], out=slot)
        return found[1]


def _follow(slot: DelayedSlot, x: Produced | None) -> None:
    """Let linears that read one tensor have one scale of it, where their pasts are alike, and so quantise it once; each its own again where one reads another."""
    if x is None:
        slot.state.part()
    elif not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        first: DelayedSlot = x.made.setdefault("slot", slot)
        slot.state.join(slot, first)


@functools.cache
def _watching() -> weakref.WeakSet[NativeBackend]:
    """Who hears of optimizers' steps. Torch keeps the hook for all optimizers and for good, so it is made once a process."""
    backends: weakref.WeakSet[NativeBackend] = weakref.WeakSet()

    def stepped(*_: object) -> None:
        for backend in list(backends):
            backend.room.stepped = True
            backend.clear_weight_cache()

    register_optimizer_step_post_hook(stepped)
    return backends
