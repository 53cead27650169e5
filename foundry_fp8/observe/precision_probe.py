"""What FP8 does to one batch: its loss and its gradients, beside those in high precision at the same parameters."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat import fsdp1, fsdp2
from foundry_fp8.distributed.attendance import Attendance, out_of_memory
from foundry_fp8.distributed.mesh import alone, collective_device
from foundry_fp8.model_structure.blocks import block_index_of, block_label, transformer_blocks
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.model_structure.wrappers import is_sharded, without_ddp
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.observe.gradient_sample import gradient_errors, sample, squares, weights_of
from foundry_fp8.observe.unchanged_state import fp8_layers, unchanged_state

__all__ = ["OutOfMemory", "PrecisionGap", "PrecisionProbe", "first_rows", "precision_gap"]

LossOf = Callable[[nn.Module, Any], Tensor]
"""``loss_of(model, batch)``: the scalar loss of a training forward, under training's autocast. It may be scaled (float16)."""
Recipes = Mapping[str, Recipe | None]
"""The recipe that each FP8 layer runs, by name; ``None`` is high precision, as are layers that are not named."""


class OutOfMemory(RuntimeError):
    """A measurement ran out of memory, on some rank."""


@dataclasses.dataclass(frozen=True)
class PrecisionGap:
    """How far FP8 is from high precision on one batch, over all ranks.

    Attributes:
        loss: In high precision, mean over ranks.
        loss_gap: ``(loss in FP8 - loss) / |loss|``; NaN or infinite where FP8's loss is.
        gradient_error: By weight, ``|g_fp8 - g| / max(|g|, floor)`` (:func:`~.gradient_sample.gradient_errors`).
        block_error: The same over all weights of a block: ``layer_003``, and ``outside`` for what is in none.
        meaningful: Whether loss and gradients in high precision are finite, so that FP8 is what is measured.
    """

    loss: float
    loss_gap: float
    gradient_error: Mapping[str, float]
    block_error: Mapping[str, float]
    meaningful: bool = True

    @property
    def worst(self) -> tuple[str, float]:
        """The block with the largest error, and that error; NaN counts as infinite."""
        errors = {n: e if math.isfinite(e) else math.inf for n, e in self.block_error.items()}
        return max(errors.items(), key=lambda item: item[1], default=("", 0.0))


def precision_gap(
    model: nn.Module, loss_of: LossOf, batch: Any, *, fp8: Iterable[str] | None = None
) -> PrecisionGap:
    """Measure what FP8 does to the loss and the gradients of ``batch``, and leave no trace in ``model`` or its training.

    Args:
        model: Converted by :func:`~foundry_fp8.apply_fp8`, in training mode, wrapped or not.
        loss_of: The loss of a training forward.
        batch: Is run twice.
        fp8: Names of the layers that run FP8, with the recipe of their conversion; ``None`` is what runs now.

    Returns:
        The gap, the same on all ranks. Every rank calls this with a batch of its own.

    Raises:
        KeyError: ``fp8`` names what is no FP8 layer.
        RuntimeError: Out of memory (:class:`OutOfMemory`), FSDP1 holds gradients, or it failed on another rank.
        TypeError: The loss is not a scalar, or ``batch`` is an iterator, which can be run once only.
    """
    probe = PrecisionProbe(model, loss_of)
    recipes: dict[str, Recipe | None] = probe.running() if fp8 is None else {}
    for name in fp8 or ():
        if name not in probe.layers:
            first = ", ".join([*probe.layers][:4])
            raise KeyError(f"{name!r} is no FP8 layer; the model has {len(probe.layers)}: {first}, ...")
        recipes[name] = probe.layers[name].configured_recipe
    with probe.on(batch) as measure:
        return measure(recipes)


