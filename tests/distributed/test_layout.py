import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.distributed.layout import BlockLayout

CPU = torch.device("cpu")
FIRSTS = [0, 3, 5]
SIZES = [70, 64, 10]  # of which the blocks are 0 to 2, 3 and 4, and 5


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_unpack_inverts_pack_and_the_rows_say_what_is_exact(tensors, world):
    sizes, exact = map(list, zip(*tensors, strict=True))
    firsts = [sum(-(-s // 32) for s in sizes[:i]) for i in range(len(sizes))]
    layout = BlockLayout(sizes, exact, firsts, 32, world, CPU)
    flat = torch.cat([torch.full((size,), 2.0 if kept else 1.0) for size, kept in tensors])
    packed = layout.pack(flat)
    assert sum(row.numel for row in layout.rows) == packed.numel() and len(layout.rows) == world
    kinds = [kept for row in layout.rows for numel, kept in row.sections for _ in range(numel)]
    assert set(packed[torch.tensor(kinds)].tolist()) <= {0.0, 2.0}  # 0 is padding
    assert set(packed[~torch.tensor(kinds)].tolist()) <= {0.0, 1.0}
    flat = torch.randn(sum(sizes))
    assert torch.equal(layout.unpack(layout.pack(flat), torch.empty_like(flat)), flat)


def test_a_block_has_one_content_and_one_owner_in_any_bucket():
    tensors = [torch.randn(n) for n in SIZES]

    def blocks(order):
        layout = BlockLayout(
            [SIZES[i] for i in order], [i == 1 for i in order], [FIRSTS[i] for i in order], 32, 3, CPU
        )
        packed = layout.pack(torch.cat([tensors[i] for i in order])).split([row.numel for row in layout.rows])
        return [{tuple(block.tolist()) for block in part.view(-1, 32)} for part in packed]

    assert blocks([0, 1, 2]) == blocks([2, 0, 1])
    assert [a | b for a, b in zip(blocks([1]), blocks([0, 2]), strict=True)] == blocks([0, 1, 2])


def test_a_residual_is_a_section_of_the_packed_bucket_and_the_same_by_tensor_in_any_bucket():
    """Four owners, of which a place of the node has two: blocks 2 and 3 of the model's six."""
    numbered = [
        torch.arange(f, f + -(-n // 32)).repeat_interleave(32) for f, n in zip(FIRSTS, SIZES, strict=True)
    ]
    by_tensor = {}
    for order in ([0, 1, 2], [2, 0, 1]):
        layout = BlockLayout(
            [len(numbered[i]) for i in order],
            [i == 1 for i in order],
            [FIRSTS[i] for i in order],
            32,
            4,
            CPU,
            range(2, 4),
        )
        packed = layout.pack(torch.cat([numbered[i] for i in order]).float())
        section = packed[sum(row.numel for row in layout.rows[:2]) :]
        assert sorted(section[::32].tolist()) == [2, 3]
        pieces = layout.unpack_residual(section)
        assert [piece.numel() for piece in pieces] == layout.residual_sizes
        assert torch.equal(layout.pack_residual(pieces), section)
        by_tensor[tuple(order)] = {i: piece.tolist() for i, piece in zip(order, pieces, strict=True)}
    assert by_tensor[0, 1, 2] == by_tensor[2, 0, 1] == {0: [2.0] * 32, 1: [3.0] * 32, 2: []}
