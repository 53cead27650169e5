"""The decoder: initialisation, masks, cache, saving, and equality with transformers' Llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from foundry_fp8.models.fog import VARIANTS, FogConfig, FogForCausalLM
from foundry_fp8.models.fog.config import LLAMA31_ROPE_SCALING
from foundry_fp8.surgery.apply import apply_fp8


def build(variant: str, seed: int = 0, **kwargs: Any) -> FogForCausalLM:
    base = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    return FogForCausalLM(FogConfig(variant=variant, vocab_size=97, **{**base, **kwargs}))


def ids(b: int = 2, s: int = 12) -> Tensor:
    return torch.randint(0, 97, (b, s), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_saves_loads_and_generates_alike(variant: str, tmp_path: Any) -> None:
    model = build(variant).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    torch.testing.assert_close(eager(ids()).logits, model(ids()).logits, rtol=1e-4, atol=1e-5)
    cached, whole = (
        m.generate(ids(), max_new_tokens=6, do_sample=False, use_cache=cache, pad_token_id=0)
        for m, cache in ((loaded, True), (model, False))
    )
    assert torch.equal(cached, whole)


def test_llama3_is_transformers_llama() -> None:
    """The same weights give the same logits, loss and gradients."""
    ours = build("llama3")
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=ours.config.intermediate_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            rope_scaling={"rope_type": "llama3", **LLAMA31_ROPE_SCALING},
            max_position_embeddings=4096,
        )
    )
    source, target = ours.state_dict(), {}
    for name in llama.state_dict():
        part = name.replace("input_layernorm", "input_norm").replace("post_attention_layernorm", "mlp_norm")
        if ".q_proj" in name or ".k_proj" in name or ".v_proj" in name:
            fused = source[
                part.replace("q_proj", "qkv_proj")
                .replace("k_proj", "qkv_proj")
                .replace("v_proj", "qkv_proj")
                .replace("qkqkv", "qkv")
            ]
            target[name] = dict(zip("qkv", fused.split((64, 32, 32)), strict=True))[name.split(".")[-2][0]]
        elif ".gate_proj" in name or ".up_proj" in name:
            fused = source[part.replace("gate_proj", "gate_up_proj").replace(".up_proj", ".gate_up_proj")]
            target[name] = fused.chunk(2)["gate_proj" not in name]
        else:
            target[name] = source[part]
    llama.load_state_dict(target)
    a, b = ours(ids(), labels=ids()), llama(ids(), labels=ids())
    torch.testing.assert_close(a.logits, b.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    torch.testing.assert_close(
        ours.model.embed_tokens.weight.grad, llama.model.embed_tokens.weight.grad, rtol=1e-3, atol=1e-6
    )


def rms(x: Tensor, gain: Tensor | float = 1.0) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


QK = {
    "fog-max": lambda x, w, which: rms(x),
    "fog-opt": lambda x, w, which: rms(x),
    "fog-flash": lambda x, w, which: torch.tanh(w[f"self_attn.{which}_norm.alpha"] * x),
    "llama3": lambda x, w, which: x,
    "llama3-smooth-swiglu": lambda x, w, which: x,
    "olmo2": lambda x, w, which: rms(x, w[f"self_attn.{which}_norm.weight"]),
    "op1": lambda x, w, which: rms(x, w[f"self_attn.{which}_norm.weight"]),
}


def swiglu(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    gate, up = (x @ w["mlp.gate_up_proj.weight"].T).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def xielu(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    up = x @ w["mlp.up_proj.weight"].T
    ap, an = (torch.log1p(w[f"mlp.act.{name}"].exp()) for name in "pn")
    return torch.where(up > 0, ap * up**2 + 0.5 * up, (an + 0.5) * (torch.expm1(up) - up) + 0.5 * up)


def gelu(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    up = x @ w["mlp.up_proj.weight"].T
    return 0.5 * up * (1 + torch.erf(up / 2**0.5))


HIDDEN = {
    "fog-max": xielu,
    "fog-opt": gelu,
    "fog-flash": gelu,
    "llama3": swiglu,
    "llama3-smooth-swiglu": swiglu,  # its scale changes nothing without rounding
    "olmo2": swiglu,
    "op1": lambda x, w: (x @ w["mlp.up_proj.weight"].T).clamp(min=0),
}


def equations(variant: str, weights: dict[str, Tensor], x: Tensor, frequencies: list[float]) -> Tensor:
    """Logits of sections 1 and 3 of the reference in float64; 2 layers, 4 query heads of 16, 2 key heads."""
    h = weights["model.embed_tokens.weight"][x]
    if variant.startswith("fog") or variant == "op1":
        h = 50.0 * h  # 1 / sigma
    angles = torch.arange(x.shape[1]).double()[:, None, None] * torch.tensor(frequencies).double()

    def turn(x: Tensor) -> Tensor:
        z = torch.complex(x[..., :8], x[..., 8:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((z.real, z.imag), -1)

    for layer in range(2):
        prefix = f"model.layers.{layer}."
        w = {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}

        def before(h: Tensor, name: str, w: dict[str, Tensor] = w) -> Tensor:
            return rms(h, w[f"{name}.weight"]) if variant.startswith("llama3") else h

        def after(branch: Tensor, name: str, w: dict[str, Tensor] = w) -> Tensor:
            if variant.startswith("llama3"):
                return branch
            return w[f"{name}.weight"] * branch if variant == "op1" else rms(branch, w[f"{name}.weight"])

        qkv = before(h, "input_norm") @ w["self_attn.qkv_proj.weight"].T
        q, k, v = qkv.unflatten(-1, (8, 16)).split((4, 2, 2), 2)
        q, k = turn(QK[variant](q, w, "q")), turn(QK[variant](k, w, "k"))
        k, v = (torch.stack([t[:, :, head // 2] for head in range(4)], 2) for t in (k, v))
        scale = (2 / 16) ** 0.5 if variant in ("fog-max", "fog-opt") else 16**-0.5
        logits = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        hidden = torch.ones(logits.shape[-2:]).triu(1).bool()
        o = torch.einsum("bhqk,bkhd->bqhd", logits.masked_fill(hidden, -torch.inf).softmax(-1), v)
        h = h + after(o.flatten(2) @ w["self_attn.o_proj.weight"].T, "attention_post_norm")
        f = HIDDEN[variant](before(h, "mlp_norm"), w) @ w["mlp.down_proj.weight"].T
        h = h + after(f, "mlp_post_norm")
    if variant.startswith("llama3") or variant == "olmo2":
        h = rms(h, weights["model.norm.weight"])
    return h @ weights["lm_head.weight"].T


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_computes_the_equations_of_its_reference(variant: str) -> None:
    model = build(variant).double()
    with (
        torch.no_grad()
    ):  # vectors and scalars away from their initial values, so that each has to stand in its place
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            else:
                parameter.mul_(3.0 if model.config.pre_norm else 1.0)
    x = ids(2, 7)
    expected = equations(variant, model.state_dict(), x, model.model.frequencies)
    # Norms, activations and rotation compute in float32.
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-4)


def test_olmo2_is_transformers_olmo2() -> None:
    """With QK-norms over the projection, as the original has them: the same weights give the same logits."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    ours = build("olmo2", qk_norm_over="projection", rope_scaling=False)
    theirs = Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=ours.config.intermediate_size,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
        )
    )
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    source, target = ours.state_dict(), {}
    for name in theirs.state_dict():
        head, _, last = name.rpartition(".")
        module, part = head.rpartition(".")[::2]
        if part in ("q_proj", "k_proj", "v_proj"):
            q, k, v = source[f"{module}.qkv_proj.{last}"].split((64, 32, 32))
            target[name] = {"q": q, "k": k, "v": v}[part[0]]
        elif part in ("gate_proj", "up_proj"):
            gate, up = source[f"{module}.gate_up_proj.{last}"].chunk(2)
            target[name] = gate if part == "gate_proj" else up
        else:
            part = {
                "post_attention_layernorm": "attention_post_norm",
                "post_feedforward_layernorm": "mlp_post_norm",
            }.get(part, part)
            target[name] = source[f"{module}.{part}.{last}" if module else f"{part}.{last}"]
    theirs.load_state_dict(target)
    torch.testing.assert_close(ours(ids()).logits, theirs(ids()).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 4, 16])
