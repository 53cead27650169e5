"""The emulated backend against float64 GEMMs of independently quantised operands."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.backends import load_backend
from foundry_fp8.backends.emulated.quantizers import quantize_operand
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics import quantize as reference
from foundry_fp8.numerics.quantize import amax_of, scale_from_amax
from foundry_fp8.numerics.recipes import (
    FOR_ANY_MODEL,
    RECIPES,
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
)
from foundry_fp8.surgery.apply import FP8Config, refuse_by_backend

every_recipe = pytest.mark.parametrize("recipe", [*FOR_ANY_MODEL, "nvfp4"])
same_in_every_pass = pytest.mark.parametrize(
    "recipe", FOR_ANY_MODEL
)  # nvfp4's in tests/numerics/test_nvfp4.py
STATELESS = [
    CurrentScaling(),
    CurrentScaling(power_2_scales=True, fp8_format="e4m3"),
    BlockScaling(),
    BlockScaling(power_2_scales=False, fp8_format="hybrid"),
    MXFP8Scaling(),
]


def ranged(*shape):
    """Gaussian values with a different range in every group of rows, so that a wrong scale cannot pass."""
    return torch.randn(*shape) * torch.exp2(torch.randint(-8, 8, (shape[0], 1)).float())


def by_reference(x, operand, recipe, along):
    fmt = recipe.format(operand)
    if isinstance(recipe, MXFP8Scaling):
        return reference.quantize_mx(x, (1, 32) if along else (32, 1), fmt)
    if isinstance(recipe, BlockScaling):
        block = (128, 128) if operand == "w" else (1, 128) if along else (128, 1)
        return reference.quantize_block(x, block, fmt, power_2=recipe.power_2_scales)
    power_2 = isinstance(recipe, CurrentScaling) and recipe.power_2_scales
    return reference.quantize_tensor(x, scale_from_amax(amax_of(x), fmt, power_2=power_2), fmt)


def linear(recipe, k=256, n=384, bias=True, dtype=torch.float32, **options):
    model = nn.Sequential(nn.Linear(k, n, bias=bias, dtype=dtype))
    model[0].weight.data = ranged(n, k).to(dtype)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated", **options)
    return model


def within_one_rounding(ours, exact):
    """Operands and products are exact, add up in float32 (an error relative to the largest sums), and are rounded once."""
    rounding = 2.0**-8 if ours.dtype == torch.bfloat16 else 0.0
    return bool(((ours.double() - exact).abs() <= exact.abs() * rounding + exact.abs().max() * 1e-6).all())


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda r: f"{r.name}-{r.fp8_format}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(384, 256), (200, 256), (3, 64)], ids=str)
@pytest.mark.parametrize("operand, along", [("x", 1), ("x", 0), ("w", 1), ("w", 0), ("dy", 1), ("dy", 0)])
def test_the_fast_cpu_path_gives_the_bytes_of_the_reference(recipe, dtype, shape, operand, along):
    x = ranged(*shape).to(dtype)
    ours, theirs = quantize_operand(x, operand, recipe, along=along), by_reference(x, operand, recipe, along)
    assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
    assert torch.equal(ours.scale_inv, theirs.scale_inv)
    assert torch.equal(ours.amax, theirs.amax)


@pytest.mark.parametrize("wgrad", ["fp8", "high_precision"])
def test_scales_of_rows_follow_what_each_gemm_contracts(wgrad):
    """Each row, or column, as a tensor of its own; the products in float64."""
    model = linear({"name": "current", "granularity": "row"}, wgrad=wgrad)
    x, dy = ranged(40, 256).requires_grad_(), ranged(40, 384)
    y = model(x)
    y.backward(dy)

    def dense(t, operand, along):
        rows = t.detach() if along else t.detach().t()
        found = torch.cat(
            [by_reference(row[None], operand, CurrentScaling(), 1).dequantize() for row in rows]
        )
        return (found if along else found.t()).double()

    w = model[0].weight
    assert within_one_rounding(y.detach() - model[0].bias, dense(x, "x", 1) @ dense(w, "w", 1).t())
    assert within_one_rounding(x.grad, dense(dy, "dy", 1) @ dense(w, "w", 0))
    dw = (
        dense(dy, "dy", 0).t() @ dense(x, "x", 0) if wgrad == "fp8" else dy.double().t() @ x.detach().double()
    )
    assert within_one_rounding(w.grad, dw)


@same_in_every_pass
@pytest.mark.parametrize("tokens", [256, 40])
def test_the_three_gemms_match_float64_products_of_the_recipes_operands(recipe, tokens):
    model = linear(recipe)
    module, r = model[0], RECIPES[recipe]()
    x = ranged(tokens, 256).requires_grad_()
    dy = ranged(tokens, 384)
    if recipe == "delayed":  # its first pass runs with scale 1; give it a history
        model(x).backward(dy)
        x.grad = module.weight.grad = module.bias.grad = None
    y = model(x)
    y.backward(dy)

    def dense(t, operand, along):
        return by_reference(t.detach(), operand, r, along).dequantize().double()

    w = module.weight
    assert within_one_rounding(y.detach() - module.bias, dense(x, "x", 1) @ dense(w, "w", 1).t())
    assert within_one_rounding(x.grad, dense(dy, "dy", 1) @ dense(w, "w", 0))
    assert within_one_rounding(w.grad, dense(dy, "dy", 0).t() @ dense(x, "x", 0))
    torch.testing.assert_close(module.bias.grad, dy.sum(0))


OUT = [("fprop",), ("dgrad",), ("fprop", "dgrad"), ("fprop", "wgrad"), ("dgrad", "wgrad")]


@same_in_every_pass
@pytest.mark.parametrize("out", OUT, ids="+".join)
def test_gemms_out_of_fp8_multiply_operands_as_they_are_and_the_others_the_recipes(recipe, out):
    model = linear([{"modules": "*", "recipe": recipe, "gemms": dict.fromkeys(out, "high_precision")}])
    module, r = model[0], RECIPES[recipe]()
    x, dy = ranged(40, 256).requires_grad_(), ranged(40, 384)
    if recipe == "delayed":  # it records what it does not multiply, too
        model(x).backward(dy)
        assert module.slots["x"].amax > 0 and module.slots["w"].amax > 0
        x.grad = module.weight.grad = module.bias.grad = None
    y = model(x)
    y.backward(dy)

    def dense(gemm, t, operand, along):
        t = t.detach()
        return (t if gemm in out else by_reference(t, operand, r, along).dequantize()).double()

    w = module.weight
    fprop = dense("fprop", x, "x", 1) @ dense("fprop", w, "w", 1).t()
    assert within_one_rounding(y.detach().double() - module.bias, fprop)
    assert within_one_rounding(x.grad, dense("dgrad", dy, "dy", 1) @ dense("dgrad", w, "w", 0))
    assert within_one_rounding(w.grad, dense("wgrad", dy, "dy", 0).t() @ dense("wgrad", x, "x", 0))
    torch.testing.assert_close(module.bias.grad, dy.sum(0))
    calls = {(gemm, "fp32" if gemm in out else "fp8") for gemm in ("fprop", "dgrad", "wgrad")}
    assert set(module.ledger.calls) == calls


@every_recipe
@pytest.mark.parametrize("out", OUT, ids="+".join)
def test_under_autocast_a_gemm_out_of_fp8_is_bfloat16s_and_the_others_are_what_they_are_without(recipe, out):
    torch.manual_seed(0)
    gemms = {"modules": "*", "recipe": recipe, "gemms": dict.fromkeys(out, "high_precision")}
    models = [linear([gemms]), linear(recipe), nn.Sequential(nn.Linear(256, 384))]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    x, dy, found = ranged(32, 256), ranged(32, 384), []
    for model in models:
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(inputs)
        y.backward(dy.to(y.dtype))
        found.append({"fprop": y.detach(), "dgrad": inputs.grad, "wgrad": model[0].weight.grad})
    ours, fp8, plain = found
    for gemm, value in ours.items():
        if gemm in out:
            assert torch.equal(value, plain[gemm]), gemm
        else:
            assert torch.equal(value, fp8[gemm]), gemm


@every_recipe
@pytest.mark.parametrize("out", [("fprop",), ("dgrad", "wgrad"), ("fprop", "dgrad", "wgrad")], ids="+".join)
def test_dequantized_gemms_multiply_the_recipes_operands_in_the_compute_dtype(recipe, out):
    """In the bits of torch's own product of what a probe sees, each operand rounded to bfloat16."""
    rule = {"modules": "*", "recipe": recipe, "gemms": dict.fromkeys(out, "dequantized")}
    model = linear([rule], bias=False, dtype=torch.bfloat16)
    module, r = model[0], RECIPES[recipe]()
    x, dy = ranged(64, 256).bfloat16().requires_grad_(), ranged(64, 384).bfloat16()
    if recipe == "delayed":
        model(x).backward(dy)
        x.grad = module.weight.grad = None
    y = model(x)
    y.backward(dy)

    def dense(t, operand, along):
        if recipe == "nvfp4":
            scaling = r.scaling(operand, along).of_pass(module.passes)
            return scaling.quantize(t.detach(), r.format(operand)).dequantize().bfloat16()
        return by_reference(t.detach(), operand, r, along).dequantize().bfloat16()

    w = module.weight
    expected = {
        "fprop": (y.detach(), dense(x, "x", 1) @ dense(w, "w", 1).t()),
        "dgrad": (x.grad, dense(dy, "dy", 1) @ dense(w, "w", 0)),
        "wgrad": (w.grad, dense(dy, "dy", 0).t() @ dense(x, "x", 0)),
    }
    for gemm in out:
        assert torch.equal(*expected[gemm]), gemm
    calls = {(gemm, "bf16" if gemm in out else "fp4" if recipe == "nvfp4" else "fp8") for gemm in expected}
    assert set(module.ledger.calls) == calls


