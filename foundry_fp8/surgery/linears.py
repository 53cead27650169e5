"""Which linears of a model become FP8, decided before anything changes."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from foundry_fp8.config import ConfigError, NoEffect
from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.gemm_layer import Choice, FP8GemmLayer
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.unit_linear import FP8UnitLinear
from foundry_fp8.model_structure.experts import router_modules
from foundry_fp8.model_structure.wrappers import replace_module
from foundry_fp8.numerics.recipes import GEMMS, Recipe
from foundry_fp8.surgery.experts import ExpertWeights, expert_weights, put_in_place
from foundry_fp8.surgery.fp8_config import KEY
from foundry_fp8.surgery.left_out import HEAD, ROUTER, left_out, output_heads, unconvertible
from foundry_fp8.surgery.policy import Policy
from foundry_fp8.surgery.report import SurgeryRow
from foundry_fp8.surgery.same_as_linear import features_of, forward_of_its_own, linear_form, looks_linear

__all__ = ["LEFT", "LinearPlan", "plan_linears"]

Turns = Sequence[Choice]
"""What a layer runs: the first of them whose rule holds."""
LEFT = "{rule} leaves it in high precision"

MULTIPLIED = "it has µnit Scaling's output multiplier, which only recipe: unit gives to the GEMMs"
NOT_MULTIPLIED = (
    "the unit recipe's constant scales need layers with µnit Scaling's output multiplier, as mus_causal_lm and MPT with "
    "fc_type: {name: unit} have; other models take delayed, current, block or mxfp8"
)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NO_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers that only look up or scale by what they hold."""


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """What a conversion will do to the linears of a model.

    Attributes:
        rows: One for each linear and each raw parameter, in the model's order.
        converted: The converted modules by their first name, made and not yet in the model.
        places: Where each goes: every name of the linear that it replaces.
        experts: What runs the products of each converted parameter of experts.
        expert_weights: All parameters of experts.
    """

    rows: tuple[SurgeryRow, ...]
    converted: Mapping[str, FP8Linear]
    places: Mapping[str, FP8Linear]
    experts: Mapping[str, FP8GroupedLinear]
    expert_weights: Mapping[str, ExpertWeights]

    @property
    def layers(self) -> dict[str, FP8GemmLayer]:
        """All that runs FP8."""
        return {**self.converted, **self.experts}

    def carry_out(self, model: nn.Module) -> None:
        """Put the converted modules in their places."""
        put_in_place(self.experts, self.expert_weights)
        for name, module in self.places.items():
            replace_module(model, name, module)
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, nn.TransformerEncoderLayer) and module.evaluate == "fp8":
                module.register_forward_pre_hook(_is_called)


@dataclasses.dataclass(frozen=True)
class _Rules:
    """What a policy's rules and the backend say of a layer: what it runs, by turns, or why it stays in high precision."""

    policy: Policy
    rules_of: Mapping[str, tuple[str, ...]]
    backend: Backend

    def of_linear(self, name: str, linear: nn.Module, form: type[FP8Linear] | None) -> Turns | str:
        if form is None:
            return forward_of_its_own(linear)

        def why_not(recipe: Recipe) -> str | None:
            if (form is FP8UnitLinear) == recipe.for_any_model:
                return MULTIPLIED if recipe.for_any_model else NOT_MULTIPLIED
            return self.backend.shape_reason(recipe, *features_of(linear))

        return self._turns(name, why_not)

    def of_experts(self, name: str, weights: ExpertWeights) -> Turns | str:
        def why_not(recipe: Recipe) -> str | None:
            return weights.reason(recipe, self.backend) if recipe.for_any_model else NOT_MULTIPLIED

        return weights.why_not or self._turns(name, why_not)

    def row(self, name: str, found: Turns | str, shape: tuple[int, ...], shared_with: str = "") -> SurgeryRow:
        """The report's line on a layer."""
        turns = () if isinstance(found, str) else found
        return SurgeryRow(
            name=name,
            action="converted" if turns else "skipped",
            reason="; ".join(map(str, turns)) or str(found),
            rule="\n".join(f"{k} {self.policy.rules[k].when}".rstrip() for k in self.rules_of.get(name, ())),
            gemms={gemm: "\n".join(turn.gemms[gemm] for turn in turns) for gemm in GEMMS if turns},
            shape=shape,
            shared_with=shared_with,
        )

    def _turns(self, name: str, why_not: Callable[[Recipe], str | None]) -> Turns | str:
        if name not in self.rules_of:
            by_list, otherwise = "no rule of {}.recipe names it", "{}.include does not name it"
            return (by_list if self.policy.listed else otherwise).format(KEY)
        turns = [self.policy.choice(key) for key in self.rules_of[name]]
        known = [(one, why_not(one.recipe) if one.recipe else LEFT.format(rule=one.rule)) for one in turns]
        reasons = [why for one, why in known if one.recipe and why] or [why for _, why in known if why]
        if all(why for _, why in known):
            return reasons[0]
        return tuple(dataclasses.replace(one, recipe=None) if why else one for one, why in known)


