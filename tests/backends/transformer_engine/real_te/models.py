"""Models, and what is compared, of the cases over Transformer Engine's own Python."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
)
from foundry_fp8.surgery.apply import apply_fp8

PER_TENSOR = [
    CurrentScaling(),
    CurrentScaling(power_2_scales=True, fp8_format="e4m3"),
    DelayedScaling(amax_history_len=4),
    DelayedScaling(amax_history_len=1, margin=2, amax_compute_algo="most_recent", fp8_format="e4m3"),
]

RECIPES = [
    *PER_TENSOR,
    BlockScaling(),
    BlockScaling(power_2_scales=False, fp8_format="hybrid"),
    MXFP8Scaling(),
    MXFP8Scaling(fp8_format="hybrid"),
]


class Single(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.proj = nn.Linear(64, 32, bias=bias).bfloat16()

    def forward(self, x):
        return self.proj(x)


class Net(nn.Module):
    def __init__(self, bias=True, dtype=torch.bfloat16):
        super().__init__()
        self.up = nn.Linear(64, 128, bias=bias)
        self.down = nn.Linear(128, 32, bias=bias)
        self.recompute = False
        self.to(dtype)

    def block(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)


def converted(backend="transformer_engine", recipe="current", *, net=None, seed=0, **options):
    torch.manual_seed(seed)
    net = Net() if net is None else net
    apply_fp8(net, recipe=recipe, backend=backend, device="cpu", **options)
    return net


def step(net, seed, shape=(2, 16)):
    """One training step; the tensors that it gave."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, 64, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(*shape, 32, generator=generator).bfloat16() * 1e-3
    net.zero_grad()
    y = net(x)
    y.backward(dy)
    return {
        "y": y.detach(),
        "x.grad": x.grad,
        **{f"{n}.grad": p.grad.clone() for n, p in net.named_parameters()},
    }


def assert_same(ours, theirs):
    """Equal up to the order of the sums, and what it makes of the rounding to bfloat16."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        largest = ours[name].abs().max().item()
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=2**-7, atol=2**-8 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


BACKENDS = ("emulated", "transformer_engine")
