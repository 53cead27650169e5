"""Kernels are exchanged in some tests; what was remembered of the others may not be launched then."""

import pytest
import torch

from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.tensorwise import quantize_tensorwise
from foundry_fp8.numerics.formats import E4M3
from tests.kernels.interpreter import interpret
from tests.kernels.ptx.launch import execute, parsed


@pytest.fixture(autouse=True)
def device():
    """In place of the folder's, which interprets the kernels for a whole test."""
    return "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are neither interpreted nor executed here")
def test_kernels_run_as_the_test_says_whatever_ran_before(monkeypatch):
    source = Producer(torch.randn(20, 30))
    found, executed = [], []
    for exchange in (interpret, execute, interpret):
        with monkeypatch.context() as patch:
            exchange(patch)
            before = sum(parsed.cache_info()[:2])
            found.append(quantize_tensorwise(source, E4M3).data.view(torch.uint8))
            executed.append(sum(parsed.cache_info()[:2]) - before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert executed == [0, 2, 0]  # the amax and the cast
