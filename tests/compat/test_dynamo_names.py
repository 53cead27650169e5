"""What torch.compile of torch 2.7 makes of an autograd.Function whose forward and backward call one helper."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foundry_fp8.compat.dynamo_names import renamed_for_dynamo

ROOT = Path(__file__).parents[2]


def doubled(x):
    part = x * 2
    return part


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, own_names):
        a, b = doubled(x), doubled(y)
        ctx.save_for_backward(*(renamed_for_dynamo((a, None, b)) if own_names else (a, None, b)))
        return a * b

    @staticmethod
    def backward(ctx, g):
        a, _, b = ctx.saved_tensors
        twice = doubled(g)
        of_y = twice * a
        return twice * b, of_y, None


def gradients(function, own_names):
    torch._dynamo.reset()
    x, y = (torch.tensor([value], requires_grad=True) for value in (3.0, 5.0))
    function(x, y, own_names).sum().backward()
    return x.grad.item(), y.grad.item()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_are_those_of_what_was_saved(backend):
    compiled = torch.compile(Product.apply, backend=backend, fullgraph=True)
    assert gradients(compiled, True) == gradients(Product.apply, True) == (20.0, 12.0)


@pytest.mark.full
@pytest.mark.skipif(not torch.__version__.startswith("2.7."), reason="torch 2.7's fault")
def test_without_names_of_their_own_they_are_wrong():
    """Else the names are no longer needed. In a process of its own: what Dynamo compiled before may change which names it gives."""
    code = (
        "import torch; from tests.compat.test_dynamo_names import Product, gradients; "
        "print(gradients(torch.compile(Product.apply, backend='eager', fullgraph=True), False))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "(12.0, 12.0)"
