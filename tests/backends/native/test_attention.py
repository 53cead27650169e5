"""Native FP8 attention as a module, with a stand-in for cuDNN: against exact attention in float64, beside the emulation, and its state."""

import contextlib
import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.backends import attention_left_out, load_backend
from foundry_fp8.backends.native import attention as native
from foundry_fp8.backends.native import cudnn_graphs
from foundry_fp8.backends.native.attention_check import check_attention
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.attention import FP8DotProductAttention, attention_format, attention_slots
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.backend import Availability
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling
from foundry_fp8.observe.operand_health import ATTENTION, HealthProbe
from tests.backends.native.cudnn_stand_in import HOPPER, SMALL_HEADS, stand_in
from tests.surgery.conversion import convert_attention
from tests.surgery.test_attention import MODELS, Plain, output_and_gradients

B, H, HK, S, D = 2, 4, 2, 40, 128
SCALE = D**-0.5
RECIPE = DelayedScaling(amax_history_len=2)
CAUSAL = AttentionMask(causal=True)


@pytest.fixture
def cudnn(device, monkeypatch):
    """What reached cuDNN: "forward" and "backward", in order."""
    if device != "cpu":
        pytest.skip("a machine with a GPU runs cuDNN itself: tests/gpu/test_native.py")
    return stand_in(monkeypatch)


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def draw(heads, size):
        # Every head has a range of its own, so that a mixed-up head or scale shows.
        spread = torch.linspace(0.3, 1.5, heads)[None, :, None, None] * size
        return (torch.randn(B, S, heads, D, generator=generator).transpose(1, 2) * spread).to(dtype)

    return draw(H, 2.0), draw(HK, 1.5), draw(HK, 0.7), draw(H, 1e-3)


def make(recipe=RECIPE, backend="native"):
    attention = FP8DotProductAttention(
        fqn="block.attn", recipe=recipe, backend=load_backend(backend).attention()
    )
    names = attention_slots(recipe)
    state = DelayedScalingState(RECIPE, [attention_format(recipe, name).max for name in names])
    attention.slots = {name: state.slot(i) for i, name in enumerate(names)}
    return attention, state


def run(attention, q, k, v, do, mask=CAUSAL, function=None):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = (function or attention)(*leaves, mask=mask, softmax_scale=SCALE)
    out.backward(do)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def warmed(backend, given, mask):
    """Three passes, so that delayed scales have followed."""
    attention, state = make(backend=backend)
    for _ in range(3):
        state.update()
        found = run(attention, *given, mask)
    return found, state


