"""Native FP8 attention as a module: against exact attention in float64, beside the emulation of TE's definition, and its state."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from foundry_fp8.backends import load_attention_backend
from foundry_fp8.layers.attention import FP8DotProductAttention, attention_format, attention_slots
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling
from foundry_fp8.observe.operand_health import ATTENTION, HealthProbe
from tests.backends.attention_masks import common_masks
from tests.kernels.interpreter import DEVICE
from tests.surgery.conversion import convert_attention
from tests.surgery.test_attention import MODELS, output_and_gradients

B, H, HK, S, D = 2, 4, 2, 96, 32
SCALE = D**-0.5
RECIPES = (DelayedScaling(amax_history_len=2), CurrentScaling())
PLACE = torch.arange(S, device=DEVICE)
MASKS = {
    **common_masks(B, S, DEVICE),
    "documents, padded": AttentionMask(
        causal=True,
        documents=torch.where(PLACE < S - 9, PLACE // 31, -1).expand(B, S),
        key_padding=(PLACE < S - 9).expand(B, S),
    ),
}


def inputs(dtype=torch.float32, keys=S):
    generator = torch.Generator().manual_seed(0)

    def draw(heads, length, size):
        # Every head has a range of its own, so that a mixed-up head or scale shows.
        spread = torch.linspace(0.3, 1.5, heads)[None, :, None, None] * size
        x = torch.randn(B, length, heads, D, generator=generator).transpose(1, 2)
        return (x * spread).to(DEVICE, dtype)

    return draw(H, S, 2.0), draw(HK, keys, 1.5), draw(HK, keys, 0.7), draw(H, S, 1e-3)


def make(recipe, backend="native", **options):
    attention = FP8DotProductAttention(
        fqn="block.attn", recipe=recipe, backend=load_attention_backend(backend), **options
    )
    names = attention_slots(recipe)
    timing = recipe if isinstance(recipe, DelayedScaling) else DelayedScaling(amax_history_len=2)
    state = DelayedScalingState(timing, [attention_format(recipe, name).max for name in names])
    state.to(torch.device(DEVICE))
    attention.slots = {name: state.slot(i) for i, name in enumerate(names)}
    return attention, state


def on(device, model, batch):
    return model.to(device), {name: value.to(device) for name, value in batch.items()}


def run(attention, q, k, v, do, mask, function=None):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = (function or attention)(*leaves, mask=mask, softmax_scale=SCALE)
    out.backward(do)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def warmed(recipe, backend, given, mask):
    """Three passes, so that delayed scales have followed."""
    attention, state = make(recipe, backend)
    for _ in range(3):
        state.update()
        found = run(attention, *given, mask)
    return found, state, attention


def exact(q, k, v, do, mask):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group = H // HK
    dense = mask.dense(S, k.shape[2], q.device, torch.float64)
    out = F.scaled_dot_product_attention(
        leaves[0], *(x.repeat_interleave(group, 1) for x in leaves[1:]), attn_mask=dense, scale=SCALE
    )
    seen, _ = mask.block(0, S, 0, k.shape[2], S, k.shape[2], q.device)
    if seen is not None:
        out = out * seen.any(-1, keepdim=True)
    out.backward(do.double())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


QUICK = {("causal", "current"), ("documents, padded", "delayed"), ("padding on the left", "delayed")}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(
            name,
            recipe,
            marks=[] if (name, recipe.name) in QUICK else pytest.mark.full,
            id=f"{name}-{recipe.name}",
        )
        for name in MASKS
        for recipe in RECIPES
    ],
)
def test_output_and_gradients_are_fp8_s_distance_from_the_exact_ones(name, recipe, device):
    given, mask = inputs(), MASKS[name]
    ours, state, _ = warmed(recipe, "native", given, mask)
    emulated, theirs, _ = warmed(recipe, "emulated", given, mask)
    for what, a, e, reference in zip(
        ("o", "dq", "dk", "dv"), ours, emulated, exact(*given, mask), strict=True
    ):
        error = float((a.double() - reference).norm() / reference.norm())
        peer = float((e.double() - reference).norm() / reference.norm())
        # TE's definition rounds to FP8 what this one does not; P's scale here is the better or the worse by less than a bit.
        assert error < 1.5 * peer and error < 0.25, (what, error, peer)
    for i, slot in enumerate(attention_slots(recipe)):
        found, expected = state.amax_history[:, i], theirs.amax_history[:, i]
        if slot in ("qkv", "do"):
            assert torch.equal(found, expected), slot
        elif slot in ("s", "dp"):
            torch.testing.assert_close(found, expected, rtol=0.2, atol=0)


def test_gradients_of_the_logits_in_bfloat16_are_nearer_to_the_exact_ones(device):
    given, mask = inputs(), MASKS["causal"]
    reference = exact(*given, mask)
    errors, recorded = {}, {}
    for kind in ("fp8", "bfloat16"):
        attention, state = make(CurrentScaling(), grad_scores=kind)
        for _ in range(2):
            state.update()
            found = run(attention, *given, mask)
        errors[kind] = [
            float((a.double() - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True)
        ]
        recorded[kind] = float(attention.slots["dp"].amax)
    assert errors["bfloat16"][1] < errors["fp8"][1] and errors["bfloat16"][2] < errors["fp8"][2]
    assert errors["bfloat16"][::3] == errors["fp8"][::3] and recorded["bfloat16"] == recorded["fp8"] > 0


@pytest.mark.parametrize("backend", ["emulated", "native"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_second_derivative_is_refused(recipe, backend, device):
    q, k, v, _ = inputs()
    attention, _ = make(recipe, backend)
    out = attention(q.requires_grad_(), k, v, mask=MASKS["causal"], softmax_scale=SCALE)
    with pytest.raises(
        RuntimeError, match=r"^block.attn: FP8 layers have no second derivative.*create_graph"
    ):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_values_that_fp8_holds_and_one_visible_key_are_exact(device):
    """Each query sees its own key alone: the output is V, dV is dO, dQ and dK are zero."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randint(-3, 4, (B, heads, S, D), generator=generator).float().to(device)
        for heads in (H, H, H, H)
    )
    attention, _ = make(CurrentScaling(power_2_scales=True))
    out, dq, dk, dv = run(attention, q, k, v, do, AttentionMask(causal=True, window=(0, 0)))
    assert torch.equal(out, v) and torch.equal(dv, do)
    assert float(dq.abs().max()) < 1e-4 and float(dk.abs().max()) < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_what_is_not_finite_stays_visible(which, value, device):
    given = list(inputs())
    given[which] = given[which].clone()
    given[which][0, 0, 5, 3] = value
    out, *gradients = run(make(CurrentScaling())[0], *given, AttentionMask(causal=True))
    if which < 3:
        assert bool(out[0].isnan().any())
    assert all(bool(g[0].isnan().any()) for g in gradients[: 3 if which != 2 else 2])


