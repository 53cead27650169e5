"""The block quantise kernels against ``foundry_fp8.numerics.quantize``, bit for bit."""

import pytest
import torch

from foundry_fp8.kernels.blockwise import quantize_blockwise, quantize_blockwise_reference
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import quantize_block, quantize_mx
from tests.kernels.cases import DTYPES, MOST_DTYPES, SHAPES, assert_same_bits, poisoned, spread

INF, NAN = float("inf"), float("nan")
GRANULARITIES = {
    "1x128": {"group": 128},
    "1x128-float-scales": {"group": 128, "power_2": False},
    "128x128": {"group": 128, "square": True},
    "1x32": {"group": 32},
}
every_granularity = pytest.mark.parametrize("options", GRANULARITIES.values(), ids=GRANULARITIES)
OUTPUTS = ("data", "gemm_scale", "data_t", "gemm_scale_t")


def assert_matches_reference(x, fmt, **options):
    source = Producer.identity(x)
    ours = quantize_blockwise(source, fmt, **options)
    reference = quantize_blockwise_reference(source, fmt, **options)
    for name in OUTPUTS:
        assert_same_bits(getattr(ours, name), getattr(reference, name), name)
    return ours


@every_granularity
@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] > 1 and shape[0]], ids=str)
def test_matches_the_reference(shape, dtype, options, device):
    assert_matches_reference(spread(*shape, dtype, device), E4M3, **options)


@pytest.mark.parametrize(
    ("group", "dtype", "fmt"),
    [
        pytest.param(
            group,
            dtype,
            fmt,
            marks=() if (group == 128) == (fmt is E4M3) and dtype != torch.float16 else pytest.mark.full,
            id=f"{group}-{dtype}-{fmt.name}",
        )
        for group in (128, 32)
        for dtype in DTYPES
        for fmt in (E4M3, E5M2)
    ],
)
def test_scales_of_every_exponent(group, dtype, fmt, device):
    """Powers of two come from exponents alone: amaxes around the formats' mantissa 1.75, from the least subnormal to the largest."""
    mantissas = torch.tensor([1.0, 1.75 - 2.0**-7, 1.75, 1.75 + 2.0**-23, 1.75 + 2.0**-7, 2 - 2.0**-23])
    amax = torch.outer(mantissas.double(), 2.0 ** torch.arange(-149, 128).double()).float().to(dtype)
    x = torch.zeros(amax.numel(), 16, dtype=dtype)
    x[:, 3], x[:, 5] = amax.view(-1), -amax.view(-1) / 3
    assert_matches_reference(x.to(device), fmt, group=group, columns=False)


@every_granularity
@pytest.mark.parametrize("shape", [(0, 48), (48, 0), (0, 0)], ids=str)
def test_nothing_gives_nothing(shape, options, device):
    ours = quantize_blockwise(
        Producer.identity(torch.zeros(shape, device=device)), E4M3, column_sum=True, **options
    )
    assert ours.data.numel() == ours.data_t.numel() == 0
    assert ours.column_sum.shape == (shape[1],) and not bool(ours.column_sum.any())


@every_granularity
def test_blocks_of_nothing_but_nan_match_the_reference(options, device):
    x = spread(200, 144, torch.bfloat16, device)
    x[:128, :128] = NAN
    assert_matches_reference(x, E4M3, **options)


@every_granularity
@pytest.mark.parametrize("values", [(NAN,), (INF,), (-INF, NAN)], ids=str)
def test_non_finite_values_match_the_reference_and_stay_visible(values, options, device):
    x = poisoned(spread(200, 144, torch.bfloat16, device), *values)
    ours = assert_matches_reference(x, E5M2, **options)
    marked = 255 if options["group"] == 32 else NAN
    if INF in map(abs, values):
        for scale in (ours.gemm_scale, ours.gemm_scale_t):
            assert bool((scale == marked).any() if marked == 255 else scale.isnan().any())


@every_granularity
def test_every_subset_of_outputs(options, device):
    x = spread(130, 70, torch.float32, device)
    both = quantize_blockwise(Producer.identity(x), E4M3, **options)
    for rows, columns in ((True, False), (False, True)):
        one = quantize_blockwise(Producer.identity(x), E4M3, rows=rows, columns=columns, **options)
        for name in OUTPUTS:
            wanted = columns if name.endswith("_t") else rows
            assert_same_bits(getattr(one, name), getattr(both, name) if wanted else None, name)


@pytest.mark.parametrize("options", [{"group": 128}, {"group": 32}], ids=["1x128", "1x32"])
def test_layouts_are_blocks_along_rows_and_along_columns(options, device):
    """Against ``quantize_block`` on the untransposed tensor, independent of the reference's own transposition."""
    x = spread(256, 384, torch.bfloat16, device)
    group = options["group"]
    ours = quantize_blockwise(Producer.identity(x), E4M3, **options)
    by = quantize_block if group == 128 else quantize_mx
    rows, columns = by(x, (1, group), E4M3), by(x, (group, 1), E4M3)
    assert_same_bits(ours.data, rows.data, "data")
    assert_same_bits(ours.data_t, columns.data.t().contiguous(), "data_t")
    if group == 128:
        assert_same_bits(ours.gemm_scale, rows.scale_inv.t().contiguous(), "gemm_scale")
        assert_same_bits(ours.gemm_scale_t, columns.scale_inv.contiguous(), "gemm_scale_t")


@pytest.mark.parametrize("value", [1e-38, 1e-42, 3e38])
@every_granularity
def test_extreme_amaxes(value, options, device):
    x = spread(20, 140, torch.float32, device).clamp(-1, 1) * value
    x[3, 3] = value
    assert_matches_reference(x, E4M3, **options)


def test_column_sum(device):
    x = spread(300, 150, torch.bfloat16, device)
    summed = quantize_blockwise(Producer.identity(x), E4M3, column_sum=True).column_sum
    bound = x.double().abs().sum(0) * 300 * 2.0**-24
    assert bool(((summed.double() - x.double().sum(0)).abs() <= bound + 1e-30).all())


def test_other_block_sizes_are_refused(device):
    with pytest.raises(ValueError, match="1 x 128, 128 x 128 or 1 x 32"):
        quantize_blockwise(Producer.identity(torch.zeros(4, 4, device=device)), E4M3, group=64)