def exact(q, k, v, do, mask):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    keys = [x.repeat_interleave(H // HK, 1) for x in leaves[1:]]
    out = F.scaled_dot_product_attention(leaves[0], *keys, is_causal=mask.causal, scale=SCALE)
    return [out.detach(), *torch.autograd.grad(out, leaves, do.double())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_gradients_and_amaxes_are_those_of_the_definition(dtype, cudnn):
    given, mask = inputs(dtype), AttentionMask(causal=True)
    (ours, state), (emulated, theirs) = (warmed(backend, given, mask) for backend in ("native", "emulated"))
    assert cudnn == ["forward", "backward"] * 3
    for what, a, b, reference in zip(
        ("o", "dq", "dk", "dv"), ours, emulated, exact(*given, mask), strict=True
    ):
        assert a.dtype == dtype and a.shape == b.shape
        error, peer, between = (
            float((x.double() - y).norm() / reference.norm())
            for x, y in ((a, reference), (b, reference), (a, b.double()))
        )
        # cuDNN takes rowsum(dO O) of a rounded O: worse by less than a quarter here, and another scale of dV. O is the same to the order of sums.
        assert error < 1.25 * peer < 0.3, (what, error, peer)
        assert what != "o" or between < 1e-3, between
    for i, slot in enumerate(attention_slots(RECIPE)):
        expected = theirs.amax_history[:, i] * (SCALE if slot == "dp" else 1.0)
        rtol = {"qkv": 0.0, "do": 0.0, "dp": 0.2, "dqkv": 0.05}.get(slot, 1e-4)
        torch.testing.assert_close(state.amax_history[:, i], expected, rtol=rtol, atol=0)


@pytest.mark.parametrize(
    "value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.full)], ids=["nan", "inf"]
)
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_what_is_not_finite_stays_visible(which, value, cudnn):
    attention, state = make()
    run(attention, *inputs())
    state.update()
    scale = state.scale.clone()
    given = list(inputs())
    given[which][0, 0, 5, 3] = value
    out, *gradients = run(attention, *given)
    if which < 3:
        assert bool(out[0].isnan().any())
    assert all(bool(g[0].isnan().any()) for g in gradients[: 3 if which != 2 else 2])
    state.update()
    assert torch.isfinite(state.scale).all() and (
        which == 3 or value != torch.inf or state.scale[0] == scale[0]
    )


def test_an_output_too_large_for_float32_is_not_hidden(cudnn, monkeypatch):
    """A saturating conversion writes 448; the amax says what it was."""
    honest = cudnn_graphs.run

    def overflowing(kind, sizes, tensors):
        honest(kind, sizes, tensors)
        tensors[cudnn_graphs.Role.amax_o if kind == "forward" else cudnn_graphs.Role.amax_dk].fill_(torch.inf)

    monkeypatch.setattr(cudnn_graphs, "run", overflowing)
    out, _, dk, dv = run(make()[0], *inputs())
    assert out.isnan().all() and dk.isnan().all()
    assert torch.isfinite(dv).all()


def test_recompute_gives_the_same_bits_and_records_nothing_twice(cudnn):
    given = inputs(torch.bfloat16)
    (plain, state), (again, state_again) = make(), make()

    def recomputed(*args, **kwargs):
        return checkpoint(again, *args, use_reentrant=False, **kwargs)

    for _ in range(2):
        expected, found = run(plain, *given), run(again, *given, function=recomputed)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(state.amax_history, state_again.amax_history)
    assert cudnn.count("forward") == 6 and cudnn.count("backward") == 4


def test_two_forwards_before_a_backward_raise_one_history(cudnn):
    (both, state), (one, alone) = make(), make()
    given = inputs()
    leaves = [[(x * size).requires_grad_() for x in given[:3]] for size in (1.0, 0.5)]
    for out in [both(*of, mask=CAUSAL, softmax_scale=SCALE) for of in leaves]:
        out.backward(given[3])
    run(one, *given)
    assert torch.equal(state.amax_history, alone.amax_history)


def test_evaluation_records_nothing(cudnn):
    attention, state = make()
    attention.eval()
    q, k, v, _ = inputs()
    attention(q, k, v, mask=CAUSAL, softmax_scale=SCALE)
    assert not state.amax_history.any() and cudnn == ["forward"]


def test_what_is_kept_for_the_backward(cudnn):
    attention, _ = make()
    kept = {}
    leaves = [x.clone().requires_grad_() for x in inputs(torch.bfloat16)[:3]]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t
    ):
        attention(*leaves, mask=CAUSAL, softmax_scale=SCALE)
    found = sum(t.untyped_storage().nbytes() for t in kept.values())
    # Q, K, V and O in a byte each, a float a query; statistics.
    assert found <= B * S * D * (2 * H + 2 * HK) + 4 * B * H * S + 512


def test_a_second_derivative_is_refused(cudnn):
    q, k, v, _ = inputs()
    out = make()[0](q.requires_grad_(), k, v, mask=CAUSAL, softmax_scale=SCALE)
    with pytest.raises(
        RuntimeError, match=r"^block.attn: FP8 layers have no second derivative.*create_graph"
    ):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_traced_on_fake_tensors_by_a_plan(device):
    """A plan asks no GPU and no frontend, and reads no mask's values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        attention, _ = make()
        assert attention.backend.module_reason(RECIPE, 64) is None
        leaves = [mode.from_tensor(x).requires_grad_() for x in inputs(torch.bfloat16)[:3]]
        padded = AttentionMask(causal=True, key_padding=mode.from_tensor(torch.ones(B, S, dtype=torch.bool)))
        out = attention(*leaves, mask=padded, softmax_scale=SCALE)
        out.backward(torch.ones_like(out))
    assert out.shape == (B, H, S, D) and [x.grad.shape for x in leaves] == [x.shape for x in leaves]


REFUSED = {
    "something added to the logits": {"mask": AttentionMask(bias=torch.zeros(S, S))},
    "document masks": {"mask": AttentionMask(causal=True, documents=(torch.arange(S) // 9).expand(B, S))},
    "a sliding window": {"mask": AttentionMask(causal=True, window=(8, 0))},
    "the batch is padded": {
        "mask": AttentionMask(causal=True, key_padding=(torch.arange(S) > 3).expand(B, S))
    },
    "there is no dropout": {"dropout_p": 0.1},
    "fewer queries than keys": {"q": torch.zeros(B, H, 3, D)},
    "its values have size 64": {"v": torch.zeros(B, HK, S, 64)},
    "on Hopper it has to be 128": {name: torch.zeros(B, HK, S, 64) for name in "qkv"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_a_call_that_cudnn_has_no_kernel_for_is_named(said, cudnn):
    q, k, v, _ = inputs()
    given = {"q": q, "k": k, "v": v, "mask": CAUSAL, **REFUSED[said]}
    with pytest.raises(RuntimeError, match=rf"^block\.attn: .* native backend: .*{said}.*\. (Set|Pack) "):
        make()[0](**given, softmax_scale=SCALE)
    assert not cudnn


def test_padding_on_the_right_and_one_document_are_no_mask(cudnn):
    given = inputs()
    place = torch.arange(S).expand(B, S)
    mask = AttentionMask(causal=True, key_padding=place < S - 3, documents=place * 0)
    found, expected = run(make()[0], *given, mask), run(make()[0], *given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (None, "runs on NVIDIA GPUs"),
        (Availability(False, "not installed", "pip install it."), "not installed. pip install"),
        (dataclasses.replace(HOPPER, capability=(8, 9)), "compute capability 8.9"),
        (dataclasses.replace(HOPPER, cudnn=(9, 10, 0)), "9.10.0 is broken"),
    ],
    ids=str,
)
def test_a_machine_that_cannot_is_refused_at_conversion_and_left_out_by_auto(machine, said, monkeypatch):
    if machine is not None:
        monkeypatch.setattr(native, "machine_here", lambda: machine)
    elif torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(
        ConfigError, match=rf"no attention was converted \(layers.0: .*({said}).*Set attention: false"
    ):
        convert_attention(Plain(), recipe=RECIPE, backend="native")
    left_out = attention_left_out("auto", load_backend("native"), RECIPE, "fp8")
    assert left_out.startswith("attention stays in high precision: native: ")


def test_the_frontend_is_looked_for_before_it_is_imported(monkeypatch):
    monkeypatch.setattr(cudnn_graphs, "frontend_missing", lambda: "not installed")
    found = native._machine.__wrapped__(torch.device("cuda:0"), False)
    assert not found.ok and "pip install 'foundry-fp8[cudnn]'" in found.remedy


def test_recipes_that_it_cannot_run_are_named_with_the_way_out(cudnn):
    backend = load_backend("native").attention()
    assert "the delayed recipe alone, not current" in backend.recipe_reason(CurrentScaling())
    assert "the delayed recipe alone, not block" in backend.recipe_reason(BlockScaling())
    assert "grad_scores is bfloat16" in backend.recipe_reason(RECIPE, "bfloat16")
    assert "on Hopper it has to be 128" in backend.module_reason(RECIPE, 64)
    assert backend.module_reason(RECIPE, 128) is None
    with pytest.raises(
        ConfigError, match=r"delayed recipe alone, not current. Set recipe: delayed, or attention: false"
    ):
        convert_attention(Plain(), recipe=CurrentScaling(), backend="native")
    attention, _ = make()
    assert not attention.can_run(CurrentScaling())  # demoted, it runs in high precision
    assert copy.deepcopy(attention).recipe == RECIPE
    assert attention_left_out("auto", load_backend("native"), RECIPE, "fp8") is None
    assert "not current" in attention_left_out("auto", load_backend("native"), CurrentScaling(), "fp8")
    assert attention_left_out("native", load_backend("native"), CurrentScaling(), "fp8") is None


def test_attention_that_auto_leaves_out_is_said(monkeypatch):
    monkeypatch.setattr("foundry_fp8.surgery.apply.attention_left_out", lambda *asked: "attention stays")
    model = Plain()
    report = foundry_fp8.apply_fp8(model, recipe="delayed", attention=True)
    assert report.attention == () and report.chosen.endswith("attention stays")
    assert not any(isinstance(m, FP8DotProductAttention) for m in model.modules())


@pytest.mark.parametrize(
    "wrong", [None, "o", *(pytest.param(wrong, marks=pytest.mark.full) for wrong in ("dk", "amax_dv"))]
)
def test_the_check_before_a_conversion_notices_what_is_wrong(wrong, cudnn, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "a GPU")
    honest = cudnn_graphs.run

    def altered(kind, sizes, tensors):
        honest(kind, sizes, tensors)
        found = {role.name: tensor for role, tensor in tensors.items()}.get(wrong)
        if found is not None and (wrong != "o" or kind == "forward"):
            found.copy_(found.float() * 4 if wrong.startswith("amax") else found.float().flip(1))

    monkeypatch.setattr(cudnn_graphs, "run", altered)
    check = check_attention.__wrapped__  # without its memory of what passed
    said = {"o": "O is", "dk": "dK is", "amax_dv": "the amax of dqkv"}.get(wrong)
    noticed = pytest.raises(RuntimeError, match=rf"attention is wrong on this machine \(a GPU.*{said}")
    with contextlib.nullcontext() if wrong is None else noticed:
        check(native.NativeAttention, RECIPE, D, torch.bfloat16, torch.device("cpu"))


def test_a_host_trains_through_it_and_monitors_see_its_operands(device, monkeypatch):
    """Near the exact gradients; health of what is quantised whole, and the ledger that MFU reads."""
    stand_in(monkeypatch, SMALL_HEADS)
    model, batch = MODELS["llama"]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    model.train()
    expected = output_and_gradients(model, batch)
    _, converted = convert_attention(model, recipe=RECIPE, backend="native")
    probe = HealthProbe(model, lambda f: f)
    assert set(probe.modules.values()) == set(converted.values())
    output_and_gradients(model, batch)  # the first pass sets the scales
    probe.attach()
    found = output_and_gradients(model, batch)
    probe.detach()
    assert 0 < (found[0] - expected[0]).norm() / expected[0].norm() < 0.1
    whole = [torch.cat([x.flatten() for x in side[1:]]) for side in (found, expected)]
    assert (whole[0] - whole[1]).norm() / whole[1].norm() < 0.25
    health = probe.collect()
    assert set(health) == {(name, operand) for name in probe.modules for operand in ATTENTION}
    assert all(15 < one.sqnr_db < 40 for one in health.values()), health
    for module in probe.modules.values():
        assert module.ledger.flops["dgrad", "fp8"] == 2 * module.ledger.flops["fprop", "fp8"] > 0
