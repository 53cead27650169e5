"""Saved-tensor hooks that keep what autograd saves in packed form, inside chosen modules.

What goes wrong with such hooks, and what is done about it here (each line has a test):

- *Who reads it back* decides whether it may be rounded: only what known nodes save is packed (:mod:`.readers`). That is known
  once something comes after the node, so a tensor is kept as it is until then.
- *Weights* must not be packed, nor their casts and views: :func:`is_parameter` walks from a tensor back through views and
  casts to a Parameter. Packing them costs accuracy and, under FSDP, keeps unsharded copies alive.
- *Masks, indices, RNG state, FP8 data, float64, complex, subclasses* pass through (:func:`~.packing.packable`), and so do
  *statistics* (mean, rstd, log-sum-exp), *small tensors*, and tensors the module was handed that need no gradient.
- What passes through is detached: an op's own output kept with its graph is a cycle that is never freed. Its version is
  kept and checked, because hooks switch off torch's check that a saved tensor was not written to.
- *Outputs of fused norms and activations* are not kept at all: the fused form makes them again (:func:`.recompute.recomputation`).
- *One tensor saved twice* is kept once. The key holds the storage, and the storage must still be alive: freed memory is
  reused at the same address within a step, and a stale hit is a wrong gradient.
- *torch.compile* saves transposed copies of weights that no longer lead back to a Parameter: it is refused.
- Hooks *inside* a checkpoint switch the checkpoint off. They go outside, where they pack its inputs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from foundry_fp8.activations.compression.layouts import Flat, Rounded
from foundry_fp8.activations.compression.packing import packable
from foundry_fp8.activations.compression.readers import Reader, Reads, Region, reads_of
from foundry_fp8.activations.compression.recompute import recomputation
from foundry_fp8.compat.autograd import newest_node
from foundry_fp8.compat.compiled_caller import compiled_caller_waits
from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.compat.pytree import tree_iter
from foundry_fp8.compat.storages import storage_number
from foundry_fp8.layers.produced import in_memory
from foundry_fp8.numerics.packed import Packed, PackFormat

__all__ = ["Compressor", "SavedBytes", "StorageRef", "UnpackedTensor", "compresses_inside", "is_parameter"]

StorageRef = weakref.ref[torch.UntypedStorage]
"""A storage's Python object lives as long as the storage. (torch's StorageWeakRef would keep the C++ object from being
destroyed, and its address with it, until the reference goes.)"""

MARK = "_saved_tensor_compressor"
"""Attribute that a module carries while hooks of this file are on it."""

_CASTS_AND_VIEWS = (
    "T", "View", "UnsafeView", "ReshapeAlias", "ToCopy", "Transpose", "Permute", "Alias", "Split", "SplitWithSizes",
    "Slice", "Select", "AsStrided", "Unsqueeze", "Squeeze", "Expand", "Narrow", "Clone", "Detach",
)  # fmt: skip


def is_parameter(x: Tensor) -> bool:
    """Whether ``x`` is a Parameter, or a view or cast of one (autocast's copy, FSDP1's view of its flat parameter)."""
    # Of a frozen one only the base shows it.
    if isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
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
        exact: What of ``passed`` was large enough to pack but is read by a node that must not find it rounded, by the
            node's name.
        left_out: What is not kept, as backward makes it again from what is.
    """

    original: int = 0
    packed: int = 0
    passed: int = 0
    exact: Counter[str] = dataclasses.field(default_factory=Counter)
    left_out: int = 0

    def __add__(self, other: SavedBytes) -> SavedBytes:
        names = (field.name for field in dataclasses.fields(SavedBytes))
        return SavedBytes(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclasses.dataclass(eq=False)
class UnpackedTensor:
    """What autograd keeps of a tensor that is not packed."""

    value: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> UnpackedTensor:
        """Keep ``x`` detached: with its graph, an op's own output would hold the op that holds it."""
        return cls(x.detach(), x._version)

    @property
    def written_to(self) -> bool:
        """Whether it has changed since."""
        return self.value._version != self.version

    def tensor(self) -> Tensor:
        """The tensor; raises ``RuntimeError`` if it was written to since."""
        if self.written_to:
            raise RuntimeError(
                f"a tensor of shape {list(self.value.shape)} that backward needs was modified in place after it was "
                f"saved (version {self.version}, now {self.value._version}). Clone it before the in-place operation."
            )
        return self.value


@dataclasses.dataclass(slots=True)
class _Waiting:
    """What autograd keeps of a tensor that may be packed, once it is known who reads it back."""

    kept: UnpackedTensor | Rounded
    positive: bool

    def tensor(self) -> Tensor:
        return self.kept.tensor()


@dataclasses.dataclass(slots=True)
class _Recomputed:
    """What autograd keeps of an output of a fused form."""

    tensor: Callable[[], Tensor]


class Compressor:
    """Packs what the modules it is attached to save for backward.

    Args:
        fmt: The format; ``None`` packs nothing: exact regions, also inside others, and counting.
        min_numel: Smaller tensors pass through.
        boundary: The modules are activation checkpoints: what comes here are their inputs, for their recompute to read.

    Attributes:
        saved: Bytes packed and passed since it was made; set a new :class:`SavedBytes` to start again.
    """

    def __init__(self, fmt: PackFormat | None, *, min_numel: int = 32768, boundary: bool = False) -> None:
        self.fmt = fmt
        self.min_numel = min_numel
        self.boundary = boundary
        self.saved = SavedBytes()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._forget()

    def _forget(self) -> None:
        self._calls: list[tuple[saved_tensors_hooks, Region[_Waiting]]] = []
        self._kept: dict[tuple[Any, ...], tuple[StorageRef, weakref.ref[UnpackedTensor | Packed]]] = {}
        self._handed: dict[int, StorageRef] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What is kept belongs to the graphs of one process.
        return {k: v for k, v in vars(self).items() if k not in ("_calls", "_kept", "_handed")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

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

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if compiled_caller_waits():
            raise RuntimeError(
                "activation compression does not work under torch.compile: a compiled graph saves copies of weights "
                "that cannot be distinguished from activations. Do not compile the model (compile_config), or take "
                "activation_compression off."
            )
        for x in tree_iter((args, kwargs)):
            # Masks, position tables: constants of the whole model, shared by its blocks.
            if type(x) in (Tensor, FakeTensor) and not x.requires_grad and x.layout == torch.strided:
                storage = x.untyped_storage()
                self._handed[storage_number(storage)] = weakref.ref(storage)
        hooks = saved_tensors_hooks(self.pack, self.unpack)
        hooks.__enter__()
        self._calls.append((hooks, Region(self._settle)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        hooks, region = self._calls.pop()
        hooks.__exit__(None, None, None)
        region.close(x.grad_fn for x in tree_iter(output) if isinstance(x, Tensor))
        self._handed.clear()
        self._kept = {key: entry for key, entry in self._kept.items() if entry[1]() is not None}

    def pack(self, x: Tensor) -> UnpackedTensor | _Waiting | _Recomputed:
        """The pack hook."""
        number = newest_node()  # first, because looking at a view's grad_fn may make nodes
        x = in_memory(x)
        if not self.boundary:
            self._calls[-1][1].resolve(x.grad_fn)
        if is_parameter(x):
            return UnpackedTensor.of(x)
        # The input of a checkpoint that is left exact must not come from a rounded one: a router would choose otherwise.
        exact = self.boundary and self.fmt is None
        if x.numel() >= self.min_numel and (again := recomputation(x, exact=exact)) is not None:
            self.saved.left_out += x.untyped_storage().nbytes()
            return _Recomputed(again)
        kept = UnpackedTensor.of(x)
        if self.fmt is None or not self._wanted(x):
            self.saved.passed += x.untyped_storage().nbytes() if type(x) in (Tensor, FakeTensor) else 0
            return kept
        waiting = _Waiting(kept, x.grad_fn is not None and reads_of(x.grad_fn) is Reads.SIGN)
        if self.boundary:
            self._settle(waiting, Reader(Reads.SMOOTHLY, "a checkpoint"))
        else:
            self._calls[-1][1].wait(waiting, number)
        return waiting

    def unpack(self, kept: UnpackedTensor | _Waiting | _Recomputed) -> Tensor:
        """The unpack hook."""
        return kept.tensor()

    def _settle(self, waiting: _Waiting, reader: Reader) -> None:
        """Pack what ``reader`` saved, if it may be."""
        kept = waiting.kept
        assert isinstance(kept, UnpackedTensor) and self.fmt is not None
        x, storage = kept.value, kept.value.untyped_storage()
        flat, number = Flat.of(x), storage_number(storage)
        key: tuple[Any, ...] = (number, x.storage_offset(), flat.layout, x.dtype, kept.version)
        held = self._held(key, storage)
        log_sum_exp = reader.reads is Reads.ATTENTION and x.dtype == torch.float32 and x.dim() < 4
        exactly = reader.reads is Reads.EXACTLY or number == reader.mask
        if exactly or log_sum_exp or kept.written_to:
            if held is None:
                self.saved.passed += storage.nbytes()
                self.saved.exact[reader.name] += 0 if log_sum_exp else storage.nbytes()
                self._kept[key] = weakref.ref(storage), weakref.ref(kept)
            return
        if held is not None:  # another node needs it as it is
            return
        nonzero = waiting.positive or reader.reads is Reads.SIGN
        key = (*key, nonzero)
        packed = self._held(key, storage)
        if packed is None:
            packed = flat.pack(self.fmt, nonzero=nonzero)
            self._kept[key] = weakref.ref(storage), weakref.ref(packed)
            self.saved.original += flat.base.numel() * x.element_size()
            self.saved.packed += packed.nbytes
        waiting.kept = flat.rounded(packed)

    def _held(self, key: tuple[Any, ...], storage: torch.UntypedStorage) -> Any:
        """What is kept under ``key``, if it is of this storage and not of another one at its address."""
        entry = self._kept.get(key)
        return entry[1]() if entry is not None and entry[0]() is storage else None

    def _wanted(self, x: Tensor) -> bool:
        """Not small, not a statistic (mean and rstd keep a last dimension of 1), and not handed to the module."""
        if not packable(x) or x.numel() < self.min_numel or x.shape[-1:] == (1,):
            return False
        handed = None if x.requires_grad else self._handed.get(storage_number(x.untyped_storage()))
        return handed is None or handed() is not x.untyped_storage()


def compresses_inside(module: nn.Module) -> str | None:
    """The name, inside ``module``, of a module that packs its saved tensors; ``None`` if there is none."""
    return next((name for name, child in module.named_modules() if MARK in child.__dict__), None)
