"""Kurtosis against float64, from the smallest gradients to the largest activations."""

import pytest
import torch

from foundry_fp8.observe.kurtosis import kurtosis_per_sample, kurtosis_per_token, row_sums, sample_tokens


def exact(x, dims):
    x = x.double()
    moment = x.pow(4).mean(dims) / x.pow(2).mean(dims).square()
    return float(moment.mean())


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-3, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_size_of_values_has_the_kurtosis_of_its_shape(size, dtype):
    rows = torch.logspace(-4, 4, 6)[:, None]  # gradients of tokens differ by orders of magnitude
    x = (torch.randn(3, 6, 64) * rows * size).to(dtype)
    sums = row_sums(x, 2)
    assert float(kurtosis_per_token(*sums)) == pytest.approx(exact(x, -1), rel=1e-5)
    assert float(kurtosis_per_sample(*sums)) == pytest.approx(exact(x, (-2, -1)), rel=1e-5)
    assert kurtosis_per_token(*sums).dtype == torch.float32


def test_zero_tokens_are_left_out_and_nan_and_inf_stay_visible():
    x = torch.randn(1, 4, 32)
    x[0, 1] = 0
    kept = x[:, [0, 2, 3]]
    assert float(kurtosis_per_token(*row_sums(x, 2))) == pytest.approx(exact(kept, -1), rel=1e-5)
    for bad in (float("nan"), float("inf")):
        y = x.clone()
        y[0, 2, 5] = bad
        assert torch.isnan(kurtosis_per_token(*row_sums(y, 2)))
        assert torch.isnan(kurtosis_per_sample(*row_sums(y, 2)))


@pytest.mark.parametrize("shape", [(3, 1024, 64), (2048, 64)])
def test_a_sample_of_a_long_sequence_is_near_the_whole_and_holds_the_token_that_sticks_out(shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    x[..., 777, :] *= 30
    leading = x.dim() - 1
    tokens = sample_tokens(x, leading)
    sums = row_sums(x, leading, tokens)
    assert sums[0].shape[-1] == 129
    assert float(kurtosis_per_token(*sums, tokens.weight)) == pytest.approx(exact(x, -1), rel=0.05)
    if leading == 2:
        found = float(kurtosis_per_sample(*sums, tokens.weight))
        assert found == pytest.approx(exact(x, (-2, -1)), rel=0.05)
        assert found > 50
