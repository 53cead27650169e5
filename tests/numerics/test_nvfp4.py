"""NVFP4: codes and scales against the rule written again in numpy, its rounding at random, its transform, and whole layers."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.backends import choose_backend
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.nvfp4 import hadamard, round_e2m1, uniform
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.recipes import NVFP4Scaling, parse_recipe
from foundry_fp8.observe.operand_health import measure, summarise
from foundry_fp8.observe.unchanged_state import unchanged_state
from tests.kernels.interpreter import interpret

PLAIN = NVFP4Scaling(hadamard=False, stochastic_rounding=False)
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
LARGEST = np.finfo(np.float32).max
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float64)


def nearest_even(x):
    """E2M1 of float32 from -6 to 6 by looking at all eight numbers; of two that are as near the even code."""
    distance = np.abs(np.abs(x.astype(np.float64))[..., None] - VALUES)
    order = distance * 16 + np.arange(8) % 2 * 1e-9
    return np.copysign(VALUES[order.argmin(-1)], x)


def by_the_rule(x, block):
    """Codes' values and what they are multiplied by, float32, of ``x`` without NaN or Inf, blocks of ``block``."""
    x = np.asarray(x, np.float32)
    rows, columns = x.shape[0] // block[0], x.shape[1] // block[1]
    tiles = x.reshape(rows, block[0], columns, block[1])
    amax = np.float32(np.abs(x).max())
    with np.errstate(all="ignore"):
        encode = np.float32(1) if amax == 0 else np.minimum(np.float32(2688) / amax, LARGEST)
        encode = np.float32(1) if encode == 0 else encode
        decode = np.float32(1) / encode
        wanted = np.abs(tiles).max((1, 3)) * (encode * np.float32(1 / 6))
        scale = np.minimum(wanted, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        factor = np.minimum(np.float32(1) / (scale * decode), LARGEST)
        clamped = np.clip(tiles * factor[:, None, :, None], np.float32(-6), np.float32(6))
    return nearest_even(clamped).reshape(x.shape), scale * decode


def halves(rows, columns):
    """All ties of E2M1 in blocks whose scale is 448 and encode 448: their largest is 6."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    return torch.cat((ties, -ties)).repeat(rows, columns // 16)


CASES = {
    "gaussian": lambda: torch.randn(64, 96),
    "magnitudes": lambda: torch.randn(64, 96) * torch.exp2(torch.randint(-30, 30, (64, 96)).float()),
    "an outlier": lambda: torch.randn(64, 96).index_put((torch.tensor(5), torch.tensor(7)), torch.tensor(3e6)),
    "ties": lambda: halves(64, 96),
    "zero blocks": lambda: torch.randn(64, 96).masked_fill(torch.arange(64)[:, None] // 16 % 2 == 0, 0.0),
    "a zero tensor": lambda: torch.zeros(64, 96),
    "subnormal scales": lambda: torch.randn(64, 96) * torch.logspace(0, -6, 64)[:, None],
    "subnormal numbers": lambda: torch.randn(64, 96) * 1e-39,
    "the largest": lambda: torch.randn(64, 96).sign() * torch.finfo(torch.float32).max,
    "negative zeros": lambda: -torch.zeros(64, 96),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operand, along, block", [("x", 1, (1, 16)), ("dy", 0, (16, 1)), ("w", 1, (16, 16)), ("w", 0, (16, 16))])  # fmt: skip
def test_codes_and_scales_are_those_of_the_rule(case, dtype, operand, along, block):
    x = CASES[case]().to(dtype)
    x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    values, scale = by_the_rule(x.float().numpy(), block)
    q = quantize(x, operand, PLAIN, along=along)
    assert q.block == block and q.fmt.name == "e2m1"
    np.testing.assert_array_equal(q.data.float().numpy(), values)
    np.testing.assert_array_equal(q.scale_inv.numpy(), scale)
    np.testing.assert_array_equal(q.dequantize().numpy(), values * np.kron(scale, np.ones(block, np.float32)))


def test_weights_in_rows_share_scales_along_each_dimension():
    w = torch.randn(32, 48)
    recipe = dataclasses.replace(PLAIN, square_weights=False)
    for along, block in ((1, (1, 16)), (0, (16, 1))):
        values, scale = by_the_rule(w.numpy(), block)
        q = quantize(w, "w", recipe, along=along)
        np.testing.assert_array_equal(q.data.float().numpy(), values)
        np.testing.assert_array_equal(q.scale_inv.numpy(), scale)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("operand, along", [("x", 1), ("w", 0)])
def test_what_is_not_finite_is_seen_in_its_block_and_nowhere_else(bad, operand, along):
    x = torch.randn(32, 64)
    x[3, 20] = bad
    q = quantize(x, operand, PLAIN, along=along)
    found = q.dequantize()
    lost = torch.zeros(32, 64, dtype=torch.bool)
    lost[(3,) if operand == "x" else slice(0, 16), 16:32] = True
    assert found[lost].isnan().all() and found[~lost].isfinite().all()
    assert q.data.float().isfinite().all()  # never through codes
    unpacked = PLAIN.scaling(operand, along).unpack(*PLAIN.scaling(operand, along).pack(q))
    assert torch.equal(unpacked[1].isnan(), q.gemm_scale.isnan())


@pytest.mark.parametrize("shape", [(48, 64), (40, 32), (1, 32)], ids=str)
def test_what_is_kept_for_backward_is_four_and_a_half_bits_and_the_same(shape):
    recipe = NVFP4Scaling()
    for operand, along in (("x", 0), ("x", 1)):
        q = quantize(torch.randn(shape), operand, recipe, along=along)
        scaling = recipe.scaling(operand, along)
        packed = scaling.pack(q)
        assert sum(t.nbytes for t in packed) == q.data.numel() // 2 + q.scale_inv.numel() + 4
        data, scale = scaling.unpack(*packed)
        assert torch.equal(data.view(torch.uint8), q.data.view(torch.uint8)) and torch.equal(
            scale, q.scale_inv
        )


def test_the_first_of_two_codes_is_in_the_low_half_of_its_byte():
    values = torch.tensor([[0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -6, 0, -3, 0, 0, 0, 0]])
    q = quantize(values, "x", PLAIN)
    assert torch.equal(q.data.float(), values)
    packed, _ = PLAIN.scaling("x", 1).pack(q)
    assert packed.tolist() == [[0x21, 0x43, 0x65, 0x97, 0xFA, 0xD0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [48, 40, 3])
def test_the_transform_is_the_published_matrix(dtype, tokens):
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    matrix = np.diag(SIGNS) @ h / 4
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(16), atol=1e-15)
    x = torch.randn(tokens, 24).to(dtype)
    padded = np.zeros((-(-tokens // 16) * 16, 24))
    padded[:tokens] = x.double().numpy()
    exact = np.einsum("tic,ij->tjc", padded.reshape(-1, 16, 24), matrix).reshape(-1, 24)
    found = hadamard(x)
    assert found.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    np.testing.assert_allclose(found.double().numpy(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("operand", ["x", "dy"])
def test_columns_are_transformed_and_rounded_before_their_amax_is_taken(operand):
    recipe = dataclasses.replace(PLAIN, hadamard=True)
    x = torch.randn(64, 32).bfloat16()
    x[5, 7] = 50.0  # the largest of x, and not of what is cast
    values, scale = by_the_rule(hadamard(x).float().numpy(), (16, 1))
    q = quantize(x, operand, recipe, along=0)
    np.testing.assert_array_equal(q.data.float().numpy(), values)
    np.testing.assert_array_equal(q.scale_inv.numpy(), scale)
    by_rows = by_the_rule(x.float().numpy(), (1, 16))
    np.testing.assert_array_equal(quantize(x, operand, recipe, along=1).scale_inv.numpy(), by_rows[1])


def test_rounding_at_random_is_unbiased_and_between_neighbours():
    """For each value the mean over n draws is within 5 standard deviations of it: at most half a step, by the root of n."""
    values = torch.cat((torch.linspace(-6, 6, 193), torch.tensor([0.01, -5.999, 3.9999, 2**-20])))
    n = 20_000
    x = values.expand(n, -1).contiguous()
    found = round_e2m1(x, uniform(x, 3))
    below = torch.tensor([max(v for v in [*-VALUES, *VALUES] if v <= x) for x in values.tolist()])
    above = torch.tensor([min(v for v in [*-VALUES, *VALUES] if v >= x) for x in values.tolist()])
    assert ((found == below) | (found == above)).all()
    deviation = (found.double().mean(0) - values.double()).abs()
    assert (deviation <= 5 * (above - below).double() / 2 / n**0.5 + 1e-6).all()
    exact = values[below == above]
    assert len(exact) and torch.equal(round_e2m1(x, uniform(x, 4))[:, below == above], exact.expand(n, -1))


def test_other_keys_and_places_draw_other_numbers():
    x = torch.randn(64, 64)
    a, b, equal = uniform(x, 1), uniform(x, 2), uniform(torch.ones(64, 64), 1)
    assert torch.equal(a, uniform(x, 1)) and a.min() > 0 and a.max() < 1
    for one, other in ((a, b), (a, equal), (equal[:32], equal[32:])):
        centred = (one - 0.5).flatten(), (other - 0.5).flatten()
        correlation = (centred[0] * centred[1]).mean() * 12
        assert correlation.abs() < 5 / one.numel() ** 0.5


# Layers.


def net(recipe="nvfp4", dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, dtype=dtype), nn.GELU(), nn.Linear(96, 64, dtype=dtype))
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated", include=["*"], **options)
    return model


def gradients(model, x, dy):
    model.zero_grad()
    model(x).backward(dy)
    return [p.grad.clone() for p in model.parameters()]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [64, 40])
@pytest.mark.parametrize("options", [{}, {"hadamard": False}, {"stochastic_rounding": False}, {"square_weights": False}], ids=str)  # fmt: skip
def test_the_three_gemms_are_products_of_the_operands(dtype, tokens, options):
    recipe = NVFP4Scaling(**options)
    layer = nn.Sequential(nn.Linear(64, 96, dtype=dtype))
    foundry_fp8.apply_fp8(layer, recipe=recipe, backend="emulated", include=["*"])
    w = layer[0].weight
    for number in (1, 2):
        x = torch.randn(tokens, 64).to(dtype).requires_grad_()
        dy, w.grad = torch.randn(tokens, 96).to(dtype), None
        y = layer(x)
        y.backward(dy)

        def dense(t, operand, along, number=number):
            scaling = recipe.scaling(operand, along).of_pass(number)
            return scaling.quantize(t.detach(), recipe.format(operand)).dequantize().double()

        rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
        for ours, exact in (
            (y.detach(), dense(x, "x", 1) @ dense(w, "w", 1).t() + layer[0].bias.detach().double()),
            (x.grad, dense(dy, "dy", 1) @ dense(w, "w", 0)),
            (w.grad, dense(dy, "dy", 0).t() @ dense(x, "x", 0)),
        ):
            assert ((ours.double() - exact).abs() <= exact.abs() * rounding + exact.abs().max() * 1e-6).all()


def test_the_transform_cancels_in_the_weights_gradient():
    """Where nothing is quantised: both operands' products are what they were, tokens that fill no block included."""
    x, dy = torch.randn(72, 32), torch.randn(72, 64)
    torch.testing.assert_close(hadamard(dy).t() @ hadamard(x), dy.t() @ x, rtol=1e-5, atol=1e-4)


def test_passes_round_otherwise_and_their_mean_is_the_exact_gradient():
    model = net({"name": "nvfp4", "hadamard": False})
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    passes = [gradients(model, x, dy)[2] for _ in range(200)]
    assert not torch.equal(passes[0], passes[1]) and model[0].passes == 200
    hidden = quantize(model[1](model[0](x)).detach(), "x", PLAIN, along=0).dequantize()
    q = quantize(dy, "dy", PLAIN, along=0)
    largest = 6 * q.expanded(q.scale_inv)  # a scale that E4M3 rounded down cuts the largest of a block off
    exact = dy.clamp(-largest, largest).double().t() @ hidden.double()
    found = torch.stack(passes).double()
    deviation = (found.mean(0) - exact).abs() / (found.std(0) / 200**0.5 + 1e-6)
    assert deviation.square().mean() < 1.5 and deviation.max() < 7


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_the_same_bit_for_bit_in_every_pass(reentrant):
    class Recomputed(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant)

    plain, again = net(), Recomputed(net())
    for _ in range(3):
        x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)
        assert same(gradients(plain, x, dy), gradients(again, x, dy))


