"""What shared memory costs the quantise kernels, counted while their PTX runs: bank conflicts, and the bandwidth they leave."""

import numpy as np
import pytest
import torch
import triton

from foundry_fp8.kernels.blockwise import quantize_blockwise
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.tensorwise import quantize_tensorwise
from foundry_fp8.numerics.formats import E4M3, E5M2
from tests.kernels.ptx.memory import Shared, wavefronts

COPY, PROCESSORS, CLOCK = 3.0e12, 132, 1.7e9
"""An H100: bytes a second of a copy, multiprocessors, Hz. A multiprocessor takes one wavefront a cycle."""


def test_wavefronts_by_definition():
    lanes = np.arange(32)
    assert wavefronts(lanes, lanes * 4, 4) == 1
    assert wavefronts(lanes, lanes * 0, 4) == 1  # one word is given to all
    assert wavefronts(lanes, lanes * 8, 4) == 2
    assert wavefronts(lanes, lanes * 128, 4) == 32
    assert wavefronts(lanes, lanes, 1) == 1
    assert wavefronts(lanes, lanes * 64, 1) == 16
    assert wavefronts(lanes, lanes * 16, 16) == 4
    assert wavefronts(np.arange(64), np.arange(64) * 8, 8) == 4


def quantised(case, x):
    source = Producer.identity(x)
    scale = torch.ones(())
    return {
        "current": lambda: quantize_tensorwise(source, E4M3, known_amax=scale),
        "delayed": lambda: quantize_tensorwise(source, E4M3, scale=scale),
        "delayed and bias": lambda: quantize_tensorwise(source, E5M2, scale=scale, column_sum=True),
        "block": lambda: quantize_blockwise(source, E4M3),
        "block, columns": lambda: quantize_blockwise(source, E4M3, rows=False),
        "square": lambda: quantize_blockwise(source, E4M3, square=True),
        "mx": lambda: quantize_blockwise(source, E4M3, group=32),
    }[case]


LEAST = {
    "current": (4, 12.7, 19.1),
    "delayed": (4, 12.1, 17.7),
    "delayed and bias": (4, 1.61, 1.94),
    "block": (4, 1.64, 1.90),
    "block, columns": (3, 1.39, 1.50),
    "square": (4, 17.8, 17.8),
    "mx": (4, 1.80, 1.90),
}
"""Bytes that an element moves; at how much of a copy's bandwidth it can, with Triton 3.3 and from 3.6 on."""


@pytest.mark.parametrize("case", LEAST)
def test_shared_memory_leaves_the_bandwidth(case):
    """No conflicts more than there were."""
    x = torch.ones(128, 128, dtype=torch.bfloat16)
    run = quantised(case, x)
    Shared.wavefronts = 0
    run()
    moved, before, since = LEAST[case]
    newer = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
    cap = PROCESSORS * CLOCK * x.numel() / Shared.wavefronts * moved / COPY
    assert cap >= (since if newer else before), Shared.wavefronts
