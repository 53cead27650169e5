"""The equations of FOG's parts, each against an independent form of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from foundry_fp8.models.fog.attention import build_qk_norm
from foundry_fp8.models.fog.config import LLAMA31_ROPE_SCALING, FogConfig
from foundry_fp8.models.fog.feedforward import (
    MLP,
    XIELU,
    GatedMLP,
    smooth_swiglu,
    smooth_swiglu_fog,
)
from foundry_fp8.models.fog.norms import LayerScale, RMSNorm, TanhNorm
from foundry_fp8.models.fog.rope import rope_frequencies, rope_tables, rotate


def test_xielu_takes_its_published_values() -> None:
    act = XIELU()
    assert float(act.p) == pytest.approx(0.203382, abs=1e-6)
    assert float(act.n) == pytest.approx(-1.050226, abs=1e-6)
    x = torch.tensor([1.0, 2.0, -1.0, -2.0, -4.0, 0.0])
    expected = torch.tensor([1.3, 4.2, -0.205696, -0.091732, 0.414653, -8e-7])
    torch.testing.assert_close(act(x), expected, rtol=1e-5, atol=1e-6)
    low = torch.tensor([-0.98083])
    assert float(act(low)) == pytest.approx(-0.20575, abs=1e-5)


def test_xielus_gradients_are_exact() -> None:
    """In x: 2 ap x + beta, and an (exp(x) - 1) + beta. In p and n: through softplus, by float64 differences."""
    act = XIELU().double()
    x = torch.cat([torch.linspace(-6, -0.1, 40), torch.linspace(0.1, 4, 40)]).double().requires_grad_()

    # The module computes in float32; the definition here in float64.
    def definition(x: torch.Tensor, p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        ap, an = F.softplus(p), 0.5 + F.softplus(n)
        return torch.where(x > 0, ap * x**2 + 0.5 * x, an * (torch.expm1(x) - x) + 0.5 * x)

    dy = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    act(x).backward(dy)
    ap = an = 0.8
    slope = torch.where(x > 0, 2 * ap * x + 0.5, an * (x.exp() - 1) + 0.5)
    torch.testing.assert_close(x.grad, dy * slope, rtol=2e-6, atol=1e-6)
    p, n = (t.detach().clone().requires_grad_() for t in (act.p, act.n))
    definition(x.detach(), p, n).backward(dy)
    torch.testing.assert_close(act.p.grad, p.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(act.n.grad, n.grad, rtol=1e-5, atol=1e-6)
    assert torch.autograd.gradcheck(definition, (x.detach()[::7].requires_grad_(), p, n))


def test_xielu_keeps_the_input_dtype_and_its_own_float32() -> None:
    act = XIELU()
    assert act(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert act.p.dtype == torch.float32


def test_rmsnorm_normalises_in_float32_and_applies_its_gain() -> None:
    x = torch.randn(4, 7, 32) * torch.logspace(-3, 3, 7)[:, None]
    norm = RMSNorm(32, gain=0.25)
    expected = 0.25 * x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (32,), norm.weight, 1e-5))
    frozen = RMSNorm(32, gain=0.25, trainable=False)
    assert not list(frozen.parameters())
    torch.testing.assert_close(frozen(x), norm(x))


def test_layer_scale_multiplies_by_its_vector() -> None:
    scale = LayerScale(8, gain=0.5)
    scale.weight.data[3] = 2.0
    assert scale(torch.ones(2, 8)).tolist() == [[0.5, 0.5, 0.5, 2.0, 0.5, 0.5, 0.5, 0.5]] * 2


def test_tanh_norm_trains_one_alpha() -> None:
    norm = TanhNorm(alpha=0.7)
    x = torch.randn(2, 3, 4, 8)
    torch.testing.assert_close(norm(x), torch.tanh(0.7 * x))
    norm(x).sum().backward()
    expected = (x * (1 - torch.tanh(0.7 * x) ** 2)).sum()
    torch.testing.assert_close(norm.alpha.grad, expected[None])  # type: ignore[union-attr]
    assert [p.shape for p in norm.parameters()] == [(1,)]
    assert not list(TanhNorm(trainable=False).parameters())


def small(**kwargs: Any) -> FogConfig:
    base = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
    return FogConfig(**{**base, **kwargs})


def test_qk_norms_work_by_head_or_by_projection() -> None:
    x = torch.randn(2, 5, 4, 16) * torch.tensor([1.0, 5.0, 0.1, 2.0])[:, None]
    by_head = build_qk_norm(small(variant="fog-max"), 4)(x)
    torch.testing.assert_close(by_head.norm(dim=-1), torch.full((2, 5, 4), 4.0), rtol=1e-2, atol=0)
    olmo = build_qk_norm(small(variant="olmo2", qk_norm_over="projection"), 4)
    assert olmo.weight.shape == (64,)  # type: ignore[union-attr]
    flat = x.flatten(-2)
    torch.testing.assert_close(olmo(x).flatten(-2), F.rms_norm(flat, (64,), eps=1e-5))
    trainable = build_qk_norm(small(variant="olmo2"), 4)
    assert [p.shape for p in trainable.parameters()] == [(16,)]


def test_rope_is_llama31s() -> None:
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        rope_theta=500000.0,
        max_position_embeddings=131072,
        rope_scaling={"rope_type": "llama3", **LLAMA31_ROPE_SCALING},
    )
    expected, factor = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    frequencies = rope_frequencies(128, 500000.0, LLAMA31_ROPE_SCALING)
    assert factor == 1.0
    torch.testing.assert_close(torch.tensor(frequencies), expected, rtol=1e-6, atol=0)
    assert rope_frequencies(128, 500000.0, False)[-1] == pytest.approx(frequencies[-1] * 8)

    x = torch.randn(2, 9, 3, 128)
    positions = torch.arange(9).expand(2, 9) + torch.tensor([[0], [100]])
    angles = positions[..., None].float() * expected
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)
    ours = rotate(x, rope_tables(positions, frequencies))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # float32 angles of 100 radians
    torch.testing.assert_close(ours.norm(dim=-1), x.norm(dim=-1))


def test_mlps_compute_their_equations() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16)
    for name, act in (("gelu", F.gelu), ("relu", F.relu)):
        mlp = MLP(16, 24, name)  # type: ignore[arg-type]
        torch.testing.assert_close(mlp(x), act(x @ mlp.up_proj.weight.T) @ mlp.down_proj.weight.T)
    gated = GatedMLP(16, 24, "swiglu")
    gate, up = gated.gate_up_proj.weight.chunk(2)
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ gated.down_proj.weight.T
    torch.testing.assert_close(gated(x), expected)


@pytest.mark.parametrize("kind", ["smooth_swiglu", "smooth_swiglu_fog"])
def test_smooth_swiglu_is_swiglu_without_rounding(kind: Any) -> None:
    """Forward and every gradient equal SwiGLU's, in float64."""
    torch.manual_seed(0)
    smooth, plain = (GatedMLP(16, 24, k).double() for k in (kind, "swiglu"))
    plain.load_state_dict(smooth.state_dict())
    x = (torch.randn(3, 5, 16) * torch.logspace(-2, 2, 5)[:, None]).double()
    dy = torch.randn(3, 5, 16).double()
    results = []
    for mlp in (smooth, plain):
        leaf = x.clone().requires_grad_()
        y = mlp(leaf)
        y.backward(dy)
        results.append([y, leaf.grad, *(p.grad for p in mlp.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_smooth_swiglu_scales_by_channel_and_fogs_by_token() -> None:
    gate, up = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    h, s = smooth_swiglu(gate, up)
    assert s.tolist() == up.abs().amax((0, 1)).tolist()
    torch.testing.assert_close(h * s, F.silu(gate) * up)
    h, s = smooth_swiglu_fog(gate, up)
    assert s.shape == (2, 3, 1) and torch.equal(s[..., 0], gate.abs().amax(-1))
    torch.testing.assert_close(h * s, F.silu(gate) * up)
    h, s = smooth_swiglu_fog(torch.zeros(1, 4), torch.zeros(1, 4))
    assert torch.equal(h, torch.zeros(1, 4)) and math.isfinite(float(s))


def test_the_mpt_forms_compute_the_same_equations() -> None:
    from foundry_fp8.models.fog.mpt_parts import FogMPTAttention, build_fog_ffn, build_smooth_swiglu_ffn

    x = torch.randn(2, 6, 64)

    def rms(x: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    for name, act in (("gelu", F.gelu), ("relu", F.relu), ("xielu", XIELU())):
        ffn = build_fog_ffn(64, 2, ffn_act=name, post_norm_gain=0.25)
        expected = rms(act(x @ ffn.up_proj.weight.T) @ ffn.down_proj.weight.T, 0.25)
        torch.testing.assert_close(ffn(x), expected, rtol=1e-4, atol=1e-5)
    smooth = build_smooth_swiglu_ffn(64, 2)
    expected = (
        F.silu(x @ smooth.gate_proj.weight.T) * (x @ smooth.up_proj.weight.T) @ smooth.down_proj.weight.T
    )
    torch.testing.assert_close(smooth(x), expected, rtol=1e-4, atol=1e-5)

    for kind, phi in (("rms", rms), ("tanh", lambda t: torch.tanh(0.7 * t)), ("none", lambda t: t)):
        attention = FogMPTAttention(
            64,
            4,
            kv_n_heads=2,
            qk_norm=kind,
            tanh_alpha_init=0.7,
            post_norm_gain=0.5,
            attn_impl="torch",
            bias=False,
        )
        q, k, v = attention.Wqkv(x).unflatten(-1, (8, 16)).split((4, 2, 2), 2)
        k, v = (t.repeat_interleave(2, 2) for t in (phi(k), v))
        logits = torch.einsum("bqhd,bkhd->bhqk", phi(q), k) / 4
        s = logits.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", s, v).flatten(2) @ attention.out_proj.weight.T
        torch.testing.assert_close(attention(x)[0], rms(out, 0.5), rtol=1e-4, atol=1e-5)


def test_an_adapter_on_a_weight_that_is_merged_into_is_refused() -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    for targets, ok in ((["gate_up_proj"], True), (["gate_up_proj", "down_proj"], False)):
        mlp = torch.nn.ModuleDict({"mlp": GatedMLP(16, 24, "smooth_swiglu")})
        adapted = peft.get_peft_model(mlp, peft.LoraConfig(r=4, target_modules=targets)).base_model.model[
            "mlp"
        ]
        if ok:
            assert adapted(torch.randn(3, 16)).shape == (3, 16)
        else:
            with pytest.raises(RuntimeError, match=r"model\.activation: smooth_swiglu .*Leave down_proj out"):
                adapted(torch.randn(3, 16))
