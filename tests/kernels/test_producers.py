"""Norms and activations fused into the quantise kernels: forward against the unfused expression, backward against autograd."""

import pytest
import torch
import torch.nn.functional as F

from foundry_fp8.kernels import gated, norms, tensorwise
from foundry_fp8.kernels.blockwise import quantize_blockwise, quantize_blockwise_reference
from foundry_fp8.kernels.gated import activation_backward, xielu_backward
from foundry_fp8.kernels.norms import (
    norm_backward,
    norm_statistics,
)
from foundry_fp8.kernels.producers import ACTIVATIONS, Producer
from foundry_fp8.kernels.tensorwise import quantize_tensorwise, quantize_tensorwise_reference
from foundry_fp8.numerics.formats import E4M3
from tests.kernels.cases import DTYPES, HALF_ULP, assert_same_bits
from tests.kernels.definitions import (
    activation_backward_reference,
    norm_backward_reference,
    norm_statistics_reference,
)
from tests.kernels.interpreter import only_from

every_activation = pytest.mark.parametrize("name", ACTIVATIONS)
gated_or_not = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])


def activation(name, x, gated):
    up = torch.randn(x.shape, device=x.device).to(x.dtype) if gated else None
    return Producer.activation(name, x, up=up)


def norm(x, centered, weight=None, bias=None):
    mean, rstd = norm_statistics(x, 1e-5, centered=centered)
    return Producer.norm(x, rstd, weight, mean=mean, bias=bias)


def assert_quantized_alike(source, share=0.005):
    """Bytes equal to quantising the unfused value, but for the rare value on which exp or erf of two libraries fall on
    different sides of a rounding: at most ``share`` of them, each to a neighbouring code."""
    pairs = []
    ours, reference = quantize_tensorwise(source, E4M3), quantize_tensorwise_reference(source, E4M3)
    torch.testing.assert_close(ours.stats, reference.stats, rtol=2.0**-7, atol=0)
    if float(ours.stats[0]) == float(reference.stats[0]):
        pairs += [(ours.data, reference.data), (ours.data_t, reference.data_t)]
    ours, reference = quantize_blockwise(source, E4M3), quantize_blockwise_reference(source, E4M3)
    same = (ours.gemm_scale == reference.gemm_scale).all() and (
        ours.gemm_scale_t == reference.gemm_scale_t
    ).all()
    if bool(same):
        pairs += [(ours.data, reference.data), (ours.data_t, reference.data_t)]
    assert pairs
    for a, b in pairs:
        codes = [t.view(torch.uint8).to(torch.int16) for t in (a, b)]
        apart = (codes[0] - codes[1]).abs()
        apart[(a.float() == 0) & (b.float() == 0)] = 0
        assert float((apart != 0).float().mean()) <= share and int(apart.max()) <= 1


@every_activation
@gated_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_activation_quantises_the_unfused_value(name, gated, dtype, device):
    x = (torch.randn(70, 150, device=device) * 2).to(dtype)
    assert_quantized_alike(activation(name, x, gated))


@every_activation
def test_reference_activations_are_those_of_torch(name, device):
    x = torch.randn(40, 40, device=device)
    expected = {
        "silu": F.silu(x),
        "gelu": F.gelu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
    }
    assert_same_bits(activation(name, x, False).reference(), expected[name], name)


