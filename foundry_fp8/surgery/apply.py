"""``apply_fp8``: convert a model, with no trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import nn

from foundry_fp8.backends import BACKENDS, Backend, choose_attention_backend, choose_backend
from foundry_fp8.config import (
    Config,
    ConfigError,
    Names,
    Natural,
    Parse,
    check_choice,
    from_mapping,
    not_empty,
    one_of,
)
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import RECIPES, DelayedScaling, Recipe, parse_recipe
from foundry_fp8.surgery.attention import plan_attention
from foundry_fp8.surgery.attention_config import AttentionConfig, parse_attention
from foundry_fp8.surgery.frozen_weights import keep_frozen_in_fp8, plan_frozen
from foundry_fp8.surgery.linears import LinearPlan, plan_linears
from foundry_fp8.surgery.norm_fusion import Fusion, fuse_norms, plan_norms
from foundry_fp8.surgery.policy import Measured, Policy, Rule, parse_rules
from foundry_fp8.surgery.report import SurgeryReport, SurgeryRow

__all__ = ["FP8Config", "apply_fp8", "resolve_recipe"]

KEY = "algorithms.fp8"


def _recipe(value: Any, key: str) -> Recipe | Sequence[Rule] | Measured | Literal["auto"]:
    if isinstance(value, Measured):
        return value
    if isinstance(value, str) and value not in RECIPES:
        check_choice(key, value, (*RECIPES, "auto", "measured"))
        return "auto" if value == "auto" else Measured()
    if isinstance(value, Mapping) and value.get("name") == "measured":
        return from_mapping(Measured, value, key, "Recipe measured")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return parse_rules(value, key)
    return parse_recipe(value, key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8Config(Config):
    """The YAML under ``algorithms.fp8``."""

    key = KEY

    recipe: Annotated[
        Recipe | Sequence[Rule] | Measured | Literal["auto"], Parse(_recipe, "a recipe or a list of rules")
    ] = "auto"
    """``delayed``, ``current``, ``block``, ``mxfp8``, ``unit`` (for µnit-scaled models), a mapping with the recipe's own fields (``{name: delayed, margin:
    1}``), or ``auto``: mxfp8 on GPUs of compute capability 10.x, current elsewhere, and where the backend predicts that
    FP8 makes a layer no faster (native does), that layer stays in high precision. Or a list of rules (docs/policy.md):
    ``[{blocks: last-2, recipe: high_precision}, {roles: [mlp], recipe: current}]``; the first that names a layer decides. ``measured``
    (``{name: measured, error: 0.2}``) chooses by what FP8 does to the gradients; until then a run is in high precision, and a plain module in delayed."""
    backend: Annotated[str, one_of("auto", *BACKENDS)] = "auto"
    """``transformer_engine``, ``native``, ``emulated``, or ``auto``: Transformer Engine if it can run the recipe, else
    native, on a GPU; emulated on a CPU."""
    accumulation: Literal["float32", "hopper"] = "float32"
    """How the emulated backend adds products up: in float32, or bit for bit as Hopper's tensor cores do under the recipe's
    ``fast_accumulation`` (slow; not for mxfp8)."""
    include: Annotated[Names, not_empty] = ("*",)
    """Globs on module names to convert. One that names a layer takes it in where it would be left out by default."""
    exclude: Names = ()
    """Globs on module names to leave in high precision. Output heads, routers, adapters (LoRA) and embeddings are out by
    default."""
    keep_first_blocks: Natural = 0
    """Transformer blocks left in high precision at the bottom, of an encoder and of a decoder each."""
    keep_last_blocks: Natural = 0
    """The same at the top."""
    wgrad: Literal["fp8", "high_precision"] = "fp8"
    """What the weight gradient's GEMM runs in."""
    evaluate: Literal["fp8", "high_precision"] = "high_precision"
    """What evaluation runs in."""
    fuse: bool = False
    """Compute the norm before a linear in the linear's own kernel, where that is the same arithmetic. Transformer Engine
    and native only."""
    cache_weights: bool = False
    """Quantise each weight once per optimizer step instead of in every microbatch's forward and again in its backward. Costs
    two bytes of memory a weight element, under FSDP2 of the whole unsharded model. Native only; not under FSDP1."""
    frozen_weights: Literal["high_precision", "fp8"] = "high_precision"
    """``fp8`` keeps the weights of converted linears that do not train (under LoRA the base's) in FP8 alone, one byte an element, as the recipe quantises
    them. Exact for the FP8 layers; what reads the weight in high precision (evaluation, merged adapters, checkpoints) sees it rounded. Not
    under FSDP, not through Transformer Engine; the recipe's scales must be powers of two."""
    attention: Annotated[
        AttentionConfig | Literal[False], Parse(parse_attention, "true, false or a mapping")
    ] = False
    """Whether attention's GEMMs run in FP8 too (FP8DPA), with the delayed or the current recipe (through Transformer Engine the delayed one alone):
    ``true``, or a mapping with ``recipe``, ``grad_scores`` and ``exclude``."""
    enabled: bool = True
    """``false`` converts nothing: with this one override a run is its own twin in high precision."""
    announce: bool = True
    """Whether a run prints what became of the model when it starts, whatever the logging level. A call prints nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fuse and self.wgrad == "high_precision":
            raise ConfigError(
                f"{KEY}.fuse: true keeps no high-precision input, from which {KEY}.wgrad: high_precision computes. "
                "Remove one of them."
            )
        if isinstance(self.recipe, Measured) and self.attention:
            raise ConfigError(
                f"{KEY}.attention: recipe: measured chooses for linears alone. Set it to false."
            )
        if not isinstance(self.recipe, Recipe | Measured | str) and tuple(self.include) != ("*",):
            raise ConfigError(f"{KEY}.include: the rules of {KEY}.recipe name what they convert. Remove it.")

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The FP8 recipes that it names; ``auto`` and ``measured`` name none."""
        if isinstance(self.recipe, Recipe):
            return (self.recipe,)
        rules = () if isinstance(self.recipe, Measured | str) else self.recipe
        return tuple(rule.recipe for rule in rules if isinstance(rule.recipe, Recipe))

    def policy(self, device: torch.device) -> Policy:
        """The rules that ``recipe``, ``include``, ``exclude``, ``keep_*_blocks`` and ``wgrad`` are, on ``device``."""
        recipe = DelayedScaling() if isinstance(self.recipe, Measured) else self.recipe
        return Policy.of(
            resolve_recipe(recipe, device) if isinstance(recipe, Recipe | str) else recipe,
            KEY,
            include=self.include,
            exclude=self.exclude,
            keep_first_blocks=self.keep_first_blocks,
            keep_last_blocks=self.keep_last_blocks,
            wgrad=self.wgrad,
        )