class PrecisionProbe:
    """Measures one model many times: its FP8 ``layers`` by name, and the ``passes`` (forward and backward) run so far."""

    def __init__(self, model: nn.Module, loss_of: LossOf) -> None:
        self.model = without_ddp(model)
        self.loss_of = loss_of
        self.layers = fp8_layers(self.model)
        self.weights = weights_of(self.model)
        self.passes = 0
        self.attendance = Attendance("the measurement of FP8 against high precision")
        self._sharded = is_sharded(self.model)
        self._blocks = [(clean_name(name), block) for name, block in transformer_blocks(self.model)]
        self._block_of = {weight.name: self.block_of(weight.name) for weight in self.weights}

    def block_of(self, name: str) -> str:
        """The block of a weight or layer, as :attr:`PrecisionGap.block_error` names it."""
        return block_label(block_index_of(name, self._blocks))

    def running(self) -> dict[str, Recipe | None]:
        """What each layer runs now."""
        return {name: layer.recipe for name, layer in self.layers.items()}

    @contextlib.contextmanager
    def on(self, batch: Any) -> Iterator[Callable[[Recipes], PrecisionGap]]:
        """Measure several choices of recipes on one batch: high precision runs once."""
        if isinstance(batch, Iterator):
            raise TypeError(f"the batch is a {type(batch).__name__}, which can be run once; give a batch")
        if not self.model.training:
            raise RuntimeError("the model is in evaluation mode, where no layer runs FP8; call model.train()")
        with unchanged_state(self.model) as rewind:
            reference: list[Any] = []

            def measure(recipes: Recipes) -> PrecisionGap:
                if not reference:
                    reference.append(self._attempt(rewind, batch, {}))
                return self._compare(self._attempt(rewind, batch, recipes, reference[0]), reference[0])

            yield measure

    def _attempt(self, rewind: Callable[[], None], batch: Any, recipes: Recipes, before: Any = None) -> Any:
        """Loss and gradient sample of one pass, or the exception in it; other ranks learn of it in :meth:`_compare`, and of one ``before``."""
        rewind()
        try:
            self.passes += 1
            for name, layer in self.layers.items():
                layer.set_recipe(recipes.get(name))  # type: ignore[arg-type]
            with self.attendance.within_limit() if self._sharded else contextlib.nullcontext():
                loss = self.loss_of(self.model, dict(batch) if isinstance(batch, Mapping) else batch)
                if not isinstance(loss, Tensor) or loss.numel() != 1:
                    raise TypeError(f"the loss is a {type(loss).__name__} and not a tensor of one element")
                loss.backward()
            found: Any = float(loss.detach()), sample(self.weights)
            self.attendance.say(before if isinstance(before, Exception) else None)
        except Exception as error:
            self.attendance.say(error)
            if self._sharded and not alone():  # whose forward and backward are full of collectives
                self.attendance.all_said()
                fsdp1.abandon_pass(self.model)
                fsdp2.abandon_pass(self.model)
            found = error.with_traceback(None)
        return found

    def _compare(self, ours: Any, theirs: Any) -> PrecisionGap:
        failures = [one for one in (ours, theirs) if isinstance(one, Exception)]
        device = torch.device("cpu") if alone() else collective_device()
        totals = torch.zeros(5 + 3 * len(self.weights), dtype=torch.float64, device=device)
        if failures:
            totals[int(out_of_memory(failures[0]))] = 1
        else:
            totals[2:5] = totals.new_tensor([1.0, ours[0], theirs[0]])
            totals[5:] = squares(self.weights, ours[1], theirs[1]).view(-1)
        if not alone():
            self.attendance.all_reduce(totals)
        failed, without_memory, ranks, fp8_loss, loss = totals[:5].tolist()
        if without_memory and not failed:
            raise OutOfMemory("measuring FP8 against high precision ran out of memory")
        if failed:
            raise failures[0] if failures else RuntimeError(f"{self.attendance}{self.attendance.failed()}")
        return self._gap(fp8_loss / ranks, loss / ranks, totals[5:].view(3, -1))

    def _gap(self, fp8_loss: float, loss: float, totals: Tensor) -> PrecisionGap:
        errors: dict[str, float] = {}
        blocks: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, error, own in gradient_errors(totals, self.weights):
            errors[name] = error / own if own else error
            block = blocks[self._block_of[name]]
            block[0] += error**2
            block[1] += own**2
        return PrecisionGap(
            loss=loss,
            loss_gap=(fp8_loss - loss) / max(abs(loss), 1e-30),
            gradient_error=errors,
            block_error={n: math.sqrt(e / own) if own else e for n, (e, own) in sorted(blocks.items())},
            meaningful=math.isfinite(loss) and bool(torch.isfinite(totals[1]).all()),
        )


def first_rows(batch: Any, rows: int) -> Any:
    """The first ``rows`` sequences of a batch: a tensor, or a mapping or sequence of tensors with one leading dimension.

    Raises:
        TypeError: It holds no tensor.
    """
    parts = batch if isinstance(batch, Mapping | list | tuple) else [batch]
    leaves = list(parts.values() if isinstance(parts, Mapping) else parts)
    size = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
    if size is None:
        raise TypeError(f"a batch of type {type(batch).__name__} holds no tensor to cut to {rows} rows")
    of_rows = [leaf.dim() > 0 if isinstance(leaf, Tensor) else isinstance(leaf, list) for leaf in leaves]
    cut = [x[:rows] if rowwise and len(x) == size else x for x, rowwise in zip(leaves, of_rows, strict=True)]
    if isinstance(batch, Mapping):
        return dict(zip(batch, cut, strict=True))
    return type(batch)(cut) if isinstance(batch, list | tuple) else cut[0]
