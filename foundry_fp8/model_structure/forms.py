"""What a norm or an MLP computes, whatever its class is called: shown by running a copy of it and comparing with each form."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_fp8.compat.fake_tensor import unset_fake_temporarily

__all__ = [
    "ACTIVATIONS", "MLPForm", "NormForm", "mlp_form", "near", "norm_form", "random_tensors", "with_sizes",
    "without_contents",
]  # fmt: skip

_ROWS, _HIDDEN, _INNER = 6, 6, 10
_NEAR = 1e-5
"""Of norms that compute in float32 whatever they are given."""
_EXACT = 1e-9

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
"""The activations that an MLP's form names."""


@dataclasses.dataclass(frozen=True)
class NormForm:
    """``(x - mean) / sqrt(mean square + eps) * gain + bias`` over the last dimension, computed in float32.

    Attributes:
        eps: As in the formula; ``None``: torch's own, the machine epsilon of what it computes in.
        centred: Whether the mean is subtracted: LayerNorm; otherwise RMSNorm.
        plus_one: The gain is 1 + weight, as Gemma's.
        rounded: The quotient is rounded to the dtype of x before the gain multiplies it, as Llama's.
        low_precision: Under autocast it casts its input and parameters to autocast's dtype, as LLM Foundry's do.
    """

    eps: float | None
    centred: bool
    plus_one: bool
    rounded: bool
    low_precision: bool

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """It in torch, in float32 or wider."""
        wide = x.double() if x.dtype == torch.float64 else x.float()
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if self.rounded:
            wide = wide.to(x.dtype).to(wide.dtype)
        wide = wide * (weight.to(wide.dtype) + (1 if self.plus_one else 0))
        return (wide if bias is None else wide + bias.to(wide.dtype)).to(x.dtype)


@dataclasses.dataclass(frozen=True)
class MLPForm:
    """``down(activation(gate(x)) * up(x))``, or ``down(activation(up(x)))``.

    Attributes:
        linears: Names of its linears in the module: gate, up, down, or up, down.
        activation: One of :data:`ACTIVATIONS`.
        others: The classes of its other children, in their order.
    """

    linears: tuple[str, ...]
    activation: str
    others: tuple[type, ...] = ()


def norm_form(module: nn.Module) -> NormForm | None:
    """The form of a norm with one weight of the size of its features, or ``None``."""
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    alone = set(module._parameters) <= {"weight", "bias"} and not module._modules and not module._buffers
    if weight is None or weight.dim() != 1 or not alone or _replaced(module):
        return None
    with unset_fake_temporarily(), torch.no_grad():
        run = _runner(module, weight.numel(), biased=bias is not None)
        try:
            for eps, centred, plus_one in itertools.product(_epsilons(module), (False, True), (False, True)):
                form = NormForm(eps, centred, plus_one, False, False)
                if all(near(*run(form, torch.float64, scale)) for scale in (1.0, 1e-3)):
                    return _with_roundings(form, run)
        except Exception:  # somebody else's forward, on a module it was not written for, may raise anything
            return None
    return None


def _epsilons(module: nn.Module) -> Iterator[float | None]:
    yield from {v for v in vars(module).values() if type(v) is float and 0 < v < 0.1}
    if getattr(module, "eps", 0.0) is None:
        yield None


def _with_roundings(form: NormForm, run: Callable[..., tuple[Tensor, Tensor]]) -> NormForm | None:
    """``form`` with the roundings by which it gives the module's own bits in bfloat16, but for a row's sum."""
    for rounded in (False, True):
        found = dataclasses.replace(form, rounded=rounded)
        ours, theirs = run(found, torch.bfloat16, 1.0)
        if theirs.dtype == ours.dtype and float((ours == theirs).float().mean()) > 0.99:
            before = torch.is_autocast_enabled("cuda")
            torch.set_autocast_enabled("cuda", True)  # what LLM Foundry's norms ask, on a CPU too
            try:
                low = run(found, torch.float32, 1.0)[1].dtype != torch.float32
            finally:
                torch.set_autocast_enabled("cuda", before)
            return dataclasses.replace(found, low_precision=low)
    return None