def test_branches_start_with_one_over_the_square_root_of_the_layers(layers: int) -> None:
    for variant, expected in (("fog-max", layers**-0.5), ("olmo2", 1.0), ("op1", layers**-0.5)):
        for block in build(variant, num_hidden_layers=layers).model.layers:
            for gain in (block.attention_post_norm.weight, block.mlp_post_norm.weight):
                torch.testing.assert_close(gain, torch.full((64,), expected))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_cache_gives_the_logits_of_the_whole_sequence(variant: str) -> None:
    model = build(variant).eval()
    x = ids(2, 9)
    out = model(x[:, :4], use_cache=True)
    found = [out.logits]
    for token in range(4, 9):
        out = model(x[:, token : token + 1], past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits)
    assert out.past_key_values.get_seq_length() == 9
    kept = out.past_key_values
    keys = kept.layers[0].keys if hasattr(kept, "layers") else kept.key_cache[0]
    assert keys.shape == (2, 2, 9, 16)  # key heads alone are kept
    torch.testing.assert_close(torch.cat(found, 1), model(x).logits, rtol=1e-4, atol=1e-5)


def test_a_static_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cache_implementation(='static'|: StaticCache)"):
        build("fog-max").eval().generate(ids(1, 4), max_new_tokens=2, cache_implementation="static")


