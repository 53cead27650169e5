"""A tensor that holds others in its place: looks like one in high precision, and is made one by whoever reads it.

Cause: torch's wrapper subclasses (``torch.Tensor._make_wrapper_subclass``, ``__torch_dispatch__``) are how torchao and DTensor do this; of what they need the
constructor, the switch that keeps results from becoming subclasses and an operator's schema have no public names
(https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_tensor.py). ``module.to``, ``deepcopy``, ``torch.compile`` and checkpoints know such tensors by
``__tensor_flatten__``. Remove when there are public names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from foundry_fp8.compat.dispatch_mode import written
from foundry_fp8.compat.pytree import tree_map

__all__ = [
    "WrapperTensor", "WrapperView", "packed_state", "save_plain", "shard_of", "sharded_like",
    "without_function_override", "without_memory",
]  # fmt: skip

_aten = torch.ops.aten
without_function_override = torch._C.DisableTorchFunctionSubclass
"""Entered around a function of torch, it runs past ``__torch_function__``."""


def without_memory(
    cls: type[Tensor],
    like: Tensor,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Any:
    """A tensor of the class ``cls`` without memory of its own, like ``like`` but for what is given; contiguous in another shape."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
        cls,
        like.shape if shape is None else shape,
        strides=like.stride() if shape is None else None,
        dtype=dtype or like.dtype,
        device=device or like.device,
    )


class WrapperTensor(Tensor):
    """Detaching, copying and moving give another of these, a view gives a :class:`WrapperView`; every other operator gets what
    :meth:`unpacked` gives.

    What is written in place, to it or to a view, goes through :meth:`write`. A subclass has a constructor whose arguments are ``parts``
    tensors by name, then :meth:`meta`, then the dtype.
    """

    parts: tuple[str, ...] = ()
    way_out: str = ""
    """What to do instead of what is refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The values, a plain tensor that nobody else holds."""
        raise NotImplementedError

    def write(self, value: Tensor) -> None:
        """Take the values of the plain ``value``, of the same shape, dtype and device."""
        raise NotImplementedError

    def meta(self) -> tuple[Any, ...]:
        """What the constructor takes beside the tensors and the dtype."""
        raise NotImplementedError

    def own(self, func: Any, args: Any) -> Any:
        """What ``func`` makes of the parts alone, another of these or itself; ``None`` where it takes the values."""
        return None

    def refuse(self, what: str) -> NoReturn:
        """Raise :class:`RuntimeError`."""
        raise RuntimeError(f"{what}: {self.way_out}")

    @property
    def data(self) -> Tensor:
        """As of any tensor: without autograd's notes, with the same memory. What is assigned is written."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            self.refuse(f"{[*value.shape]} {value.dtype} on {value.device} cannot become its .data")
        self.detach().copy_(value)

    @property
    def requires_grad(self) -> bool:
        """Never: no gradient would be written to it."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Nothing for ``False``; otherwise refused."""
        return self.refuse("it cannot train") if requires_grad else self

    def share_memory_(self) -> Any:
        """Move what it holds to shared memory."""
        for name in self.parts:
            getattr(self, name).share_memory_()
        return self

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.unpacked(self.dtype).tolist()

    def _no_memory(self, *args: Any, **options: Any) -> Any:
        """Refused: who reads or writes memory there would not find the values."""
        return self.refuse("it has no memory of its own")

    storage = numpy = apply_ = map_ = map2_ = __dlpack__ = _no_memory

    def module_load(self, other: Tensor, assign: bool = False) -> Tensor:
        """For ``load_state_dict``: take the values, whatever ``assign`` says."""
        self.copy_(other)
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = [getattr(self, name)[None] for name in self.parts]
        held = [(part.dtype, part.view(torch.uint8)) for part in parts]  # not every torch pickles FP8
        return _rebuilt, (type(self), held, self.meta(), self.dtype, isinstance(self, nn.Parameter))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.parts), (*self.meta(), self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, size: Any, stride: Any) -> Any:
        return cls(*(inner[name] for name in cls.parts), *meta)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        one = args[0] if args else None
        if isinstance(one, WrapperTensor) and one.parts:
            held, dtype = (getattr(one, name) for name in one.parts), kwargs.get("dtype") or one.dtype
            copied = func is _aten.clone.default or (
                func is _aten._to_copy.default and dtype.is_floating_point
            )
            if copied or func is _aten.detach.default:
                made = (part.to(kwargs.get("device"), copy=True) if copied else part for part in held)
                return type(one)(*made, *one.meta(), dtype)
        if isinstance(one, WrapperTensor) and (own := one.own(func, args[1:])) is not None:
            return own
        if isinstance(one, WrapperTensor) and func.is_view:
            return _views(one, func, args[1:], kwargs)
        plain: dict[int, tuple[WrapperTensor, Tensor]] = {}

        def unpack(x: Any) -> Any:
            if not isinstance(x, WrapperTensor):
                return x
            if "c10d" in func.namespace or func is _aten._pin_memory.default:
                x.refuse(f"{func} would not reach its values")
            if func is _aten.new_zeros.default:  # how FSDP2 makes a shard
                x.refuse(
                    f"{func} would be a shard in high precision. FSDP2 shards it on dim 0, or leaves it out by ignored_params"
                )
            return plain.setdefault(id(x), (x, x.unpacked(x.dtype)))[1]

        out = func(*tree_map(unpack, args), **tree_map(unpack, kwargs))
        for one in written(func, args, kwargs):
            if isinstance(one, WrapperTensor):
                if plain[id(one)][1].shape != one.shape:
                    one.refuse(f"{func} would change its shape")
                one.write(plain[id(one)][1])
        back = {id(value): wrapper for wrapper, value in plain.values()}
        return tree_map(lambda x: back.get(id(x), x), out)


