"""One storage has one number, whatever it holds and however it is looked at; two that live have two."""

import pytest
import torch
from torch import Tensor

from foundry_fp8.compat.fake_tensor import FakeTensorMode
from foundry_fp8.compat.storages import storage_number


def number(x: Tensor) -> int:
    return storage_number(x.untyped_storage())


@pytest.mark.parametrize("kind", ["plain", "empty", "meta", "fake"])
def test_views_have_the_number_of_their_storage_and_others_another(kind):
    mode = FakeTensorMode()
    with mode if kind == "fake" else torch.device("meta" if kind == "meta" else "cpu"):
        shape = (0, 3) if kind == "empty" else (4, 3)
        x, y = torch.zeros(shape), torch.zeros(shape)
        views = [x, x.t(), x.detach(), x.view(-1), x[:0]]
        was = number(x)
        del x
        assert {number(view) for view in views} == {was}
        assert number(y) != was
