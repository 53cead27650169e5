"""The native backend's linear, forward and backward, against float64 GEMMs of the reference's operands."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.backends.native import NativeBackend
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics import quantize as reference
from foundry_fp8.numerics.quantize import amax_of, scale_from_amax
from foundry_fp8.numerics.recipes import (
    FOR_ANY_MODEL,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
)

every_recipe = pytest.mark.parametrize("recipe", FOR_ANY_MODEL)
some_recipes = pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=() if r in ("delayed", "block") else pytest.mark.full) for r in FOR_ANY_MODEL],
)
"""One with a scale for a tensor and one with many by default: the products of all are in the first test."""
RECIPE_VARIANTS = [
    CurrentScaling(),
    CurrentScaling(power_2_scales=True, fp8_format="e4m3"),
    CurrentScaling(granularity="row"),
    DelayedScaling(amax_history_len=4),
    BlockScaling(),
    BlockScaling(power_2_scales=False, fp8_format="hybrid"),
    MXFP8Scaling(),
]


def ranged(*shape):
    """Gaussian values with a different range in every group of rows, so that a wrong scale cannot pass."""
    return torch.randn(*shape) * torch.exp2(torch.randint(-4, 5, (shape[0], 1)).float())


def make(recipe, device, k=96, n=160, bias=True, dtype=torch.float32, **options):
    model = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype))
    model[0].weight.data = ranged(n, k).to(dtype)
    model.to(device)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native", **options)
    return model


def padded(recipe, device, k, n, dtype):
    """A layer of a shape that the surgery leaves alone, which the kernels pad."""
    linear = nn.Linear(k, n, dtype=dtype)
    linear.weight.data = ranged(n, k).to(dtype)
    backend = NativeBackend()
    layer = FP8Linear.from_linear(linear.to(device), fqn="0", backend=backend, recipe=recipe)
    model = nn.Sequential(layer)
    FP8State(model, {"0": layer}, backend)
    return model


def hold_scales(model, device):
    """Count what follows as one forward of the whole model, so that layers called one by one begin no pass of their own."""
    delayed = FP8State.of(model).delayed
    if delayed is not None:
        delayed.begin_forward(torch.device(device), trains=False)


def by_reference(x, operand, recipe, along, scale=None):
    """float64 values of the operand after quantising, by ``foundry_fp8.numerics.quantize`` alone."""
    fmt = recipe.format(operand)
    if isinstance(recipe, MXFP8Scaling):
        q = reference.quantize_mx(x, (1, 32) if along else (32, 1), fmt)
    elif isinstance(recipe, BlockScaling):
        block = (128, 128) if operand == "w" else (1, 128) if along else (128, 1)
        q = reference.quantize_block(x, block, fmt, power_2=recipe.power_2_scales)
    elif recipe.by_row:  # each row, or column, as a tensor of its own
        parts = x if along else x.t()
        one = [
            reference.quantize_tensor(p[None], scale_from_amax(amax_of(p), fmt), fmt).dequantize()
            for p in parts
        ]
        return torch.cat(one).double() if along else torch.cat(one).t().double()
    else:
        power_2 = isinstance(recipe, CurrentScaling) and recipe.power_2_scales
        scale = scale_from_amax(amax_of(x), fmt, power_2=power_2) if scale is None else scale
        q = reference.quantize_tensor(x, scale, fmt)
    return q.dequantize().double()


def assert_close(ours, exact, a, b, recipe=None):
    """Products are exact; what remains is accumulation over the contracted dimension and one rounding of the result."""
    rounding = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[ours.dtype]
    accumulation = a.shape[1] * 2.0**-23
    if recipe is not None and recipe.by_row:  # torch's GEMM writes bfloat16 then
        accumulation += 2.0**-8
    bound = exact.abs() * rounding + (a.abs() @ b.abs()) * accumulation + 1e-6
    if ours.is_cuda:
        # Hopper's tensor cores align the products of an instruction to the largest and keep 13 bits below it (DeepSeek-V3, 3.3.2).
        largest = (a.abs()[:, :, None] * b.abs()[None]).amax(1)
        bound += 2.0**-13 * (a.shape[1] * largest + (a.abs() @ b.abs()))
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs()
    assert bool((error <= bound).all()), f"largest error {float((error / bound).max()):.2f} of the bound"


class CountOps(TorchDispatchMode):
    """Counts this package's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "foundry_fp8":
            self.calls.append(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", RECIPE_VARIANTS, ids=lambda r: f"{r.name}-{r.fp8_format}")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(
            shape,
            dtype,
            marks=() if (shape == (64, 96, 160)) == (dtype == torch.bfloat16) else pytest.mark.full,
            id=f"{shape}-{dtype}",
        )
        for shape in ((64, 96, 160), (33, 100, 75), (1, 17, 8))
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_three_gemms_match_float64(shape, dtype, recipe, device):
    m, k, n = shape
    model = padded(recipe, device, k, n, dtype)
    x = ranged(m, k).to(dtype).to(device).requires_grad_()
    dy = (ranged(m, n) * 1e-3).to(dtype).to(device)
    y = model(x)
    y.backward(dy)
    one = torch.ones((), device=device) if isinstance(recipe, DelayedScaling) else None  # its first scale
    w, bias = model[0].weight.detach(), model[0].bias.detach().double()
    qx, qw, qdy = (by_reference(t, op, recipe, 1, one) for t, op in ((x.detach(), "x"), (w, "w"), (dy, "dy")))
    assert_close(y.detach(), qx @ qw.t() + bias, qx, qw.t(), recipe)
    qw_by_columns = by_reference(w, "w", recipe, 0, one)
    assert_close(x.grad, qdy @ qw_by_columns, qdy, qw_by_columns, recipe)
    qx, qdy = by_reference(x.detach(), "x", recipe, 0, one), by_reference(dy, "dy", recipe, 0, one)
    assert_close(model[0].weight.grad, qdy.t() @ qx, qdy.t(), qx, recipe)
    torch.testing.assert_close(
        model[0].bias.grad.double(),
        dy.double().sum(0),
        rtol=2.0**-8 if dtype != torch.float32 else 1e-5,
        atol=1e-6,
    )