@every_activation
@gated_or_not
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_backward(name, gated, dtype, device):
    x = (torch.randn(70, 90, device=device) * 2).to(dtype)
    dy = torch.randn(70, 90, device=device).to(dtype)
    source = activation(name, x, gated)
    ours, reference = activation_backward(dy, source), activation_backward_reference(dy, source)
    # Two libraries' exp and erf, a few float32 roundings, one rounding to the dtype that may fall either way.
    for a, b, what in zip(ours, reference, ("dx", "dup"), strict=True):
        if b is not None:
            torch.testing.assert_close(
                a, b, rtol=4 * HALF_ULP[dtype] + 1e-5, atol=2e-6 + 4 * HALF_ULP[dtype] / 100, msg=what
            )
    assert (ours[1] is None) == (not gated)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_xielu_backward(dtype, device):
    """Against its derivatives in float64 (arXiv:2411.13010); at 0 and above -1e-6 the slope of what is below."""
    x = (torch.randn(70, 90, device=device) * 2).to(dtype)
    x[0, :3] = torch.tensor([0.0, -1e-7, 1e-7])
    dy, slopes = torch.randn(70, 90, device=device).to(dtype), torch.tensor([0.8, 0.9], device=device)
    dx, dslopes = xielu_backward(dy, x, slopes)
    x, dy, (positive, negative) = x.double(), dy.double(), slopes.double()
    bend = torch.expm1(x.clamp(max=-1e-6))
    expected = dy * torch.where(x > 0, 2 * positive * x, negative * bend).add(0.5)
    torch.testing.assert_close(dx.double(), expected, rtol=4 * HALF_ULP[dtype] + 1e-5, atol=2e-6)
    of_slopes = torch.stack([(dy * x * x)[x > 0].sum(), (dy * (bend - x))[x <= 0].sum()])
    torch.testing.assert_close(dslopes.double(), of_slopes, rtol=1e-4, atol=1e-2)