def plan_linears(
    model: nn.Module,
    *,
    policy: Policy,
    backend: Backend,
    evaluate: Literal["fp8", "high_precision"] = "high_precision",
) -> LinearPlan:
    """Choose the linears of ``model`` that become an :class:`FP8Linear`, and make those; the model stays as it is.

    Parameters keep their identity, name, device (``meta`` included) and ties. A module that appears under several names
    is converted once. Converted are ``nn.Linear``, what is shown to compute the same
    (:mod:`foundry_fp8.surgery.same_as_linear`), and experts in one parameter (:mod:`foundry_fp8.surgery.experts`).

    Args:
        model: Any module that holds linears; it is not one itself.
        policy: What each of them runs. A glob that names a layer takes it in also where it would be left out by default
            (:mod:`foundry_fp8.surgery.left_out`).
        backend: Who runs them; it also says which shapes it cannot take.
        evaluate: What ``eval()`` mode runs in.

    Raises:
        ConfigError: A model that is a linear itself, a rule that names nothing, too many blocks kept, or nothing
            left to convert.
    """
    if looks_linear(model):
        raise ConfigError(
            f"{KEY}: the model is a single {type(model).__name__}, and a module cannot be replaced in itself. "
            "Wrap it: apply_fp8(torch.nn.Sequential(layer)) converts the layer inside."
        )
    linears = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if looks_linear(m)]
    experts = expert_weights(model)
    rules = _Rules(policy, policy.resolve(model, [*(name for name, _ in linears), *experts]), backend)
    held = policy.held(defaultdict(int))
    never, by_default = unconvertible(model, linears), left_out(model, linears)

    rows: list[SurgeryRow] = []
    first_name: dict[int, str] = {}  # by weight
    made: dict[nn.Module, FP8Linear] = {}
    converted: dict[str, FP8Linear] = {}
    places: dict[str, FP8Linear] = {}
    forms = {linear: None if linear in never else linear_form(linear) for _, linear in linears}

    def verdict(name: str, linear: nn.Module) -> Turns | str:
        """What it runs, or why it stays in high precision."""
        if linear in never:
            return never[linear]
        default = by_default.get(name)
        if default is not None and forms[linear] is not None and not default.named_by(name, policy.globs):
            return default.reason
        return rules.of_linear(name, linear, forms[linear])

    def begin(layer: FP8GemmLayer, turns: Turns) -> None:
        layer.turns = turns
        layer.take_turn(held, torch.device("cpu"))
        layer.turns = turns if any(turn.when for turn in turns) else ()

    left = {LEFT.format(rule=rule) for rule in policy.rules}
    verdicts = _one_verdict_a_place(model, {n: verdict(n, linear) for n, linear in linears}, left)
    chosen: dict[nn.Module, Turns] = {}
    for name, linear in linears:
        form, found = forms[linear], verdicts[name]
        if form is not None and not isinstance(found, str):
            found = chosen.setdefault(linear, found)
            if linear not in made:
                recipe = next(filter(None, (turn.recipe for turn in found)))
                made[linear] = converted[name] = form.from_linear(linear, fqn=name, backend=backend, recipe=recipe, evaluate=evaluate)  # fmt: skip
                begin(made[linear], found)
            places[name] = made[linear]
        weight = linear._parameters.get("weight")
        rows.append(rules.row(name, found, features_of(linear)[::-1], first_name.get(id(weight), "")))
        if weight is not None:
            first_name.setdefault(id(weight), name)
    grouped: dict[str, FP8GroupedLinear] = {}
    for name, weights in experts.items():
        found = rules.of_experts(name, weights)
        if not isinstance(found, str):
            grouped[name] = FP8GroupedLinear(fqn=name, shape=weights.shape, backend=backend, recipe=None, wgrad="fp8", evaluate=evaluate)  # fmt: skip
            begin(grouped[name], found)
        rows.append(rules.row(name, found, weights.shape))
    if not converted and not grouped:
        said = "; ".join(f"{n} because {r}" for r, n in Counter(row.reason for row in rows).most_common(5))
        named = policy.listed or any(rule.globs != ("*",) for rule in policy.rules.values())
        multiplied = {MULTIPLIED, NOT_MULTIPLIED} & {row.reason for row in rows}
        raise (ConfigError if named or multiplied else NoEffect)(
            f"{KEY}: no linear layer was converted ({said or 'the model has none'}). "
            f"Check {KEY}.{'recipe' if policy.listed else 'include'} and {KEY}.exclude, or remove the algorithm."
        )
    listed = [p for _, linear in linears for p in linear.parameters(recurse=False)]
    rows += _other_weights(model, [*listed, *map(model.get_parameter, experts)])
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    rows.sort(key=lambda row: order.get(row.name, order.get(row.name.rpartition(".")[0], 0)))
    return LinearPlan(tuple(rows), converted, places, grouped, experts)


