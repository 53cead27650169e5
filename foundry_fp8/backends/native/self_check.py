"""Before a model is converted: the kernels that it will use, run once on this machine and compared with their definitions.

What is proven elsewhere is another compiler's output or another driver's. A kernel that gives other bytes here trains wrongly and
says nothing, so that it is an error, before anything is changed. The values are the awkward ones: zeros, exact ties,
subnormals, a range of its own in each row and column, Inf and NaN; the sizes end inside a tile. They are multiples of 16, as a
model's are, so that what is compiled here is what training launches.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.backends.native.inputs import LinearCall
from foundry_fp8.backends.native.passes import EagerPass
from foundry_fp8.backends.native.plan import FORMATS, Layout, Plan, plan_of
from foundry_fp8.backends.native.scaling import SCALINGS
from foundry_fp8.backends.native.source import BOTH, BY_COLUMNS, BY_ROWS, Amaxes, Layouts, Source
from foundry_fp8.kernels.launch import driver_version
from foundry_fp8.kernels.zeros import statistics
from foundry_fp8.numerics.formats import Float8Format
from foundry_fp8.numerics.quantize import amax_of, quantize_tensor, scale_from_amax
from foundry_fp8.numerics.recipes import Gemm, Operand, Recipe

__all__ = ["check_kernels", "kernel_error"]

TOKENS, IN, OUT = 208, 144, 176
GEMM_TOLERANCE = 2.0**-7
"""Of the sum of magnitudes: a bfloat16 result, and Hopper's short accumulation over 144 products."""


@functools.cache
def check_kernels(
    recipe: Recipe, dtype: torch.dtype, device: torch.device, fused: bool, experts: bool = False
) -> None:
    """Run what a linear of ``recipe`` runs and compare it. Once a process.

    Args:
        recipe: What the model will run.
        dtype: Its compute dtype.
        device: Where; a CUDA device, or the CPU under Triton's interpreter.
        fused: Also the norm computed inside the quantise kernel.
        experts: Also what experts in one parameter run.

    Raises:
        RuntimeError: A kernel gives something else than its definition. Names it, the stack and the first difference.
    """
    plan = plan_of(recipe)
    # Not known before the first batch; the same kernel for every power of two.
    if plan.gradient_scale == "auto":
        plan = dataclasses.replace(plan, gradient_scale=2**20)
    results = _results(recipe, plan, dtype, device, fused)
    if experts and SCALINGS[plan.kind].follows_amax:
        results = itertools.chain(results, _experts(plan, device))
    for kernel, what, ours, reference, bound in results:
        found = _difference(ours, reference, bound)
        if found:
            raise kernel_error(kernel, f"{what} of the {recipe.name} recipe {found}", device)


def kernel_error(kernel: str, said: str, device: torch.device) -> RuntimeError:
    """What to raise of a kernel that is wrong here."""
    import triton

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    return RuntimeError(
        f"algorithms.fp8: the native backend's kernel {kernel} is wrong on this machine ({where}, Triton "
        f"{triton.__version__}, torch {torch.__version__}, driver for CUDA {driver_version() or 'unknown'}): {said}. "
        "Training with it would be silently wrong. Use another version of Triton, or backend: transformer_engine."
    )


Result = tuple[str, str, Tensor | None, Tensor | None, Tensor | None]
"""Kernel, what of it, ours, its definition's, and the error allowed (``None``: the same bits)."""


def _results(
    recipe: Recipe, plan: Plan, dtype: torch.dtype, device: torch.device, fused: bool
) -> Iterator[Result]:
    x, w, dy = (_awkward(*shape, dtype, device) for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))
    if SCALINGS[plan.kind].has_kernels:
        yield from _operands(x, w, dy, recipe, plan, fused)
    yield _product("fprop", x, w, recipe, plan)
    yield _product("wgrad", dy.t().contiguous(), x.t().contiguous(), recipe, plan)
    # In whole blocks of 128, for which torch has a GEMM of its own on some GPUs.
    x, w = _awkward(TOKENS, 512, dtype, device), _awkward(128, 512, dtype, device)
    yield _product("fprop", x, w, recipe, plan)
    yield _product("wgrad", x, w, recipe, plan)


