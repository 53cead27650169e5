"""Which modules of experts have their products in FP8: the form of each, shown by running it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from foundry_fp8.compat.fake_tensor import unset_fake_temporarily
from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.experts import (
    FORMS,
    ExpertsForm,
    RoutedGateUp,
    RoutedStackedRows,
    SortedGateUp,
    StackedRows,
)
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
from foundry_fp8.model_structure.experts import expert_count
from foundry_fp8.model_structure.forms import near, random_tensors, with_sizes
from foundry_fp8.model_structure.names import BESIDE_PARAMETERS
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.surgery.left_out import unfit

__all__ = ["ExpertWeights", "expert_weights", "put_in_place"]

_EXPERTS, _SMALL, _CHOICES = 3, 4, 2
_TOLERANCE = 1e-12


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """One parameter with a weight of each expert.

    Attributes:
        module: The experts' module.
        form: What its forward computes; ``None`` where that is not known.
        part: The parameter's name in the form's holder.
        shape: Experts, out_features, in_features; of no form, the parameter's own.
        why_not: Why it stays in high precision whatever the recipe, or empty.
    """

    module: nn.Module
    form: type[ExpertsForm] | None
    part: str
    shape: tuple[int, ...]
    why_not: str = ""

    def reason(self, recipe: Recipe, backend: Backend) -> str | None:
        """Why it cannot run ``recipe`` on ``backend``, or ``None``."""
        why = backend.experts_reason() or backend.shape_reason(recipe, self.shape[2], self.shape[1])
        return why and f"experts: {why}"


def expert_weights(model: nn.Module) -> dict[str, ExpertWeights]:
    """By name, the parameters of experts in ``model`` that hold a weight of each expert."""
    found: dict[str, ExpertWeights] = {}
    seen: set[int] = set()
    containers = [(n, m) for n, m in model.named_modules() if expert_count(n, m) and not isinstance(m, nn.ModuleList | nn.ModuleDict)]  # fmt: skip
    for name, module in containers:
        new = ((n, p) for n, p in module.named_parameters() if id(p) not in seen)
        own = [(n, p) for n, p in new if is_lazy(p) or p.dim() > 1]
        holders = {n.rpartition(".")[0] for n, _ in own}
        if any(isinstance(module.get_submodule(holder), nn.Linear) for holder in holders):
            continue
        seen |= {id(p) for _, p in own}
        form, why_not = _form_of(module)
        matrices = {} if form is None else _matrices(module, form)
        for part, parameter in own:
            whole = f"{name}.{part}" if name else part
            leaf = part.rpartition(".")[2]
            if form is not None and leaf not in matrices:
                continue
            matrix = parameter if form is None else matrices[leaf]
            shape = () if is_lazy(matrix) else tuple(matrix.shape)
            found[whole] = ExpertWeights(module, form, leaf, shape, why_not or unfit(parameter) or "")
    return found


def put_in_place(layers: Mapping[str, FP8GroupedLinear], weights: Mapping[str, ExpertWeights]) -> None:
    """Give each module of ``layers`` its form, and in high precision a layer to every parameter that has none."""
    for name, layer in layers.items():
        one = weights[name]
        assert one.form is not None
        _take_form(one.module, one.form, {one.part: layer})
    for name, one in weights.items():
        holder = one.module if one.form is None else one.form.holder(one.module)
        beside = holder._modules.get(BESIDE_PARAMETERS)
        if isinstance(beside, nn.ModuleDict) and one.part not in beside:
            converted = next(iter(beside.values()))
            assert isinstance(converted, FP8GroupedLinear)
            beside[one.part] = _in_high_precision(name, one.shape, converted.backend)


def _form_of(module: nn.Module) -> tuple[type[ExpertsForm] | None, str]:
    """The form of ``module``, or why it has none."""
    if type(module).__module__.startswith("megablocks."):
        own = "Megablocks' experts multiply in kernels of their own; ffn_type: torch_dmoe trains them in FP8"
        return None, own
    if any("forward" in vars(m) or hasattr(m, "parametrizations") for m in module.modules()):
        return (
            None,
            "experts whose forward or parameters something else has replaced (an adapter on a parameter)",
        )
    for form in FORMS:
        holder = form.holder(module)
        names = tuple(sorted(n for n, p in module.named_parameters() if p is not None))
        prefix = "" if holder is module else "mlp."
        known = [tuple(sorted(prefix + part for part in parts)) for parts in form.parts]
        if any(is_lazy(p) for p in module.parameters()) or names not in known or not form.count(module):
            continue
        with unset_fake_temporarily():
            if _same(module, form):
                return form, ""
    return None, f"experts of the class {type(module).__name__}, whose forward is none that FP8 knows"


def _take_form(module: nn.Module, form: type[ExpertsForm], layers: Mapping[str, FP8GroupedLinear]) -> None:
    if not isinstance(module, ExpertsForm):
        cls = type(module)
        module.__class__ = type(f"FP8{cls.__name__}", (form, cls), {"_unfused": cls})
    holder = form.holder(module)
    if BESIDE_PARAMETERS not in holder._modules:
        holder.add_module(BESIDE_PARAMETERS, nn.ModuleDict())
    holder.get_submodule(BESIDE_PARAMETERS).update(dict(layers))  # type: ignore[operator]


def _same(module: nn.Module, form: type[ExpertsForm]) -> bool:
    """Whether the form gives the module's own output and gradients in float64, on a small copy with random parameters."""
    random = random_tensors()
    try:
        ours = _small_copy(module, form)
        form.prepare(ours)
        for parameter in ours.parameters():
            parameter.data = random(*parameter.shape)
        theirs = copy.deepcopy(ours)
        weights = _matrices(ours, form)
        nobody: Any = None
        layers = {part: _in_high_precision(part, w.shape, nobody) for part, w in weights.items()}
        _take_form(ours, form, layers)
        hidden = next(iter(weights.values())).shape[2]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            inputs = _inputs(form, hidden, random)
            found, expected = (_output_and_gradients(m, inputs) for m in (ours, theirs))
    except Exception:  # somebody else's forward, on a module it was not written for, may raise anything
        return False
    return all(near(a, b, _TOLERANCE) for a, b in zip(found, expected, strict=True))


