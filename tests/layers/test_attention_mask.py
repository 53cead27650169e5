"""The rules of an attention mask against loops over queries and keys."""

import itertools

import pytest
import torch

from foundry_fp8.layers.attention_mask import AttentionMask

WINDOWS = (None, (0, 0), (2, 0), (2, 1), (None, 1), (3, None))


def sees(query, key, causal, window):
    """``query``: its position among the keys."""
    left, right = window or (None, None)
    return (
        not (causal and key > query)
        and not (left is not None and key < query - left)
        and not (right is not None and key > query + right)
    )


@pytest.mark.parametrize("queries", [7, 3], ids=["whole", "with a cache"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_causal_and_window_rules(window, causal, queries):
    keys = 7
    mask = AttentionMask(causal=causal, window=window)
    wanted = torch.tensor(
        [[sees(q + keys - queries, k, causal, window) for k in range(keys)] for q in range(queries)]
    )
    dense = mask.dense(queries, keys, torch.device("cpu"), torch.float32)[0, 0]
    assert torch.equal(dense == 0, wanted)
    for start, stop in itertools.combinations(range(queries + 1), 2):
        first, last = mask.keys_seen(start, stop, queries, keys)
        assert not wanted[start:stop, :first].any() and not wanted[start:stop, last:].any()
        seen, bias = mask.block(start, stop, first, last, queries, keys, torch.device("cpu"))
        assert bias is None
        assert torch.equal(
            torch.ones(stop - start, last - first).bool() if seen is None else seen,
            wanted[start:stop, first:last],
        )


def test_padding_and_documents_of_each_sequence():
    padding = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0]])
    documents = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    mask = AttentionMask(causal=True, key_padding=padding, documents=documents)
    dense = mask.dense(4, 4, torch.device("cpu"), torch.float32)
    for b, q, k in itertools.product(range(2), range(4), range(4)):
        wanted = k <= q and bool(padding[b, k]) and documents[b, q] == documents[b, k]
        assert (dense[b, 0, q, k] == 0) == wanted, (b, q, k)