@every_recipe
def test_wgrad_in_high_precision_is_exact(recipe, device):
    model = make(recipe, device, wgrad="high_precision")
    x = ranged(40, 96).to(device).requires_grad_()
    dy = ranged(40, 160).to(device)
    model(x).backward(dy)
    torch.testing.assert_close(model[0].weight.grad, dy.t() @ x.detach())


@every_recipe
def test_delayed_state_and_probe_agree_with_the_emulated_backend(recipe, device):
    """Every operand that a probe sees has the emulated backend's bytes, over three passes with moving scales."""
    seen = {"native": [], "emulated": []}
    weight = ranged(160, 96)
    batches = [(ranged(48, 96) * 3**i, ranged(48, 160)) for i in range(3)]
    for backend in seen:
        model = nn.Sequential(nn.Linear(96, 160))
        model[0].weight.data = weight.clone()
        model.to(device)
        foundry_fp8.apply_fp8(model, recipe=recipe, backend=backend)
        model[0].probe = lambda op, hp, q, backend=backend: seen[backend].append((op, q))
        for x, dy in batches:
            model(x.to(device).requires_grad_()).backward(dy.to(device))
        state = FP8State.of(model)
        state.update()
        seen[backend].append(("scale", None if state.delayed is None else state.delayed.scale))
        seen[backend].append(("history", None if state.delayed is None else state.delayed.amax_history))
    for (op, ours), (other, theirs) in zip(seen["native"], seen["emulated"], strict=True):
        assert op == other
        if op in ("scale", "history"):
            assert ours is theirs is None or torch.equal(ours, theirs)
        else:
            assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
            assert torch.equal(ours.scale_inv, theirs.scale_inv) and torch.equal(ours.amax, theirs.amax)


def test_a_state_goes_on_in_another_backend(device):
    """What the emulated backend saved, native computes with: scales, and the histories that the next ones come from."""
    x, models = ranged(48, 96).to(device), {}
    for backend in ("emulated", "native"):
        models[backend] = nn.Sequential(nn.Linear(96, 160)).to(device)
        foundry_fp8.apply_fp8(models[backend], recipe="delayed", backend=backend)
    models["emulated"](x).sum().backward()
    ours, theirs = (FP8State.of(models[backend]) for backend in ("emulated", "native"))
    ours.update()
    theirs.load_state_dict(ours.state_dict())
    assert (theirs.delayed.scale != 1).all() and torch.equal(
        theirs.delayed.scale.cpu(), ours.delayed.scale.cpu()
    )
    assert torch.equal(theirs.delayed.amax_history, ours.delayed.amax_history)


@every_recipe
@pytest.mark.parametrize("value", [pytest.param(float("inf"), marks=pytest.mark.full), float("nan")])
def test_a_non_finite_gradient_stays_visible(recipe, value, device):
    model = make(recipe, device)
    x = ranged(32, 96).to(device).requires_grad_()
    dy = ranged(32, 160).to(device)
    dy[3, 5] = value
    model(x).backward(dy)
    assert not bool(torch.isfinite(x.grad).all())
    assert not bool(torch.isfinite(model[0].weight.grad).all())
    assert not bool(torch.isfinite(model[0].bias.grad).all())


