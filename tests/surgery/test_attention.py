"""FP8 attention in real models: MPT, Hugging Face, a plain torch module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling
from foundry_fp8.surgery.attention import FP8AttentionState
from tests import model_zoo
from tests.surgery.conversion import convert_attention

RECIPES = [DelayedScaling(amax_history_len=4), CurrentScaling()]


class PlainAttention(nn.Module):
    """What anyone writes who uses torch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Plain(nn.Module):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PlainAttention(), PlainAttention()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def plain() -> tuple[nn.Module, dict[str, Any]]:
    return Plain(), {"x": torch.randn(2, 16, 32)}


def labelled_text() -> dict[str, Any]:
    ids = torch.randint(0, 64, (2, 16))
    return {"input_ids": ids, "labels": ids}


def llama(name: str = "Llama") -> tuple[nn.Module, dict[str, Any]]:
    return model_zoo.hugging_face(name), labelled_text()


DOCUMENTS = (torch.arange(16) // 6).expand(2, 16)


def fog() -> tuple[nn.Module, dict[str, Any]]:
    return model_zoo.fog(sliding_window=9), {**labelled_text(), "sequence_id": DOCUMENTS}


def mpt() -> tuple[nn.Module, dict[str, Any]]:
    attention = {
        "attn_type": "grouped_query_attention",
        "kv_n_heads": 2,
        "attn_uses_sequence_id": True,
        "sliding_window_size": 8,
    }
    ids = torch.randint(0, 64, (2, 16))
    batch = {"input_ids": ids, "sequence_id": DOCUMENTS, "attention_mask": torch.ones_like(ids).bool()}
    return model_zoo.mpt(attention), batch


MODELS = {"plain": plain, "llama": llama, "mistral": lambda: llama("Mistral"), "fog": fog, "mpt": mpt}


def output_and_gradients(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    model.zero_grad()
    out = model(**batch)
    out = out if isinstance(out, Tensor) else out.logits
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(out.device) * 1e-3)
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("recipe", RECIPES, ids=["delayed", "current"])
@pytest.mark.parametrize("name", MODELS)
def test_converted_models_stay_near_and_run_fp8(name: str, recipe: Any) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    if name in ("llama", "mistral", "fog"):  # whose initial weights are so small that attention is uniform
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    model.train()
    keys = list(model.state_dict())
    exact = output_and_gradients(model, batch)
    rows, converted = convert_attention(model, recipe=recipe)
    assert list(model.state_dict()) == keys
    assert [row.action for row in rows] == ["converted"] * 2 and len(converted) == 2
    for _ in range(2):  # the first pass sets the scales
        found = output_and_gradients(model, batch)
    # Not the same (it is quantised), and as near as three to five mantissa bits in two GEMMs a layer allow.
    assert len(found) == len(exact)
    assert not torch.equal(found[0], exact[0])
    assert (found[0] - exact[0]).norm() / exact[0].norm() < 0.1
    whole = [torch.cat([x.flatten() for x in side[1:]]) for side in (found, exact)]
    assert (whole[0] - whole[1]).norm() / whole[1].norm() < 0.25
    for attention in converted.values():
        assert attention.ledger.calls["fprop", "fp8"] == 4 and attention.ledger.calls["dgrad", "fp8"] == 8


@pytest.mark.parametrize("name", MODELS)
def test_the_mask_of_the_host_arrives(name: str) -> None:
    """A change of a token changes the same positions of the output with FP8 attention as without."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.eval()
    changed = copy.deepcopy(batch)
    first = next(iter(changed.values()))
    first[:, 7] = (first[:, 7] + 1) % 64 if first.dtype == torch.int64 else first[:, 7] + 1

    def touched() -> Tensor:
        with torch.no_grad():
            a, b = (model(**x) for x in (batch, changed))
        a, b = (x if isinstance(x, Tensor) else x.logits for x in (a, b))
        return ((a - b).abs().amax(-1) > 0)[0]

    exact = touched()
    # Fixed scales, so that an amax that moves with the token does not touch every position.
    convert_attention(model, recipe=DelayedScaling(), evaluate="fp8")
    assert exact[7] and not exact[:7].any()
    assert torch.equal(touched(), exact)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_in_high_precision_is_unchanged(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.eval()

    def logits() -> Tensor:
        with torch.no_grad():
            out = model(**batch)
        return out if isinstance(out, Tensor) else out.logits

    before = logits()
    convert_attention(model, recipe=DelayedScaling())
    torch.testing.assert_close(logits(), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "fog"])
def test_generation_with_a_cache_equals_generation_without(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.eval()
    convert_attention(model, recipe=DelayedScaling(), evaluate="fp8")
    ids = batch["input_ids"][:, :8]
    runs = [
        model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=cache, pad_token_id=0)
        for cache in (True, False)
    ]
    assert torch.equal(*runs)


def test_mpt_generates_with_a_cache() -> None:
    torch.manual_seed(0)
    model, batch = mpt()
    model.eval()
    convert_attention(model, recipe=DelayedScaling(), evaluate="fp8")
    ids = batch["input_ids"][:, :8]
    mask = torch.ones_like(ids).bool()
    with torch.no_grad():
        whole = model(input_ids=ids, attention_mask=mask, sequence_id=torch.zeros_like(ids)).logits
        past = model(
            input_ids=ids[:, :7],
            attention_mask=mask[:, :7],
            sequence_id=torch.zeros_like(ids[:, :7]),
            use_cache=True,
        ).past_key_values
        last = model(
            input_ids=ids[:, 7:], attention_mask=mask, sequence_id=torch.zeros_like(ids), past_key_values=past
        ).logits
    torch.testing.assert_close(last[:, -1], whole[:, -1], rtol=1e-4, atol=1e-5)


def test_state_updates_by_forward_and_round_trips() -> None:
    torch.manual_seed(0)
    model, batch = plain()
    model.train()
    other = copy.deepcopy(model)
    convert_attention(model, recipe=RECIPES[0])
    state = FP8AttentionState.of(model)
    assert state is not None
    for _ in range(3):
        model(**batch).sum().backward()
    history = state.delayed.amax_history
    assert (history[-2:] > 0).all() and (history[:1] >= 0).all()
    state.update()
    saved = state.state_dict()
    convert_attention(other, recipe=RECIPES[0])
    FP8AttentionState.of(other).load_state_dict(saved)  # type: ignore[union-attr]
    a, b = (output_and_gradients(m, batch) for m in (model, other))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_foreign_or_damaged_state_is_refused() -> None:
    model, _ = plain()
    convert_attention(model, recipe=RECIPES[0])
    state = FP8AttentionState.of(model)
    assert state is not None
    good = state.state_dict()
    with pytest.raises(RuntimeError, match="FP8 attention state was made by the recipe"):
        state.load_state_dict({**good, "recipe": CurrentScaling().to_dict()})
    with pytest.raises(RuntimeError, match="FP8 attention state is not readable: it lacks slots"):
        state.load_state_dict({key: value for key, value in good.items() if key != "slots"})
    with pytest.raises(RuntimeError, match="FP8 attention state has slots"):
        state.load_state_dict({**good, "slots": ["q"]})
    with pytest.raises(RuntimeError, match=r"another model or selection.*layers\.1"):
        state.load_state_dict({**good, "modules": {"layers.0": good["modules"]["layers.0"]}})
    good["modules"]["layers.1"]["scale"][2] = torch.nan
    with pytest.raises(RuntimeError, match=r"layers\.1 is damaged"):
        state.load_state_dict(good)


def test_selection_and_its_errors() -> None:
    model, _ = plain()
    rows, converted = convert_attention(model, recipe=RECIPES[0], exclude=["layers.1"])
    assert [row.action for row in rows] == ["converted", "skipped"] and list(converted) == ["layers.0"]
    model, _ = plain()
    _, converted = convert_attention(model, recipe=RECIPES[0], kept_blocks={0})
    assert list(converted) == ["layers.1"] and "recipe=delayed" in repr(converted["layers.1"])
    with pytest.raises(
        ConfigError, match=r"attention\.exclude: pattern 'layer\.1' matches none.*Did you mean"
    ):
        convert_attention(plain()[0], recipe=RECIPES[0], exclude=["layer.1"])
    with pytest.raises(ConfigError, match="the block recipe has no FP8 attention"):
        convert_attention(plain()[0], recipe=BlockScaling())
    with pytest.raises(ConfigError, match="no attention was converted"):
        convert_attention(nn.Sequential(nn.Linear(4, 4)), recipe=RECIPES[0])
    with pytest.raises(ConfigError, match="converted already"):
        convert_attention(model, recipe=RECIPES[0], exclude=["layers.0"])


def test_soft_capping_is_left_out_with_a_reason() -> None:
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    model = MPTForCausalLM(
        MPTConfig(
            d_model=32,
            n_heads=2,
            n_layers=1,
            vocab_size=64,
            attn_config={"attn_impl": "torch", "attn_logit_softcapping": 30.0},
        )
    )
    with pytest.raises(ConfigError, match="attn_logit_softcapping is not part of FP8 attention"):
        convert_attention(model, recipe=RECIPES[0])


def test_torch_attention_of_uneven_causal_shape_is_refused() -> None:
    attention = FP8DotProductAttention(fqn="a", recipe=CurrentScaling(), backend=EmulatedAttention())
    from foundry_fp8.surgery.attention_hosts import _SDPAMode

    with _SDPAMode(attention), pytest.raises(RuntimeError, match="as many queries as keys"):
        F.scaled_dot_product_attention(
            torch.ones(1, 1, 2, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), is_causal=True
        )