@pytest.mark.parametrize("variant", ["fog-max", "fog-flash"])
def test_initial_magnitudes_are_those_of_the_reference(variant: str) -> None:
    """Residual RMS^2 after layer l of about 1 + 2 l / L; untied logits of std sigma sqrt(3 d)."""
    model = build(variant, hidden_size=512, num_hidden_layers=8, num_attention_heads=4)
    with torch.no_grad():
        out = model(ids(4, 32), output_hidden_states=True)
    for layer, hidden in enumerate(out.hidden_states[:-1]):
        assert float(hidden.square().mean()) == pytest.approx(1 + 2 * layer / 8, rel=0.12)
    assert float(out.logits.std()) == pytest.approx(0.02 * (3 * 512) ** 0.5, rel=0.12)


def test_initial_weights_are_smaller_where_a_branch_ends() -> None:
    model = build("llama3", hidden_size=256, num_hidden_layers=8)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            std = 0.02 / 4 if ("o_proj" in name or "down_proj" in name) else 0.02
            assert float(parameter.std()) == pytest.approx(std, rel=0.05), name


def test_tied_logit_of_the_own_token_is_what_the_warning_says() -> None:
    with pytest.warns(UserWarning, match="= 10.2"):
        model = build(
            "fog-opt",
            hidden_size=512,
            num_attention_heads=4,
            tie_word_embeddings=True,
            initializer_range=0.02,
        )
    x = ids()
    with torch.no_grad():
        own = 50 * (model.lm_head.weight[x].square().sum(-1))
    assert float(own.mean()) == pytest.approx(512 * 0.02, rel=0.1)


def test_meta_initialisation_leaves_nothing_uninitialised() -> None:
    for variant in VARIANTS:
        with torch.device("meta"):
            model = build(variant)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        model.apply(model._init_weights)
        expected = dict(build(variant).named_parameters())
        for name, parameter in model.named_parameters():
            assert torch.isfinite(parameter).all(), name
            if parameter.dim() == 1:
                assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_documents_padding_and_window_are_kept_apart(implementation: str) -> None:
    model = build("fog-max").eval()
    model.config._attn_implementation = implementation
    x = ids(1, 12)
    alone = model(x[:, :5]).logits
    documents = torch.tensor([[0] * 5 + [1] * 7])
    packed = model(x, sequence_id=documents)
    torch.testing.assert_close(packed.logits[:, :5], alone, rtol=1e-4, atol=1e-5)
    # RoPE sees differences of positions only, so the second document does not know where it stands.
    torch.testing.assert_close(packed.logits[:, 5:], model(x[:, 5:]).logits, rtol=1e-3, atol=1e-4)

    mask = torch.tensor([[0] * 4 + [1] * 8])
    padded = model(x, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(padded[:, 4:], model(x[:, 4:]).logits, rtol=1e-3, atol=1e-4)

    model.config.sliding_window = 3
    changed = x.clone()
    changed[0, 2] = (changed[0, 2] + 1) % 97
    touched = (model(x).logits - model(changed).logits).abs().amax(-1)[0] > 0
    # Two layers of a window of three reach four positions further.
    assert touched.tolist() == [False] * 2 + [True] * 5 + [False] * 5


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for checkpoint in (False, True):
        model = build("fog-max").train()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids(), labels=ids()).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_probabilities_only_from_eager_attention() -> None:
    model = build("fog-max").eval()
    with pytest.raises(ValueError, match="output_attentions: the sdpa attention keeps no probabilities"):
        model(ids(), output_attentions=True)
    model.config._attn_implementation = "eager"
    out = model(ids(), output_attentions=True, output_hidden_states=True)
    assert [a.shape for a in out.attentions] == [(2, 4, 12, 12)] * 2 and len(out.hidden_states) == 3
    torch.testing.assert_close(out.attentions[0].sum(-1), torch.ones(2, 4, 12))


@pytest.mark.parametrize("activation", ["smooth_swiglu", "smooth_swiglu_fog"])
def test_smooth_swiglu_in_fp8_takes_an_outlier_better_than_swiglu(activation: str) -> None:
    """One channel of the linear branch is a million times the others (they underflow): the paper's form gives it a scale of its own.

    FOG's form has one scale a token, which does nothing for a channel; it has to stay as good as SwiGLU.
    """
    errors = {}
    for kind in ("swiglu", activation):
        model = build("custom", activation=kind, num_hidden_layers=1)
        mlp = model.model.layers[0].mlp
        with torch.no_grad():
            mlp.gate_up_proj.weight[mlp.down_proj.in_features + 5] *= 1e6
            mlp.down_proj.weight[:, 5] /= 1e6
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            exact = mlp(x)
        apply_fp8(model.train(), recipe="current", include=["*.down_proj"])
        y = mlp(x)
        errors[kind] = float((y - exact).norm() / exact.norm())
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)))
        assert mlp.down_proj.ledger.calls["wgrad", "fp8"] == 1
        assert torch.isfinite(mlp.down_proj.weight.grad).all() and mlp.down_proj.weight.grad.abs().max() > 0
    if activation == "smooth_swiglu":
        assert errors["smooth_swiglu"] < 0.5 * errors["swiglu"]
    else:
        assert errors["smooth_swiglu_fog"] < 1.2 * errors["swiglu"]
