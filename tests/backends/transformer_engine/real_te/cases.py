"""The backend over Transformer Engine's own Python, cast and GEMM computed on the CPU. Run by test_real_te.py."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from foundry_fp8.backends.transformer_engine.backend import library, te_module_of, te_recipe_of
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    parse_recipe,
)
from foundry_fp8.surgery.apply import apply_fp8
from foundry_fp8.surgery.norm_fusion import SITES

PER_TENSOR = [
    CurrentScaling(),
    CurrentScaling(power_2_scales=True, fp8_format="e4m3"),
    DelayedScaling(amax_history_len=4),
    DelayedScaling(amax_history_len=1, margin=2, amax_compute_algo="most_recent", fp8_format="e4m3"),
]


class Single(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.proj = nn.Linear(64, 32, bias=bias).bfloat16()

    def forward(self, x):
        return self.proj(x)


class Net(nn.Module):
    def __init__(self, bias=True, dtype=torch.bfloat16):
        super().__init__()
        self.up = nn.Linear(64, 128, bias=bias)
        self.down = nn.Linear(128, 32, bias=bias)
        self.recompute = False
        self.to(dtype)

    def block(self, x):
        return self.down(torch.relu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)


def converted(backend="transformer_engine", recipe="current", *, net=None, seed=0, **options):
    torch.manual_seed(seed)
    net = Net() if net is None else net
    apply_fp8(net, recipe=recipe, backend=backend, device="cpu", **options)
    return net


def step(net, seed, shape=(2, 16)):
    """One training step; the tensors that it gave."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, 64, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(*shape, 32, generator=generator).bfloat16() * 1e-3
    net.zero_grad()
    y = net(x)
    y.backward(dy)
    return {
        "y": y.detach(),
        "x.grad": x.grad,
        **{f"{n}.grad": p.grad.clone() for n, p in net.named_parameters()},
    }


