"""How much faster a training step is in FP8, on paper: one GPU's step in BF16 and in a recipe.

    step = (GEMMs + attention + casts + elementwise + loss + recompute) * microbatches + optimizer

GEMMs, attention and bytes run at the rates of :mod:`foundry_fp8.backends.size_rule`. Of a block of width H whose MLP is F wide, the
forward and backward of norms, residual adds and rotary embeddings move 28 H elements of two bytes a token, of a gated activation 14 F, of
another 5 F (reads and writes of eager kernels, counted). A cast of x or dy reads two bytes and writes two, once more two under recipes
that measure first; a weight's layouts are two casts. Where norms and MLPs are fused they write codes: siblings share the norm's, and the
activation's kernels replace the casts of what they make. The loss moves 26 bytes a logit, AdamW 28 a parameter.

A checkpoint repeats of its module the fprop GEMMs, a third of attention, the casts of x, one of a weight's two, and the activation's
forward (5 of 14 F, 2 of 5 F); a block's also 10 of 28 H: its norms read and write (4), one residual add (3), rotary embeddings (3, the
rest of 28 halved); and a third of its host's time (assumed). torch stops where the last saved tensor is there: before the last GEMM, whose
inputs BF16 saves before it runs, FP8's autograd functions after (of blocks that end with it; routing reads what experts return). ``selective`` keeps GEMMs and attention, ``offload`` repeats nothing. MFU counts the model's FLOPs alone.

Runs are slower than these kernels: published BF16 runs reach about 0.4 of the peak, where the kernels alone would reach 0.6. Nobody
knows whether FP8 speeds the rest up too, so there are two ends: the rest stays as it is (:attr:`Speed.low`), or shrinks like the kernels
(:attr:`Speed.high`); the estimate is their middle. A step is never shorter than its host needs, and communicates as
:mod:`foundry_fp8.planning.communication.step` has it. Nothing is fitted to published ratios (``benchmarks/results/plan_speed_check.txt``).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from foundry_fp8.backends.size_rule import bytes_per_element, rates_of
from foundry_fp8.gpus import Gpu
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.model_structure.roles import roles_of
from foundry_fp8.numerics.recipes import Recipe
from foundry_fp8.observe.flops.attention import attended_pairs, attention_shapes
from foundry_fp8.observe.flops.gemms import Gemm, gemms_of
from foundry_fp8.planning.communication.machines import Network
from foundry_fp8.planning.communication.step import Workload, layout

__all__ = ["USUAL_MFU", "Speed", "Step", "model_step", "predict"]

USUAL_MFU = 0.4
"""Of BF16 runs before what they repeat: the median of the smallest runs of each series in ``benchmarks/results/plan_communication_check.txt``."""
HOST_SECONDS = 2.5e-3, 4.3e-3
"""Of a block's forward and backward, in BF16 and in FP8: half of a Hugging Face block's on a slow host (H200, 2026-11-27)."""
BLOCK_ELEMENTS = 10, 18
"""What a checkpoint of a block repeats, and the rest; below in forward and backward."""
GATED = {"elementwise": (5, 9), "elementwise_fused": (3, 5), "measured": (2, 3), "cast_fused": (-1, -2)}
UNGATED = {"elementwise": (2, 3), "elementwise_fused": (2, 3), "measured": (1, 2), "cast_fused": (-1, -1)}
LOGIT_BYTES = 26
OPTIMIZER_BYTES = 28


@dataclasses.dataclass(frozen=True)
class Step:
    """What a model's forward and backward do, a token; elements are of two bytes."""

    blocks: float
    fp8_flops: float
    """Of the GEMMs that run in FP8."""
    other_flops: float
    attention_flops: float
    cast: float
    """Elements of x and dy that are quantised."""
    cast_fused: float
    """The same where norms and MLPs are fused."""
    weights: float
    """Elements of FP8 weights, which are quantised once a microbatch."""
    elementwise: float
    elementwise_fused: float
    measured: float
    """What recipes that measure first read once more where norms and MLPs are fused."""
    trained: float
    """Elements of parameters."""
    vocabulary: float
    again: Step | None = None
    """What checkpoints repeat of it; its blocks as shares of what their hosts do."""
    stops: float = 0.0
    """Of ``again``: FLOPs of those FP8 GEMMs before which BF16 stops."""

    @property
    def flops(self) -> float:
        """Of the model, as MFU counts them."""
        return self.fp8_flops + self.other_flops + self.attention_flops

    def ideal_seconds(self, gpu: Gpu, recipe: Recipe | None) -> float:
        """Of a token's GEMMs at the peaks of ``gpu``: over what a step takes, its MFU."""
        peak = "bf16" if recipe is None else f"fp{recipe.element_bits}"
        return self.fp8_flops / gpu.peaks.of(peak) + (self.flops - self.fp8_flops) / gpu.bf16_flops

    def kernel_seconds(self, tokens: float, gpu: Gpu, recipe: Recipe | None) -> float:
        """Of a microbatch's kernels."""
        rates = rates_of(gpu)
        arithmetic = self.other_flops / rates.bf16 + self.attention_flops / rates.attention
        in_fp8 = self.fp8_flops if recipe is not None else self.fp8_flops - self.stops
        arithmetic += in_fp8 / rates.products(recipe)
        moved, weights = 2 * self.elementwise + LOGIT_BYTES * self.vocabulary, 0.0
        if recipe is not None:
            each = bytes_per_element(recipe)
            weights = (each + 2) * self.weights
            if recipe.element_bits == 8:
                more = self.measured if each > 4 else 0
                moved += 2 * (self.elementwise_fused + more - self.elementwise) + each * self.cast_fused
            else:  # no norm and no MLP writes FP4
                moved += each * self.cast
        again = 0.0 if self.again is None else self.again.kernel_seconds(tokens, gpu, recipe)
        return tokens * (arithmetic + moved / rates.bandwidth) + weights / rates.bandwidth + again


