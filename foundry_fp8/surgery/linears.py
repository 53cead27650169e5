"""Which linears of a model become FP8, decided before anything changes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.unit_linear import FP8UnitLinear
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks, transformer_stacks
from foundry_fp8.model_structure.selection import check_patterns_match, matches
from foundry_fp8.model_structure.wrappers import replace_module
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.surgery.left_out import left_out, unconvertible
from foundry_fp8.surgery.other_weights import other_weights
from foundry_fp8.surgery.report import SurgeryRow
from foundry_fp8.surgery.same_as_linear import features_of, linear_form, looks_linear

__all__ = ["LinearPlan", "kept_blocks", "plan_linears"]

EXCLUDED = "{key}.exclude names it"
IN_KEPT_BLOCK = "it is in a block that keep_first_blocks or keep_last_blocks leaves in high precision"

MULTIPLIED = "it has µnit Scaling's output multiplier, which only recipe: unit gives to the GEMMs"
NOT_MULTIPLIED = (
    "the unit recipe's constant scales need layers with µnit Scaling's output multiplier, as mus_causal_lm and MPT with "
    "fc_type: {name: unit} have; other models take delayed, current, block or mxfp8"
)


@dataclasses.dataclass(frozen=True)
class LinearPlan:
    """What a conversion will do to the linears of a model.

    Attributes:
        rows: One for each linear and each raw parameter, in the model's order.
        converted: The converted modules by their first name, made and not yet in the model.
        places: Where each goes: every name of the linear that it replaces.
    """

    rows: tuple[SurgeryRow, ...]
    converted: Mapping[str, FP8Linear]
    places: Mapping[str, FP8Linear]

    def carry_out(self, model: nn.Module) -> None:
        """Put the converted modules in their places."""
        for name, module in self.places.items():
            replace_module(model, name, module)
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, nn.TransformerEncoderLayer) and module.evaluate == "fp8":
                module.register_forward_pre_hook(_is_called)


def plan_linears(
    model: nn.Module,
    *,
    recipe: Recipe,
    backend: Backend,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    wgrad: Literal["fp8", "high_precision"] = "fp8",
    evaluate: Literal["fp8", "high_precision"] = "high_precision",
    key: str = "algorithms.fp8",
) -> LinearPlan:
    """Choose the linears of ``model`` that become an :class:`FP8Linear`, and make those; the model stays as it is.

    Parameters keep their identity, name, device (``meta`` included) and ties. A module that appears under several names
    is converted once. Converted are ``nn.Linear`` and what is shown to compute the same
    (:mod:`foundry_fp8.surgery.same_as_linear`).

    Args:
        model: Any module that holds linears; it is not one itself.
        recipe: What the converted modules run.
        backend: Who runs them; it also says which shapes it cannot take.
        include: Globs on the module names to consider. One that names a layer takes it in also where it would be left out
            by default (:mod:`foundry_fp8.surgery.left_out`).
        exclude: Globs on the module names to leave out.
        keep_first_blocks: Transformer blocks left alone at the bottom of each stack.
        keep_last_blocks: Transformer blocks left alone at the top of each stack.
        wgrad: Whether the weight gradient's GEMM runs in FP8.
        evaluate: What ``eval()`` mode runs in.
        key: The YAML key, for messages.

    Raises:
        ConfigError: A model that is a linear itself, a pattern that matches nothing, too many blocks kept, or nothing
            left to convert.
    """
    if looks_linear(model):
        raise ConfigError(
            f"{key}: the model is a single {type(model).__name__}, and a module cannot be replaced in itself. "
            "Wrap it: apply_fp8(torch.nn.Sequential(layer)) converts the layer inside."
        )
    linears = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if looks_linear(m)]
    names = [name for name, _ in linears]
    if include != ("*",):
        check_patterns_match(include, names, f"{key}.include", "linear layers")
    check_patterns_match(exclude, names, f"{key}.exclude", "linear layers")
    kept = kept_blocks(model, keep_first_blocks, keep_last_blocks, key)
    blocks = transformer_blocks(model)
    never, by_default = unconvertible(model, linears), left_out(model, linears)

    rows: list[SurgeryRow] = []
    first_name: dict[int, str] = {}  # by weight
    made: dict[nn.Module, FP8Linear] = {}
    converted: dict[str, FP8Linear] = {}
    places: dict[str, FP8Linear] = {}

    def why_not(name: str, linear: nn.Module, form: type[FP8Linear] | None) -> str | None:
        if linear in never:
            return never[linear]
        if form is None:
            return f"its class {type(linear).__name__} has a forward of its own, which is not x W^T + b"
        if name in by_default and not by_default[name].named_by(name, include):
            return by_default[name].reason
        if not matches(name, include):
            return f"{key}.include does not name it"
        if matches(name, exclude):
            return EXCLUDED.format(key=key)
        if block_index_of(name, blocks) in kept:
            return IN_KEPT_BLOCK
        if (form is FP8UnitLinear) == recipe.for_any_model:
            return MULTIPLIED if recipe.for_any_model else NOT_MULTIPLIED
        return backend.shape_reason(recipe, *features_of(linear))

    forms = {linear: None if linear in never else linear_form(linear) for _, linear in linears}
    reasons = _one_reason_a_place(model, {n: why_not(n, linear, forms[linear]) for n, linear in linears}, key)
    for name, linear in linears:
        form, reason = forms[linear], reasons[name]
        if form is not None and reason is None:
            if linear not in made:
                made[linear] = converted[name] = form.from_linear(
                    linear, fqn=name, backend=backend, recipe=recipe, wgrad=wgrad, evaluate=evaluate
                )
            places[name] = made[linear]
        weight = linear._parameters.get("weight")
        rows.append(
            SurgeryRow(
                name=name,
                action="converted" if reason is None else "skipped",
                reason=recipe.name if reason is None else reason,
                shape=features_of(linear)[::-1],
                shared_with=first_name.get(id(weight), ""),
            )
        )
        if weight is not None:
            first_name.setdefault(id(weight), name)
    if not converted:
        said = "; ".join(f"{n} because {r}" for r, n in Counter(row.reason for row in rows).most_common(5))
        raise ConfigError(
            f"{key}: no linear layer was converted ({said or 'the model has none'}). "
            f"Check {key}.include and {key}.exclude, or remove the algorithm."
        )
    rows += other_weights(model, [linear for _, linear in linears])
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    rows.sort(key=lambda row: order.get(row.name, order.get(row.name.rpartition(".")[0], 0)))
    return LinearPlan(tuple(rows), converted, places)


def _one_reason_a_place(
    model: nn.Module, reasons: Mapping[str, str | None], key: str
) -> dict[str, str | None]:
    """The same answer for every name of one place: of a layer in a module that several blocks share (Zamba's attention).

    Who leaves one of the names out leaves the layer out; otherwise who takes one of them in takes it in.
    """
    places: dict[tuple[nn.Module, str], list[str]] = {}
    for name in reasons:
        owner, _, leaf = name.rpartition(".")
        places.setdefault((model.get_submodule(owner), leaf), []).append(name)
    found = dict(reasons)
    for names in places.values():
        said = [reasons[name] for name in names]
        out = next((r for r in said if r in (EXCLUDED.format(key=key), IN_KEPT_BLOCK)), None)
        if out is not None or None in said:
            found |= dict.fromkeys(names, out)
    return found


def _is_called(module: nn.Module, args: Any) -> None:
    """A hook for a hook's sake: where there is one, ``nn.TransformerEncoderLayer`` calls its linears in evaluation too.

    Otherwise it hands their weights to a fused kernel. Source: ``torch/nn/modules/transformer.py``, ``forward``.
    """


def kept_blocks(model: nn.Module, first: int, last: int, key: str) -> set[int]:
    """Indices of the transformer blocks that stay in high precision, of every stack the outermost.

    Raises:
        ConfigError: They are all blocks of all stacks.
    """
    if not first and not last:
        return set()
    kept: set[int] = set()
    count = 0
    for stack in transformer_stacks(model):
        inside = range(count, count + len(stack))
        kept |= {*inside[:first], *inside[max(0, len(stack) - last) :]}
        count += len(stack)
    if len(kept) == count:
        raise ConfigError(
            f"{key}.keep_first_blocks={first} and {key}.keep_last_blocks={last} leave nothing of the model's {count} "
            "transformer blocks to convert. Lower them, or name the layers with exclude."
        )
    return kept
