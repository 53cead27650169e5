"""What a forward really multiplied: by which weight, where, in which precision; and the report corrected by it.

A conversion knows modules, not what their owners do with them: one may multiply by a layer's weight without calling the
layer (VideoMAE's queries, Mamba's fused kernel), or hold a parameter that it only adds. A forward shows it. Torch's
functions are watched as Python calls them, above autocast and autograd; what happens inside a kernel of somebody else's is
not seen, and for converted layers the ledger speaks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.ledger import precision_of
from foundry_fp8.model_structure.experts import expert_count
from foundry_fp8.surgery.report import Action, SurgeryReport, SurgeryRow, kind_of, merged_name

__all__ = ["ForwardTrace", "Product", "as_run"]

PRODUCTS = frozenset({
    "linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv",
    "einsum", "tensordot", "inner", "multi_head_attention_forward", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "scaled_mm", "_scaled_mm", "grouped_mm", "_grouped_mm",
})  # fmt: skip
"""Names of torch's functions and methods that multiply matrices."""


@dataclasses.dataclass(frozen=True)
class Product:
    """A weight that was multiplied."""

    by: str
    """The module whose forward did it."""
    precision: str
    """Of the result: ``bf16``, ..."""
    weights: frozenset[str]
    """What it is called, and what else was part of it: its ties, an adapter merged into it."""


def _reads_nothing(hook: Any) -> Any:
    """Marks a hook for whose sake nothing has to be computed that would not be (``backends/native/fused.py``)."""
    hook.reads_nothing = True
    return hook