def model_step(
    model: nn.Module,
    fp8: Collection[str],
    norms: Collection[str],
    mlps: Collection[str],
    length: int,
    again: Mapping[str, str] | None = None,
) -> Step:
    """The step of ``model``, on any device.

    Args:
        model: Converted or not.
        fp8: Names of the linears that run in FP8.
        norms: Names of those that write codes where they are fused (:func:`~foundry_fp8.surgery.fusion.plan_fusion`).
        mlps: Likewise of MLPs.
        length: Tokens of a sequence.
        again: Names of the modules that checkpoints repeat, and whether they are ``full`` or ``selective``.
    """
    gemms = {gemm.name: gemm for gemm in gemms_of(model)}
    blocks, again = transformer_blocks(model), again or {}
    full = [one for one, policy in again.items() if policy == "full"]
    ends = ([n for n in gemms if f"{n}.".startswith(f"{one}.")][-1:] for one in full)
    last = {n for end in ends for n in end if gemms[n].share == 1}
    totals: dict[str, float] = defaultdict(float)
    repeated = totals.copy()

    def add(where: str, **terms: tuple[float, float]) -> None:
        """What the module ``where`` does in forward and in backward."""
        policy = next((again[one] for one in again if f"{where}.".startswith(f"{one}.")), "")
        for term, (forward, backward) in terms.items():
            totals[term] += forward + backward
            kept = policy != "full" and term.endswith("flops")
            if policy and not kept and not (term == "other_flops" and where in last):
                repeated[term] += forward

    for name, gemm in gemms.items():
        casts = gemm.share * gemm.in_features, gemm.share * gemm.out_features
        products = gemm.per_token, sum(gemm.flops(1).values()) - gemm.per_token
        add(name, **{"fp8_flops" if name in fp8 else "other_flops": products})
        if name in fp8:
            layout_of = gemm.in_features * gemm.out_features / 2
            add(name, cast=casts, cast_fused=casts, weights=(layout_of, layout_of))
    for shape in attention_shapes(model):
        forward = shape.forward_flops(attended_pairs(length, shape.window, shape.causal)) / length
        add(shape.name, attention_flops=(forward, 2 * forward))
    roles = roles_of(model, gemms)
    for name, _ in blocks:
        parents: dict[str, list[Gemm]] = {}
        for gemm in (own := [gemm for n, gemm in gemms.items() if n.startswith(f"{name}.")]):
            add(gemm.name, launches=(1, 2))
            parents.setdefault(gemm.name.rpartition(".")[0], []).append(gemm)
        width = own[0].in_features if own else 0
        codes = sum(norm.startswith(f"{name}.") for norm in norms)
        once, rest = (n * width for n in BLOCK_ELEMENTS)
        # A norm that writes codes writes one element less and spares its readers one; measuring first reads it again.
        less = once - 2 * codes * width
        add(name, elementwise=(once, rest), elementwise_fused=(less, rest), measured=(codes * width, 0))
        for parent, (*readers, out) in parents.items():
            if codes or parent in mlps:
                quantised = [g for g in readers if g.name in fp8]
                add(parent, cast_fused=(-sum(g.share * g.in_features for g in quantised[1:]), 0))
            if roles.get(out.name) == "attention" or not readers:
                continue
            moved = GATED if sum(g.per_token for g in readers) > 1.5 * out.per_token else UNGATED
            if parent not in mlps:
                moved = {term: moved["elementwise"] for term in ("elementwise", "elementwise_fused")}
            hidden = out.share * out.in_features
            add(parent, **{term: (f * hidden, b * hidden) for term, (f, b) in moved.items()})

    def step(terms: dict[str, float], **more: Any) -> Step:
        return Step(**{f.name: terms[f.name] for f in dataclasses.fields(Step)} | more)

    shares = len(blocks) * repeated["launches"] / max(1, totals["launches"])
    stops = sum(gemms[n].per_token for n in last if n in fp8)
    outside = [n for n in gemms if not n.startswith(tuple(f"{block}." for block, _ in blocks))]
    return step(
        totals,
        blocks=len(blocks),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        vocabulary=max((gemms[n].out_features for n in outside), default=0),
        again=step(repeated, blocks=shares, again=None, stops=stops) if again else None,
    )


