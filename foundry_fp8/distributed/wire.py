"""Coding and decoding of messages in a :class:`~foundry_fp8.numerics.wire_format.WireFormat`, in plain torch; Triton's twins on CUDA."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from foundry_fp8.numerics.wire_format import HADAMARD_ORDER, LEAST_AMAX, WireFormat, hadamard_matrix

__all__ = ["Noise", "decode", "decode_mean", "encode", "encode_keeping_error"]

_CHUNK = 1 << 17  # elements worked on at a time on a CPU, so that the intermediates stay in its cache


def encode(x: Tensor, wire: WireFormat, out: Tensor | None = None, *, seed: int | None = None) -> Tensor:
    """Code the rows of ``x``.

    Args:
        x: ``[R, N]``, float32, float16 or bfloat16, contiguous rows.
        wire: The format.
        out: uint8 ``[R, wire.row_bytes(N)]``, written in place; a new tensor where ``None``.
        seed: Round codes up or down at random, so that their mean is ``x``; to the nearest where ``None``.

    Returns:
        uint8 ``[R, wire.row_bytes(N)]``.
    """
    rows, numel = x.shape
    if out is None:
        out = torch.empty(rows, wire.row_bytes(numel), dtype=torch.uint8, device=x.device)
    if out.numel() == 0:
        return out
    if wire.name == "fp32":
        out[:, : 4 * numel].view(torch.float32).copy_(x)
    elif wire.name == "bf16":
        out[:, : 2 * numel].view(torch.bfloat16).copy_(x)
        out[:, 2 * numel : wire.payload_bytes(numel)].zero_()
    else:
        _encode_rows(x, wire, out, seed)
    return out


def encode_keeping_error(x: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Code the rows of ``x`` into ``out``, and leave in ``x`` what coding lost: ``x - decode(out)``.

    Where a block is not finite its error is zero: the receivers see NaN, and error feedback must not keep it.

    Args:
        x: float32 ``[R, N]``, contiguous rows; overwritten.
        wire: The format.
        out: uint8 ``[R, wire.row_bytes(N)]``, written in place.
    """
    encode(x, wire, out)
    numel = x.shape[1]
    if x.is_cuda:
        x.sub_(decode(out, wire, numel)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return
    for row, message in zip(x, out, strict=True):
        for start, values in _decoded_chunks(message, wire, numel):
            row[start : start + values.numel()].sub_(values).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def decode(message: Tensor, wire: WireFormat, numel: int, out: Tensor | None = None) -> Tensor:
    """The elements of the rows of ``message``.

    Args:
        message: uint8 ``[R, wire.row_bytes(numel)]``.
        wire: The format it was coded with.
        numel: Elements a row stands for.
        out: ``[R, numel]`` of any floating dtype, written in place; a new float32 tensor where ``None``.
    """
    rows = message.shape[0]
    out = torch.empty(rows, numel, dtype=torch.float32, device=message.device) if out is None else out
    if numel == 0:
        return out
    if wire.quantized and message.is_cuda:
        from foundry_fp8.kernels.wire import decode_rows

        return decode_rows(message, wire, numel, out)
    for row, target in zip(message, out, strict=True):
        for start, values in _decoded_chunks(row, wire, numel):
            target[start : start + values.numel()] = values
    return out


def decode_mean(
    message: Tensor, wire: WireFormat, numel: int, divisor: float, out: Tensor | None = None
) -> Tensor:
    """The float32 sum over the rows of ``message``, divided by ``divisor``: what a reduction leaves.

    Rows are added in order, so that every rank that reduces the same bytes gets the same bits.

    Args:
        message: uint8 ``[R, wire.row_bytes(numel)]``.
        wire: The format it was coded with.
        numel: Elements a row stands for.
        divisor: Usually the number of rows, or 1.
        out: float32 ``[numel]``, contiguous, written in place; a new tensor where ``None``.
    """
    out = torch.empty(numel, dtype=torch.float32, device=message.device) if out is None else out
    if numel == 0:
        return out
    if wire.quantized and message.is_cuda:
        from foundry_fp8.kernels.wire import decode_mean_rows

        return decode_mean_rows(message, wire, numel, divisor, out)
    # Chunk by chunk over all rows, so that the sum stays in the cache.
    for chunks in zip(*(_decoded_chunks(row, wire, numel) for row in message), strict=True):
        start, values = chunks[0]
        total = out[start : start + values.numel()].copy_(values)
        for _, more in chunks[1:]:
            total += more
        if divisor != 1:
            total.div_(divisor)
    return out


def _encode_rows(x: Tensor, wire: WireFormat, out: Tensor, seed: int | None) -> None:
    """Write codes and scales of every row of ``x`` into ``out``."""
    if x.is_cuda:
        from foundry_fp8.kernels.wire import encode_rows

        encode_rows(x, wire, out, seed)
        return
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    numel = x.shape[1]
    payload, blocks, size = wire.payload_bytes(numel), wire.blocks(numel), wire.block_size
    code_bytes = payload // blocks
    per_chunk = max(1, _CHUNK // size)
    for row, target in zip(x, out, strict=True):
        codes = target[:payload].view(blocks, code_bytes)
        scales = target[payload : payload + 4 * blocks].view(torch.float32)
        for first in range(0, blocks, per_chunk):
            last = min(first + per_chunk, blocks)
            chunk = row[first * size : last * size].float()
            if chunk.numel() < (last - first) * size:
                chunk = torch.nn.functional.pad(chunk, (0, (last - first) * size - chunk.numel()))
            noise = None
            if generator is not None:
                noise = torch.rand(chunk.shape, generator=generator, dtype=torch.float32, device="cpu")
            _encode_blocks(chunk.view(-1, size), wire, codes[first:last], scales[first:last], noise)


def _encode_blocks(x: Tensor, wire: WireFormat, codes: Tensor, scales: Tensor, noise: Tensor | None) -> None:
    """``x``: float32 ``[n, block]``; writes ``codes`` (uint8 ``[n, bytes]``) and ``scales`` (float32 ``[n]``)."""
    if wire.name == "int4":
        x = rotate(x)
    scaled = x.abs()
    amax = scaled.amax(dim=1)  # NaN wherever the block holds one
    finite = torch.isfinite(amax)
    whole = bool(finite.all())
    if not whole:
        amax.masked_fill_(~finite, torch.nan)
    amax.clamp_(min=LEAST_AMAX)
    # One rounding, as in the kernel; limit / amax would be reciprocal and product, and decide ties otherwise.
    inverse = torch.div(torch.full_like(amax, wire.limit), amax)
    torch.mul(x, inverse.unsqueeze(1), out=scaled)
    if not whole:
        scaled.nan_to_num_(nan=0.0)  # the scale says it; a code must be a number
    torch.div(amax, wire.limit, out=scales)
    if noise is not None:
        _round_at_random(scaled, wire, noise.view_as(scaled))
    if wire.name == "e4m3":
        codes.view(torch.float8_e4m3fn).copy_(scaled.clamp_(-wire.limit, wire.limit))
        return
    scaled.round_()  # |scaled| exceeds the limit by a rounding error at most, so that no clamp is needed
    if wire.name == "int8":
        codes.view(torch.int8).copy_(scaled)
        return
    nibbles = scaled.add_(8).to(torch.uint8)  # 1 to 15
    half = wire.block_size // 2
    torch.bitwise_or(nibbles[:, :half], nibbles[:, half:] << 4, out=codes)


def _round_at_random(scaled: Tensor, wire: WireFormat, noise: Tensor) -> None:
    """Round ``scaled`` up or down to a neighbouring code, in place, so that its mean over ``noise`` in [0, 1) is itself."""
    if wire.name == "e4m3":  # three bits after the leading one; a step of 2**-9 below 2**-6
        _, exponent = torch.frexp(scaled)
        step = torch.exp2(exponent.sub_(1).clamp_(min=-6).sub_(3).float())
        scaled.div_(step).add_(noise).floor_().mul_(step)
    else:
        scaled.add_(noise).floor_()
    scaled.clamp_(-wire.limit, wire.limit)


def _decoded_chunks(row: Tensor, wire: WireFormat, numel: int) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(first element, float32 [n])`` for one row; the values may be a view of it."""
    if not wire.quantized:
        row = row[: wire.payload_bytes(numel)]
        values = row.view(torch.float32 if wire.name == "fp32" else torch.bfloat16)[:numel]
        step = _CHUNK if row.device.type == "cpu" else numel
        for start in range(0, numel, step):
            yield start, values[start : start + step].float()
        return
    payload, blocks, size = wire.payload_bytes(numel), wire.blocks(numel), wire.block_size
    codes = row[:payload].view(blocks, payload // blocks)
    scales = row[payload : payload + 4 * blocks].view(torch.float32).unsqueeze(1)
    per_chunk = max(1, _CHUNK // size)
    for first in range(0, blocks, per_chunk):
        part, scale = codes[first : first + per_chunk], scales[first : first + per_chunk]
        if wire.name == "int8":
            decoded = torch.mul(part.view(torch.int8), scale)
        elif wire.name == "e4m3":
            decoded = _e4m3_values(part, scale)
        else:
            nibbles = torch.cat([part & 15, part >> 4], dim=1).to(torch.int8) - 8
            decoded = rotate(nibbles * scale)
        yield first * size, decoded.view(-1)[: numel - first * size]


def _e4m3_values(codes: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes times their scale, by way of float16: on a CPU several times faster than torch's cast.

    Exponent and mantissa of a code moved into those of a float16 are its value times 2**-8, subnormal codes too.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign is extended into the bits above
    bits = bits.bitwise_left_shift_(7).bitwise_and_(-0x4080)  # sign 0x8000, magnitude 0x3F80
    return bits.view(torch.float16).float().mul_(scale * 256)


def rotate(x: Tensor) -> Tensor:
    """Multiply each run of 32 elements with the normalised Hadamard matrix, which is its own inverse."""
    matrix = hadamard_matrix(x.device)
    return (x.reshape(-1, HADAMARD_ORDER) @ matrix).view(x.shape)


class Noise:
    """Seeds for stochastic rounding, those of one leg, which a resumed run draws again.

    Rounding to the nearest code has a bias where many small elements share a block with a large one: they are zero in every step.
    Rounding up with the probability of what is left over has none: ``E[round(x)] = x``, at up to four times the squared error. It is for
    what no error feedback corrects.

    A seed depends on the rank, the leg, the batch and the number of seeds drawn since the batch began, and on nothing else: the random
    numbers of the model (dropout) are the same with and without it, and a run resumed at a batch draws what the first run drew.

    ``leg`` and ``rank`` distinguish it from others, so that their errors are independent and average out.
    """

    def __init__(self, leg: str, rank: int) -> None:
        self._key = f"{leg}/{rank}"
        self._batch = 0
        self._drawn = 0

    def start_batch(self, batch: int) -> None:
        """Say which batch comes next."""
        self._batch, self._drawn = batch, 0

    def seed(self) -> int:
        """The next seed, of 31 bits."""
        text = f"{self._key}/{self._batch}/{self._drawn}"
        self._drawn += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