def test_offsets_past_2_to_the_31(device, monkeypatch):
    """Of memory that is asked for and, but for its last rows, never touched; only the last program runs."""
    only_from(monkeypatch, 2**31 // gated.TILE**2, gated, "_backward_kernel")
    x, dy = (
        torch.empty(2**31 // gated.TILE + gated.TILE, gated.TILE, dtype=torch.bfloat16) for _ in range(2)
    )
    for tensor in (x, dy):
        tensor[-gated.TILE :] = torch.randn(gated.TILE, gated.TILE)
    dx, _ = activation_backward(dy, Producer.activation("silu", x))
    end = Producer.activation("silu", x[-gated.TILE :].clone())
    expected, _ = activation_backward_reference(dy[-gated.TILE :], end)
    torch.testing.assert_close(dx[-gated.TILE :], expected, rtol=2.0**-6, atol=1e-5)


@gated_or_not
def test_quantising_past_2_to_the_31(gated, device, monkeypatch):
    """The last tile of ``[R, C]``: its first element lies past 2**31, by rows and by columns."""
    height, width = tensorwise.TILE_R, tensorwise.TILE_C
    rows, columns = 2**16 + height, 2**15 + width
    last = (rows // height) * (columns // width) - 1
    only_from(monkeypatch, last, tensorwise, "_quantize_kernel")
    x, up = (torch.empty(rows, columns, dtype=torch.bfloat16) for _ in range(2))
    for tensor in (x, up):
        tensor[-height:, -width:] = torch.randn(height, width)
    tiles = (x, up), (x[-height:, -width:].clone(), up[-height:, -width:].clone())
    ours, one = (Producer.activation("silu", a, up=b if gated else None) for a, b in tiles)
    found = quantize_tensorwise(ours, E4M3, constant=1.0)
    expected = quantize_tensorwise_reference(one, E4M3, constant=1.0)
    for a, b in (
        (found.data[-height:, -width:], expected.data),
        (found.data_t[-width:, -height:], expected.data_t),
    ):
        # Two libraries' exp may fall on different sides of a rounding.
        assert (a.view(torch.uint8) == b.view(torch.uint8)).float().mean() > 0.99


@pytest.mark.parametrize("options", [{}, {"group": 128}, {"group": 32}], ids=str)
def test_more_rows_than_an_offset_of_32_bits_reaches_are_refused(options, device):
    """Offsets of a transpose's last column wrapped."""
    quantize = quantize_blockwise if options else quantize_tensorwise
    x = torch.empty(2**24 + 16, 1, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=f"reach {2**24} rows"):
        quantize(Producer.identity(x), E4M3, **options)
    wide = torch.empty(2**26 + 1, dtype=torch.bfloat16, device=device).as_strided((2, 1), (2**26, 1))
    with pytest.raises(ValueError, match="elements from one to the next"):
        quantize(Producer.identity(wide), E4M3, **options)


def test_the_last_of_the_rows_that_are_reached(device, monkeypatch):
    """A tile at the end of 2^24 rows, whose transpose's last column lies 2^31 bytes behind its first."""
    height, width = tensorwise.TILE_R, tensorwise.TILE_C
    rows = 2**24
    only_from(monkeypatch, rows // height - 1, tensorwise, "_quantize_kernel")
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    x[-height:] = torch.randn(height, width)
    found = quantize_tensorwise(Producer.identity(x), E4M3, constant=1.0)
    expected = quantize_tensorwise_reference(Producer.identity(x[-height:].clone()), E4M3, constant=1.0)
    assert_same_bits(found.data_t[:, -height:].clone(), expected.data_t, "the transpose")


@every_activation
def test_activation_backward_is_the_derivative(name, device):
    """Against finite differences in float64, independent of autograd and of the reference."""
    x = torch.linspace(-4, 4, 200, device=device).reshape(4, 50) + 0.01
    source = activation(name, x, False)
    step = 1e-4

    def value(shift):
        return in_float64(name, x.double() + shift)

    slope = (value(step) - value(-step)) / (2 * step)
    dx, _ = activation_backward(torch.ones_like(x), source)
    torch.testing.assert_close(dx.double(), slope, rtol=1e-4, atol=1e-5)


def in_float64(name, x):
    return {
        "silu": F.silu(x),
        "gelu": F.gelu(x),
        "gelu_tanh": F.gelu(x, approximate="tanh"),
    }[name]


@every_activation
def test_activations_far_out(name, device):
    """Against float64 between -40 and 40, far beyond where exponentials overflow, and Inf stays Inf (of which torch's GELU makes NaN on a CPU)."""
    x = torch.cat([torch.linspace(-40, 40, 1601), torch.tensor([-1e30, -300.0, 300.0, 1e18])])[None]
    far = torch.tensor([[float("inf"), -float("inf"), float("nan")]], device=device)

    def value(x):
        return activation_backward(torch.ones_like(x), activation(name, x, True))[1]

    expected = in_float64(name, x.double()).to(device)
    torch.testing.assert_close(value(x.to(device)).double(), expected, rtol=1e-5, atol=2e-6)
    assert_same_bits(value(far), torch.tensor([[float("inf"), float("nan"), float("nan")]]), name)


@pytest.mark.parametrize("centered", [False, True], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize("shape", [(70, 200), (33, 16), (3, 1025), (0, 8)], ids=str)
def test_norm_statistics(centered, shape, device):
    x = torch.randn(shape, device=device) * 3 + 1
    ours, reference = (
        norm_statistics(x, 1e-5, centered=centered),
        norm_statistics_reference(x.double(), 1e-5, centered=centered),
    )
    torch.testing.assert_close(ours[1].double(), reference[1].double(), rtol=1e-5, atol=0)
    if centered:
        torch.testing.assert_close(ours[0].double(), reference[0].double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("centered", [False, True], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_norm_quantises_the_unfused_value(centered, dtype, device):
    x = (torch.randn(70, 200, device=device) * 2).to(dtype)
    weight, bias = torch.rand(200, device=device) + 0.5, torch.randn(200, device=device)
    assert_quantized_alike(norm(x, centered, weight, bias if centered else None))
    assert_quantized_alike(norm(x, centered))


@pytest.mark.parametrize("centered", [False, True], ids=["rmsnorm", "layernorm"])
def test_norm_producer_is_torchs_norm(centered, device):
    x = torch.randn(40, 96, device=device)
    weight, bias = torch.rand(96, device=device), torch.randn(96, device=device)
    if centered:
        expected = F.layer_norm(x, (96,), weight, bias, 1e-5)
    else:
        expected = F.rms_norm(x, (96,), weight, 1e-5)
    ours = norm(x, centered, weight, bias if centered else None).reference()
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("centered", [False, True], ids=["rmsnorm", "layernorm"])
@pytest.mark.parametrize("affine", [False, True])
def test_norm_backward_is_autograds(centered, affine, device):
    x = torch.randn(37, 130, device=device).requires_grad_()
    dy = torch.randn(37, 130, device=device)
    weight = (torch.rand(130, device=device) + 0.5).requires_grad_() if affine else None
    bias = torch.zeros(130, device=device, requires_grad=True)
    y = F.layer_norm(x, (130,), weight, bias, 1e-5) if centered else F.rms_norm(x, (130,), weight, 1e-5)
    y.backward(dy)
    source = norm(x.detach(), centered, None if weight is None else weight.detach())
    args = (dy, source.x, source.rstd, source.weight)
    for dx, dweight, dbias in (
        norm_backward(*args, mean=source.mean),
        norm_backward_reference(*args, mean=source.mean),
    ):
        torch.testing.assert_close(dx, x.grad, rtol=1e-4, atol=1e-5)
        if affine:
            torch.testing.assert_close(dweight, weight.grad, rtol=1e-4, atol=1e-4)
        if centered:
            torch.testing.assert_close(dbias, bias.grad, rtol=1e-4, atol=1e-4)


def test_a_norms_gradients_are_rounded_once(device):
    x, dy = torch.randn(37, 130, device=device), torch.randn(37, 130, device=device)
    source = norm(x, True)
    given = dy, source.x, source.rstd, source.weight
    wide = norm_backward(*given, mean=source.mean)
    rounded = norm_backward(*given, mean=source.mean, dtype=torch.bfloat16)
    for ours, reference in zip(rounded, (wide[0], wide[1].bfloat16(), wide[2].bfloat16()), strict=True):
        assert ours.dtype == reference.dtype and torch.equal(ours, reference)


@pytest.mark.parametrize("parts", [1, 16, 37])
def test_parts_of_a_norms_gradients_add_up(parts, device):
    partial = torch.randn(2, parts, 70, device=device)
    sums = torch.empty(2, 70, device=device)
    constants = {"PROGRAMS": parts, "ROWS": norms.SUM_ROWS, "COLUMNS": norms.SUM_COLUMNS}
    norms._sum_kernel[(6,)](partial, sums[0], sums[1], 70, **constants)
    torch.testing.assert_close(sums, partial.double().sum(1).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("centered", [False, True], ids=["rmsnorm", "layernorm"])
def test_norms_of_rows_past_2_to_the_31(centered, device):
    """Rows far apart in memory that is asked for and, but for them, never touched."""
    memory = torch.empty(2**31 + 128, dtype=torch.bfloat16, device=device)
    x, dy = (memory[first:].as_strided((3, 64), (2**30, 1)) for first in (0, 64))
    x.copy_(torch.randn(3, 64)), dy.copy_(torch.randn(3, 64))
    statistics = norm_statistics(x, 1e-5, centered=centered)
    expected = norm_statistics_reference(x, 1e-5, centered=centered)
    torch.testing.assert_close(statistics[1], expected[1])
    gradients = norm_backward(dy, x, expected[1], None, mean=expected[0])
    for ours, reference in zip(
        gradients, norm_backward_reference(dy, x, expected[1], None, mean=expected[0]), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=2.0**-7, atol=1e-5)


def test_a_nan_in_x_stays_visible_through_norm_and_activation(device):
    x = torch.randn(20, 64, device=device)
    x[4, 7] = float("nan")
    for source in (norm(x, False), activation("silu", x, True)):
        q = quantize_tensorwise(source, E4M3)
        assert bool(q.data.float()[4].isnan().any())
        assert not bool(q.data.float()[5].isnan().any())


def test_wrong_activations_are_named(device):
    x = torch.zeros(4, 4, device=device)
    with pytest.raises(ValueError, match="not one of silu"):
        Producer.activation("relu", x)