@dataclasses.dataclass(frozen=True)
class Speed:
    """A training step on a number of GPUs."""

    seconds: float
    mfu: float
    """Each GEMM over the peak of its own precision."""
    low: float
    """Times as fast as in BF16, of the two ends the less: as a rule FP8 saves of its GEMMs, costs its casts, and leaves all else as it is."""
    estimate: float
    high: float
    """As a rule, where what is slower than the kernels shrinks as they do."""


def predict(
    step: Step,
    work: Workload,
    recipe: Recipe | None,
    gpus: int,
    shard: int,
    gpu: Gpu,
    network: Network,
    mfu: float | None = None,
) -> Speed:
    """The step of ``recipe`` on ``gpus``.

    Args:
        step: Of the model.
        work: The run in BF16: its tokens and microbatches, and how it communicates.
        recipe: ``None`` is BF16, 1 times as fast.
        gpus: Of the run.
        shard: Ranks that hold a copy of the model.
        gpu: Of which kind they are.
        network: Between them.
        mfu: In BF16, of a GPU that computes alone, with the run's checkpoints; ``None`` for :data:`USUAL_MFU`, to which their kernels come.
    """
    micro = work.microbatches
    optimizer = OPTIMIZER_BYTES * step.trained / shard / rates_of(gpu).bandwidth
    bf16, fp8 = (
        micro * step.kernel_seconds(work.tokens / micro, gpu, one) + optimizer for one in (None, recipe)
    )
    again = step.again
    plain, coded = (
        seconds * (step.blocks + (again.blocks if again else 0)) * micro for seconds in HOST_SECONDS
    )
    alone = step.flops * work.tokens / (gpu.bf16_flops * (mfu or USUAL_MFU))
    if again is not None:
        alone += 0.0 if mfu else micro * again.kernel_seconds(work.tokens / micro, gpu, None)
        work = dataclasses.replace(work, repeated=(again.flops - again.stops) / step.flops)
    alone = max(alone, bf16, plain)
    ends = alone / max(alone - bf16 + fp8, plain if recipe is None else coded), bf16 / fp8

    def seconds(faster: float) -> float:
        one = dataclasses.replace(work, compute_seconds=alone / faster)
        return layout(one, gpus, shard, gpu, network).step_seconds

    whole, taken = seconds(1.0), seconds(sum(ends) / 2)
    low, high = (whole / seconds(end) for end in sorted(ends))
    reached = step.ideal_seconds(gpu, recipe) * work.tokens / taken
    return Speed(taken, reached, low, whole / taken, high)