@every_recipe
@pytest.mark.parametrize("value", [float("inf"), pytest.param(float("nan"), marks=pytest.mark.full)])
def test_a_non_finite_input_stays_visible(recipe, value, device):
    model = make(recipe, device)
    x = ranged(32, 96).to(device)
    x[3, 5] = value
    assert not bool(torch.isfinite(model(x)).all())


@some_recipes
def test_recompute_is_bit_identical_and_records_no_amax_twice(recipe, device):
    gradients, histories = [], []
    for use_reentrant in (None, True, False):
        torch.manual_seed(0)
        model = Maybe(nn.Linear(96, 160), use_reentrant).to(device)
        foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
        for scale in (1.0, 4.0):
            x = (ranged(32, 96) * scale).to(device).requires_grad_()
            dy = ranged(32, 160).to(device)
            model.zero_grad()
            model(x).backward(dy)
        gradients.append((x.grad, model.body.weight.grad))
        delayed = FP8State.of(model).delayed
        histories.append(None if delayed is None else delayed.amax_history[0].clone())
    for (dx, dw), history in zip(gradients[1:], histories[1:], strict=True):
        assert torch.equal(dx, gradients[0][0]) and torch.equal(dw, gradients[0][1])
        assert history is None or torch.equal(history, histories[0])


class Maybe(nn.Module):
    """A body, checkpointed unless ``use_reentrant`` is None."""

    def __init__(self, body, use_reentrant):
        super().__init__()
        self.body, self.use_reentrant = body, use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.use_reentrant)


@some_recipes
def test_gradients_accumulate(recipe, device):
    model = make(recipe, device)
    hold_scales(model, device)
    batches = [(ranged(32, 96).to(device), ranged(32, 160).to(device)) for _ in range(2)]
    single = []
    for x, dy in batches:
        model.zero_grad()
        model[0](x).backward(dy)
        single.append(model[0].weight.grad.clone())
    model.zero_grad()
    for x, dy in batches:
        model[0](x).backward(dy)
    assert torch.equal(model[0].weight.grad, single[0] + single[1])


@every_recipe
def test_saves_one_byte_an_element_of_the_input(recipe, device):
    model = make(recipe, device, k=256, n=128, dtype=torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.randn(512, 256, device=device, dtype=torch.bfloat16, requires_grad=True))
    activations = [
        t for t in saved if t is not model[0].weight and t.data_ptr() != model[0].weight.data_ptr()
    ]
    own = sum(t.numel() * t.element_size() for t in activations)
    scales = {"tensor": 0, "block": 4 / 128, "mx": 1 / 32}[
        {"block": "block", "mxfp8": "mx"}.get(recipe, "tensor")
    ]
    assert own <= 512 * 256 * (1 + scales) + 64


@some_recipes
@pytest.mark.parametrize("frozen", ["weight", "input", "both"])
def test_frozen_parts_get_no_gradient_and_cost_no_gemm(recipe, frozen, device):
    model = make(recipe, device, bias=False)
    model[0].weight.requires_grad_(frozen == "input")
    x = ranged(32, 96).to(device).requires_grad_(frozen == "weight")
    y = model(x)
    assert y.requires_grad == (frozen != "both")
    if frozen == "both":
        return
    with CountOps() as ops:
        y.backward(ranged(32, 160).to(device))
    assert (x.grad is None) == (frozen == "input")
    assert (model[0].weight.grad is None) == (frozen == "weight")
    # dy once; the weight again only for dgrad.
    assert sum(name.startswith("quantize") for name in ops.calls) == (2 if frozen == "weight" else 1)


@every_recipe
def test_evaluation_records_nothing(recipe, device):
    model = make(recipe, device, evaluate="fp8").eval()
    with torch.no_grad():
        model(ranged(32, 96).to(device))
    delayed = FP8State.of(model).delayed
    assert delayed is None or not bool(delayed.amax_history.any())


@some_recipes
def test_any_shape_of_input(recipe, device):
    model = make(recipe, device)[0]
    x = ranged(24, 96).to(device)
    flat = model(x)
    assert torch.equal(model(x.view(2, 3, 4, 96)), flat.view(2, 3, 4, 160))
    assert torch.equal(model(x.t().contiguous().t()), flat)  # not contiguous
    assert model(x[0]).shape == (160,)
    empty = torch.zeros(0, 5, 96, device=device, requires_grad=True)
    y = model(empty)
    assert y.shape == (0, 5, 160)
    y.sum().backward()
    assert empty.grad.shape == empty.shape