def resolve_recipe(recipe: str | Mapping[str, Any] | Recipe, device: torch.device) -> Recipe:
    """The recipe itself; for ``auto``, what suits the device."""
    if recipe != "auto":
        return parse_recipe(recipe, f"{KEY}.recipe")
    blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
    return RECIPES["mxfp8" if blackwell else "current"]()


def apply_fp8(model: nn.Module, *, device: torch.device | str | None = None, **options: Any) -> SurgeryReport:
    """Convert the linear layers of ``model`` to FP8, in place.

    Call it before wrapping with DDP or FSDP and before ``torch.compile``. Parameters keep their identity and names, so an
    optimizer made before or after is fine, and the model's checkpoints are those of the unconverted model.

    Args:
        model: Any module; its root is what training calls.
        device: Where it will run; by default where its parameters are (for ``meta``: the GPU if there is one).
        **options: The fields of :class:`FP8Config`.

    Returns:
        What became of every weight that is multiplied.

    Raises:
        ConfigError: Unknown option or value, a pattern that matches nothing, a model that is converted already, nothing
            to convert, or ``enabled: false``, which is for who would call this.
        RuntimeError: The backend cannot run the recipe here.

    Example:
        >>> report = apply_fp8(model, recipe="current", exclude=["*.down_proj"])
        >>> print(report.summary())
    """
    config = from_mapping(FP8Config, options, KEY)
    if not config.enabled:
        raise ConfigError(f"{KEY}.enabled: false converts nothing. Do not call this, or set it to true.")
    if any(isinstance(module, FP8Linear) for module in model.modules()):
        raise ConfigError(f"{KEY}: the model is converted to FP8 already. Name the algorithm once.")
    foreign = [n for n, m in model.named_modules() if type(m).__module__.startswith("transformer_engine.")]
    if foreign:
        raise ConfigError(
            f"{KEY}: the model holds Transformer Engine modules ({foreign[0]}, ...), so FP8 would be set up twice. "
            "Remove `fc_type: te` and `ffn_type: te_ln_mlp` from the model's config; this algorithm converts plain linears."
        )
    where = _device_of(model) if device is None else torch.device(device)
    policy = config.policy(where)
    backend, chosen = choose_backend(config.backend, policy.recipes, where, f"{KEY}.backend")
    backend.only_where_faster = config.recipe == "auto" or isinstance(config.recipe, Measured)
    if config.accumulation != "float32":
        chosen = f"{chosen}; {_emulate_accumulation(backend, config.accumulation, policy.recipes, where)}"
    if config.cache_weights:
        reason = backend.weight_cache_reason()
        if reason is not None:
            raise ConfigError(
                f"{KEY}.cache_weights: the {backend.name} backend cannot keep quantised weights: {reason}. "
                "Set it to false, or backend: native."
            )
        backend.cache_weights = True
    # Everything that can fail comes first: a call that raises leaves the model as it was.
    linears = plan_linears(model, policy=policy, backend=backend, evaluate=config.evaluate, key=KEY)
    recipes = linears.recipes
    fusions = _plan_norms(model, linears, backend) if config.fuse else {}
    attention = None
    if config.attention:
        attention_recipe = config.attention.recipe or _only(recipes)
        attention = plan_attention(
            model,
            recipe=attention_recipe,
            runner=choose_attention_backend(
                config.backend, backend.name, attention_recipe, config.attention.grad_scores, where
            ),
            grad_scores=config.attention.grad_scores,
            exclude=config.attention.exclude,
            kept_blocks=policy.kept_blocks(model),
            evaluate=config.evaluate,
        )
    frozen = {}
    if config.frozen_weights == "fp8":
        frozen = plan_frozen(model, linears.converted, backend, f"{KEY}.frozen_weights")
    for recipe in recipes:
        backend.self_check(recipe, _compute_dtype(model), where, fused=bool(fusions))
    if attention is not None:
        attention.self_check(model, _compute_dtype(model), where)
    linears.carry_out(model)
    fuse_norms(model, linears.converted, fusions)
    if attention is not None:
        attention.carry_out(model)
    keep_frozen_in_fp8(model, frozen, f"{KEY}.frozen_weights")
    FP8State(model, linears.converted, backend, measured=isinstance(config.recipe, Measured))
    rows = (_with_fusion(row, fusions.get(row.name)) for row in linears.rows)
    return SurgeryReport(
        rows=tuple(_with_frozen(row, row.name in frozen) for row in rows),
        attention=() if attention is None else attention.rows,
        recipes=recipes,
        backend=backend.name,
        chosen=chosen,
    )


