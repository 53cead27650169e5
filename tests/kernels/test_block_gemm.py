"""The block-scaled GEMM against float64."""

import pytest
import torch

from foundry_fp8.kernels import block_gemm as module
from foundry_fp8.kernels.block_gemm import CONFIGS, block_gemm
from foundry_fp8.kernels.blockwise import quantize_blockwise
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.numerics.formats import E4M3, E5M2
from tests.kernels.cases import assert_same_bits, spread
from tests.kernels.definitions import block_gemm_reference

SHAPES = ((128, 128, 256), (150, 90, 200), (17, 33, 40), (1, 1, 16), (260, 140, 129))


def operands(m, n, k, square, device, fmt_a=E4M3):
    a = quantize_blockwise(Producer.identity(spread(m, k, torch.bfloat16, device)), fmt_a, columns=False)
    b = quantize_blockwise(
        Producer.identity(spread(n, k, torch.bfloat16, device, seed=1)), E4M3, columns=False, square=square
    )
    return a.data, a.gemm_scale, b.data, b.gemm_scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("square", [True, False], ids=["128x128", "1x128"])
@pytest.mark.parametrize("fmt_a", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_matches_float64(shape, square, fmt_a, device):
    m, n, k = shape
    args = operands(m, n, k, square, device, fmt_a)
    options = {"m": m, "n": n, "out_dtype": torch.float32, "square_b": square}
    ours, exact = block_gemm(*args, **options), block_gemm_reference(*args, **options).double()
    # Products of FP8 values are exact; k float32 additions of at most the row's and column's magnitudes. On a GPU the
    # tensor core keeps 14 bits of each of four sums of 32 in a block (DeepSeek-V3, section 3.3.2).
    magnitude = block_gemm_reference(
        args[0].float().abs(), args[1], args[2].float().abs(), args[3], **options
    )
    share = float(((ours.double() - exact).abs() / (magnitude.double() + 1e-30)).max())
    assert ours.shape == (m, n)
    assert share <= (k * 2.0**-24 if device == "cpu" else 2.0**-9), share


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_small_integers_and_bias_are_exact(out_dtype, device):
    a = torch.randint(-2, 3, (40, 256), device=device).to(torch.float8_e4m3fn)
    b = torch.randint(-2, 3, (24, 256), device=device).to(torch.float8_e4m3fn)
    a_scale, b_scale = torch.full((2, 40), 2.0, device=device), torch.full((2, 24), 0.25, device=device)
    bias = torch.arange(24.0, device=device).to(out_dtype)
    options = {"m": 40, "n": 24, "out_dtype": out_dtype, "bias": bias}
    ours = block_gemm(a, a_scale, b, b_scale, **options)
    assert_same_bits(ours, block_gemm_reference(a, a_scale, b, b_scale, **options), "out")


@pytest.mark.parametrize("square", [True, False], ids=["128x128", "1x128"])
def test_every_config_gives_the_same_bits(square, monkeypatch, device):
    """So that tuning, which may differ between ranks and runs, never changes a result."""
    args = operands(150, 90, 300, square, device)
    results = []
    for config in CONFIGS:
        monkeypatch.setattr(module, "_choose", lambda run, key, configs, config=config: config)
        results.append(block_gemm(*args, m=150, n=90, out_dtype=torch.float32, square_b=square))
    for other in results[1:]:
        # numpy's matmul may block a different tile differently; the tensor core does not.
        if device == "cuda":
            assert_same_bits(other, results[0], "out")
        else:
            torch.testing.assert_close(
                other, results[0], rtol=1e-5, atol=1e-4 * float(results[0].abs().max())
            )


def test_nan_scale_reaches_exactly_its_rows(device):
    a, a_scale, b, b_scale = operands(64, 48, 256, False, device)
    a_scale[1, 5] = float("nan")
    out = block_gemm(a, a_scale, b, b_scale, m=64, n=48, out_dtype=torch.bfloat16)
    assert bool(out[5].isnan().all())
    assert bool(torch.isfinite(out[torch.arange(64, device=device) != 5]).all())


def test_operands_that_do_not_fit_are_named(device):
    a, a_scale, b, b_scale = operands(32, 32, 128, False, device)
    with pytest.raises(ValueError, match="do not fit"):
        block_gemm(a, a_scale, b, b_scale, m=32, n=32, out_dtype=torch.bfloat16, square_b=True)