def test_evaluation_and_measurements_leave_no_trace():
    model, other = net(evaluate="fp8"), net(evaluate="fp8")
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    for _ in range(2):
        ours = gradients(model, x, dy)
        other.eval()(x)
        other.train()
        with torch.no_grad():
            other(x)
        with unchanged_state(other):
            other(x).backward(dy)
        assert same(ours, gradients(other, x, dy))


def test_no_other_random_numbers_are_drawn():
    model, x, dy = net(), torch.randn(32, 64), torch.randn(32, 64)
    before = torch.get_rng_state()
    gradients(model, x, dy)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_resumed_run_rounds_as_the_first_did(tmp_path):
    """From a file that torch reads with weights_only, whatever the seed of the process that resumes."""
    torch.manual_seed(1)
    batches = [(torch.randn(32, 64), torch.randn(32, 64)) for _ in range(4)]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model, optimizer, batches):
        for x, dy in batches:
            gradients(model, x, dy)
            optimizer.step()

    train(model, optimizer, batches[:2])
    saved = {"model": model.state_dict(), "fp8": foundry_fp8.training_state(model).state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    train(model, optimizer, batches[2:])

    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    torch.manual_seed(99)
    for restores in (True, False):
        resumed = net()
        resumed.load_state_dict(loaded["model"])
        if restores:
            foundry_fp8.training_state(resumed).load_state_dict(loaded["fp8"])
        train(resumed, torch.optim.SGD(resumed.parameters(), lr=0.1), batches[2:])
        assert same(resumed.state_dict().values(), model.state_dict().values()) == restores


@pytest.mark.parametrize("passes", [{"0": 1.5, "2": 1}, {"0": "1", "2": 1}, {"5": 1}, 3])
def test_a_state_that_is_damaged_is_refused_and_nothing_changes(passes):
    model = net()
    state = FP8State.of(model)
    saved = state.state_dict() | {"passes": passes}
    with pytest.raises(RuntimeError, match="not readable"):
        state.load_state_dict(saved)
    assert model[0].passes == 0


def test_the_state_of_other_recipes_has_nothing_new():
    assert "passes" not in FP8State.of(net("mxfp8")).state_dict()
    assert "passes" not in FP8State.of(net({"name": "nvfp4", "stochastic_rounding": False})).state_dict()


def test_two_copies_of_a_model_that_saw_other_data_do_not_make_the_same_errors():
    """As ranks of a data-parallel run: the same passes, other gradients."""
    x = torch.randn(64, 64)
    noise = [uniform(x * factor, 1) - 0.5 for factor in (1.0, 1.001)]
    assert (noise[0] * noise[1]).mean().abs() * 12 < 5 / 64


def test_demotion_and_return():
    model = net()
    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    plain.load_state_dict(model.state_dict())
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    for layer in (model[0], model[2]):
        layer.set_recipe(None)
    assert same(gradients(model, x, dy), gradients(plain, x, dy))
    model[0].set_recipe(parse_recipe("current"))
    model[2].set_recipe(model[2].configured_recipe)
    assert not same(gradients(model, x, dy), gradients(plain, x, dy))


@pytest.mark.parametrize("zero", [False, True])
def test_monitors_see_the_operands_as_they_were(zero):
    """The input of the first layer needs no gradient, so that only its transformed dy is ever quantised."""
    model, seen = net(), []
    for layer in (model[0], model[2]):
        layer.probe = lambda operand, x, q: seen.append((operand, summarise(measure(x, q).tolist())))
    model(torch.randn(48, 64)).backward(torch.zeros(48, 64) if zero else torch.randn(48, 64))
    assert sorted(operand for operand, _ in seen) == ["dy", "dy", "w", "w", "x", "x"]
    for operand, health in seen:
        assert health.saturated == 0
        assert 14 < health.sqnr_db < 25 or (zero and operand == "dy")


@pytest.mark.parametrize("tied", [False, True])
def test_compiled_and_with_shared_weights(tied):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        if tied:
            model[2].weight = model[0].weight
        foundry_fp8.apply_fp8(model, recipe="nvfp4", backend="emulated", include=["*"])
        assert (model[2].weight is model[0].weight) == tied
        return model

    models = [build(), build()]
    x, dy = torch.randn(32, 64), torch.randn(32, 64)
    compiled = torch.compile(models[1], backend="aot_eager")
    compiled(x).backward(dy)
    assert same(gradients(models[0], x, dy), [p.grad for p in models[1].parameters()])


# Who does not take it, and says so.


def test_native_kernels_refuse_it_by_name(monkeypatch):
    interpret(monkeypatch)
    model = nn.Sequential(nn.Linear(64, 96))
    with pytest.raises(RuntimeError, match=r"no kernels for the scales of nvfp4.*Blackwell's for FP4"):
        foundry_fp8.apply_fp8(model, recipe="nvfp4", backend="native", include=["*"])
    assert type(model[0]) is nn.Linear
    emulated, _ = choose_backend("emulated", NVFP4Scaling(), torch.device("cpu"))
    assert emulated.recipe_reason(NVFP4Scaling()) is None


@pytest.mark.parametrize(
    "options, said",
    [
        ({"attention": True}, "the nvfp4 recipe has no FP8 attention"),
        ({"frozen_weights": "fp8"}, "those of nvfp4 are not"),
        ({"accumulation": "hopper"}, "accumulation: hopper is that of GPUs which cannot run nvfp4"),
    ],
    ids=str,
)
def test_options_that_it_has_no_form_for_are_refused_by_name(options, said):
    model = nn.Sequential(nn.Linear(64, 96))
    model[0].weight.requires_grad_("frozen_weights" not in options)
    with pytest.raises((ConfigError, RuntimeError), match=said):
        foundry_fp8.apply_fp8(model, recipe="nvfp4", backend="emulated", include=["*"], **options)


@pytest.mark.parametrize(
    "value, said",
    [
        ({"name": "nvfp4", "fp8_format": "hybrid"}, "'hybrid' is not e4m3"),
        ({"name": "nvfp4", "hadamard": 1}, "1 is not true or false"),
        ({"name": "nvfp4", "disable_rht": True}, "unknown key"),
        ("nvfp8", "Did you mean"),
    ],
)
def test_options_are_checked(value, said):
    with pytest.raises(ConfigError, match=said):
        parse_recipe(value)


@pytest.mark.parametrize("sizes, said", [((64, 48), "out_features=48 is not a multiple of 32"), ((80, 64), "in_features=80")])  # fmt: skip
def test_a_layer_that_it_cannot_take_stays_as_it_is(sizes, said):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(*sizes))
    report = foundry_fp8.apply_fp8(model, recipe="nvfp4", backend="emulated", include=["*"])
    assert report.converted == ("0",) or list(report.converted) == ["0"]
    assert any(said in row.reason for row in report.rows)


def test_the_report_is_plain():
    assert json.loads(json.dumps(NVFP4Scaling().to_dict())) == {
        "name": "nvfp4", "fp8_format": "e4m3", "hadamard": True, "stochastic_rounding": True, "square_weights": True,
    }  # fmt: skip