def _inputs(form: type[ExpertsForm], hidden: int, random: Any) -> tuple[Any, ...]:
    tokens = 5
    # Nobody chooses expert 1.
    chosen = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [2, 0]], dtype=torch.int64, device="cpu")
    weights = random(tokens, _CHOICES).abs()
    if form is StackedRows:
        return random(1, tokens, hidden), random(tokens, _EXPERTS), weights, chosen
    if form is SortedGateUp:
        return (random(_EXPERTS * tokens, hidden),)
    if form in (RoutedGateUp, RoutedStackedRows):
        return random(tokens, hidden), chosen, weights
    return random(tokens, hidden), [3, 0, 2]


def _output_and_gradients(module: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    x = inputs[0].clone().requires_grad_()
    output = module(x, *inputs[1:])
    dy = torch.linspace(-1, 1, output.numel(), dtype=torch.float64, device="cpu").view(output.shape)
    return [output, *torch.autograd.grad(output, [x, *module.parameters()], dy)]


def _in_high_precision(name: str, shape: tuple[int, ...], backend: Backend) -> FP8GroupedLinear:
    return FP8GroupedLinear(
        fqn=name, shape=shape, backend=backend, recipe=None, wgrad="high_precision", evaluate="high_precision"
    )


def _matrices(module: nn.Module, form: type[ExpertsForm]) -> dict[str, Tensor]:
    """The weights that its products multiply by, without biases."""
    parts = form.holder(module)._parameters
    return {part: form.matrices(module, part) for part in parts if not part.endswith("_bias")}


def _small_copy(module: nn.Module, form: type[ExpertsForm]) -> nn.Module:
    """``module`` with every size replaced: of what is a size of its weights, and of the attributes that say it."""
    experts = form.count(module)
    assert experts is not None
    holder = form.holder(module)
    sizes = {experts: _EXPERTS}
    matrices = _matrices(module, form)
    for size in sorted({n for weight in matrices.values() for n in weight.shape[1:]}):
        sizes.setdefault(size, 2 * sizes[size // 2] if size / 2 in sizes else _SMALL * len(sizes))

    found = with_sizes(module, sizes, training=True)
    own = found if holder is module else with_sizes(holder, sizes, training=True)
    if own is not found:
        found.add_module("mlp", own)
    for name, child in (*holder._modules.items(), *module._modules.items()):
        if child is not holder and name not in own._modules:
            own.add_module(name, child)
    for part, parameter in holder._parameters.items():
        assert parameter is not None
        shape = [sizes.get(size, size) for size in parameter.shape]
        if len(shape) == 2 and part in matrices:
            shape[0] = _EXPERTS * sizes[parameter.shape[0] // experts]
        own.register_parameter(part, nn.Parameter(torch.empty(shape, dtype=torch.float64, device="cpu")))
    return found