def _operands(x: Tensor, w: Tensor, dy: Tensor, recipe: Recipe, plan: Plan, fused: bool) -> Iterator[Result]:
    """What the quantise kernels make of each operand."""
    from foundry_fp8.kernels.norms import norm_statistics

    operands: tuple[tuple[Operand, Tensor], ...] = (("x", x), ("w", w), ("dy", dy))
    for operand, value in operands:
        for layouts in (BOTH,) if operand != "w" else (BY_ROWS, BY_COLUMNS):
            source = Source.identity(value)
            yield from _quantised(source, operand, recipe, plan, layouts)
    if recipe.measures_first:  # an Inf makes the scale 1; training's is a quotient
        yield from _quantised(Source.identity(_finite(x)), "x", recipe, plan, BOTH)
    if SCALINGS[plan.kind].joins:
        yield from _together(x, w, recipe, plan)
    if fused:
        _, rstd = norm_statistics(x, 1e-5, centered=False)
        source = Source.norm(x, rstd, torch.ones_like(x[0]))
        yield from _quantised(source, "x", recipe, plan, BOTH)


def _together(x: Tensor, w: Tensor, recipe: Recipe, plan: Plan) -> Iterator[Result]:
    """An input and three weights in one launch, measured in one where the scale is the amax's."""
    given: tuple[tuple[Operand, Tensor], ...] = (("x", x), ("w", w), ("w", w[:48]), ("w", w))
    pieces, amaxes = statistics(x.device, len(given)), _amaxes(recipe, x.device)
    run = EagerPass("x", x, [one for _, one in given[1:]], plan)
    made = run.quantize([(i, one, pieces[i], BOTH, amaxes) for i, (_, one) in enumerate(given)])
    for (operand, one), (rows, transposed, stats, _) in zip(given, made, strict=True):
        again = _amaxes(recipe, x.device)
        wanted = SCALINGS[plan.kind].both(Source(one), operand, plan, BOTH, (again, again)).reference
        for name, ours in (("data", rows[0]), ("data_t", transposed[0]), ("stats", stats)):
            yield _same("quantize_together", name, operand, ours, wanted, plan)


def _amaxes(recipe: Recipe, device: torch.device) -> Amaxes:
    """Some delayed scale, and where the amax goes."""
    if not recipe.uses_history:
        return None, None, None
    scale, slot = torch.tensor([13.7, 0.0], dtype=torch.float32, device=device).unbind()
    return scale, None, slot


def _same(kernel: str, name: str, operand: Operand, ours: Tensor, wanted: Any, plan: Plan) -> Result:
    reference = getattr(wanted, name)
    rounds = name.startswith("data") and reference is not None and _rounds_twice(reference.device)
    allowed = _neighbour(reference, FORMATS[plan.fmt(operand)]) if rounds else None
    return kernel, f"{name} of {operand}", ours, reference, allowed


def _quantised(
    source: Source, operand: Operand, recipe: Recipe, plan: Plan, layouts: Layouts
) -> Iterator[Result]:
    amaxes = _amaxes(recipe, source.x.device), _amaxes(recipe, source.x.device)
    layouts = layouts._replace(column_sum=operand == "dy")
    made = SCALINGS[plan.kind].both(source, operand, plan, layouts, amaxes)
    yield made.kernel, f"the recorded amax of {operand}", amaxes[0][2], amaxes[1][2], None
    for name in made.names:
        yield _same(made.kernel, name, operand, getattr(made.ours, name), made.reference, plan)
    bound = source.x.double().abs().sum(0) * len(source.x) * 2.0**-24
    sums = made.ours.column_sum, made.reference.column_sum
    yield made.kernel, f"column_sum of {operand}", *sums, bound


def _product(which: Gemm, a: Tensor, b: Tensor, recipe: Recipe, plan: Plan) -> Result:
    """One GEMM of finite operands, against float64 of the same operands."""
    a, b, scaling = _finite(a), _finite(b), SCALINGS[plan.kind]
    scale = torch.ones((), dtype=torch.float32, device=a.device) if recipe.uses_history else None
    pairs: list[tuple[Layout, Tensor]] = []
    operands: tuple[Operand, Operand] = ("dy", "x") if which == "wgrad" else ("x", "w")
    for value, operand in zip((a, b), operands, strict=True):
        layout, _, _, _ = scaling.quantize(
            Source(value), operand, plan, BY_ROWS, (scale, None, None), direct=False
        )
        dense = layout[0].double() * scaling.scales(layout, square=operand == "w")
        pairs.append((layout, dense[: value.shape[0], : value.shape[1]]))
    (qa, da), (qb, db) = pairs
    ours = scaling.multiply(which, qa, qb, plan, (a.shape[0], b.shape[0], a.dtype), direct=False)
    bound = (da.abs() @ db.abs().t()) * GEMM_TOLERANCE + 1e-6
    return scaling.product, which, ours, da @ db.t(), bound


SIZES = (45, 0, 3, 160)
"""Rows of four experts."""