def _only(recipes: Sequence[Recipe]) -> Recipe:
    """The linears' recipe, which is attention's where it names none."""
    if len(recipes) > 1:
        raise ConfigError(
            f"{KEY}.attention.recipe: it is the linears' recipe by default, and they run {len(recipes)}. Name one."
        )
    return recipes[0]


def _emulate_accumulation(
    backend: Backend,
    accumulation: Literal["float32", "hopper"],
    recipes: Sequence[Recipe],
    device: torch.device,
) -> str:
    """Set it; what to say of it in the log."""
    key = f"{KEY}.accumulation"
    if backend.name != "emulated":
        raise ConfigError(
            f"{key}: {accumulation} is for backend: emulated; {backend.name} runs on hardware, which adds up in its own way. "
            f"Remove it, and choose with the recipe's fast_accumulation."
        )
    backend.accumulation = accumulation
    for recipe in recipes:
        found = backend.availability(recipe, device)
        if not found.ok:
            raise ConfigError(f"{key}: {accumulation}: {found.reason}. {found.remedy}")
    return f"products are added up as {accumulation.capitalize()} does"


def _plan_norms(model: nn.Module, linears: LinearPlan, backend: Backend) -> dict[str, Fusion]:
    """Which norms are fused into the linears that read them; an error if none is."""
    plan = plan_norms(model, linears.converted) if backend.fuses_norms else {}
    if all(fusion.refused for fusion in plan.values()):
        if not backend.fuses_norms:
            why = f"the {backend.name} backend fuses nothing; transformer_engine and native do"
        else:
            why = "; ".join(sorted({f.refused for f in plan.values() if f.refused}))
            why = why or "no norm is known to feed exactly one converted linear (MPT blocks have such)"
        raise ConfigError(f"{KEY}.fuse: nothing can be fused: {why}. Set it to false.")
    return plan


def _with_fusion(row: SurgeryRow, fusion: Fusion | None) -> SurgeryRow:
    if fusion is None:
        return row
    if fusion.refused:
        reason = f"{row.reason}, not fused with {fusion.norm}: {fusion.refused}"
        return dataclasses.replace(row, reason=reason)
    return dataclasses.replace(row, reason=f"{row.reason}, fused with {fusion.norm}", fused_with=fusion.norm)


def _with_frozen(row: SurgeryRow, kept: bool) -> SurgeryRow:
    return dataclasses.replace(row, reason=f"{row.reason}, its weight kept in FP8 alone") if kept else row


def _compute_dtype(model: nn.Module) -> torch.dtype:
    """float16 or bfloat16 where the parameters have it; bfloat16, autocast's, for float32 ones."""
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.float16 if first == torch.float16 else torch.bfloat16


def _device_of(model: nn.Module) -> torch.device:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return device