@some_recipes
def test_autocast_decides_the_dtype(recipe, device):
    model = make(recipe, device)
    x = ranged(32, 96).to(device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


BAD_INPUTS = [
    (torch.zeros(4, 96, dtype=torch.float64), TypeError, r"0: the input is torch\.float64"),
    (torch.zeros(4, 96, dtype=torch.int64), TypeError, r"0: the input is torch\.int64"),
    (torch.zeros(4, 96, device="meta"), RuntimeError, "0: the input is on meta, the weight on"),
    # Padded to 96, which a GEMM would take.
    (torch.zeros(4, 90), ValueError, r"0: the input is \(4, 90\); its last dimension must be in_features=96"),
    (torch.zeros(()), ValueError, r"0: the input is \(\)"),
]


@pytest.mark.parametrize(("x", "error", "message"), BAD_INPUTS)
@every_recipe
def test_bad_inputs_are_named(recipe, x, error, message, device):
    model = make(recipe, device)
    x = x if x.device.type == "meta" else x.to(device)
    with pytest.raises(error, match=message):
        model[0](x)


@some_recipes
def test_gradients_and_weights_of_any_strides(recipe, device):
    """Expanded (as ``sum()`` gives), transposed and sliced: the same as their contiguous copies."""
    net = make(recipe, device)
    hold_scales(net, device)
    model = net[0]
    x = ranged(32, 96).to(device).requires_grad_()
    dy = ranged(160, 64).to(device).t()[::2]
    for strided in (dy, dy[:1].expand(32, -1), dy[:, :1].expand(-1, 160)):
        given = []
        for gradient in (strided, strided.contiguous()):
            x.grad = model.weight.grad = None
            model(x).backward(gradient)
            given.append((x.grad, model.weight.grad))
        assert torch.equal(given[0][0], given[1][0]) and torch.equal(given[0][1], given[1][1])
    contiguous = model(x)
    model.weight.data = model.weight.data.t().contiguous().t()
    assert torch.equal(model(x), contiguous)


@every_recipe
def test_a_layer_without_outputs_is_empty(recipe, device):
    model = nn.Sequential(nn.Linear(32, 0)).to(device)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
    x = torch.ones(4, 32, device=device, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (4, 0) and not bool(x.grad.any())


def test_ledger_counts_native_gemms(device):
    model = make("current", device)
    model(ranged(33, 96).to(device).requires_grad_()).backward(torch.ones(33, 160, device=device))
    assert dict(model[0].ledger.flops) == {(g, "fp8"): 2 * 33 * 96 * 160 for g in ("fprop", "dgrad", "wgrad")}


@pytest.mark.parametrize("tokens", [16, 5])
def test_a_result_may_be_changed_in_place(tokens, device):
    """It is nobody's view, padded or not, and its backward is counted all the same, as often as it runs."""
    model = make("current", device)
    layer = model[0]
    x = ranged(2 * tokens, 96).view(2, tokens, 96).to(device).requires_grad_()
    y = layer(x)
    assert y._base is None and y.shape == (2, tokens, 160)
    apart = layer(x) * 1
    y *= 1
    dy = ranged(2 * tokens, 160).view(2, tokens, 160).to(device)
    found, expected = (torch.autograd.grad(out, layer.weight, dy, retain_graph=True)[0] for out in (y, apart))
    assert torch.equal(found, expected)
    torch.autograd.grad(y, layer.weight, dy)
    assert layer.ledger.calls["fprop", "fp8"] == 2 and layer.ledger.calls["wgrad", "fp8"] == 3


def test_converted_models_train_alike(device):
    """Ten steps of a small MLP: native follows emulated, and both learn."""
    losses = {}
    for backend in ("native", "emulated"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
        foundry_fp8.apply_fp8(model, recipe="delayed", backend=backend)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        x = torch.randn(64, 32, device=device)
        losses[backend] = []
        for _ in range(10):
            loss = F.mse_loss(model(x), x.roll(1, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[backend].append(float(loss))
    assert losses["native"][-1] < 0.7 * losses["native"][0]
    assert losses["native"] == pytest.approx(losses["emulated"], rel=0.02)


def test_one_backend_instance_serves_a_model():
    assert NativeBackend().name == "native"


@pytest.mark.parametrize("fast", [(), ("fprop",), ("dgrad",), ("fprop", "dgrad", "wgrad")], ids=str)
def test_the_recipe_says_which_gemms_accumulate_fast(fast, device, monkeypatch):
    """On a CPU the product is its definition; what a GPU is asked is the argument."""
    from foundry_fp8.backends.native.scaling import tensor

    asked, multiply = [], tensor.tensorwise_mm

    def spy(*args, fast_accumulation, **options):
        asked.append(fast_accumulation)
        return multiply(*args, fast_accumulation=fast_accumulation, **options)

    model = make(CurrentScaling(fast_accumulation=fast), device, k=32, n=48)
    x = ranged(16, 32).to(device).requires_grad_()
    model(x)  # on a GPU the first pass tries the kernels
    monkeypatch.setattr(tensor, "tensorwise_mm", spy)
    model(x).sum().backward()
    assert asked == [gemm in fast for gemm in ("fprop", "dgrad", "wgrad")]
