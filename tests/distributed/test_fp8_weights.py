import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.distributed.compression.fsdp2_parameters import TensorCodec
from foundry_fp8.numerics.formats import E4M3
from foundry_fp8.numerics.quantize import amax_of, quantize_tensor, scale_from_amax


def quantized(weight, power_2):
    amax = amax_of(weight)
    return quantize_tensor(weight, scale_from_amax(amax, E4M3, power_2=power_2), E4M3, amax)


def through(weight, power_2):
    """What arrives where ``weight`` is two ranks' rows."""
    amax = amax_of(weight)
    scale = scale_from_amax(amax, E4M3, power_2=power_2)
    codec = TensorCodec(amax, scale, weight.dtype, weight.numel() // 2 + 12)
    messages = torch.stack([codec.encode(shard.reshape(-1)) for shard in weight.chunk(2)])
    arrived = torch.empty(2, weight.numel() // 2, dtype=weight.dtype)
    codec.decode(messages, arrived)
    return arrived.view(weight.shape)


@given(
    st.integers(0, 2**31),
    st.floats(-42, 36),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=150, deadline=None)
def test_quantising_what_arrived_gives_what_quantising_the_weight_gives(seed, exponent, power_2, dtype):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-5, 0, 64)[torch.randperm(64, generator=generator)]
    weight = (torch.randn(6, 64, generator=generator) * spread * 10.0**exponent).to(dtype)
    wanted, got = quantized(weight, power_2), quantized(through(weight, power_2), power_2)
    assert torch.equal(got.data.view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(got.scale_inv, wanted.scale_inv)


@pytest.mark.parametrize("power_2", [False, True])
def test_zeros_nan_and_inf_stay_in_place(power_2):
    assert torch.equal(through(torch.zeros(2, 8), power_2), torch.zeros(2, 8))
    weight = torch.ones(2, 8)
    weight[1, 3] = torch.nan
    assert through(weight, power_2).isnan().nonzero().tolist() == [[1, 3]]
    weight[0, 0] = torch.inf
    assert through(weight, power_2).isinf().nonzero().tolist() == [[0, 0]]
    assert through(weight, power_2).isnan().nonzero().tolist() == [[1, 3]]
