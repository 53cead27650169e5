"""What is converted because it was shown to compute a linear, and what is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from foundry_fp8.layers.linear import FP8Linear, FP8TransposedLinear
from foundry_fp8.surgery.same_as_linear import linear_form, looks_linear


class Same(nn.Linear):
    """Falcon's."""

    def forward(self, x):
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Affine(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + 1


class Scaled(nn.Linear):
    factor = 2.0

    def forward(self, x):
        return super().forward(x * self.factor)


class Single(nn.Linear):
    """Computes in float32 whatever comes."""

    def forward(self, x):
        return F.linear(x.float(), self.weight.float(), self.bias.float())


class Dropping(nn.Linear):
    """Only in training does it do more."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class StraightThrough(nn.Linear):
    """The right output, another gradient."""

    def forward(self, x):
        return F.linear(x, self.weight.detach() * 0.5 + self.weight * 0.5, self.bias)


class Adapter(nn.Linear):
    """loralib's: zero at first, and then not."""

    def __init__(self, k, n):
        super().__init__(k, n)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(4, k)), nn.Parameter(torch.zeros(n, 4))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class Flattening(nn.Linear):
    """Right for two dimensions only."""

    def forward(self, x):
        return F.linear(x.flatten(0, -2), self.weight, self.bias)


class Raising(nn.Linear):
    def forward(self, x):
        raise KeyError("no")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_same_function_in_other_words_is_converted(bias, device):
    state = torch.random.get_rng_state()
    with torch.no_grad():
        assert linear_form(Same(64, 32, bias=bias, device=device)) is FP8Linear
    assert linear_form(nn.Linear(64, 32, bias=bias, device=device)) is FP8Linear
    assert device == "cpu" or torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    "cls", [Affine, Scaled, Single, Dropping, StraightThrough, Adapter, Flattening, Raising]
)
def test_another_function_is_not(cls):
    module = cls(64, 32)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    assert looks_linear(module) and linear_form(module) is None
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items()) and module.training


def test_a_forward_of_the_instance_is_not():
    module = nn.Linear(64, 32)
    module.forward = lambda x: x
    assert linear_form(module) is None


def test_conv1d_is_a_transposed_linear():
    from transformers.pytorch_utils import Conv1D

    class Doubled(Conv1D):
        def forward(self, x):
            return 2 * super().forward(x)

    assert linear_form(Conv1D(32, 64)) is FP8TransposedLinear
    assert linear_form(Doubled(32, 64)) is None