@pytest.mark.parametrize("gemms", [{"fprop": "high_precision"}, {"dgrad": "high_precision"}, {"wgrad": "dequantized"}], ids=str)  # fmt: skip
def test_transformer_engine_refuses_them_by_name(gemms):
    model = nn.Sequential(nn.Linear(64, 64))
    rules = [{"recipe": "block", "gemms": {"wgrad": "high_precision"}, "modules": "0", "until": 9},
             {"recipe": "current", "gemms": gemms}]  # fmt: skip
    te = "transformer_engine"
    with pytest.raises(ConfigError, match=rf"recipe\[1\]\.gemms: not with the {te} backend.*backend: native"):
        refuse_by_backend(FP8Config(recipe=rules, backend=te), load_backend(te))
    refuse_by_backend(FP8Config(recipe=rules[:1], backend=te), load_backend(te))
    for backend in ("native", "emulated"):
        refuse_by_backend(FP8Config(recipe=rules, backend=backend), load_backend(backend))
    foundry_fp8.apply_fp8(model, recipe=rules, backend="emulated")


@every_recipe
def test_high_precision_wgrad_is_that_of_the_plain_linear(recipe):
    model = linear(recipe, wgrad="high_precision")
    x, dy = ranged(64, 256), ranged(64, 384)
    model(x).backward(dy)
    torch.testing.assert_close(model[0].weight.grad, dy.t() @ x)
    ledger, flops = model[0].ledger, 2 * 64 * 256 * 384
    low = "fp4" if recipe == "nvfp4" else "fp8"
    assert ledger.flops["wgrad", "fp32"] == ledger.flops["fprop", low] == flops
    assert not ledger.flops["wgrad", low]