def assert_same(ours, theirs):
    """Equal up to the order of the sums, and what it makes of the rounding to bfloat16."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        largest = ours[name].abs().max().item()
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=2**-7, atol=2**-8 * largest, msg=lambda m, n=name: f"{n}: {m}"
        )


BACKENDS = ("emulated", "transformer_engine")


@pytest.mark.parametrize("recipe", PER_TENSOR, ids=repr)
@pytest.mark.parametrize("bias", [True, False])
def test_three_gemms_match_the_reference_over_several_steps(recipe, bias):
    nets = [converted(backend, recipe, net=Single(bias)) for backend in BACKENDS]
    nets[1].load_state_dict(nets[0].state_dict())
    for seed in range(4):
        assert_same(step(nets[0], seed), step(nets[1], seed))


@pytest.mark.parametrize("recipe", [r for r in PER_TENSOR if isinstance(r, DelayedScaling)], ids=repr)
def test_delayed_state_is_that_of_the_reference_and_te_keeps_none(recipe):
    nets = [converted(backend, recipe, net=Single()) for backend in BACKENDS]
    nets[1].load_state_dict(nets[0].state_dict())
    for seed in range(6):
        for net in nets:
            step(net, seed)
    states = [FP8State.of(net) for net in nets]
    for state in states:
        state.update()
    ours, theirs = (state.state_dict()["modules"] for state in states)
    for name in ours:
        for key in ("scale", "amax_history"):
            assert torch.equal(ours[name][key], theirs[name][key])
        assert (ours[name]["scale"] != 1).all()
    manager = library().quantization.FP8GlobalStateManager
    buffers = getattr(manager, "quantization_state", manager)
    assert not buffers.global_amax_buffer


def test_delayed_casts_use_the_scales_of_the_state(casts):
    net = converted(recipe=DelayedScaling(amax_history_len=2))
    step(net, 0)
    assert {scale for _, _, scale in casts} == {1.0}
    casts.clear()
    step(net, 1)
    scales = FP8State.of(net).delayed.scale.tolist()
    assert sorted(scale for _, _, scale in casts) == sorted(scales)
    assert {kind for kind, _, _ in casts} == {"Float8Quantizer"}


@pytest.mark.parametrize("recipe", [CurrentScaling, DelayedScaling])
@pytest.mark.parametrize("fast", [(), ("fprop",), ("dgrad",), ("fprop", "wgrad")], ids=str)
def test_the_recipe_says_which_gemms_accumulate_fast(recipe, fast, split_accumulators):
    step(converted(recipe=recipe(fast_accumulation=fast), net=Single()), 0)
    fprop, *backward = split_accumulators
    assert fprop == ("fprop" not in fast)
    assert sorted(backward) == sorted(gemm not in fast for gemm in ("dgrad", "wgrad"))


@pytest.mark.parametrize("fp8_format, dy", [("hybrid", torch.float8_e5m2), ("e4m3", torch.float8_e4m3fn)])
def test_operands_have_the_formats_of_the_recipe(fp8_format, dy, casts):
    net = nn.Linear(64, 32).bfloat16()
    apply_fp8(
        net2 := nn.Sequential(net),
        recipe=CurrentScaling(fp8_format=fp8_format),
        backend="transformer_engine",
        device="cpu",
    )
    net2(torch.randn(16, 64).bfloat16().requires_grad_()).sum().backward()
    assert [fp8 for _, fp8, _ in casts] == [torch.float8_e4m3fn, torch.float8_e4m3fn, dy]


def test_power_2_current_scales_take_effect_without_the_environment(casts):
    step(converted(recipe=CurrentScaling(power_2_scales=True)), 0)
    assert casts and all(torch.frexp(torch.tensor(scale))[0] == 0.5 for _, _, scale in casts)
    casts.clear()
    step(converted(recipe=CurrentScaling()), 0)
    assert any(torch.frexp(torch.tensor(scale))[0] != 0.5 for _, _, scale in casts)


@pytest.mark.parametrize("power_2", [True, False])
def test_block_scales_follow_the_recipe(power_2):
    te_recipe = te_recipe_of(BlockScaling(power_2_scales=power_2))
    create = library().quantization.RecipeState.create
    quantizers = [*create(te_recipe, mode="forward", num_quantizers=3).make_quantizers()]
    quantizers += create(te_recipe, mode="backward", num_quantizers=2).make_quantizers()
    assert {q.force_pow_2_scales for q in quantizers} == {power_2}
    assert {q.block_scaling_dim for q in quantizers[:2]} == {1, 2}


def test_te_itself_is_asked_last():
    refusals = {name: library().refusal(name) for name in ("delayed", "current", "block", "mxfp8")}
    assert (
        refusals["delayed"] is refusals["current"] is refusals["mxfp8"] is None
    )  # on compute capability 10.0
    assert refusals["block"] is None or "CUDA >= 12.9" in refusals["block"]


RECIPES = [
    *PER_TENSOR,
    BlockScaling(),
    BlockScaling(power_2_scales=False, fp8_format="hybrid"),
    MXFP8Scaling(),
    MXFP8Scaling(fp8_format="hybrid"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_every_field_of_a_recipe_reaches_te(recipe, monkeypatch):
    te_recipe = te_recipe_of(recipe)
    formats = library().recipe.Format
    assert te_recipe.fp8_format == {"hybrid": formats.HYBRID, "e4m3": formats.E4M3}[recipe.fp8_format]
    assert getattr(te_recipe, "backward_override", None) is None
    assert not te_recipe.fp8_dpa and not te_recipe.fp8_mha
    if isinstance(recipe, CurrentScaling | BlockScaling):
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            assert getattr(te_recipe, name).power_2_scale is recipe.power_2_scales
    if isinstance(recipe, BlockScaling):
        dims = te_recipe.x_block_scaling_dim, te_recipe.w_block_scaling_dim, te_recipe.grad_block_scaling_dim
        assert dims == (1, 2, 1)
    assert te_recipe_of(dataclasses.replace(recipe)) is te_recipe


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_model_keeps_parameters_names_and_state(recipe):
    net = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 256, bias=False))
    before = dict(net.named_parameters())
    keys = list(net.state_dict())
    apply_fp8(net, recipe=recipe, backend="transformer_engine", device="cpu")
    assert list(net.state_dict()) == keys == list(before)
    assert all(net.get_parameter(name) is parameter for name, parameter in before.items())
    assert [type(m) for m in net.modules()] == [nn.Sequential, FP8Linear, FP8Linear]


def test_meta_model_converts_and_initialises_itself():
    with torch.device("meta"):
        net = Net()
    apply_fp8(net, recipe="current", backend="transformer_engine", device="cpu")
    assert all(p.is_meta for p in net.parameters())
    net.to_empty(device="cpu")
    for module in (net.up, net.down):
        module.reset_parameters()
    assert step(net, 0)["y"].isfinite().all()


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_recompute_runs_in_fp8_and_is_bit_identical(recipe, casts):
    results = []
    for recompute in (False, True):
        net = converted(recipe=recipe)
        net.recompute = recompute
        casts.clear()
        results.append([step(net, seed) for seed in range(3)])
        forwards = 2 if recompute else 1
        assert len(casts) == 3 * 2 * (2 * forwards + 1)  # steps x layers x (x and w a forward, and dy)
        results[-1].append(
            {k: v for n, m in FP8State.of(net).state_dict()["modules"].items() for k, v in m.items()}
        )
    for plain, recomputed in zip(*results, strict=True):
        for name in plain:
            assert torch.equal(plain[name], recomputed[name]), name


def test_high_precision_wgrad_is_the_unquantised_product(casts):
    nets = [converted(wgrad=wgrad) for wgrad in ("fp8", "high_precision")]
    fp8, hp = (step(net, 0) for net in nets)
    assert torch.equal(fp8["y"], hp["y"]) and torch.equal(fp8["x.grad"], hp["x.grad"])
    assert torch.equal(fp8["up.bias.grad"], hp["up.bias.grad"])
    assert not torch.equal(fp8["down.weight.grad"], hp["down.weight.grad"])
    layer = nn.Sequential(nn.Linear(64, 32).bfloat16())
    apply_fp8(layer, recipe="current", backend="transformer_engine", device="cpu", wgrad="high_precision")
    x, dy = torch.randn(16, 64).bfloat16(), torch.randn(16, 32).bfloat16()
    layer(x).backward(dy)  # an input that needs no gradient: the weight must get one all the same
    torch.testing.assert_close(layer[0].weight.grad, dy.t() @ x, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 7, 16, 33])
def test_any_number_of_tokens_is_exact(tokens):
    nets = [converted(backend, net=Single()) for backend in BACKENDS]
    nets[1].load_state_dict(nets[0].state_dict())
    assert_same(*(step(net, 0, shape=(tokens,)) for net in nets))


def test_recipe_can_change_at_run_time(casts):
    net = converted(recipe="delayed")
    step(net, 0)
    casts.clear()
    net.down.set_recipe(CurrentScaling(fp8_format="e4m3"))
    net.up.set_recipe(None)
    step(net, 1)
    assert [(kind, fp8) for kind, fp8, _ in casts] == [
        ("Float8CurrentScalingQuantizer", torch.float8_e4m3fn)
    ] * 3
    casts.clear()
    net.down.set_recipe(CurrentScaling())  # the same class again: TE itself would keep the old quantisers
    step(net, 2)
    assert [fp8 for _, fp8, _ in casts] == [torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2]
    casts.clear()
    for layer in (net.up, net.down):
        layer.set_recipe(layer.configured_recipe)
    step(net, 3)
    assert {kind for kind, _, _ in casts} == {"Float8Quantizer"} and len(casts) == 6


@pytest.mark.parametrize("evaluate, expected", [("high_precision", 0), ("fp8", 4)])
def test_evaluation_runs_what_was_asked_and_leaves_the_history_alone(evaluate, expected, casts):
    net = converted(recipe="delayed", evaluate=evaluate)
    step(net, 0)
    state = FP8State.of(net)
    state.update()
    before = copy.deepcopy(state.state_dict())
    net.eval()
    casts.clear()
    with torch.no_grad():
        net(1e4 * torch.randn(16, 64).bfloat16())
    assert len(casts) == expected
    after = state.state_dict()
    for name, entry in before["modules"].items():
        assert all(torch.equal(entry[key], after["modules"][name][key]) for key in entry)


def test_state_resumes_bit_exact():
    net = converted(recipe=DelayedScaling(amax_history_len=3))
    for seed in range(3):
        step(net, seed)
    FP8State.of(net).update()
    resumed = converted(recipe=DelayedScaling(amax_history_len=3), seed=1)
    resumed.load_state_dict(net.state_dict())
    FP8State.of(resumed).load_state_dict(copy.deepcopy(FP8State.of(net).state_dict()))
    ours, theirs = step(net, 9), step(resumed, 9)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_autocast_computes_in_its_dtype_from_float32_parameters():
    net = converted(net=Net(dtype=torch.float32))
    x = torch.randn(16, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == net.up.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("wgrad", ["fp8", "high_precision"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_nan_and_inf_stay_visible(recipe, value, wgrad):
    net = converted(recipe=recipe, net=Single(), wgrad=wgrad)
    x, dy = torch.randn(16, 64).bfloat16().requires_grad_(), torch.randn(16, 32).bfloat16()
    poisoned_x, poisoned_dy = x.detach().clone(), dy.clone()
    poisoned_x[3, 5] = poisoned_dy[7, 1] = value
    assert not net(poisoned_x).isfinite().all()
    with torch.no_grad():
        assert not net(poisoned_x).isfinite().all()
    y = net(x)
    assert y.isfinite().all()
    y.backward(poisoned_dy)
    assert not net.proj.weight.grad.isfinite().all() and not x.grad.isfinite().all()
    assert poisoned_dy[7, 1].isnan() == torch.tensor(value).isnan()


def test_copies_and_pickles_work(tmp_path):
    net = converted(recipe="delayed")
    step(net, 0)
    twin = copy.deepcopy(net)
    ours, theirs = step(net, 1), step(twin, 1)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_probe_sees_each_operand_once():
    net = converted(recipe="delayed")
    step(net, 0)
    seen = []
    net.down.probe = lambda operand, x, quantized: seen.append((operand, tuple(x.shape), quantized))
    step(net, 1)
    assert [(operand, shape) for operand, shape, _ in seen] == [
        ("x", (32, 128)),
        ("w", (32, 128)),
        ("dy", (32, 32)),
    ]
    scales = [float(slot.scale) for slot in net.down.slots.values()]
    assert [1 / float(quantized.scale_inv) for _, _, quantized in seen] == pytest.approx(scales)


def test_te_sees_no_tensor_between_forwards():
    net = converted()
    step(net, 0)
    te_module = te_module_of(net.up, net.up.recipe)
    assert not list(te_module.parameters()) and te_module not in list(net.modules())


def test_empty_input_gives_an_empty_output():
    assert converted()(torch.empty(0, 64).bfloat16()).shape == (0, 32)


def test_unknown_fields_never_reach_te():
    with pytest.raises(ValueError, match=r"override_linear_precision: unknown key"):
        parse_recipe({"name": "delayed", "override_linear_precision": [0, 0, 1]})


class Block(nn.Module):
    """A block as MPT's: each norm feeds one linear."""

    def __init__(self, norm):
        super().__init__()
        self.norm_1 = norm
        self.attn = nn.ModuleDict({"Wqkv": nn.Linear(64, 32)})
        self.to(torch.bfloat16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape))

    def forward(self, x):
        return self.attn["Wqkv"](self.norm_1(x))


