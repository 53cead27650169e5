import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry_fp8.distributed import replicas
from foundry_fp8.distributed.replicas import fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
@given(numel=st.integers(2, 300), seed=st.integers(0, 999), change=st.sampled_from(["bit", "swap", "cancel"]))
@settings(max_examples=40, deadline=None)
def test_one_changed_bit_two_exchanged_elements_and_changes_that_cancel_show(dtype, numel, seed, change):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(numel, generator=generator).to(dtype)
    other = tensor.clone()
    words = other.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    i, j = torch.randperm(numel, generator=generator)[:2].tolist()
    if change == "bit":
        words[i] ^= 1
    elif change == "swap":
        words[[i, j]] = words[[j, i]]
    else:  # the plain sum of the words stays the same
        words[i] += 1
        words[j] -= 1
    same = torch.equal(words, tensor.view(words.dtype))
    assert (fingerprint(tensor) == fingerprint(other)).item() == same
    assert fingerprint(tensor) == fingerprint(tensor.clone())


def test_parts_of_a_long_tensor_count_with_their_place(monkeypatch):
    monkeypatch.setattr(replicas, "CHUNK", 16)
    tensor = torch.randn(40)
    exchanged = torch.cat([tensor[16:32], tensor[:16], tensor[32:]])
    assert fingerprint(tensor) != fingerprint(exchanged)
    assert fingerprint(tensor) == fingerprint(tensor.clone())


def test_empty_and_strided_tensors_have_one_too():
    assert fingerprint(torch.empty(0)) == 0
    matrix = torch.randn(4, 6)
    assert fingerprint(matrix.t()) == fingerprint(matrix.t().contiguous())


def test_a_model_that_nothing_wraps_has_no_replicas():
    assert not list(replicas.replicated_parameters(torch.nn.Linear(2, 2)))