class ForwardTrace(TorchFunctionMode):
    """Watches the first forward of ``model`` in training after :meth:`arm`.

    Args:
        model: Converted or not; whatever wraps it later, names are those of now.

    Attributes:
        products: Weight -> who multiplied by it, outside of converted layers.
        shapes: Of the weights by name.
        complete: Whether that forward has run; from then on nothing is watched.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.products: dict[str, Product] = {}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self.complete = False
        self._root = model
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {
            module: [(part, f"{name}.{part}" if name else part) for part in module._parameters]
            for module, name in self._names.items()
        }
        self._experts = [
            f"{n}." for n, m in model.named_modules() if isinstance(m, nn.ModuleDict) and expert_count(n, m)
        ]
        self._with_data: set[str] = set()
        self._known = WeakTensorKeyDictionary()  # Tensor -> the names of the weights that it is made of
        self._inside: list[nn.Module] = []
        self._handles: list[Any] = []

    @property
    def not_multiplied(self) -> set[str]:
        """Weights that met data in some other function of torch, and were multiplied by nobody."""
        return self._with_data - set(self.products)

    @property
    def ran(self) -> dict[str, str]:
        """Names of the converted linears and attentions that have run by now, and in what."""
        ran = {m.fqn: [p for _, p in m.ledger.calls] for m in self._names if _converted(m)}
        return {
            name: min(found, key=lambda p: p not in ("fp4", "fp8")) for name, found in ran.items() if found
        }

    def kind_of(self, name: str) -> str:
        """``name`` without the numbers of blocks and experts: modules of one kind answer for each other."""
        for experts in self._experts:  # by name: expert_0, expert_1, ...
            if name.startswith(experts):
                name = f"{experts}0.{name.removeprefix(experts).partition('.')[2]}"
        return kind_of(name)

    def arm(self) -> None:
        """Wait for the forward. Not for a model under ``torch.compile``: the hooks would be compiled."""
        for module in self._names:
            self._handles.append(module.register_forward_pre_hook(self._begin))
            self._handles.append(module.register_forward_hook(self._end, always_call=True))

    def disarm(self) -> None:
        """Stop waiting, whether or not a forward came."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @_reads_nothing
    def _begin(self, module: nn.Module, args: Any) -> None:
        if module is self._root and module.training and torch.is_grad_enabled():
            self.__enter__()
        elif not self._inside:
            return
        self._inside.append(module)
        # Here and not once: FSDP gathers the parameters of one unit at a time, as tensors of their own.
        for inner in module.modules():
            for part, name in self._parameters.get(inner, ()):
                tensor = getattr(inner, part, None)
                if tensor is not None:
                    self._known[tensor] = (self._known.get(tensor) or frozenset()) | {name}
            for buffer in inner._buffers.values():
                if buffer is not None:
                    self._known[buffer] = frozenset()

    @_reads_nothing
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._inside:
            return
        self._inside.pop()
        if module is not self._root:
            return
        self.__exit__(None, None, None)
        self._known.clear()
        self._inside.clear()
        if output is not None:  # which is what a forward that raised gives; the next one is watched then
            self.complete = True
            self.disarm()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not any(_converted(module) for module in self._inside):
            self._see(getattr(func, "__name__", ""), _tensors((args, kwargs)), _tensors(output))
        return output

    def _see(self, function: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        found = [self._known.get(tensor) for tensor in inputs]
        weights = frozenset().union(*(names for names in found if names))
        if not weights or not outputs:
            return
        if function in PRODUCTS:
            by = self._names[self._inside[-1]] or type(self._root).__name__
            for weight in weights:
                self.products.setdefault(weight, Product(by, precision_of(outputs[0].dtype), weights))
        elif None in found:
            self._with_data |= weights
        if None not in found:  # made of weights alone: a view, a cast, a merged adapter
            for tensor in outputs:
                self._known[tensor] = weights


def as_run(report: SurgeryReport, trace: ForwardTrace) -> tuple[SurgeryReport, list[str]]:
    """The report of what ran, and a warning for each kind of converted module that did not.

    Modules of one kind (names that differ in numbers) answer for each other: an expert may get no tokens, a block may be
    dropped. Call it after the batch whose first forward ``trace`` watched.
    """
    ran = {trace.kind_of(name): precision for name, precision in trace.ran.items()}
    idle: dict[tuple[str, str], list[str]] = {}

    def seen(row: SurgeryRow) -> SurgeryRow:
        product = trace.products.get(row.name if row.name in trace.shapes else f"{row.name}.weight")
        precision = "" if product is None else product.precision
        if row.action == "converted" and (kind := trace.kind_of(row.shared_with or row.name)) in ran:
            return dataclasses.replace(row, precision=ran[kind])
        if row.action == "converted":
            action: Action = "unused"
            why = "nothing called it"
            if product is not None:
                action, why = "skipped", f"{kind_of(product.by)} multiplies by its weight itself"
            idle.setdefault((trace.kind_of(row.name), why), []).append(row.name)
            reason = f"converted, but {why}"
            return dataclasses.replace(row, action=action, reason=reason, precision=precision)
        if row.name in trace.not_multiplied:
            return dataclasses.replace(row, action="unused", reason="used otherwise than in a product")
        return dataclasses.replace(row, precision=precision)

    rows = [seen(row) for row in report.rows]
    listed = {name for row in rows for name in (row.name, f"{row.name}.weight")}
    for weight, product in trace.products.items():
        if not product.weights & listed and len(trace.shapes[weight]) > 1:
            listed.add(weight)
            reason = f"{kind_of(product.by)} multiplies by it itself"
            shape, precision = trace.shapes[weight], product.precision
            rows.append(
                SurgeryRow(name=weight, action="skipped", reason=reason, shape=shape, precision=precision)
            )
    for row in report.attention:
        if row.action == "converted" and trace.kind_of(row.name) not in ran:
            idle.setdefault((trace.kind_of(row.name), "nothing called it"), []).append(row.name)
    warnings = [
        f"{merged_name(names)}: converted to FP8, but in the first batch {why}. It does not run in FP8."
        for (_, why), names in idle.items()
    ]
    return dataclasses.replace(report, rows=tuple(rows)), warnings


def _converted(module: nn.Module) -> TypeGuard[FP8GemmLayer | FP8DotProductAttention]:
    return isinstance(module, FP8GemmLayer | FP8DotProductAttention)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_iter(value) if isinstance(x, Tensor)]
