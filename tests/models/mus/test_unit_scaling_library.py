"""The pieces that µnit Scaling shares with u-µP, against Graphcore's ``unit-scaling``."""

import math

import pytest
import torch
import unit_scaling.functional as library

from foundry_fp8.layers.unit_linear import UnitLinear
from foundry_fp8.models.mus.residual import fixed_residual


@pytest.mark.parametrize("head", [False, True])
def test_the_linear_is_theirs_but_for_the_weights_gradient_which_they_scale_by_tokens(head):
    layer = UnitLinear(48, 80, output_multiplier=1 / 48 if head else None).double()
    x, dy = torch.randn(32, 48).double(), torch.randn(32, 80).double()
    ours_x, theirs_x = (x.clone().requires_grad_() for _ in range(2))
    theirs_w = layer.weight.detach().clone().requires_grad_()
    linear = library.linear_readout if head else library.linear
    theirs = linear(theirs_x, theirs_w, None, constraint="to_output_scale")
    ours = layer(ours_x)
    torch.testing.assert_close(ours, theirs)
    ours.backward(dy), theirs.backward(dy)
    torch.testing.assert_close(ours_x.grad, theirs_x.grad)
    # Theirs is of unit variance, 1/sqrt(tokens); ours has the forward's alpha, as the paper's GEMM has it.
    torch.testing.assert_close(layer.weight.grad / layer.output_multiplier, theirs_w.grad * math.sqrt(32))


@pytest.mark.parametrize("tau", [0.1, 0.4, 0.5])
def test_the_residual_is_theirs_with_the_ratio_of_deviations_for_tau(tau):
    x, dy = torch.randn(16, 64).double(), torch.randn(16, 64).double()
    ours_x, theirs_x = (x.clone().requires_grad_() for _ in range(2))
    ours = fixed_residual(ours_x, torch.tanh(ours_x), tau)
    theirs = library.residual_apply(torch.tanh, theirs_x, tau=math.sqrt(tau / (1 - tau)))
    torch.testing.assert_close(ours, theirs)
    ours.backward(dy), theirs.backward(dy)
    torch.testing.assert_close(ours_x.grad, theirs_x.grad)
