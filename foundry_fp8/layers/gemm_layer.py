"""What every layer has that multiplies by a weight in FP8: its recipe, its state, its ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward, maybe_transformed, transformed
from foundry_fp8.kernels.launch import HP_DTYPES
from foundry_fp8.layers.autocast import compute_dtype
from foundry_fp8.layers.backend import Backend
from foundry_fp8.layers.delayed_scaling import DelayedSlot
from foundry_fp8.layers.dtensor import is_dtensor
from foundry_fp8.layers.ledger import Gemm, GemmLedger, Precision, precision_of
from foundry_fp8.layers.second_derivative import refuse_second_derivative, refuse_transforms
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import (
    GEMMS,
    GemmPrecision,
    Operand,
    Recipe,
    most_common_recipes,
    recipe_name,
)

__all__ = ["OPERANDS", "Choice", "FP8GemmLayer", "Probe", "Slots", "configured_recipes"]

OPERANDS: tuple[Operand, ...] = ("x", "w", "dy")

Probe = Callable[[Operand, Tensor, Quantized], None]
"""Called with each operand that a layer quantises: its name, the hp tensor ``[R, C]``, and the result."""

Slots = Mapping[Operand, DelayedSlot]


@dataclasses.dataclass(frozen=True)
class Choice:
    """A recipe (``None``: high precision), what GEMMs run in beside FP8, and the rule that says so: its YAML key, and its times, if it has some."""

    recipe: Recipe | None
    beside: Mapping[Gemm, GemmPrecision] = dataclasses.field(default_factory=dict, hash=False)
    rule: str = ""
    when: str = ""

    @property
    def gemms(self) -> dict[str, str]:
        """The recipe's name, ``dequantized`` or ``high_precision``, by GEMM."""
        beside = self.beside if self.recipe else {}
        return {gemm: beside.get(gemm, recipe_name(self.recipe)) for gemm in GEMMS}

    def __str__(self) -> str:
        said = recipe_name(self.recipe)
        for precision, words in (("dequantized", "dequantized"), ("high_precision", "in high precision")):
            gemms = " and ".join(g for g in GEMMS if self.recipe and self.beside.get(g) == precision)
            said += gemms and f", {gemms} {words}"
        return f"{said} {self.when}".rstrip()