@pytest.fixture
def fusible(monkeypatch):
    monkeypatch.setitem(SITES, f"{Block.__module__}.Block", (("norm_1", "attn.Wqkv"),))


NORMS = {
    "layer": lambda: nn.LayerNorm(64, eps=1e-3),
    "layer without bias": lambda: nn.LayerNorm(64, bias=False),
    "rms": lambda: nn.RMSNorm(64, eps=1e-5),
}


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("norm", NORMS)
def test_fused_norm_computes_what_the_two_modules_do(norm, recipe, fusible, casts):
    nets = [converted(recipe=recipe, net=Block(NORMS[norm]()), seed=3, fuse=fuse) for fuse in (False, True)]
    nets[1].load_state_dict(nets[0].state_dict())
    before = list(nets[0].state_dict())
    assert list(nets[1].state_dict()) == before
    for seed in range(3):
        plain, fused = (step(net, seed) for net in nets)
        assert nets[1].norm_1.deferred
        for name in plain:
            largest = plain[name].abs().max().item()
            torch.testing.assert_close(plain[name], fused[name], rtol=2**-6, atol=2**-6 * largest)
    assert len(casts) == 2 * 3 * 3
    states = [FP8State.of(net).state_dict()["modules"] for net in nets]
    assert states[0].keys() == states[1].keys()


