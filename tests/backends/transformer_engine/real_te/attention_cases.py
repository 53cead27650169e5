"""FP8 attention over Transformer Engine's own Python, cuDNN's kernel computed by our definition. Run by test_real_te.py.

What this shows: that TE's casts and its kernel get our scales, record into our amaxes, and see the right layouts and mask. What
it cannot show is what cuDNN computes.
"""

import importlib
import os
import sys

import pytest
import te_on_cpu
import torch

from foundry_fp8.backends import load_backend
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import Quantized, quantize_tensor
from foundry_fp8.numerics.recipes import CurrentScaling, DelayedScaling
from foundry_fp8.surgery.attention import FP8AttentionState, plan_attention
from tests.backends.attention_definition import attention_reference

B, H, HK, S, D = 2, 4, 2, 128, 128
RECIPE = DelayedScaling(amax_history_len=4)


class Kernel:
    """cuDNN's fused FP8 attention: takes and gives what TE's wrappers say."""

    def __init__(self, te):
        tensors = importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")
        self.Float8Tensor = tensors.Float8Tensor
        self.storage = getattr(tensors, "Float8TensorStorage", None) or tensors.Float8TensorBase
        self.quantizer = tensors.Float8Quantizer
        # Log-sum-exp, or maximum and inverse sum.
        self.statistics = 1 if te_on_cpu.release(os.environ["TE_WHEEL"]) >= (2, 15) else 2
        extension = sys.modules["transformer_engine_torch"]
        extension.fused_attn_fwd = self.forward
        extension.fused_attn_bwd = self.backward
        extension.dequantize = self.dequantize
        extension.get_cudnn_version = lambda: 91900
        importlib.import_module("transformer_engine.pytorch.cpp_extensions").get_cudnn_version = lambda: 91900
        modules = [m for n, m in sys.modules.items() if n.startswith("transformer_engine.pytorch") and m]
        for module in modules:
            if isinstance(module.__dict__.get("AttnMaskType"), dict):
                module.AttnMaskType.update({name: name for name in ("no_mask", "causal")})
        utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
        fp8_backend = extension.NVTE_Fused_Attn_Backend.NVTE_FP8
        # cuDNN would be asked; the answer is yes: flash, its version, fused, which, unfused, the list.
        utils.get_attention_backend = lambda params: (
            False,
            None,
            True,
            fp8_backend,
            False,
            [False, True, False],
        )

    def values(self, args):
        tensors = [a for a in args if isinstance(a, self.Float8Tensor | self.storage)]
        quantizers = [a for a in args if isinstance(a, self.quantizer)]
        mask = AttentionMask(causal="causal" in [a for a in args if isinstance(a, str)])
        return tensors, quantizers, mask

    def as_quantized(self, x):
        fmt = E4M3 if x._fp8_dtype.name == "kFloat8E4M3" else E5M2
        data = x._data.view(fmt.dtype).transpose(1, 2)
        return Quantized(data, x._scale_inv.view(()), None, fmt, torch.zeros(()))

    def cast(self, quantizer, x):
        fmt = E4M3 if quantizer.dtype.name == "kFloat8E4M3" else E5M2
        torch.fmax(quantizer.amax, x.abs().max().view(1), out=quantizer.amax)
        return quantize_tensor(x, quantizer.scale.view(()), fmt)

    def as_te(self, found, quantizer):
        data = found.data.transpose(1, 2).contiguous().view(torch.uint8)
        return self.Float8Tensor(
            shape=data.shape,
            dtype=torch.bfloat16,
            data=data,
            fp8_scale_inv=found.scale_inv.view(1),
            fp8_dtype=quantizer.dtype,
            quantizer=quantizer,
        )

    def dequantize(self, x, dtype):
        fmt = E4M3 if x._fp8_dtype.name == "kFloat8E4M3" else E5M2
        torch_dtype = {
            int(c): d
            for d, c in importlib.import_module("transformer_engine.pytorch.constants").TE_DType.items()
        }
        return (x._data.view(fmt.dtype).float() * x._scale_inv).to(torch_dtype[int(dtype)])

    def run(self, tensors, do, mask, scale, cast):
        given = dict(zip("qkv", map(self.as_quantized, tensors), strict=False))

        def quantize(name, x):
            return given[name] if name in given else cast(name, x)

        q, k, v = (given[n].data.float() for n in "qkv")
        return attention_reference(q, k, v, do, quantize=quantize, mask=mask, softmax_scale=scale)

    def forward(self, *args):
        tensors, (s, o), mask = self.values(args)
        kept = {}

        def cast(name, x):
            kept[name] = self.cast({"s": s, "o": o}[name], x)
            return kept[name]

        self.run(tensors[:3], None, mask, args[3], cast)
        statistics = [torch.zeros(B, H, S, 1)] * self.statistics
        return self.as_te(kept["o"], o), *statistics, torch.zeros(2, dtype=torch.int64)

    def backward(self, *args):
        tensors, (s, dp, dqkv), mask = self.values(args)
        do = self.as_quantized(tensors[4])
        kept = {}

        def cast(name, x):
            if name == "do":
                return do
            if name == "o":
                return kept.setdefault(name, quantize_tensor(x, torch.ones(()), E4M3))
            kept[name] = self.cast({"s": s, "dp": dp}.get(name, dqkv), x)
            return kept[name]

        self.run(tensors[:3], do.data.float(), mask, args[2], cast)
        return [self.as_te(kept[n], dqkv) for n in ("dq", "dk", "dv")]


