"""Packing against float64 and against the published error of each format."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.activations.compression import packing
from foundry_fp8.activations.compression.packing import pack, packable, unpack
from foundry_fp8.config import ConfigError
from foundry_fp8.numerics.packed import FORMATS, PackFormat

BOUND = {"int8": 0.5 / 127, "e4m3": 2.0**-4, "int4": 0.5 / 7 * 1.01}
"""Largest error in units of the block's amax (int) or of the value (e4m3, above its subnormals)."""
RMS = {"int8": 6.5e-3, "e4m3": 2.6e-2, "int4": 9.7e-2}
BYTES = {"int8": 1 + 4 / 128, "e4m3": 1 + 4 / 128, "int4": 0.5 + 2 / 32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_error_is_the_format_s(name, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(513 * 64, generator=generator).to(dtype)[:-31]  # does not divide into blocks
    fmt = PackFormat(name=name)
    packed = pack(x, fmt, row=fmt.block)
    y = unpack(packed).view(x.shape)
    assert y.dtype == dtype
    error = (y.double() - x.double()).norm() / x.double().norm()
    assert error == pytest.approx(RMS[name], rel=0.1)
    assert packed.nbytes / x.numel() == pytest.approx(BYTES[name], rel=0.01)
    rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-6
    flat = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % fmt.block)).double().view(-1, fmt.block)
    unit = (
        flat.abs().amax(1, keepdim=True)
        if name != "e4m3"
        else flat.abs().clamp_min(flat.abs().amax() * 2.0**-13)
    )
    got = torch.nn.functional.pad(y.flatten(), (0, -x.numel() % fmt.block)).double().view(-1, fmt.block)
    assert ((got - flat).abs() <= unit * (BOUND[name] + rounding)).all()


@pytest.mark.parametrize("name", FORMATS)
@given(
    values=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=300),
    power=st.integers(-20, 20),
)
@settings(max_examples=40, deadline=None)
def test_packing_is_odd_and_scales_with_powers_of_two(name, values, power):
    x = torch.tensor(values, dtype=torch.float32)
    fmt = PackFormat(name=name, block=16)
    y = unpack(pack(x, fmt))
    assert torch.equal(unpack(pack(-x, fmt)), -y)
    if (x.abs() > 1e-22).all() and (x.abs() < 1e20).all():  # away from the smallest amax and from overflow
        assert torch.equal(unpack(pack(x * 2.0**power, fmt)), y * 2.0**power)
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", FORMATS)
def test_a_block_that_is_not_finite_comes_back_as_nan_and_only_that_block(name, bad):
    fmt = PackFormat(name=name, block=32)
    x = torch.ones(96)
    x[40] = bad
    packed = pack(x, fmt)
    assert packed.scale_inv.view(fmt.scale_dtype).isnan().tolist() == [False, True, False]
    y = unpack(packed)
    assert y[32:64].isnan().all()
    assert torch.equal(y[:32], y[64:]) and torch.allclose(y[:32], torch.ones(32), rtol=4e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_and_numbers_too_small_to_scale_vanish(name):
    assert torch.equal(unpack(pack(torch.zeros(40), PackFormat(name=name))), torch.zeros(40))
    assert unpack(pack(torch.tensor([0.0, 1e-38, -1e-42]), PackFormat(name=name))).abs().max() < 1e-32


def test_what_is_not_packable():
    for x in (
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(4, dtype=torch.complex64),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, dtype=torch.float8_e4m3fn),
        torch.zeros(4, 4).to_sparse(),
    ):
        assert not packable(x)
    assert packable(torch.zeros(4, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "int6"}, "name: 'int6' is not one of int8, e4m3, int4. Did you mean 'int8'"),
        (
            {"name": "int8", "block": 100},
            "block: 100 is not 0 or an integer that is a power of two from 16 to 1024",
        ),
    ],
)
def test_bad_formats(options, message):
    with pytest.raises(ConfigError, match=message):
        PackFormat(**options)


def test_blocks_do_not_cross_rows_where_they_can_help_it():
    """A token a thousand times larger than its neighbour must not swallow it."""
    x = (
        torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 1e-3]).repeat(32)[:, None]
    )
    packed = pack(x, PackFormat(name="int8"))
    assert packed.fmt.block == 32
    error = (unpack(packed).view(x.shape) - x).norm(dim=1) / x.norm(dim=1)
    assert error.max() < 1.5e-2


@pytest.mark.parametrize("name", FORMATS)
def test_nonzero_keeps_what_is_positive_apart_from_zero(name):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).relu()
    x[:3] = torch.tensor([1e-5, torch.inf, torch.nan])  # a block that is not finite beside the others
    fmt = PackFormat(name=name)
    back = unpack(pack(x, fmt, nonzero=True))
    assert back[: fmt.block].isnan().all()
    assert torch.equal(back[fmt.block :].sign(), x[fmt.block :].sign())
    amax = x[fmt.block :].view(-1, fmt.block).amax(1, keepdim=True)
    unit = {"int8": 1 / 127, "e4m3": 2.0**-4, "int4": 1.01 / 7}[name]
    assert ((back - x)[fmt.block :].view(-1, fmt.block).abs() <= unit * amax).all()


def test_small_elements_are_rounded_without_a_bias():
    """Lifting them all to the smallest code made the tail of a softmax heavier than its head."""
    x = torch.rand(128 * 512, generator=torch.Generator().manual_seed(0)) / 127
    x[::128] = 1.0
    tail = x.view(-1, 128)[:, 1:]
    back = unpack(pack(x, PackFormat(name="int8"))).view(-1, 128)[:, 1:]
    assert back.sum().item() == pytest.approx(tail.sum().item(), rel=0.02)


def test_a_tensor_of_several_parts(monkeypatch):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x[300], x[600] = torch.inf, torch.nan
    for name in FORMATS:
        whole = pack(x, PackFormat(name=name))
        with monkeypatch.context() as patch:
            patch.setattr(packing, "PART", 256)
            parts = pack(x, PackFormat(name=name))
        assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scale_inv, whole.scale_inv)