def test_norm_is_not_left_out_where_its_linear_runs_in_high_precision(fusible, casts):
    net = Block(nn.LayerNorm(64))
    x = torch.randn(16, 64).bfloat16()
    expected = net(x)
    converted(net=net, fuse=True)
    net.eval()
    assert torch.equal(net(x), expected) and not net.norm_1.deferred
    net.train()
    net.attn["Wqkv"].set_recipe(None)
    assert torch.equal(net(x), expected) and not casts


def test_fusion_steps_back_where_the_arithmetic_would_differ(fusible, caplog):
    net = converted(net=Block(nn.LayerNorm(64)).float(), fuse=True)
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(16, 64))
    assert not net.norm_1.deferred and "is not fused with its norm" in caplog.text
    net.bfloat16()
    net(torch.randn(7, 64).bfloat16())
    assert not net.norm_1.deferred and "tokens are not a multiple of 16" in caplog.text


def test_report_says_what_was_fused(fusible):
    net = nn.Sequential(Block(nn.LayerNorm(64)), nn.Linear(32, 32).bfloat16(), Block(nn.RMSNorm(64)))
    report = apply_fp8(net, recipe="current", backend="transformer_engine", device="cpu", fuse=True)
    rows = {row.name: row for row in report.rows}
    assert rows["0.attn.Wqkv"].fused_with == "0.norm_1"
    assert not rows["1"].fused_with and not rows["2.attn.Wqkv"].fused_with
    assert "takes eps from the dtype" in rows["2.attn.Wqkv"].reason
    assert "1 of them compute the norm" in report.summary()