@every_recipe
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["activation", "gradient"])
def test_what_is_not_finite_reaches_the_gradients(recipe, value, where):
    model = linear(recipe, k=128, n=128)
    x, dy = torch.randn(64, 128, requires_grad=True), torch.randn(64, 128)
    (x.data if where == "activation" else dy)[3, 5] = value
    y = model(x)
    y.backward(dy)
    if where == "activation":
        assert not y[3].isfinite().any()
    else:
        assert not x.grad[3].isfinite().any()
    assert not model[0].weight.grad.isfinite().all()


@every_recipe
def test_backward_keeps_eight_bits_of_the_input(recipe):
    model = linear(recipe, k=512, n=256)
    saved = {}

    def pack(t):
        if not isinstance(t, nn.Parameter):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    x = torch.randn(512, 512)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x.requires_grad_())
    share = sum(saved.values()) / (x.numel() * 4)
    assert share <= 0.27


@every_recipe
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_is_bit_identical_and_records_no_amax_twice(recipe, reentrant):
    def build():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated")
        return model

    class Checkpointed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant)

    plain, checkpointed = (
        build(),
        Checkpointed(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))),
    )
    checkpointed.body.load_state_dict(plain.state_dict())
    foundry_fp8.apply_fp8(checkpointed, recipe=recipe, backend="emulated")
    for step in range(4):
        torch.manual_seed(step)
        x, dy = ranged(32, 64) * (step + 1), ranged(32, 64)
        outputs, grads = [], []
        for model in (plain, checkpointed):
            x_ = x.clone().requires_grad_()
            model.zero_grad()
            y = model(x_)
            y.backward(dy)
            outputs.append(y.detach())
            grads.append([x_.grad, *(p.grad for p in model.parameters())])
        assert torch.equal(*outputs)
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    ours, theirs = FP8State.of(plain), FP8State.of(checkpointed)
    ours.update(), theirs.update()
    if recipe == "delayed":
        assert torch.equal(ours.delayed.amax_history, theirs.delayed.amax_history)
    ledger, other = plain[0].ledger, checkpointed.body[0].ledger
    assert ledger.flops == other.flops
    assert sum(ledger.recomputed_flops.values()) == 0
    assert other.recomputed_flops["fprop", "fp8"] == ledger.flops["fprop", "fp8"]


@every_recipe
def test_evaluation_runs_in_high_precision_unless_asked(recipe):
    x = ranged(32, 256)
    model = linear(recipe).eval()
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias), rtol=0, atol=0)
    in_fp8 = linear(recipe, evaluate="fp8").eval()
    assert not torch.equal(in_fp8(x), F.linear(x, in_fp8[0].weight, in_fp8[0].bias))
    state = FP8State.of(in_fp8)
    assert state.delayed is None or not state.delayed.amax_history.any()


