"""Saved-tensor hooks that keep what autograd saves in packed form, inside chosen modules.

What goes wrong with such hooks, and what is done about it here (each line has a test):

- *Weights* must not be packed, nor their casts and views: :func:`is_parameter` walks from a tensor back through views and
  casts to a Parameter. Packing them costs accuracy and, under FSDP, keeps unsharded copies alive.
- *Masks, indices, RNG state, FP8 data, float64, complex, subclasses* pass through (:func:`~.packing.packable`), and so do
  *statistics* (mean, rstd, log-sum-exp), *small tensors*, and tensors the module was handed that need no gradient.
- What passes through is detached: an op's own output kept with its graph is a cycle that is never freed. Its version is
  kept and checked, because hooks switch off torch's check that a saved tensor was not written to.
- *relu* asks its packed result which elements passed, and *sqrt* divides by its own: there nothing becomes zero.
- *Outputs of fused norms and activations* are not kept at all: the fused form makes them again (:func:`.recompute.recomputation`).
- *One tensor saved twice* is packed once. The key holds the storage, and the storage must still be alive: freed memory is
  reused at the same address within a step, and a stale hit is a wrong gradient.
- *torch.compile* saves transposed copies of weights that no longer lead back to a Parameter: it is refused.
- Hooks *inside* a checkpoint switch the checkpoint off. They go outside, where they pack its inputs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from foundry_fp8.activations.compression.packing import pack, packable, unpack
from foundry_fp8.activations.compression.recompute import recomputation
from foundry_fp8.compat.compiled_caller import compiled_caller_waits
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = ["Compressor", "SavedBytes", "StorageRef", "Untouched", "compresses_inside", "is_parameter"]

StorageRef = weakref.ref[torch.UntypedStorage]
"""A storage's Python object lives as long as the storage. (torch's StorageWeakRef would keep the C++ object from being
destroyed, and its address with it, until the reference goes.)"""

MARK = "_saved_tensor_compressor"
"""Attribute that a module carries while hooks of this file are on it."""

_CASTS_AND_VIEWS = (
    "T", "View", "UnsafeView", "ReshapeAlias", "ToCopy", "Transpose", "Permute", "Alias", "Split", "SplitWithSizes",
    "Slice", "Select", "AsStrided", "Unsqueeze", "Squeeze", "Expand", "Narrow", "Clone", "Detach",
)  # fmt: skip

_ZEROS_MATTER = frozenset({"ReluBackward0", "SqrtBackward0"})
"""Nodes that keep their result, which is never negative, and whose backward is wrong where it became zero."""


def is_parameter(x: Tensor) -> bool:
    """Whether ``x`` is a Parameter, or a view or cast of one (autocast's copy, FSDP1's view of its flat parameter)."""
    if isinstance(x, nn.Parameter):
        return True
    node = x.grad_fn
    while node is not None:
        variable = getattr(node, "variable", None)  # AccumulateGrad
        if variable is not None:
            return isinstance(variable, nn.Parameter)
        if node.name().split("Backward")[0] not in _CASTS_AND_VIEWS or len(node.next_functions) != 1:
            return False
        node = node.next_functions[0][0]
    return False


@dataclasses.dataclass
class SavedBytes:
    """Bytes saved for backward, counted by storage.

    Attributes:
        original: What would have been kept of the tensors that were packed.
        packed: What is kept of them.
        passed: What is kept as it was, parameters left out.
        left_out: What is not kept, as backward makes it again from what is.
    """

    original: int = 0
    packed: int = 0
    passed: int = 0
    left_out: int = 0


class _Payload:
    """A :class:`Packed` that several handles share; ``__slots__`` with a weakref, for the cache."""

    __slots__ = ("__weakref__", "packed")

    def __init__(self, packed: Packed) -> None:
        self.packed = packed


@dataclasses.dataclass(slots=True)
class _Handle:
    """What autograd keeps of a packed tensor: the payload, and how to lay it out again."""

    payload: _Payload
    size: Sequence[int]
    stride: Sequence[int] | None
    expanded: Sequence[int] | None

    def tensor(self) -> Tensor:
        flat = unpack(self.payload.packed)
        x = flat.view(self.size) if self.stride is None else flat.as_strided(self.size, self.stride)
        return x if self.expanded is None else x.expand(self.expanded)


@dataclasses.dataclass(eq=False)
class Untouched:
    """What autograd keeps of a tensor that is not packed."""

    value: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> Untouched:
        """Keep ``x`` detached: with its graph, an op's own output would hold the op that holds it."""
        return cls(x.detach(), x._version)

    def tensor(self) -> Tensor:
        """The tensor; raises ``RuntimeError`` if it was written to since."""
        if self.value._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.value.shape)} that backward needs was modified in place after it was "
                f"saved (version {self.version}, now {self.value._version}). Clone it before the in-place operation."
            )
        return self.value


@dataclasses.dataclass(slots=True)
class _MadeAgain:
    """What autograd keeps of an output of a fused form."""

    tensor: Callable[[], Tensor]


