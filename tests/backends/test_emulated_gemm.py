"""The emulated GEMM against float64 products of the same operands: the sums' accuracy, one rounding, no overflow on the way."""

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends.emulated.dense import dense_values
from foundry_fp8.backends.emulated.gemm import scaled_mm
from foundry_fp8.backends.emulated.quantizers import quantize_operand
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import Quantized
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, MXFP8Scaling

RECIPES = [
    CurrentScaling(),
    CurrentScaling(granularity="row"),
    BlockScaling(),
    BlockScaling(power_2_scales=False, fp8_format="hybrid"),
    MXFP8Scaling(),
]
every_recipe = pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda r: f"{r.name}-{getattr(r, 'power_2_scales', True)}"
)
MANTISSA = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}


def ranged(*shape):
    return torch.randn(*shape) * torch.exp2(torch.randint(-4, 4, (shape[0], 1)).float())


def operands(recipe, m=72, n=256, k=384):
    """x and w of fprop, by rows, and of wgrad, by columns and transposed."""
    x, w, dy = ranged(m, k), ranged(n, k), ranged(m, n)
    yield quantize_operand(x, "x", recipe, along=1), quantize_operand(w, "w", recipe, along=1)
    yield (
        quantize_operand(dy, "dy", recipe, along=0).t(),
        quantize_operand(x, "x", recipe, along=0).t(),
    )


def exact(a, b):
    """The product in float64, and the sum of the magnitudes of its terms."""
    a, b = a.dequantize().double(), b.dequantize().double()
    return a @ b.t(), a.abs() @ b.abs().t()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_fp8_value_is_exact_in_the_dense_operand(fmt):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype)[None]
    finite = codes.float().isfinite()
    for nan_free in (True, False):
        q = Quantized(codes, torch.tensor(1.0), None, fmt, torch.tensor(1.0), nan_free=nan_free)
        for dense in (dense_values(q), dense_values(q.t()).t()):
            assert torch.equal(dense[finite], codes.float()[finite])
    assert torch.equal(dense.isnan(), codes.float().isnan())


@every_recipe
@pytest.mark.parametrize("dtype", MANTISSA, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_sums_are_float32_and_rounded_once(recipe, dtype, bias):
    for a, b in operands(recipe):
        expected, magnitude = exact(a, b)
        added = torch.randn(b.data.shape[0]) if bias else None
        power_2 = getattr(recipe, "power_2_scales", True)
        y = scaled_mm(a, b, out_dtype=dtype, bias=added, power_2=power_2, by_row=recipe.by_row)
        if added is not None:
            expected = expected + added.double()
            magnitude = magnitude + added.abs().double()
        # K sums in float32, each at most half an ulp of what has been added up, and once half an ulp of the result.
        summing = (a.data.shape[1] + 4) * 2.0**-24 * magnitude
        rounding = expected.abs() * 2.0 ** -MANTISSA[dtype]
        assert y.dtype == dtype
        assert ((y.double() - expected).abs() <= summing + rounding).all()


@pytest.mark.parametrize("power_2", [False, True])
def test_results_do_not_depend_on_the_precision_that_the_user_allows_and_leave_it_alone(power_2):
    recipe = BlockScaling(power_2_scales=power_2)
    found = []
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            torch.manual_seed(0)
            found.append(
                [scaled_mm(a, b, out_dtype=torch.float32, power_2=power_2) for a, b in operands(recipe)]
            )
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_float16_autocast_stays_finite_where_the_result_is(recipe):
    """448 x 448 summed up is far beyond float16; scaled, it is an ordinary number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128, bias=False))
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated")
    x, dy = torch.randn(64, 256), torch.randn(64, 128).half()
    for _ in range(2):  # delayed: the second pass has scales
        x_ = x.clone().requires_grad_()
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = model(x_)
        y.backward(dy)
    w = model[0].weight
    for ours, plain in ((y, x @ w.t()), (x_.grad, dy.float() @ w), (w.grad, dy.float().t() @ x)):
        assert ours.isfinite().all()
        assert (ours.float() - plain).norm() / plain.norm() < 0.08  # two E4M3 or one E5M2 operand


def test_scratch_of_an_evaluation_serves_training():
    """Buffers made in inference mode could not be written outside of it."""
    import threading

    failures = []

    def run():  # a thread has buffers of its own
        try:
            model = nn.Sequential(nn.Linear(64, 32))
            foundry_fp8.apply_fp8(model, recipe="current", backend="emulated", evaluate="fp8")
            x = torch.randn(16, 64)
            with torch.inference_mode():
                model.eval()(x.bfloat16())
            model.train()(x).sum().backward()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failures