def test_recompute_gives_the_same_bits_and_records_nothing_twice(device):
    given, mask = inputs(torch.bfloat16), MASKS["causal"]
    plain, state = make(RECIPES[0])
    again, state_again = make(RECIPES[0])

    def recomputed(*args, **kwargs):
        return checkpoint(again, *args, use_reentrant=False, **kwargs)

    for _ in range(2):
        expected, found = run(plain, *given, mask), run(again, *given, mask, recomputed)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(state.amax_history, state_again.amax_history)


def test_what_is_kept_for_the_backward(device):
    given = inputs(torch.bfloat16)
    attention, _ = make(CurrentScaling())
    kept = {}
    leaves = [x.clone().requires_grad_() for x in given[:3]]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        attention(*leaves, mask=MASKS["causal"], softmax_scale=SCALE)
    found = sum(t.untyped_storage().nbytes() for t in kept.values())
    # Q, K and V in a byte each, O in bfloat16, a float a query; statistics.
    assert found <= B * S * D * (H + 2 * HK) + 2 * B * S * H * D + 4 * B * H * S + 256


def test_traced_on_fake_tensors(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    attention, _ = make(CurrentScaling())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in inputs(torch.bfloat16)[:3]]
        out = attention(*leaves, mask=AttentionMask(causal=True), softmax_scale=SCALE)
        out.backward(torch.ones_like(out))
    assert out.shape == (B, H, S, D) and [x.grad.shape for x in leaves] == [x.shape for x in leaves]


def test_refusals_say_where_and_what_to_do(device):
    q, k, v, _ = inputs()
    attention, _ = make(CurrentScaling())
    with pytest.raises(RuntimeError, match=r"block\.attn: .*ALiBi"):
        attention(q, k, v, mask=AttentionMask(bias=torch.zeros(S, S, device=device)), softmax_scale=SCALE)
    with pytest.raises(RuntimeError, match=r"block\.attn: .*no dropout .*to 0"):
        attention(q, k, v, mask=AttentionMask(), softmax_scale=SCALE, dropout_p=0.1)
    backend = load_attention_backend("native")
    assert "block recipe" in (backend.recipe_reason(BlockScaling()) or "")
    assert backend.module_reason(CurrentScaling(), 128) is None
    assert "up to 128" in (backend.module_reason(CurrentScaling(), 192) or "")
    assert copy.deepcopy(attention).recipe == CurrentScaling()


@pytest.mark.parametrize(
    "name",
    ["fog", pytest.param("llama", marks=pytest.mark.full), pytest.param("mpt", marks=pytest.mark.full)],
)
def test_hosts_train_through_it(name, device):
    """Packed documents, a sliding window, grouped queries: what each host means arrives, and gradients are FP8's distance away."""
    torch.manual_seed(0)
    model, batch = on(device, *MODELS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if name != "mpt" and parameter.dim() > 1 else 1.0)
    model.train()
    exact_ones = output_and_gradients(model, batch)
    rows, converted = convert_attention(model, recipe=RECIPES[0], backend="native")
    assert len(converted) == 2, [row.reason for row in rows]
    for _ in range(2):  # the first pass sets the scales
        found = output_and_gradients(model, batch)
    assert 0 < (found[0] - exact_ones[0]).norm() / exact_ones[0].norm() < 0.1
    whole = [torch.cat([x.flatten() for x in side[1:]]) for side in (found, exact_ones)]
    assert (whole[0] - whole[1]).norm() / whole[1].norm() < 0.25


@pytest.mark.parametrize("backend", ["native", "emulated"])
def test_monitors_see_its_operands(backend, device):
    """Health of what is quantised whole, and the ledger that MFU reads."""
    torch.manual_seed(0)
    model, batch = on(device, *MODELS["fog"]())
    model.train()
    _, converted = convert_attention(model, recipe=RECIPES[0], backend=backend)
    probe = HealthProbe(model, lambda f: f, attention=True)
    assert set(probe.modules.values()) == set(converted.values())
    output_and_gradients(model, batch)  # the first pass sets the scales
    probe.attach()
    output_and_gradients(model, batch)
    probe.detach()
    found = probe.collect()
    assert set(found) == {(name, operand) for name in probe.modules for operand in ATTENTION}
    assert all(15 < health.sqnr_db < 40 for health in found.values()), found
    for module in probe.modules.values():
        assert module.probe is None
        assert module.ledger.flops["dgrad", "fp8"] == 2 * module.ledger.flops["fprop", "fp8"] > 0
