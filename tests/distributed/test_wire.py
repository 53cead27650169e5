import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.config import ConfigError
from foundry_fp8.distributed.wire import decode, decode_mean, encode
from foundry_fp8.numerics.wire_format import FORMATS, HADAMARD_ORDER, WireFormat, hadamard_matrix

QUANTIZED = ("int8", "e4m3", "int4")


def spread(rows, numel, seed=0):
    """Rows whose blocks differ in range by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, numel, generator=generator) * torch.logspace(-4, 3, max(numel, 1))[:numel]


def reference(x, name, block):
    """Quantise and dequantise one row with numpy in float64, block by block."""
    out = np.zeros(len(x))
    for start in range(0, len(x), block):
        piece = np.zeros(block)
        piece[: len(x[start : start + block])] = x[start : start + block]
        if name == "int4":
            matrix = hadamard_matrix(torch.device("cpu")).double().numpy()
            piece = (piece.reshape(-1, HADAMARD_ORDER) @ matrix).ravel()
        limit = {"int8": 127, "e4m3": 448, "int4": 7}[name]
        scale = max(np.abs(piece).max(), 1e-30) / limit
        scaled = piece / scale
        codes = scaled.astype(ml_dtypes.float8_e4m3fn).astype(float) if name == "e4m3" else np.rint(scaled)
        values = codes * scale
        if name == "int4":
            values = (values.reshape(-1, HADAMARD_ORDER) @ matrix).ravel()
        out[start : start + block] = values[: len(x[start : start + block])]
    return out


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("numel", [1, 31, 128, 1000])
def test_codes_match_a_float64_reference(name, numel):
    x = spread(2, numel)
    wire = WireFormat(name=name, block_size=64)
    got = decode(encode(x, wire), wire, numel)
    for row in range(2):
        wanted = reference(x[row].double().numpy(), name, 64)
        # Float32 arithmetic may round one element in a tie the other way: at most one step, in very few elements.
        step = np.repeat([np.abs(x[row, s : s + 64]).max() / 7 for s in range(0, numel, 64)], 64)[:numel]
        difference = np.abs(got[row].double().numpy() - wanted)
        assert (difference <= step + 1e-30).all()
        assert (difference > 1e-5 * step).mean() < 0.02


@pytest.mark.parametrize("name", QUANTIZED)
def test_error_stays_within_half_a_step_of_the_block(name):
    x = spread(3, 777)
    wire = WireFormat(name=name, block_size=32)
    error = (decode(encode(x, wire), wire, 777) - x).abs()
    for start in range(0, 777, 32):
        block, wrong = x[:, start : start + 32], error[:, start : start + 32]
        amax = block.abs().amax(1, keepdim=True)
        if name == "int8":
            assert (wrong <= 0.5 * amax / 127 * (1 + 1e-5)).all()
        elif name == "e4m3":  # half an ulp of 4 significant bits, or half a subnormal step
            assert (wrong <= torch.maximum(block.abs() / 16, amax / 448 * 2.0**-10) * (1 + 1e-5)).all()
        else:  # after the rotation: the L2 error of 32 codes, each within half a step of an amax of at most norm
            norm = block.norm(dim=1, keepdim=True)
            assert (wrong.norm(dim=1, keepdim=True) <= 32**0.5 * 0.5 * norm / 7 * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", FORMATS)
@given(numel=st.integers(0, 300), rows=st.integers(1, 4), blocks=st.sampled_from([32, 64, 128]))
@settings(max_examples=15, deadline=None)
def test_size_on_the_wire_is_what_was_announced(name, numel, rows, blocks):
    wire = WireFormat(name=name, block_size=blocks)
    message = encode(torch.randn(rows, numel), wire)
    assert message.shape == (rows, wire.row_bytes(numel)) and message.dtype == torch.uint8
    assert decode(message, wire, numel).shape == (rows, numel)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_block_stays_non_finite_and_alone(name, bad):
    wire = WireFormat(name=name, block_size=32)
    x = torch.ones(1, 128)
    x[0, 40] = bad
    message = encode(x, wire)
    out = decode(message, wire, 128)
    assert not out[0, 40].isfinite()
    if wire.quantized:  # as the kernel says it: by a scale that is NaN, whatever the value was
        scales = message[0, wire.payload_bytes(128) :].view(torch.float32)
        assert scales.isnan().tolist() == [False, True, False, False]
    assert out[0, :32].isfinite().all() and out[0, 64:].isfinite().all()
    assert not decode_mean(encode(torch.cat([x, torch.ones(1, 128)]), wire), wire, 128, 2)[40].isfinite()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e-30, 3e38])
def test_extreme_blocks_decode_to_finite_values(name, value):
    wire = WireFormat(name=name, block_size=32)
    out = decode(encode(torch.full((1, 64), value), wire), wire, 64)
    if name == "int4" and value == 3e38:
        assert not out.isfinite().any()  # the rotation overflows, and says so
        return
    # bf16 rounds to 8 bits; below 1e-30 a block keeps that amax as its floor.
    assert (out - value).abs().max() <= max(value / 128, 1e-30)


def test_rotation_helps_a_spiky_block():
    """Why int4 rotates: one outlier would otherwise set the step of 127 small neighbours."""
    x = torch.randn(1, 4096)
    x[0, ::128] = 60.0
    wire = WireFormat(name="int4")
    error = (decode(encode(x, wire), wire, 4096) - x)[:, 1::128].norm()
    plain = torch.where(x.abs() > 60 / 14, x, 0.0)  # what 4 bits without a rotation keep of the neighbours
    assert error < 0.95 * (plain - x)[:, 1::128].norm()


def test_the_hadamard_matrix_is_orthonormal_and_symmetric():
    matrix = hadamard_matrix(torch.device("cpu")).double()
    assert torch.allclose(matrix @ matrix, torch.eye(32, dtype=torch.float64), atol=1e-6)
    assert torch.equal(matrix, matrix.T)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("divisor", [1, 2, 5])
def test_decode_mean_is_the_sum_of_the_decoded_rows_over_the_divisor(name, divisor):
    wire = WireFormat(name=name)
    message = encode(spread(5, 1001), wire)
    wanted = decode(message, wire, 1001).double().sum(0) / divisor
    got = decode_mean(message, wire, 1001, divisor).double()
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-7 * wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_coded_as_its_float32_value(dtype):
    x = torch.randn(2, 300).to(dtype)
    wire = WireFormat(name="int8")
    assert torch.equal(encode(x, wire), encode(x.float(), wire))


@pytest.mark.parametrize(
    "options", [{"name": "int9"}, {"name": "int8", "block_size": 48}, {"name": "int8", "block_size": 0}]
)
def test_bad_formats_are_refused(options):
    with pytest.raises(ConfigError):
        WireFormat(**options)


@pytest.mark.parametrize("name", QUANTIZED)
def test_rounding_at_random_has_no_bias_and_takes_neighbouring_codes(name):
    """One spike in a block: the rest is below half a step of int8, and to the nearest always zero."""
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(1)) * 0.1
    x[0, 17] = 60.0
    wire, draws = WireFormat(name=name), 4000
    nearest = decode(encode(x, wire), wire, 128)
    drawn = torch.cat([decode(encode(x, wire, seed=seed), wire, 128) for seed in range(draws)]).double()
    if name == "int4":  # it rounds what the rotation leaves
        error, step = drawn - x, 32**0.5 * 60 / 7
    else:
        codes = (drawn / nearest.abs().max() * {"int8": 127, "e4m3": 448}[name]).float()
        scaled = x / x.abs().max() * {"int8": 127, "e4m3": 448}[name]
        if name == "int8":
            low, high = scaled.floor(), scaled.ceil()
        else:
            grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
            grid = grid[grid.isfinite()].unique()
            at = torch.searchsorted(grid, scaled)
            low, high = grid[(at - 1).clamp(min=0)], grid[at.clamp(max=len(grid) - 1)]
        near = ((codes - low).abs() < 1e-3 * low.abs().clamp(min=1e-3)) | (
            (codes - high).abs() < 1e-3 * high.abs().clamp(min=1e-3)
        )
        assert near.all()
        error, step = drawn - x, (high - low) * 60 / {"int8": 127, "e4m3": 448}[name]
    # The mean of n draws, each within a step: five standard deviations of at most step / 2.
    assert (error.mean(0).abs() <= 5 * step / 2 / draws**0.5 + 1e-6).all()
    if name == "int8":
        assert (nearest[0, 18:] == 0).float().mean() > 0.95 and (drawn[:, 18:] != 0).any()


def test_a_seed_gives_the_same_codes_again_and_another_gives_others():
    x, wire = spread(2, 1000), WireFormat(name="int8")
    assert torch.equal(encode(x, wire, seed=5), encode(x, wire, seed=5))
    assert not torch.equal(encode(x, wire, seed=5), encode(x, wire, seed=6))
    x[0, 3] = float("nan")
    assert decode(encode(x, wire, seed=5), wire, 1000)[0, :128].isnan().all()


@pytest.mark.parametrize("name", FORMATS)
def test_messages_without_elements_decode_to_nothing(name):
    """A rank that owns only padding."""
    wire = WireFormat(name=name, block_size=32)
    message = encode(torch.zeros(2, 0), wire)
    assert decode(message, wire, 0).shape == (2, 0) and decode_mean(message, wire, 0, 2).shape == (0,)
