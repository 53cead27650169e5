"""The grouped GEMMs of experts against a linear for each expert, and against float64."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry_fp8.backends.native import NativeBackend
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling
from tests.kept_bytes import activation_bytes

E, N, K = 4, 96, 64
SIZES = ([48, 16, 32, 16], [5, 0, 90, 17], [0, 0, 0, 31])
RECIPES = (CurrentScaling(), CurrentScaling(power_2_scales=True, fp8_format="e4m3"), DelayedScaling())


QUICK = (
    (SIZES[1], False, False), (SIZES[1], True, False), (SIZES[0], False, False),
    (SIZES[1], False, True), (SIZES[2], False, True),
)  # fmt: skip


def layer(recipe, device, wgrad="fp8"):
    made = FP8GroupedLinear(
        fqn="experts.w",
        shape=(E, N, K),
        backend=NativeBackend(),
        recipe=recipe,
        wgrad=wgrad,
        evaluate="high_precision",
    )
    if isinstance(recipe, DelayedScaling):
        state = DelayedScalingState(recipe, [recipe.format(name).max for name in ("x", "w", "dy")])
        state.to(torch.device(device))
        state.scale.copy_(torch.tensor([32.0, 64.0, 8192.0]))
        state.begin_pass()
        made.slots = {name: state.slot(i) for i, name in enumerate(("x", "w", "dy"))}
    return made


def given(sizes, device, flipped=False):
    torch.manual_seed(0)
    spread = torch.exp2(torch.arange(E).float() - 2)  # a mixed-up expert shows
    x = torch.randn(sum(sizes), K) * torch.repeat_interleave(spread, torch.tensor(sizes))[:, None]
    w = torch.randn(E, N, K) * 0.1 * spread.flip(0)[:, None, None]
    dy = torch.randn(sum(sizes), N) * 1e-3
    x, w, dy = (value.to(device, torch.bfloat16) for value in (x, w, dy))
    w = (w.transpose(1, 2).contiguous() if flipped else w).requires_grad_()
    return x.requires_grad_(), w, dy


def run(module, x, w, dy, sizes, flipped=False):
    y = module(x, w.transpose(1, 2) if flipped else w, sizes)
    x.grad = w.grad = None
    y.backward(dy)
    return [y.detach(), x.grad, w.grad]


@pytest.fixture
def one_by_one(monkeypatch):
    """What follows runs a linear for each expert."""

    def off():
        monkeypatch.setattr("foundry_fp8.backends.native.grouped.fits_grouped", lambda *args: False)

    return off


def products():
    """With ragged sizes and an expert without tokens, in the recipes' own formats; one expert's alone in one of them."""
    for recipe, sizes, flipped in itertools.product(RECIPES, SIZES, (False, True)):
        delayed = isinstance(recipe, DelayedScaling)
        quick = recipe.fp8_format != "e4m3" and (sizes, flipped, delayed) in QUICK
        how = "[in, out]" if flipped else "[out, in]"
        name = f"{recipe.name}-{recipe.fp8_format}-{sizes}-{how}"
        yield pytest.param(recipe, sizes, flipped, id=name, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("recipe", "sizes", "flipped"), list(products()))
def test_the_products_are_those_of_a_linear_for_each_expert(recipe, sizes, flipped, device, one_by_one):
    inputs = given(sizes, device, flipped)
    module = layer(recipe, device)
    ours = run(module, *inputs, sizes, flipped)
    recorded = None if module.slots is None else [float(slot.amax) for slot in module.slots.values()]
    assert module(inputs[0], inputs[1].transpose(1, 2) if flipped else inputs[1], sizes).grad_fn.name() == (
        "GroupedLinearBackward"
    )
    one_by_one()
    module = layer(recipe, device)
    theirs = run(module, *inputs, sizes, flipped)
    for what, a, b in zip(("y", "dx", "dw"), ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        # The same FP8 operands: what differs is the order of sums and one rounding to bfloat16.
        assert float((a.double() - b.double()).norm() / b.double().norm()) < 2.0**-9, what
    if recorded is not None:
        assert recorded == [float(slot.amax) for slot in module.slots.values()]
    empty = [e for e, size in enumerate(sizes) if not size]
    assert not ours[2][empty].any()


def test_gradients_are_fp8_s_distance_from_float64(device):
    sizes = [40, 0, 64, 9]
    x, w, dy = given(sizes, device)
    ours = run(layer(CurrentScaling(), device), x, w, dy, sizes)
    starts = [sum(sizes[:e]) for e in range(E)]
    for e, (first, size) in enumerate(zip(starts, sizes, strict=True)):
        if size:
            one, g = x.detach()[first : first + size].double(), dy[first : first + size].double()
            exact = one @ w.detach()[e].double().t(), g @ w.detach()[e].double(), g.t() @ one
            found = ours[0][first : first + size], ours[1][first : first + size], ours[2][e]
            for a, b in zip(found, exact, strict=True):
                assert 1e-3 < float((a.double() - b).norm() / b.norm()) < 0.08


def test_frozen_parts_get_no_gradient(device):
    sizes = [16, 16, 0, 32]
    x, w, dy = given(sizes, device)
    both = run(layer(CurrentScaling(), device), x, w, dy, sizes)
    for frozen in (0, 1):
        inputs = [x.detach(), w.detach()]
        inputs[1 - frozen].requires_grad_()
        inputs[1 - frozen].grad = None
        layer(CurrentScaling(), device)(*inputs, sizes).backward(dy)
        assert inputs[frozen].grad is None
        assert torch.equal(inputs[1 - frozen].grad, both[2 - frozen])


def test_an_inf_stays_visible_in_its_expert_alone(device):
    sizes = [16, 16, 16, 16]
    x, w, dy = given(sizes, device)
    with torch.no_grad():
        x[20, 3] = float("inf")
    y, dx, dw = run(layer(CurrentScaling(), device), x, w, dy, sizes)
    assert y[16:32].isnan().any() and not y[:16].isnan().any() and not y[32:].isnan().any()
    assert dw[1].isnan().any() and not dw[0].isnan().any() and dx.isfinite().all()


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w: (BlockScaling(), "fp8", x, w),
        lambda x, w: (CurrentScaling(granularity="row"), "fp8", x, w),
        lambda x, w: (CurrentScaling(), "high_precision", x, w),
        lambda x, w: (CurrentScaling(), "dequantized", x, w),
        lambda x, w: (CurrentScaling(), "fp8", x.float(), w.float()),
    ],
    ids=["block", "row", "wgrad", "dequantized", "float32"],
)
def test_what_the_grouped_gemm_does_not_take_runs_one_by_one(change, device):
    x, w, _ = given([16, 16, 16, 16], device)
    recipe, wgrad, x, w = change(x, w)
    y = layer(recipe, device, wgrad)(x, w, [16, 16, 16, 16])
    assert y.grad_fn.name() != "GroupedLinearBackward" and y.shape == (64, N)


def test_a_second_derivative_is_refused(device):
    x, w, _ = given([16, 16, 16, 16], device)
    y = layer(CurrentScaling(), device)(x, w, [16, 16, 16, 16])
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_a_dry_run_keeps_what_the_grouped_kernels_keep():
    """It cannot launch them: no operator says what they make. One expert after another keeps no indices of rows."""
    sizes = SIZES[0]
    x, w, _ = given(sizes, "cpu")
    y = layer(CurrentScaling(), "cpu")(x, w, sizes)
    kept = sum(t.nbytes for t in y.grad_fn.saved_tensors if t.data_ptr() != w.data_ptr())
    with FakeTensorMode() as fake:
        made, x, w = layer(CurrentScaling(), "cpu"), fake.from_tensor(x), fake.from_tensor(w)
        dry = activation_bytes(lambda: made(x, w, sizes), torch.device("cpu"))
    assert dry == pytest.approx(kept, rel=0.1)
