"""Numbers that stand for codes: quantised again they are the same codes, by the same scale, for every number of 16 bits."""

import pytest
import torch

from foundry_fp8.distributed.compression.fsdp2_parameters import TensorCodec
from foundry_fp8.numerics.formats import E4M3, cast
from foundry_fp8.numerics.quantize import amax_of, quantize_tensor, scale_from_amax

INF = float("inf")


def numbers_up_to(amax, dtype):
    """Every number of ``dtype`` up to ``amax``, with both signs; of float32 as many at random, subnormal ones too."""
    if dtype is torch.float32:
        bits = torch.randint(0, int(amax.view(torch.int32)) + 1, (2**16,), dtype=torch.int32)
        x = bits.view(dtype)
    else:
        x = torch.arange(0, 2**15, dtype=torch.int16).view(dtype)
        x = x[x <= amax]
    return torch.cat([x, -x, amax.to(dtype).view(1)])


def again(x, scale):
    """The codes of ``x``, and of the numbers that stand for them, which are returned."""
    codes = quantize_tensor(x, scale, E4M3).data.view(torch.uint8)
    numbers = TensorCodec(amax_of(x), scale, x.dtype, 260).numbers()
    assert numbers.dtype == x.dtype and numbers.shape == (256,)
    y = numbers[codes.int()]
    return codes, quantize_tensor(y, scale, E4M3).data.view(torch.uint8), y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("power_2", [False, True])
def test_current_scaling_finds_the_same_scale_and_codes(dtype, power_2):
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    middle = torch.randn(60).exp().to(dtype).abs().tolist()
    small = [info.smallest_normal * 2.0**i * m for i, m in enumerate([1, 1.3, 1.7, 1.9, 1.1, 1.6, 1.2] * 2)]
    for amax in [0.0, info.smallest_normal / 4, info.max, 448.0, 450.0, 226.0, 1e-3, 0.02, *small, *middle]:
        amax = torch.tensor(amax).to(dtype).float()
        x = numbers_up_to(amax, dtype)
        scale = scale_from_amax(amax_of(x), E4M3, power_2=power_2)
        codes, codes_again, y = again(x, scale)
        assert torch.equal(amax_of(y), amax_of(x)), amax
        assert torch.equal(scale_from_amax(amax_of(y), E4M3, power_2=power_2), scale)
        assert torch.equal(codes, codes_again), amax


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_given_scale_saturates_or_flushes_and_the_amax_stays(dtype):
    torch.manual_seed(0)
    for amax in (1e-4, 0.7, 3.0, 1000.0):
        amax = torch.tensor(amax).to(dtype).float()
        x = numbers_up_to(amax, dtype)
        for scale in (
            1.0,
            0.37,
            1e-5,
            447.3,
            91789.7734375,
            1e6,
        ):  # float16: 7.1526e-07 by 91789.77 is nearly a tie
            codes, codes_again, y = again(x, torch.tensor(scale))
            assert torch.equal(codes, codes_again) and torch.equal(amax_of(y), amax_of(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bad", [INF, -INF, float("nan")])
def test_what_is_not_finite_stays_visible(dtype, bad):
    x = torch.tensor([0.0, 1.0, -3.0, bad, 0.3]).to(dtype)
    scale = scale_from_amax(amax_of(x), E4M3)
    *_, y = again(x, scale)
    assert torch.equal(amax_of(y), amax_of(x))
    assert torch.equal(cast(y.float() * scale, E4M3).float().isnan(), x.isnan())
    assert torch.equal(quantize_tensor(y, scale, E4M3).gemm_scale.isnan(), torch.tensor(bad == bad))