def _other_weights(model: nn.Module, listed: Iterable[nn.Parameter]) -> Iterator[SurgeryRow]:
    """A row for each parameter with two or more dimensions (of more than one element) that is not ``listed``: raw parameters,
    convolutions, tied heads, which belong to no linear layer and may be multiplied by all the same.

    Embeddings and norms have none, except for an embedding that is the output head too.
    """
    heads, routers = set(output_heads(model)), dict(router_modules(model)).values()
    seen = {id(p) for p in listed}
    for name, module in model.named_modules():
        if isinstance(module, NO_PRODUCTS) and module not in heads:
            continue
        for part, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or is_lazy(parameter) or sum(n > 1 for n in parameter.shape) < 2:
                continue
            seen.add(id(parameter))
            if module in heads:
                reason = HEAD
            elif module in routers:
                reason = ROUTER
            elif isinstance(module, CONVOLUTIONS):
                reason = "convolutions stay in high precision"
            else:
                reason = f"{type(module).__name__} holds it as a parameter, not as a linear layer"
            whole = f"{name}.{part}" if name else part
            yield SurgeryRow(name=whole, action="skipped", reason=reason, shape=tuple(parameter.shape))


def _one_verdict_a_place(
    model: nn.Module, verdicts: Mapping[str, Turns | str], left: Collection[str]
) -> dict[str, Turns | str]:
    """The same answer for every name of one place: of a layer in a module that several blocks share (Zamba's attention).

    Who leaves one of the names out leaves the layer out; otherwise who takes one of them in takes it in.
    """
    places: dict[tuple[nn.Module, str], list[str]] = {}
    for name in verdicts:
        owner, _, leaf = name.rpartition(".")
        places.setdefault((model.get_submodule(owner), leaf), []).append(name)
    found = dict(verdicts)
    for names in places.values():
        said = [verdicts[name] for name in names]
        deciding = [one for one in said if one in left] or [one for one in said if not isinstance(one, str)]
        if deciding:
            found |= dict.fromkeys(names, deciding[0])
    return found


def _is_called(module: nn.Module, args: Any) -> None:
    """A hook for a hook's sake: where there is one, ``nn.TransformerEncoderLayer`` calls its linears in evaluation too.

    Otherwise it hands their weights to a fused kernel. Source: ``torch/nn/modules/transformer.py``, ``forward``.
    """
