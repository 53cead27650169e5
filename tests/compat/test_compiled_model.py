"""Every way in which a model gets compiled; nothing is compiled here, since nothing runs."""

import torch
from torch import nn

from foundry_fp8.compat.compiled_model import is_compiled


def test_it_is_recognised_whoever_compiled_it():
    plain, wrapped, marked, composers, part = (nn.Sequential(nn.Linear(4, 4)) for _ in range(5))
    part[0] = torch.compile(part[0], backend="eager")
    marked.compile(backend="eager")
    compiled = torch.compile(composers, backend="eager")  # as Composer's trainer does with compile_config
    composers.forward = compiled.dynamo_ctx(composers.forward)
    assert not is_compiled(plain)
    plain.forward = plain.forward  # somebody's own function, not compiled
    assert not is_compiled(plain)
    for model in (torch.compile(wrapped, backend="eager"), marked, composers, part):
        assert is_compiled(model)