def test_fusing_nothing_is_an_error(fusible):
    with pytest.raises(ValueError, match=r"fuse: nothing can be fused: no norm is known"):
        converted(fuse=True)
    with pytest.raises(ValueError, match=r"fuse: nothing can be fused: RMSNorm takes eps"):
        converted(net=Block(nn.RMSNorm(64)), fuse=True)


def test_fused_recompute_is_bit_identical(fusible):
    results = []
    for recompute in (False, True):
        block = Block(nn.LayerNorm(64))
        net = converted(recipe="delayed", net=block, fuse=True, seed=1)
        net.load_state_dict(results[0][0] if results else net.state_dict())
        first = copy.deepcopy(net.state_dict())
        run = (lambda x, net=net: checkpoint(net, x, use_reentrant=False)) if recompute else net
        steps = []
        for seed in range(3):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)).bfloat16().requires_grad_()
            net.zero_grad()
            run(x).square().sum().backward()
            steps.append([x.grad, *(p.grad.clone() for p in net.parameters())])
        results.append((first, steps))
    for plain, recomputed in zip(results[0][1], results[1][1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.fixture
def gloo(monkeypatch, tmp_path):
    """One rank on the CPU; call it once the TE modules are made, because then no GPU may be pretended."""

    def start():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        return init_device_mesh("cpu", (1,))

    yield start
    dist.destroy_process_group()


def assert_same_steps(plain, wrapped):
    for seed in range(3):
        ours, theirs = step(plain, seed), step(wrapped, seed)
        for name, theirs_full in theirs.items():
            if isinstance(theirs_full, DTensor):
                theirs_full = theirs_full.full_tensor()
            ours_full = ours[name.replace("_fsdp_wrapped_module.", "")]
            assert torch.equal(ours_full, theirs_full.view_as(ours_full)), name


@pytest.mark.parametrize("wgrad", ["fp8", "high_precision"])
def test_fsdp2_shards_the_models_own_parameters(wgrad, gloo):
    plain, sharded = (converted(recipe="delayed", wgrad=wgrad) for _ in range(2))
    mesh = gloo()
    fully_shard(sharded.up, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    assert_same_steps(plain, sharded)
    for layer in (sharded.up, sharded.down):
        te_module = te_module_of(layer, layer.recipe)
        # From 2.16 on, TE asks, and then quantises the weight again in the backward instead of keeping it.
        assert getattr(te_module, "_is_fsdp2", True) is True
        assert not [name for name in layer.__dict__ if "fsdp_state" in name]


def test_fsdp1_flattens_the_models_own_parameters(gloo):
    plain, sharded = (converted(recipe="delayed") for _ in range(2))
    gloo()
    sharded = FullyShardedDataParallel(sharded, use_orig_params=True, device_id=torch.device("cpu"))
    assert_same_steps(plain, sharded)
