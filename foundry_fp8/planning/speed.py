"""How much faster a training step is in FP8, on paper: one GPU's step in BF16 and in a recipe.

    step = (GEMMs + attention + casts + elementwise + loss) * microbatches + optimizer

GEMMs, attention and bytes run at the rates of :mod:`foundry_fp8.backends.size_rule`. Of a block of width H whose MLP is F wide, the
forward and backward of norms, residual adds and rotary embeddings move 28 H elements of two bytes a token, of a gated activation 14 F, of
another 5 F (reads and writes of eager kernels, counted). A cast of x or dy reads two bytes and writes two, once more two under recipes
that measure first; a weight's layouts are two casts. Where norms and MLPs are fused they write codes: siblings share the norm's, and the
activation's kernels replace the casts of what they make. The loss moves 26 bytes a logit, AdamW 28 a parameter.

Runs are slower than these kernels: published BF16 runs reach about 0.4 of the peak, where the kernels alone would reach 0.6. Nobody
knows whether FP8 speeds the rest up too, so there are two ends: the rest stays as it is (:attr:`Speed.low`), or shrinks like the kernels
(:attr:`Speed.high`); the estimate is their middle. A step is never shorter than its host needs, and communicates as
:mod:`foundry_fp8.planning.communication.step` has it. Nothing is fitted to published ratios (``benchmarks/results/plan_speed_check.txt``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

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
"""Of BF16 runs: the median of the smallest runs of each series in ``benchmarks/results/plan_communication_check.txt``."""
HOST_SECONDS = 2.5e-3, 4.3e-3
"""Of a block's forward and backward, in BF16 and in FP8: half of a Hugging Face block's on a slow host (H200, 2026-11-27)."""
BLOCK_ELEMENTS = 28
LOGIT_BYTES = 26
OPTIMIZER_BYTES = 28


@dataclasses.dataclass(frozen=True)
class Step:
    """What a model's forward and backward do, a token; elements are of two bytes."""

    blocks: int
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
        arithmetic += self.fp8_flops / rates.products(recipe)
        moved, weights = 2 * self.elementwise + LOGIT_BYTES * self.vocabulary, 0.0
        if recipe is not None:
            each = bytes_per_element(recipe)
            weights = (each + 2) * self.weights
            if recipe.element_bits == 8:
                more = self.measured if each > 4 else 0
                moved += 2 * (self.elementwise_fused + more - self.elementwise) + each * self.cast_fused
            else:  # no norm and no MLP writes FP4
                moved += each * self.cast
        return tokens * (arithmetic + moved / rates.bandwidth) + weights / rates.bandwidth


def model_step(
    model: nn.Module, fp8: Collection[str], norms: Collection[str], mlps: Collection[str], length: int
) -> Step:
    """The step of ``model``, on any device.

    Args:
        model: Converted or not.
        fp8: Names of the linears that run in FP8.
        norms: Names of those that write codes where they are fused (:func:`~foundry_fp8.surgery.fusion.plan_fusion`).
        mlps: Likewise of MLPs.
        length: Tokens of a sequence.
    """
    gemms = {gemm.name: gemm for gemm in gemms_of(model)}
    per_token = {name: sum(gemm.flops(1).values()) for name, gemm in gemms.items()}
    attention = sum(
        s.forward_flops(attended_pairs(length, s.window, s.causal)) for s in attention_shapes(model)
    )
    in_fp8 = [gemms[name] for name in fp8 if name in gemms]
    cast = sum(g.share * (g.in_features + g.out_features) for g in in_fp8)
    elementwise = saved_casts = saved = measured = 0.0
    blocks = transformer_blocks(model)
    outside = [n for n in gemms if not n.startswith(tuple(f"{block}." for block, _ in blocks))]
    roles = roles_of(model, gemms)
    for name, _ in blocks:
        inside = {n: g for n, g in gemms.items() if n.startswith(f"{name}.")}
        parents: dict[str, list[Gemm]] = {}
        for n, gemm in inside.items():
            parents.setdefault(n.rpartition(".")[0], []).append(gemm)
        width = next(iter(inside.values())).in_features if inside else 0
        elementwise += BLOCK_ELEMENTS * width
        codes = sum(norm.startswith(f"{name}.") for norm in norms)
        # A norm that writes codes writes one element less and spares its readers one; measuring first reads it again.
        saved += 2 * codes * width
        measured += codes * width
        for parent, (*readers, last) in parents.items():
            quantised = [g for g in readers if g.name in fp8]
            if codes or parent in mlps:
                saved_casts += sum(g.share * g.in_features for g in quantised[1:])
            if roles.get(last.name) == "attention" or not readers:
                continue
            hidden = last.share * last.in_features
            gated = sum(g.per_token for g in readers) > 1.5 * last.per_token
            elementwise += (14 if gated else 5) * hidden
            if parent in mlps:
                saved_casts += (
                    3 if gated else 2
                ) * hidden  # of the hidden features, and of dy of their makers
                saved += 6 * hidden if gated else 0  # of 14 its kernels leave 8, of 5 all
                measured += (5 if gated else 3) * hidden
    return Step(
        blocks=len(blocks),
        fp8_flops=sum(per_token[g.name] for g in in_fp8),
        other_flops=sum(f for n, f in per_token.items() if n not in fp8),
        attention_flops=3 * attention / length,
        cast=cast,
        cast_fused=cast - saved_casts,
        weights=sum(g.in_features * g.out_features for g in in_fp8),
        elementwise=elementwise,
        elementwise_fused=elementwise - saved,
        measured=measured,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        vocabulary=max((gemms[n].out_features for n in outside), default=0),
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
    mfu: float,
    compressing: float = 0.0,
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
        mfu: In BF16, of a GPU that computes alone.
        compressing: Seconds of a step that compression of activations takes; it is held against a run in BF16 without.
    """
    micro = work.microbatches
    optimizer = OPTIMIZER_BYTES * step.trained / shard / rates_of(gpu).bandwidth
    bf16, fp8 = (
        micro * step.kernel_seconds(work.tokens / micro, gpu, one) + optimizer for one in (None, recipe)
    )
    fp8 += compressing
    plain, coded = (seconds * step.blocks * micro for seconds in HOST_SECONDS)
    alone = max(step.flops * work.tokens / (gpu.bf16_flops * mfu), bf16, plain)
    ends = alone / max(alone - bf16 + fp8, plain if recipe is None else coded), bf16 / fp8

    def seconds(faster: float) -> float:
        busy = work.flops * faster / alone / gpu.bf16_flops
        return layout(dataclasses.replace(work, mfu=min(1.0, busy)), gpus, shard, gpu, network).step_seconds

    whole, taken = seconds(1.0), seconds(sum(ends) / 2)
    low, high = (whole / seconds(end) for end in sorted(ends))
    reached = step.ideal_seconds(gpu, recipe) * work.tokens / taken
    return Speed(taken, reached, low, whole / taken, high)
