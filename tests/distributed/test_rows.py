import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.distributed.rows import Row, share
from foundry_fp8.distributed.wire import Noise, decode, encode
from foundry_fp8.numerics.wire_format import WireFormat

SECTIONS = st.lists(st.tuples(st.integers(0, 200), st.booleans()), max_size=7)
BLOCK = 32


def kinds(row):
    """Of every element, whether it travels exactly."""
    return list(itertools.chain.from_iterable([exact] * numel for numel, exact in row.sections))


def through(row, x, wire, noise=None):
    message = torch.empty(x.shape[0], row.nbytes(wire), dtype=torch.uint8)
    row.encode(x, wire, message, noise)
    return row.decode(message, wire, torch.empty(x.shape)), message


@given(SECTIONS, st.sampled_from(["int8", "e4m3", "int4", "bf16"]))
@settings(max_examples=60, deadline=None)
def test_coded_sections_are_messages_of_their_own_and_exact_ones_keep_their_bits(sections, name):
    row = Row.join(sections, BLOCK)
    wire = WireFormat(name=name, block_size=BLOCK)
    x = torch.randn(3, row.numel) * torch.logspace(-6, 4, max(row.numel, 1))[: row.numel]
    got, message = through(row, x, wire)
    at = 0
    for numel, exact in row.sections:
        part = x[:, at : at + numel].contiguous()
        wanted = part if exact else decode(encode(part, wire), wire, numel)
        assert torch.equal(got[:, at : at + numel], wanted)
        at += numel
    total = torch.empty(row.numel)
    row.decode_mean(message, wire, 3, total)
    # Coded values are added in the order of the rows.
    assert torch.equal(total, sum(got[1:].unbind(), start=got[0]) / 3)
    error = x.clone()
    row.encode_keeping_error(error, wire, message)
    assert torch.equal(error, x - got)


def test_noise_rounds_what_is_coded_up_or_down_without_a_bias():
    """Elements of a third of a step beside a spike: to the nearest they are zero in every row, by noise they are so in two of three."""
    x = torch.full((1000, 37), 1 / 3)
    x[:, 0] = 127.0
    row, wire = Row.join([(32, False), (5, True)], BLOCK), WireFormat(name="int8", block_size=BLOCK)
    nearest, noisy = through(row, x, wire)[0], through(row, x, wire, Noise("leg", 0))[0]
    assert not nearest[:, 1:32].any() and noisy[:, 1:32].unique().tolist() == [0.0, 1.0]
    # 31000 draws: the mean's standard deviation is 0.0027.
    assert abs(float(noisy[:, 1:32].mean()) - 1 / 3) < 0.015
    assert torch.equal(noisy[:, 32:], x[:, 32:]) and torch.equal(noisy[:, 0], x[:, 0])


def test_a_small_parameter_keeps_its_precision_beside_a_large_one():
    """Three elements of 1e-6 among ones: in one block they would all be zero."""
    x = torch.cat([torch.ones(70), torch.tensor([3e-6, -1e-6, 2e-6]), torch.ones(70)])[None]
    wire = WireFormat(name="int8", block_size=BLOCK)
    alone = Row.join([(70, False), (3, False), (70, False)], BLOCK)
    wrong = (through(alone, x, wire)[0] - x)[0, 70:73].abs().max()
    assert wrong <= 3e-6 / 127 * 0.5001
    assert torch.equal(
        through(Row.join([(70, False), (3, True), (70, False)], BLOCK), x, wire)[0][0, 70:73], x[0, 70:73]
    )
    assert not through(Row.of(143), x, wire)[0][0, 70:73].any()


@given(SECTIONS)
@settings(max_examples=60, deadline=None)
def test_joining_keeps_the_kind_of_every_element_and_every_block(sections):
    joined = Row.join(sections, BLOCK)
    assert kinds(joined) == kinds(Row(tuple(sections)))
    x = torch.randn(1, joined.numel)
    wire = WireFormat(name="int8", block_size=BLOCK)
    apart = Row(tuple(section for section in sections if section[0]))
    assert torch.equal(through(joined, x, wire)[0], through(apart, x, wire)[0])
    assert len(joined.sections) <= len(apart.sections)


@given(SECTIONS, st.integers(1, 6))
@settings(max_examples=100, deadline=None)
def test_shares_are_the_row_in_order_in_whole_blocks_and_even(sections, parts):
    row = Row.join(sections, BLOCK)
    shares = share(row, parts, BLOCK)
    assert len(shares) == parts
    assert list(itertools.chain.from_iterable(map(kinds, shares))) == kinds(row)
    x = torch.randn(1, row.numel)
    wire = WireFormat(name="int8", block_size=BLOCK)
    pieces = x.split([part.numel for part in shares], dim=1)
    apart = torch.cat([through(part, piece, wire)[0] for part, piece in zip(shares, pieces, strict=True)], 1)
    assert torch.equal(apart, through(row, x, wire)[0])
    blocks = sum(-(-numel // BLOCK) for numel, _ in row.sections)
    largest = max(sum(-(-numel // BLOCK) for numel, _ in part.sections) for part in shares)
    assert largest <= -(-blocks // parts)


@given(SECTIONS, st.sampled_from([32, 64, 128]))
@settings(max_examples=60, deadline=None)
def test_pieces_are_the_row_in_order_with_its_blocks(sections, step):
    row = Row.join(sections, BLOCK)
    x, wire = torch.randn(1, row.numel), WireFormat(name="int8", block_size=BLOCK)
    at, values = 0, []
    for start, piece in row.pieces(step):
        assert start == at and 0 < piece.numel <= step
        values.append(through(piece, x[:, at : at + piece.numel], wire)[0])
        at += piece.numel
    assert at == row.numel
    if values:
        assert torch.equal(torch.cat(values, 1), through(row, x, wire)[0])


@given(SECTIONS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_cut_has_the_kinds_of_its_elements(sections, data):
    row = Row(tuple(sections))
    start = data.draw(st.integers(0, row.numel))
    stop = data.draw(st.integers(start, row.numel))
    assert kinds(Row(row.cut(start, stop))) == kinds(row)[start:stop]
