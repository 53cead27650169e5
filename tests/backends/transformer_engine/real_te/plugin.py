"""A pytest plugin that loads Transformer Engine's Python from TE_WHEEL before anything else imports it."""

import os
import sys

import pytest
import te_on_cpu
import torch

from foundry_fp8.backends.transformer_engine import TransformerEngineBackend
from foundry_fp8.layers.backend import Availability

_TE = te_on_cpu.load(os.environ["TE_WHEEL"])

# The rules for machines have tests of their own; here every recipe has to pass them on a machine without a GPU.
TransformerEngineBackend.availability = lambda self, recipe, device: Availability(True)


@pytest.fixture
def te():
    return _TE


@pytest.fixture
def casts():
    """What the extension was asked to cast since: quantiser class, dtype, scale."""
    log = sys.modules["transformer_engine_torch"].casts
    log.clear()
    return log


@pytest.fixture
def split_accumulators():
    """For each GEMM that ran since, whether it was asked to promote its sums."""
    log = sys.modules["transformer_engine_torch"].split_accumulators
    log.clear()
    return log


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