@pytest.fixture(scope="module")
def kernel():
    import transformer_engine.pytorch as te

    assert te.DotProductAttention
    torch.backends.cudnn.version = lambda: 91900
    return Kernel(te)


def build(backend):
    attention = FP8DotProductAttention(fqn="attn", recipe=RECIPE, backend=load_backend(backend).attention())
    attention.bias = None
    holder = torch.nn.Linear(1, 1)
    state = FP8AttentionState(holder, {"attn": attention}, RECIPE)
    return attention, state


def step(attention, seed, causal=True):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, h, S, D, generator=generator).bfloat16().requires_grad_() for h in (H, HK, HK))
    do = (torch.randn(B, H, S, D, generator=generator) * 1e-2).bfloat16()
    out = attention(q, k, v, mask=AttentionMask(causal=causal), softmax_scale=D**-0.5)
    out.backward(do)
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("causal", [True, False])
def test_transformer_engine_is_the_emulation_with_one_state(kernel, causal):
    """Output, gradients, scales and amax histories over three steps.

    The kernel here is our definition, which adds in float64; the emulation adds in float32, which moves a few probabilities to the
    neighbouring FP8 value, and with each the row of the output that it weighs.
    """
    (ours, state), (emulated, expected) = build("transformer_engine"), build("emulated")
    for seed in range(3):
        for s in (state, expected):
            s.delayed.update()
        a, b = step(ours, seed, causal), step(emulated, seed, causal)
        for name, x, y in zip(("o", "dq", "dk", "dv"), a, b, strict=True):
            assert (x == y).float().mean() > 0.95, f"step {seed}: {name}"
            assert (x - y).float().norm() < 0.01 * y.float().norm(), f"step {seed}: {name}"
        torch.testing.assert_close(
            state.delayed.amax_history, expected.delayed.amax_history, rtol=0.02, atol=0
        )
        torch.testing.assert_close(state.delayed.scale, expected.delayed.scale, rtol=0.02, atol=0)
    assert (state.delayed.amax_history[-1] > 0).all() and state.delayed.scale.unique().numel() > 3
    assert "_te_attention" in ours.__dict__ and not list(ours.children()) and not ours.state_dict()


def test_evaluation_records_nothing(kernel):
    attention, state = build("transformer_engine")
    attention.evaluate = "fp8"
    attention.eval()
    with torch.no_grad():
        q, k, v = (torch.randn(B, h, S, D).bfloat16() for h in (H, HK, HK))
        attention(q, k, v, mask=AttentionMask(causal=True), softmax_scale=0.1)
    assert float(state.delayed.amax_history.max()) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 192}, "head_dim is 192"),
        ({"dtype": torch.float32}, r"its inputs are torch\.float32.*Set precision: amp_bf16"),
        (
            {"mask": AttentionMask(causal=True, documents=(torch.arange(S) // 50).expand(B, S))},
            "document masks",
        ),
        ({"mask": AttentionMask(key_padding=torch.arange(S).expand(B, S) > 3)}, "the batch is padded"),
    ],
)
def test_what_cudnn_cannot_do_is_an_error_that_says_so(kernel, changes, message):
    attention, _ = build("transformer_engine")
    d = changes.get("head_dim", D)
    q, k, v = (torch.randn(B, h, S, d).to(changes.get("dtype", torch.bfloat16)) for h in (H, HK, HK))
    with pytest.raises(
        RuntimeError, match=rf"attn: FP8 attention cannot run on the transformer_engine backend: .*{message}"
    ):
        attention(q, k, v, mask=changes.get("mask", AttentionMask(causal=True)), softmax_scale=0.1)


def test_a_deterministic_process_runs_where_te_can_and_is_refused_where_it_cannot(kernel, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    attention, _ = build("transformer_engine")
    q, k, v = (torch.randn(B, h, S, D).bfloat16() for h in (H, HK, HK))
    if te_on_cpu.release(os.environ["TE_WHEEL"]) >= (2, 13):
        assert attention(q, k, v, mask=AttentionMask(causal=True), softmax_scale=0.1).shape == q.shape
    else:
        with pytest.raises(
            RuntimeError, match=r"attn: .*deterministic algorithms.*2\.13 on \(here 9\.19\.0 and"
        ):
            attention(q, k, v, mask=AttentionMask(causal=True), softmax_scale=0.1)


def test_a_mask_that_hides_nothing_is_no_mask(kernel):
    attention, _ = build("transformer_engine")
    q, k, v = (torch.randn(B, h, S, D).bfloat16() for h in (H, HK, HK))
    mask = AttentionMask(causal=True, key_padding=torch.ones(B, S).bool(), documents=torch.zeros(B, S).long())
    a = attention(q, k, v, mask=mask, softmax_scale=0.1)
    assert torch.equal(a, attention(q, k, v, mask=AttentionMask(causal=True), softmax_scale=0.1))


def test_a_head_size_without_a_kernel_is_left_out_at_conversion(kernel):
    class Attention(torch.nn.Module):
        def __init__(self, head_dim):
            super().__init__()
            self.head_dim = head_dim

        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    model = torch.nn.Sequential(Attention(128), Attention(192))
    plan = plan_attention(model, recipe=RECIPE, runner=load_backend("transformer_engine").attention())
    assert list(plan.converted) == ["0"] and "head_dim is 192" in plan.rows[1].reason
    with pytest.raises(ConfigError, match="with the delayed recipe alone, not current"):
        plan_attention(model, recipe=CurrentScaling(), runner=load_backend("transformer_engine").attention())