class WrapperView(WrapperTensor):
    """Part of a wrapper, or another shape of it: read and written through it, in whatever reads it a plain tensor.

    Args:
        like: Of its shape, strides and dtype.
        whole: What it is a view of.
        path: The operators, with their arguments, that make it from that.
    """

    def __new__(cls, like: Tensor, whole: WrapperTensor, path: Any) -> WrapperView:
        """A tensor of the shape of ``like`` to who looks."""
        made: WrapperView = without_memory(cls, like, device=whole.device)
        return made

    def __init__(self, like: Tensor, whole: WrapperTensor, path: Any) -> None:
        self.whole, self.path, self.way_out = whole, path, whole.way_out

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({[*self.shape]} of {self.whole!r})"

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """See :meth:`WrapperTensor.unpacked`."""
        return self.of(self.whole.unpacked(self.whole.dtype)).to(dtype)

    def write(self, value: Tensor) -> None:
        """See :meth:`WrapperTensor.write`."""
        whole = self.whole.unpacked(self.whole.dtype)
        self.of(whole).copy_(value)
        self.whole.write(whole)

    def of(self, found: Any) -> Any:
        """The same view of another tensor, of the shape of ``whole``."""
        for func, args, kwargs, index in self.path:
            found = func(found, *args, **kwargs)
            found = found if index is None else found[index]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.unpacked(self.dtype).__reduce_ex__(protocol)


def _views(one: WrapperTensor, func: Any, args: Any, kwargs: Any) -> Any:
    whole, path = (one.whole, one.path) if isinstance(one, WrapperView) else (one, ())
    like = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
    seen = func(like, *args, **kwargs)

    def view(found: Tensor, index: int | None = None) -> WrapperView:
        return WrapperView(found, whole, (*path, (func, args, kwargs, index)))

    return view(seen) if isinstance(seen, Tensor) else [view(found, i) for i, found in enumerate(seen)]


def _rebuilt(made: Any, held: Any, meta: Any, dtype: torch.dtype, parameter: bool) -> Any:
    found = made(*(part.view(kept)[0] for kept, part in held), *meta, dtype)
    return nn.Parameter(found, requires_grad=False) if parameter else found


def packed_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of ``state_dict()``, wrappers among them as they are."""
    state: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                state[f"{prefix}.{name}".removeprefix(".")] = buffer
    return state


def shard_of(parameter: Any) -> Any:
    """This rank's part of a DTensor, the object itself; anything else as it is."""
    return getattr(parameter, "_local_tensor", parameter)


def sharded_like(parameter: Any, local: Tensor) -> Any:
    """A DTensor with the layout of the DTensor ``parameter``, of which this rank holds ``local``."""
    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    return parameter.from_local(local, parameter.device_mesh, parameter.placements, run_check=False, **layout)


def save_plain(module: nn.Module) -> None:
    """Have ``module`` give what its parameters stand for to ``state_dict``, and take it from there by value, ``assign`` or not."""
    module.register_state_dict_post_hook(_unpack_saved)
    # The public one keeps the module, which a conversion replaces.
    module._register_load_state_dict_pre_hook(_copy_loaded)


def _unpack_saved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, value in module._parameters.items():
        if isinstance(local := shard_of(value), WrapperTensor):
            plain = local.unpacked(local.dtype)
            state[prefix + name] = plain if local is value else sharded_like(value, plain)


def _copy_loaded(state: Any, prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
    local_metadata["assign_to_params_buffers"] = False