def _runner(module: nn.Module, features: int, biased: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    random = random_tensors()
    x, weight, bias = random(_ROWS, features), random(features), random(features) if biased else None

    def run(form: NormForm, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
        copy = without_contents(module, {}, training=True)
        parts = {"weight": weight.to(dtype), "bias": None if bias is None else bias.to(dtype)}
        for name, part in parts.items():
            copy.register_parameter(name, None if part is None else nn.Parameter(part))
        given = (x * scale).to(dtype)
        return form(given, parts["weight"], parts["bias"]), type(module).forward(copy, given)  # type: ignore[arg-type]

    return run


def near(ours: Tensor, theirs: Tensor, tolerance: float = _NEAR) -> bool:
    """Whether two have one shape and are within ``tolerance`` of the largest element, at least 1."""
    size = max(1.0, float(theirs.detach().abs().max()))
    return ours.shape == theirs.shape and torch.allclose(
        ours, theirs.to(ours.dtype), rtol=0, atol=tolerance * size
    )


def mlp_form(module: nn.Module, linears: Mapping[str, tuple[int, int]]) -> MLPForm | None:
    """The form of a module whose own children ``linears`` are (name: in and out features) and whose others hold no parameters, or ``None``."""
    others = {n: m for n, m in module._modules.items() if n not in linears and m is not None}
    if not 2 <= len(linears) <= 3 or _replaced(module) or module._parameters or module._buffers:
        return None
    if any(any(True for _ in m.parameters()) for m in others.values()):
        return None
    down = [
        n for n, (k, m) in linears.items() if all(shape == (m, k) for o, shape in linears.items() if o != n)
    ]
    with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for last in down:
            try:
                if (form := _mlp_form(module, linears, others, last)) is not None:
                    return form
            except Exception:  # as above
                continue
    return None


def _mlp_form(
    module: nn.Module, linears: Mapping[str, tuple[int, int]], others: Mapping[str, nn.Module], last: str
) -> MLPForm | None:
    inner, hidden = linears[last]
    copy, x = _small_mlp(module, linears, others, {hidden: _HIDDEN, inner: _INNER})
    theirs = type(module).forward(copy, x)
    first = itertools.permutations([n for n in linears if n != last])
    for order, (name, activation) in itertools.product(first, ACTIVATIONS.items()):
        gate, *up = (copy._modules[n](x) for n in order)  # type: ignore[misc]
        product = activation(gate) * up[0] if up else activation(gate)
        if near(copy._modules[last](product), theirs, _EXACT):  # type: ignore[misc]
            return MLPForm((*order, last), name, tuple(map(type, others.values())))
    return None


def _small_mlp(
    module: nn.Module,
    linears: Mapping[str, tuple[int, int]],
    others: Mapping[str, nn.Module],
    sizes: Mapping[int, int],
) -> tuple[nn.Module, Tensor]:
    random, copy = random_tensors(), with_sizes(module, sizes, training=True)
    for name, child in module._modules.items():
        if name in linears:
            inside, outside = (sizes[n] for n in linears[name])
            biased = getattr(child, "bias", None) is not None
            small = nn.Linear(inside, outside, bias=biased, dtype=torch.float64, device="cpu")
            for parameter in small.parameters():
                parameter.data = random(*parameter.shape)
            copy.add_module(name, small)
        else:
            copy.add_module(name, others.get(name))
    return copy, random(2, _ROWS, _HIDDEN)


def _replaced(module: nn.Module) -> bool:
    """Whether something else has given ``module`` its forward."""
    return (
        "forward" in vars(module)
        or "_unfused" in type(module).__dict__
        or hasattr(module, "parametrizations")
    )


def random_tensors() -> Callable[..., Tensor]:
    """What makes one normal float64 tensor after another, of the sizes that it is called with; the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return functools.partial(torch.randn, dtype=torch.float64, device="cpu", generator=generator)


def with_sizes(module: nn.Module, sizes: Mapping[int, int], *, training: bool) -> nn.Module:
    """:func:`without_contents` of a module whose integers that are a key of ``sizes`` become its value."""
    changed = {k: sizes[v] for k, v in vars(module).items() if type(v) is int and v in sizes}
    return without_contents(module, changed, training=training)


def without_contents(module: nn.Module, changed: Mapping[str, Any], *, training: bool) -> nn.Module:
    """A module of the same class and attributes, but those in ``changed``, without parameters, buffers, children and hooks."""
    copy = type(module).__new__(type(module))
    nn.Module.__init__(copy)
    mine = copy.__dict__
    mine.update({key: value for key, value in module.__dict__.items() if key not in mine}, **changed)
    copy.training = training
    return copy
