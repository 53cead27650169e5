"""The Triton kernels of the wire format against the torch reference, interpreted (or on a GPU)."""

import pytest
import torch

from foundry_fp8.distributed.wire import WireFormat, decode, decode_mean, encode
from foundry_fp8.kernels import wire as kernels
from foundry_fp8.kernels.wire import decode_mean_rows, decode_rows, encode_rows
from tests.kernels.interpreter import only_from

NAMES = ("int8", "e4m3", "int4")
# (block, elements): one element, more blocks than a program takes (16), another block; the last block is ragged in each.
SHAPES = ((128, 1), (128, 2100), (32, 333))


def largest(error, of):
    return float(error.nan_to_num(0).abs().max() / of.nan_to_num(0).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("block", "numel"), SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_encode_decode_and_mean_are_the_references(name, block, numel, dtype, device):
    """Three rows: finite, with a NaN, with an Inf."""
    exact = name != "int4"  # the rotation's sums may be taken in another order
    x = (torch.randn(3, numel) * torch.logspace(-4, 3, numel)).to(dtype)
    x[1, numel // 2] = float("nan")
    x[2, 0] = float("inf")
    wire = WireFormat(name=name, block_size=block)
    wanted = encode(x, wire)
    message = torch.empty_like(wanted).to(device)
    encode_rows(x.to(device), wire, message)
    codes, scales = message.cpu().tensor_split([wire.payload_bytes(numel)], dim=1)
    codes_wanted, scales_wanted = wanted.tensor_split([wire.payload_bytes(numel)], dim=1)
    assert float((codes != codes_wanted).float().mean()) <= (0 if exact else 0.02)
    scales, scales_wanted = (s.contiguous().view(torch.float32) for s in (scales, scales_wanted))
    torch.testing.assert_close(scales, scales_wanted, rtol=0 if exact else 1e-6, atol=0, equal_nan=True)
    assert scales[1:].isnan().any(1).all() and scales[0].isfinite().all()

    out = decode_rows(wanted.to(device), wire, numel, torch.empty(3, numel, dtype=dtype, device=device)).cpu()
    reference = decode(wanted, wire, numel, out=torch.empty(3, numel, dtype=dtype))
    assert torch.equal(out.isnan(), reference.isnan())
    half_ulp = 2.0**-9 if dtype == torch.bfloat16 else 2.0**-22
    assert largest(out.float() - reference.float(), reference.float()) <= (0 if exact else 2 * half_ulp)

    mean = decode_mean_rows(wanted.to(device), wire, numel, 3, torch.empty(numel, device=device)).cpu()
    mean_reference = decode_mean(wanted, wire, numel, 3)
    assert torch.equal(mean.isnan(), mean_reference.isnan())
    assert largest(mean - mean_reference, mean_reference.nan_to_num(0).abs().clamp(min=1e-30)) <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_rounding_at_random_is_unbiased_and_follows_the_seed(name, device):
    """512 blocks alike, 16 in a row: every row and every element draws for itself."""
    x = torch.randn(128) * 0.1
    x[17] = 60.0
    rows = x.repeat(32, 16)
    wire = WireFormat(name=name)

    def codes(seed):
        out = torch.empty(32, wire.row_bytes(2048), dtype=torch.uint8, device=device)
        encode_rows(rows.to(device), wire, out, seed)
        return out.cpu()

    drawn = codes(7)
    assert torch.equal(drawn, codes(7)) and not torch.equal(drawn, codes(8))
    decoded = decode(drawn, wire, 2048).double()
    assert len({tuple(row) for row in decoded.view(512, 128).tolist()}) > 400
    step = 60 / {"int8": 127, "e4m3": 448 * 8, "int4": 7 / 32**0.5}[name] + (
        x.abs() / 8 if name == "e4m3" else 0
    )
    error = (decoded.view(512, 128) - x) / step
    assert float(error.abs().max()) <= 1.001  # to a neighbouring code
    assert (
        float(error.mean(0).abs().max()) <= 5 * 0.5 / 512**0.5
    )  # five standard deviations of the mean of 512


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_elements_past_2_to_the_31(name, device, monkeypatch):
    """The last programs of one row, of memory that is asked for and, but for its end, never touched."""
    wire = WireFormat(name=name)
    tail = 2 * 16 * wire.block_size
    start = 2**31 if name == "int8" else 2**32  # int4 has two codes a byte
    numel = start + tail
    only_from(monkeypatch, start // (16 * wire.block_size), kernels, "_encode", "_decode")
    x = torch.empty(1, numel, dtype=torch.bfloat16)
    x[:, start:] = torch.randn(1, tail)
    wanted = encode(x[:, start:].clone(), wire)
    message = torch.empty(1, wire.row_bytes(numel), dtype=torch.uint8)
    encode_rows(x, wire, message)
    ours = message.tensor_split([wire.payload_bytes(numel)], dim=1)
    theirs = wanted.tensor_split([wire.payload_bytes(tail)], dim=1)
    codes, scales = (a[:, -b.shape[1] :] for a, b in zip(ours, theirs, strict=True))
    # As above, the rotation's sums may be taken in another order.
    assert float((codes != theirs[0]).float().mean()) <= (0 if name == "int8" else 0.02)
    scales, scales_wanted = (s.contiguous().view(torch.float32) for s in (scales, theirs[1]))
    torch.testing.assert_close(scales, scales_wanted, rtol=0 if name == "int8" else 1e-6, atol=0)

    message[:, wire.payload_bytes(numel) - theirs[0].shape[1] : wire.payload_bytes(numel)] = theirs[0]
    out = decode_rows(message, wire, numel, torch.empty_like(x))
    reference = decode(wanted, wire, tail, out=torch.empty(1, tail, dtype=x.dtype))
    torch.testing.assert_close(out[:, start:], reference, rtol=2.0**-7, atol=1e-4)