def test_gradient_accumulation_rolls_the_history_once_a_forward():
    model = linear({"name": "delayed", "amax_history_len": 8})
    for _ in range(3):
        model(ranged(32, 256)).sum().backward()
    FP8State.of(model).update()
    history = model[0].slots["x"].amax_history
    assert (history != 0).sum() == 3 and (history[-3:] != 0).all()


@same_in_every_pass
def test_bf16_under_autocast_computes_in_bf16_and_gives_fp32_gradients(recipe):
    model = linear(recipe, bias=False)
    module, r = model[0], RECIPES[recipe]()
    x, dy = ranged(64, 256).requires_grad_(), ranged(64, 384).bfloat16()
    for _ in range(2):  # delayed scaling runs its first pass with scale 1
        x.grad = module.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.backward(dy)

    def dense(t, operand, along):
        return by_reference(t.detach().bfloat16(), operand, r, along).dequantize().double()

    w = module.weight
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert within_one_rounding(y.detach(), dense(x, "x", 1) @ dense(w, "w", 1).t())
    # Rounded to bfloat16 too, by the GEMMs, before autograd hands them to float32 tensors.
    assert within_one_rounding(x.grad.bfloat16(), dense(dy, "dy", 1) @ dense(w, "w", 0))
    assert within_one_rounding(w.grad.bfloat16(), dense(dy, "dy", 0).t() @ dense(x, "x", 0))
    assert torch.equal(x.grad, x.grad.bfloat16().float()) and torch.equal(w.grad, w.grad.bfloat16().float())
    assert set(module.ledger.flops) == {("fprop", "fp8"), ("dgrad", "fp8"), ("wgrad", "fp8")}


@every_recipe
def test_empty_and_three_dimensional_inputs(recipe):
    model = linear(recipe)
    assert model(torch.zeros(0, 256)).shape == (0, 384)
    x = ranged(6, 256)
    with torch.no_grad():  # so that no delayed update falls between the two
        torch.testing.assert_close(model(x.view(2, 3, 256)).view(6, 384), model(x))


@same_in_every_pass
def test_a_frozen_weight_gets_no_gradient_and_costs_no_wgrad(recipe):
    model = linear(recipe)
    x = ranged(32, 256).requires_grad_()
    for _ in range(3):  # delayed scaling's scales follow, in the third pass that of the gradient too
        (trained,) = torch.autograd.grad(model(x).square().sum(), x)
    model[0].weight.requires_grad_(False)
    model[0].ledger.flops.clear()
    model(x).square().sum().backward()
    assert model[0].weight.grad is None
    assert torch.equal(x.grad, trained)
    assert not any(gemm == "wgrad" for gemm, _ in model[0].ledger.flops)


def test_compiled_models_still_run_and_train():
    model = linear("current")
    x = ranged(32, 256).requires_grad_()
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, expected)
    wanted = torch.autograd.grad(expected.square().sum(), (x, model[0].weight))
    y.square().sum().backward()
    torch.testing.assert_close((x.grad, model[0].weight.grad), wanted)


@pytest.mark.parametrize("recipe", ["current", "delayed", None])
def test_what_is_compiled_is_compiled_once(recipe):
    torch.compiler.reset()
    model = linear(recipe or "current")
    model[0].set_recipe(model[0].recipe if recipe else None)
    compiled = torch.compile(model, backend="eager")
    frames = torch._dynamo.utils.counters["frames"]
    counts = []
    for _ in range(6):
        compiled(ranged(32, 256).requires_grad_()).sum().backward()
        counts.append(frames["total"])
    assert counts[0] > 0 and counts[1:] == counts[1:2] * 5


def test_delayed_scaling_uses_yesterdays_scale():
    model = linear({"name": "delayed", "amax_history_len": 1}, bias=False)
    x = ranged(64, 256)
    model(x).sum().backward()
    model(x * 4).sum().backward()
    scale = model[0].slots["x"].scale.item()
    assert scale == pytest.approx(DelayedScaling().format("x").max / x.abs().amax().item(), rel=1e-6)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_selective_checkpoint_may_keep_what_the_gemm_returned(recipe, dtype):
    """Scales and bias go into memory of their own: torch refuses a kept tensor that was written to."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    found = []
    for selective in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.SiLU(), torch.nn.Linear(128, 128))
        foundry_fp8.apply_fp8(model.to(dtype), recipe=recipe, backend="emulated")
        x = torch.randn(64, 128, dtype=dtype, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=False, context_fn=contexts) if selective else model(x)
        y.float().square().mean().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, checkpointed in zip(*found, strict=True):
        assert torch.equal(plain, checkpointed)
