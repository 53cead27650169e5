"""What conversion proves of attention's kernels before it changes anything."""

import pytest
import torch

from foundry_fp8 import apply_fp8
from foundry_fp8.backends.native import attention_check, attention_ops
from foundry_fp8.backends.native.attention import NativeAttention
from foundry_fp8.numerics.formats import E5M2
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling
from tests import model_zoo

check = attention_check.check_attention_kernels.__wrapped__  # without its memory of what passed
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("recipe", "grad_scores", "head_dim"),
    [
        (CurrentScaling(), "fp8", 16),
        pytest.param(DelayedScaling(), "bfloat16", 80, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_kernels_pass(recipe, grad_scores, head_dim, device):
    check(recipe, grad_scores, head_dim, BF16, torch.device(device))


@pytest.mark.parametrize(("kernel", "output"), [("forward", "output"), ("backward", "dK")])
def test_a_wrong_kernel_is_an_error_that_names_it(kernel, output, monkeypatch, device):
    right = getattr(attention_ops, f"{kernel}_kernel")

    def wrong(*args, **kwargs):
        found = list(right(*args, **kwargs))
        found[kernel == "backward"][..., 5:] *= 1.05
        return tuple(found)

    monkeypatch.setattr(attention_ops, f"{kernel}_kernel", wrong)
    with pytest.raises(RuntimeError, match=rf"attention_{kernel} is wrong .* {output} for a head size of 16"):
        check(CurrentScaling(), "fp8", 16, BF16, torch.device(device))


def test_gradients_of_the_logits_saturate_in_one_case(monkeypatch, device):
    """A conversion without `satfinite` would give NaN there."""
    largest, right = [], attention_ops.backward_kernel

    def watched(*args, dp_scale, amax_dp, **kwargs):
        found = right(*args, dp_scale=dp_scale, amax_dp=amax_dp, **kwargs)
        largest.append(float(dp_scale * amax_dp))
        return found

    monkeypatch.setattr(attention_ops, "backward_kernel", watched)
    check(CurrentScaling(), "fp8", 16, BF16, torch.device(device))
    beyond = [found > E5M2.max for found in largest]
    assert beyond == [False, False, True, True]


def test_conversion_asks_for_every_head_size(monkeypatch, device):
    asked = []
    monkeypatch.setattr(NativeAttention, "self_check", lambda self, *args: asked.append(args))
    model = model_zoo.hugging_face("Llama")
    apply_fp8(model, recipe="current", backend="native", device=device, attention=True)
    size = model.model.layers[0].self_attn.head_dim
    assert asked == [(CurrentScaling(), "fp8", size, BF16, torch.device(device))]
