import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.distributed.layout import BlockLayout


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_unpack_inverts_pack_and_splits_cover_it(sizes, world):
    firsts = [sum(-(-s // 32) for s in sizes[:i]) for i in range(len(sizes))]
    layout = BlockLayout(sizes, firsts, 32, world, torch.device("cpu"))
    flat = torch.randn(sum(sizes))
    packed = layout.pack(flat)
    assert sum(layout.splits) == packed.numel() and len(layout.splits) == world
    assert torch.equal(layout.unpack(packed, torch.empty_like(flat)), flat)


def test_a_block_has_one_content_and_one_owner_in_any_bucket():
    sizes, firsts = [70, 64, 10], [0, 3, 5]
    tensors = [torch.randn(n) for n in sizes]

    def blocks(order):
        layout = BlockLayout(
            [sizes[i] for i in order], [firsts[i] for i in order], 32, 3, torch.device("cpu")
        )
        packed = layout.pack(torch.cat([tensors[i] for i in order])).split(layout.splits)
        return [{tuple(block.tolist()) for block in part.view(-1, 32)} for part in packed]

    assert blocks([0, 1, 2]) == blocks([2, 0, 1])
    assert [a | b for a, b in zip(blocks([1]), blocks([0, 2]), strict=True)] == blocks([0, 1, 2])