def _experts(plan: Plan, device: torch.device) -> Iterator[Result]:
    """The casts of all experts' rows, and the three products, in bfloat16."""
    from foundry_fp8.backends.native.grouped import GroupedLinear, Rows
    from foundry_fp8.kernels import grouped as kernels

    rows = Rows.of(SIZES, device)
    maps = rows.group, rows.source
    x, dy = _awkward(TOKENS, IN, torch.bfloat16, device), _awkward(TOKENS, OUT, torch.bfloat16, device)
    given: tuple[tuple[Operand, Tensor], ...] = (("x", x), ("dy", dy))
    for operand, value in given:
        fmt = FORMATS[plan.fmt(operand)]
        amax = kernels.group_amax(value, *maps, len(SIZES))
        wanted = kernels.group_amax_reference(value, *maps, len(SIZES))
        yield "group_amax", f"the experts' amaxes of {operand}", amax, wanted, None
        scale = scale_from_amax(wanted, fmt, power_2=plan.power_2)
        casts = (kernels.quantize_groups, kernels.quantize_groups_reference)
        made = (cast(value, scale, *maps, fmt, rows=True, columns=True) for cast in casts)
        for layout, ours, reference in zip(("rows", "columns"), *made, strict=True):
            allowed = _neighbour(reference, fmt) if _rounds_twice(device) else None
            yield "quantize_groups", f"the experts' {layout} of {operand}", ours, reference, allowed

    x, dy = _finite(x).requires_grad_(), _finite(dy)
    w = _finite(_awkward(len(SIZES) * OUT, IN, torch.bfloat16, device)).view(-1, OUT, IN).requires_grad_()
    with torch.enable_grad():
        y = GroupedLinear.apply(x, w, SIZES, LinearCall(plan=plan))  # type: ignore[no-untyped-call]
        dx, dw = torch.autograd.grad(y, (x, w), dy)

    def quantised(value: Tensor, fmt: str) -> Tensor:
        scale = scale_from_amax(amax_of(value), FORMATS[fmt], power_2=plan.power_2)
        return quantize_tensor(value, scale, FORMATS[fmt]).dequantize().double()

    first = 0
    for expert, size in enumerate(SIZES):
        if size:
            mine = slice(first, first := first + size)
            qx, qw = quantised(x.detach()[mine], plan.x_fmt), quantised(w.detach()[expert], plan.x_fmt)
            qdy = quantised(dy[mine], plan.dy_fmt)
            products = (
                ("fprop", y[mine], qx, qw.t()),
                ("dgrad", dx[mine], qdy, qw),
                ("wgrad", dw[expert], qdy.t(), qx),
            )
            for which, ours, a, b in products:
                bound = (a.abs() @ b.abs()) * GEMM_TOLERANCE + 1e-6
                yield "torch._scaled_mm", f"{which} of expert {expert}", ours, a @ b, bound


def _awkward(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu")
    x *= torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator, device="cpu").float())
    flat = x.view(-1)
    flat[::7] = 0.0
    flat[3::11] = (flat[3::11] * 8).round() / 8 + 0.0625  # halfway between neighbours in E4M3
    flat[5::13] *= 2.0**-20
    flat[columns + 1], flat[-2] = float("nan"), float("-inf")
    return x.to(dtype).to(device)


def _rounds_twice(device: torch.device) -> bool:
    """Whether Triton converts to FP8 through float16 there, so that a value next to a midpoint may take its other neighbour."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0)


def _neighbour(codes: Tensor | None, fmt: Float8Format) -> Tensor | None:
    """How far the next code is."""
    return None if codes is None else codes.double().abs() * torch.finfo(fmt.dtype).eps + fmt.min_subnormal


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-2.0)


def _difference(ours: Tensor | None, expected: Tensor | None, bound: Tensor | None) -> str:
    """Where the two differ, in words; empty if they do not. Any NaN equals any other."""
    if ours is None or expected is None:
        return "" if ours is expected else "is made where it should not be, or the other way round"
    if ours.shape != expected.shape:
        return f"has shape {tuple(ours.shape)} instead of {tuple(expected.shape)}"
    a, b = ours.double(), expected.double()
    equal = (
        (a == b) & (torch.signbit(a) == torch.signbit(b))
        if bound is None
        else (a == b) | ((a - b).abs() <= bound)
    )
    same = equal | (a.isnan() & b.isnan())
    if bool(same.all()):
        return ""
    place = tuple(int(i) for i in (~same).nonzero()[0])
    return f"is {float(a[place])} instead of {float(b[place])} at {place}, {int((~same).sum())} of {same.numel()} differ"