class Compressor:
    """Packs what the modules it is attached to save for backward.

    Args:
        fmt: The format; ``None`` packs nothing: exact regions, also inside others, and counting.
        min_numel: Smaller tensors pass through.

    Attributes:
        saved: Bytes packed and passed since it was made; set a new :class:`SavedBytes` to start again.
    """

    def __init__(self, fmt: PackFormat | None, *, min_numel: int = 32768) -> None:
        self.fmt = fmt
        self.min_numel = min_numel
        self.saved = SavedBytes()
        self._cache: dict[tuple[Any, ...], tuple[StorageRef, weakref.ref[_Payload]]] = {}
        self._leading: set[tuple[int, ...]] = set()
        self._handed: dict[int, StorageRef] = {}
        self._regions: list[saved_tensors_hooks] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, module: nn.Module) -> None:
        """Pack what ``module`` saves during its forward. Of nested modules the innermost's compressor acts."""
        self._handles += [
            module.register_forward_pre_hook(self._enter, with_kwargs=True),
            module.register_forward_hook(self._leave, always_call=True),
        ]
        setattr(module, MARK, self)

    def detach(self, model: nn.Module) -> None:
        """Take all hooks of this compressor off ``model``."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in model.modules():
            if module.__dict__.get(MARK) is self:
                delattr(module, MARK)

    @contextlib.contextmanager
    def region(self) -> Iterator[Compressor]:
        """Pack what is saved inside this context."""
        with saved_tensors_hooks(self.pack, self.unpack):
            yield self

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for x in tree_iter((args, kwargs)):
            # Masks, position tables: constants of the whole model, shared by its blocks.
            if (
                isinstance(x, Tensor)
                and not x.requires_grad
                and type(x) is Tensor
                and x.layout == torch.strided
            ):
                storage = x.untyped_storage()
                self._handed[storage._cdata] = weakref.ref(storage)
        self._push()

    def _push(self) -> None:
        if compiled_caller_waits():
            raise RuntimeError(
                "activation compression does not work under torch.compile: a compiled graph saves copies of weights "
                "that cannot be told from activations. Do not compile the model (compile_config), or take "
                "activation_compression off."
            )
        region = saved_tensors_hooks(self.pack, self.unpack)
        region.__enter__()
        self._regions.append(region)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._regions.pop().__exit__(None, None, None)
        self._leading.clear()
        self._handed.clear()
        self._cache = {key: entry for key, entry in self._cache.items() if entry[1]() is not None}

    def pack(self, x: Tensor) -> _Handle | Untouched | _MadeAgain:
        """The pack hook."""
        parameter = is_parameter(x)
        if not parameter and x.numel() >= self.min_numel and (again := recomputation(x)) is not None:
            self.saved.left_out += x.untyped_storage().nbytes()
            return _MadeAgain(again)
        if parameter or self.fmt is None or not self._wanted(x):
            if not parameter:
                self.saved.passed += x.untyped_storage().nbytes() if type(x) is Tensor else 0
            return Untouched.of(x)
        base, expanded = _without_expansion(x.detach())
        size: tuple[int, ...] = tuple(base.shape)
        stride: tuple[int, ...] | None = tuple(base.stride())
        if torch._prims_common.is_non_overlapping_and_dense(base):
            base = base.as_strided((base.numel(),), (1,))  # as it lies in memory: no copy, strides come back
        else:
            base, stride = base.contiguous().view(-1), None
        row = size[-1] if size and (stride is None or stride[-1] == 1) else 0
        return _Handle(self._payload(x, base, stride is None, row), size, stride, expanded)

    def unpack(self, handle: _Handle | Untouched | _MadeAgain) -> Tensor:
        """The unpack hook."""
        return handle.tensor()

    def _payload(self, x: Tensor, flat: Tensor, copied: bool, row: int) -> _Payload:
        assert self.fmt is not None
        storage = x.untyped_storage()
        layout = (tuple(x.shape), tuple(x.stride())) if copied else flat.numel()
        key = (storage._cdata, x.data_ptr(), layout, x.dtype, x._version)
        entry = self._cache.get(key)
        if entry is not None and entry[0]() is storage:  # the same storage, not another one at its address
            payload = entry[1]()
            if payload is not None:
                return payload
        nonzero = x.grad_fn is not None and x.grad_fn.name() in _ZEROS_MATTER
        payload = _Payload(pack(flat, self.fmt, row=row, nonzero=nonzero))
        self._cache[key] = (weakref.ref(storage), weakref.ref(payload))
        self.saved.original += flat.numel() * flat.element_size()
        self.saved.packed += payload.packed.nbytes
        return payload

    def _wanted(self, x: Tensor) -> bool:
        if not packable(x) or x.numel() < self.min_numel:
            return False
        if not x.requires_grad:
            handed = self._handed.get(x.untyped_storage()._cdata)
            if handed is not None and handed() is x.untyped_storage():
                return False
        return not self._is_statistic(x)

    def _is_statistic(self, x: Tensor) -> bool:
        """Mean and rstd keep a last dimension of 1; an attention's log-sum-exp has its output's shape but the last."""
        if x.shape[-1:] == (1,):
            return True
        if x.dim() == 4:
            self._leading.add(tuple(x.shape[:3]))
            self._leading.add((x.shape[0], x.shape[2], x.shape[1]))
            return False
        # Attention kernels may pad the sequence of the log-sum-exp.
        return (
            x.dim() == 3
            and x.dtype == torch.float32
            and any(
                tuple(x.shape[:2]) == seen[:2] and seen[2] <= x.shape[2] < seen[2] + 128
                for seen in self._leading
            )
        )


def _without_expansion(x: Tensor) -> tuple[Tensor, Sequence[int] | None]:
    """``x`` with expanded dimensions (stride 0) cut to 1, and the shape to expand to again."""
    if not any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x, None
    cut = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    return x[cut], tuple(x.shape)


def compresses_inside(module: nn.Module) -> str | None:
    """The name, inside ``module``, of a module that packs its saved tensors; ``None`` if there is none."""
    for name, child in module.named_modules():
        if MARK in child.__dict__:
            return name
    return None