class FP8GemmLayer(nn.Module):
    """A layer with one weight, or one an expert, that runs its three GEMMs in FP8.

    FP8 state is not in ``state_dict``; it belongs to :class:`~foundry_fp8.layers.state.FP8State`.

    Attributes:
        fqn: The layer's name in the model, for messages and reports.
        backend: Who runs the GEMMs.
        recipe: What runs now; ``None`` is high precision. Change it with :meth:`set_recipe`.
        configured_recipe: What the conversion asked for; ``None`` where a measurement chose high precision.
        fprop, dgrad, wgrad: What that GEMM runs in, while a recipe does.
        turns: What it runs by turns, where rules hold for a part of the run; ``turn`` is the present one.
        demoted: In a turn in high precision: what the guard demoted it to, which it is again in the next one: ``finer``, ``out`` or nothing.
        evaluate: What a forward in ``eval()`` mode runs in.
        slots: The delayed-scaling state of each operand; ``None`` unless ``configured_recipe`` is delayed.
        ledger: The GEMMs that ran.
        probe: Called with every operand quantised while it is set; for monitors.
        passes: Training forwards that the emulated backend ran, by which it rounds at random.
        output_multiplier: What the result of every GEMM is multiplied by, as part of its scale; 1 but for
            :class:`~foundry_fp8.layers.unit_linear.FP8UnitLinear`.
    """

    in_features: int
    out_features: int
    fqn: str
    backend: Backend
    recipe: Recipe | None
    configured_recipe: Recipe | None
    evaluate: Literal["fp8", "high_precision"]
    slots: Slots | None
    _first_forward_recorded: bool
    ledger: GemmLedger
    probe: Probe | None
    passes: int
    output_multiplier: float = 1.0
    fprop: GemmPrecision = "fp8"
    dgrad: GemmPrecision = "fp8"
    wgrad: GemmPrecision = "fp8"
    turns: Sequence[Choice] = ()
    turn: Choice
    demoted: str = ""
    _compute: Callable[..., Tensor]

    def _begin(
        self, fqn: str, backend: Backend, recipe: Recipe | None, evaluate: Literal["fp8", "high_precision"]
    ) -> None:
        """Set the attributes that every conversion sets."""
        self.fqn = fqn
        self.backend = backend
        self.recipe = self.configured_recipe = recipe
        self.evaluate = evaluate
        self.slots = None
        self.ledger = GemmLedger()
        self.probe = None
        self.passes = 0
        self._first_forward_recorded = False

    def set_recipe(self, recipe: Recipe | None) -> None:
        """Run ``recipe`` from the next forward on; ``None`` runs high precision.

        Raises:
            RuntimeError: A delayed recipe for a layer that has no delayed-scaling state.
        """
        if recipe is not None and recipe.uses_history and recipe != self.configured_recipe:
            raise RuntimeError(
                f"{self.fqn}: delayed scaling has state only where the model was converted with it "
                f"(this layer was converted with {self.configured_recipe and self.configured_recipe.name}). Demote to current, block or mxfp8."
            )
        if self.slots is not None:  # who reads the same tensor may go on, or stop, without it
            self.slots["x"].state.part()
        self.recipe = recipe

    def take_turn(self, held: Collection[str], device: torch.device) -> None:
        """Run the first of ``turns`` whose rule is ``held``, from the next forward on; what the guard demoted stays so."""
        configured = self.configured_recipe
        self.turn = turn = next((turn for turn in self.turns if turn.rule in held), Choice(None))
        if configured is not None:  # by name: unit's recipe has its gradient scale by now
            own = self.recipe is not None and self.recipe.name == configured.name
            self.demoted = "" if own else "out" if self.recipe is None else "finer"
        recipe = self.configured_recipe = turn.recipe
        if recipe is not None and self.demoted:
            recipe = recipe.finer if self.demoted == "finer" else None
            recipe = recipe if recipe is not None and self.can_run(recipe, device) else None
        for gemm in GEMMS:
            setattr(self, gemm, turn.beside.get(gemm, "fp8"))
        self.set_recipe(recipe)

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """What it was converted to run, at some time."""
        return tuple(filter(None, dict.fromkeys(t.recipe for t in self.turns) or (self.configured_recipe,)))

    def extra_repr(self) -> str:
        """What it runs."""
        beside = "".join(
            f", {gemm}={getattr(self, gemm)}" for gemm in ("fprop", "dgrad") if getattr(self, gemm) != "fp8"
        )
        return f"recipe={recipe_name(self.recipe)}, backend={self.backend.name}{beside}, wgrad={self.wgrad}"

    def can_run(self, recipe: Recipe, device: torch.device) -> bool:
        """Whether the backend runs ``recipe`` with this layer's shapes on ``device``."""
        fits = self.backend.shape_reason(recipe, self.in_features, self.out_features) is None
        return fits and self.backend.availability(recipe, device).ok

    @property
    def runs_fp8(self) -> bool:
        """Whether a forward in the present mode runs in FP8."""
        return self.recipe is not None and (self.training or self.evaluate == "fp8")

    def recording(self) -> tuple[Operand, ...]:
        """Whose amax this forward and its backward take into the delayed-scaling state; call it once a forward.

        A recompute leaves out ``x`` and ``w`` where the first forward took them: its ``x`` may have been packed since.
        Under a reentrant checkpoint the first forward runs without gradients and takes nothing.
        """
        trains = self.training and torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            if trains and inside_backward() and self._first_forward_recorded:
                return ("dy",)
            # Compared first: a module looks through all it has before it sets anything.
            if trains is not self._first_forward_recorded and not inside_backward():
                self._first_forward_recorded = trains
        return ("x", "w", "dy") if trains else ()

    def gemm_precisions(self, hp: Precision) -> dict[Gemm, Precision]:
        """The precision of each GEMM in the present mode; ``hp`` names the high precision that runs beside FP8."""
        recipe = self.recipe if self.runs_fp8 else None
        low: Precision = hp if recipe is None else "fp8" if recipe.element_bits == 8 else "fp4"
        return {"fprop": low if self.fprop == "fp8" else hp, "dgrad": low if self.dgrad == "fp8" else hp,
                "wgrad": low if self.wgrad == "fp8" else hp}  # fmt: skip

    def recorded(self, input: Tensor, weight: Tensor, *more: Any) -> Tensor:
        """``self._compute(input, *more)``, a product with ``weight``, entered in the ledger."""
        # A compiled graph cannot keep Python counters, nor is there a number of rows in a transform.
        if torch.compiler.is_compiling() or (not self.runs_fp8 and (transformed() or input.is_nested)):
            return self._compute(input, *more)
        # Before the GEMM: a recompute that stops as soon as it has what it needs never comes back from its last one.
        record_backward = self.enter(input, weight, input.numel() // self.in_features, input.requires_grad)
        output = self._compute(input, *more)
        if not output.requires_grad:
            return output
        node: Any = output.grad_fn
        if getattr(node, "calls_at_backward", record_backward) is None:
            node.calls_at_backward = record_backward  # a tensor's hook takes the host as long as a launch
        else:
            output.register_hook(record_backward)
        return output

    def enter(
        self, input: Tensor, weight: Tensor, tokens: int, dgrad: bool
    ) -> Callable[[Tensor | None], None]:
        """Enter a forward of ``tokens`` rows in the ledger, before its GEMM; never in a compiled graph.

        ``dgrad``: whether the input gets a gradient. What is returned has to be called once in the backward.
        """
        # Cheap questions first: this is every pass.
        if (maybe_transformed() or input.is_nested or not self.training) and self.runs_fp8:
            refuse_transforms(self.fqn, input)
        state = self.slots["x"].state if self.slots is not None else None
        if state is not None:
            state.begin_layer(input.device, trains=self.training and torch.is_grad_enabled())
        dtype, ledger = compute_dtype(input), self.ledger
        if dtype not in HP_DTYPES or input.__class__ is not Tensor or weight.__class__ is not nn.Parameter:
            self._check_input(input, weight, dtype)
        precisions = self.gemm_precisions(precision_of(dtype))
        fp8, wgrad = self.runs_fp8, weight.requires_grad
        n, k = self.out_features, self.in_features
        # Of a DTensor this rank multiplies a part.
        if weight.__class__ is not nn.Parameter and is_dtensor(weight):
            n, k = weight.detach().to_local().shape  # type: ignore[attr-defined]
        ledger.record("fprop", tokens, n, k, precisions["fprop"], recompute=inside_backward())
        forward = None if state is None else state.in_force()

        # In the backward, because only one that really runs should count: a recompute builds a graph that nothing walks.
        def record_backward(_: Tensor | None = None) -> None:
            if fp8:
                refuse_second_derivative(self.fqn)
            if state is not None and forward is not None:
                state.begin_backward(forward)
            if dgrad:
                ledger.record("dgrad", tokens, k, n, precisions["dgrad"])
            if wgrad:
                ledger.record("wgrad", n, k, tokens, precisions["wgrad"])

        return record_backward

    def _check_input(self, input: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
        """What would otherwise end in an error of some kernel, or run in a precision that is not FP8's."""
        fp8 = self.runs_fp8
        if dtype not in HP_DTYPES and (fp8 or dtype is not torch.float64):
            raise TypeError(
                f"{self.fqn}: the input is {dtype}; FP8 layers take float32, bfloat16 and float16."
            )
        if fp8 and is_dtensor(input) is not is_dtensor(weight):
            one, other = ("input", "weight") if is_dtensor(input) else ("weight", "input")
            raise RuntimeError(
                f"{self.fqn}: its {one} is a DTensor and its {other} is not. Under tensor parallelism name it in the plan of parallelize_module, "
                "or leave it in high precision (algorithms.fp8.exclude)."
            )


def configured_recipes(layers: Iterable[FP8GemmLayer]) -> tuple[Recipe, ...]:
    """What ``layers`` were converted with, each recipe once, first what most of them were."""
    return most_common_recipes(recipe for layer in layers for recipe in layer.recipes)
