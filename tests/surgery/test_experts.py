"""Experts in one parameter: whose forwards are known, what their products are, state, refusals."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import foundry_fp8
from foundry_fp8.backends.emulated import EmulatedBackend
from foundry_fp8.backends.native import NativeBackend
from foundry_fp8.cli.probe import _measure
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.experts import routed
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, MXFP8Scaling
from foundry_fp8.observe.precision_probe import PrecisionProbe
from foundry_fp8.surgery.experts import expert_weights
from tests.kernels.interpreter import interpret
from tests.model_zoo import MODELS, TRANSFORMERS_4

EXPERTS, IN, OUT = 4, 64, 96
SIZES = [5, 0, 40, 3]


def built(name, **options):
    torch.manual_seed(3)
    model, batch = MODELS[name]()
    report = foundry_fp8.apply_fp8(model.train(), **{"recipe": "current", "backend": "emulated", **options})
    return model, batch, {row.name: row for row in report.rows}


def step(model, batch):
    model.zero_grad()
    output = model(**batch).logits
    (output * torch.linspace(-1, 1, output.numel()).view(output.shape)).sum().backward()
    return {clean_name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [
        pytest.param(
            backend,
            recipe,
            marks=pytest.mark.full if backend is NativeBackend and recipe.name in ("block", "mxfp8") else (),
            id=f"{backend.__name__}-{recipe.name}-{recipe.by_row}",
        )
        for backend in (EmulatedBackend, NativeBackend)
        for recipe in (CurrentScaling(), CurrentScaling(granularity="row"), BlockScaling(), MXFP8Scaling())
    ],
)
def test_each_expert_is_a_linear_of_its_own(backend, recipe, monkeypatch):
    """Bit for bit, with scales of its own rows; an expert without rows has a gradient of zeros."""
    if backend is NativeBackend:
        interpret(monkeypatch)
    backend = backend()
    torch.manual_seed(0)
    # What every expert gets, and what it holds, has a range of its own: one scale for all would not do.
    weights = torch.randn(EXPERTS, OUT, IN) * torch.tensor([1, 8, 0.25, 64])[:, None, None]
    weights = weights.to(torch.bfloat16).requires_grad_()
    x = torch.cat([torch.randn(n, IN) * 4.0**e for e, n in enumerate(SIZES)])
    x, dy = x.to(torch.bfloat16).requires_grad_(), torch.randn(sum(SIZES), OUT, dtype=torch.bfloat16)
    layer = FP8GroupedLinear(
        fqn="experts.w", shape=(EXPERTS, OUT, IN), backend=backend, recipe=recipe, wgrad="fp8", evaluate="fp8"
    )
    y = layer(x, weights, SIZES)
    dx, dw = torch.autograd.grad(y, [x, weights], dy)
    assert dw[1].count_nonzero() == 0 and layer.ledger.calls
    rows = zip(x.split(SIZES), y.split(SIZES), dx.split(SIZES), dy.split(SIZES), strict=True)
    for expert, (xe, ye, dxe, dye) in enumerate(rows):
        if not len(xe):
            continue
        linear = nn.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
        linear.weight.data = weights[expert].detach().clone()
        alone = FP8Linear.from_linear(linear, fqn="one", backend=backend, recipe=recipe)
        xa = xe.detach().clone().requires_grad_()
        ya = alone(xa)
        dxa, dwa = torch.autograd.grad(ya, [xa, alone.weight], dye)
        for found, expected in ((ye, ya), (dxe, dxa), (dw[expert], dwa)):
            assert torch.equal(found, expected)


def test_rows_are_sorted_by_expert_then_choice():
    top = torch.tensor([[2, 0], [0, 1], [2, 1], [4, 0]])  # 4: nobody, of 4 experts
    rows = routed(top, 4)
    assert rows.sizes == [3, 2, 2, 0]
    assert rows.token.tolist() == [1, 0, 3, 1, 2, 0, 2] and rows.choice.tolist() == [0, 1, 1, 1, 1, 0, 0]


KNOWN = [
    "Dbrx",
    "Llama4",
    "GraniteMoe",
    "JetMoe",
    *(["MPT-dmoe-glu"] if TRANSFORMERS_4 else ["Mixtral", "GptOss"]),
]


@pytest.mark.parametrize("name", KNOWN)
def test_forms_are_known_by_running_them(name):
    torch.manual_seed(3)
    model, _ = MODELS[name]()
    found = expert_weights(model)
    assert found and all(one.form is not None and not one.why_not for one in found.values())
    for one in found.values():
        one.module.forward = one.module.forward  # somebody replaced it
        assert "something else has replaced" in next(iter(expert_weights(model).values())).why_not
        break
    changed = copy.deepcopy(model)
    cls = type(next(iter(expert_weights(changed).values())).module)
    for module in changed.modules():
        vars(module).pop("forward", None)
        if type(module) is cls:
            module.__class__ = type(
                cls.__name__, (cls,), {"forward": lambda self, *a: 2 * cls.forward(self, *a)}
            )
    assert "whose forward is none that FP8 knows" in next(iter(expert_weights(changed).values())).why_not


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 5 spreads experts over ranks")
def test_experts_spread_over_ranks_by_transformers_are_left_by_name():
    model, _ = MODELS["Mixtral"]()
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    rows = {row.name: row for row in foundry_fp8.apply_fp8(model, recipe="current", backend="emulated").rows}
    assert "none that FP8 knows" in rows["model.layers.0.mlp.experts.down_proj"].reason
    assert rows["model.layers.1.mlp.experts.down_proj"].action == "converted"


def test_megablocks_and_sharded_experts_are_left_by_name():
    model, _ = MODELS["MPT-dmoe"]()
    experts = model.transformer.blocks[0].ffn.experts
    experts.__class__ = type(
        "ParallelDroplessMLP", (type(experts),), {"__module__": "megablocks.layers.dmoe"}
    )
    rows = {row.name: row for row in foundry_fp8.apply_fp8(model, recipe="current").rows}
    assert "torch_dmoe trains them in FP8" in rows["transformer.blocks.0.ffn.experts.mlp.w1"].reason
    assert rows["transformer.blocks.1.ffn.experts.mlp.w1"].action == "converted"


def test_beside_adapters_frozen_experts_run_in_fp8_and_an_adapter_on_the_parameter_is_left_by_name():
    model, batch = MODELS["Dbrx"]()
    parametrized = model.transformer.blocks[1].ffn.experts.mlp
    nn.utils.parametrize.register_parametrization(parametrized, "w1", nn.Identity())
    model = get_peft_model(model, LoraConfig(target_modules=["Wqkv"])).train()
    power_2 = {"name": "current", "power_2_scales": True}
    report = foundry_fp8.apply_fp8(model, recipe=power_2, backend="emulated", frozen_weights="fp8")
    rows = {row.name.removeprefix("base_model.model.transformer.blocks."): row for row in report.rows}
    assert rows["0.norm_attn_norm.attn.Wqkv.base_layer"].reason.endswith("kept in FP8 alone")
    assert rows["0.ffn.experts.mlp.w1"].reason == "current"
    assert "something else has replaced (an adapter on a parameter)" in rows["1.ffn.experts.mlp.v1"].reason
    assert step(model, batch)
    layers = [m for m in model.modules() if isinstance(m, FP8GroupedLinear)]
    assert len(layers) == 3 and all(
        set(m.ledger.calls) == {("fprop", "fp8"), ("dgrad", "fp8")} for m in layers
    )


@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("mxfp8", marks=pytest.mark.full)])
def test_rules_name_them_by_role_and_by_parameter(recipe):
    policy = [
        {"modules": "*.0.ffn.experts.mlp.w2", "recipe": "high_precision"},
        {"roles": ["expert"], "recipe": recipe, "gemms": {"wgrad": "high_precision"}},
    ]
    model, batch, rows = built("MPT-dmoe-glu", recipe=policy)
    assert rows["transformer.blocks.0.ffn.experts.mlp.w2"].action == "skipped"
    assert rows["transformer.blocks.1.ffn.experts.mlp.v1"].gemms == {
        "fprop": recipe, "dgrad": recipe, "wgrad": "high_precision"
    }  # fmt: skip
    gradients = step(model, batch)
    layers = {m.fqn: m for m in model.modules() if isinstance(m, FP8GroupedLinear)}
    left = layers["transformer.blocks.0.ffn.experts.mlp.w2"]
    assert left.recipe is None and {p for (_, p, *_), n in _calls(left)} == {"fp32"}
    assert {p for (_, p, *_), n in _calls(layers["transformer.blocks.1.ffn.experts.mlp.v1"])} == {
        "fp4" if recipe == "nvfp4" else "fp8",
        "fp32",
    }
    assert gradients.keys() == dict(model.named_parameters()).keys()


def test_the_probe_measures_those_that_were_converted():
    policy = [{"modules": "*.mlp.w2", "recipe": "high_precision"}, {"recipe": "current"}]
    model, *_ = built("MPT-dmoe", recipe=policy)
    probe = PrecisionProbe(model, lambda module, batch: module(**batch).logits.square().mean())
    asked = []
    errors, _ = _measure(probe, lambda recipes: asked.append(recipes) or 0.0, 0.1)
    assert set(errors["all layers"]) == {"current", "block", "mxfp8"}
    assert asked and not any(name.endswith("w2") for recipes in asked for name in recipes)


def _calls(layer):
    return [((gemm, precision), n) for (gemm, precision, *_), n in layer.ledger.calls.items()]


def test_delayed_scaling_has_one_scale_for_all_experts_and_goes_on_after_a_load():
    model, batch, _ = built("Dbrx", recipe="delayed")
    step(model, batch)
    state = FP8State.of(model)
    state.update()
    name = "transformer.blocks.0.ffn.experts.mlp.w1"
    saved = state.state_dict()["modules"][name]["amax_history"]
    assert (saved == dict(model.named_parameters())[name].detach().abs().max()).any()
    again, _, _ = built("Dbrx", recipe="delayed")
    FP8State.of(again).load_state_dict(copy.deepcopy(state.state_dict()))
    for (n, a), b in zip(step(model, batch).items(), step(again, batch).values(), strict=True):
        assert torch.equal(a, b), n


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.full)])
def test_a_recompute_and_two_microbatches_change_nothing(recipe):
    found = []
    for checkpointed in (False, True):
        model, batch, _ = built("MPT-dmoe", recipe=recipe)
        if checkpointed:
            foundry_fp8.apply_activation_checkpointing(model)
        step(model, batch)
        step(model, batch)
        found.append((step(model, batch), FP8State.of(model).state_dict()["modules"]))
    (plain, histories), (recomputed, recomputed_histories) = found
    assert all(torch.equal(plain[n], recomputed[n]) for n in plain)
    for name, tensors in histories.items():
        assert all(torch.equal(t, recomputed_histories[name][k]) for k, t in tensors.items()), name


def test_evaluation_is_the_models_own_forward():
    model, batch, _ = built("Dbrx")
    plain = MODELS["Dbrx"]()[0]
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(**batch).logits, plain.eval()(**batch).logits)
    layers = [m for m in model.modules() if isinstance(m, FP8GemmLayer)]
    for layer in layers:
        layer.evaluate = "fp8"
    assert not torch.equal(model(**batch).logits, plain(**batch).logits)


def test_sizes_that_do_not_add_up_are_an_error():
    layer = FP8GroupedLinear(
        fqn="experts.w", shape=(2, OUT, IN), backend=EmulatedBackend(), recipe=CurrentScaling(), wgrad="fp8",
        evaluate="fp8",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"7 rows and 2 experts do not fit the sizes \[3, 3\]"):
        layer(torch.randn(7, IN), torch.randn(2, OUT, IN), [3, 3])


def test_export_and_unit_refuse_them():
    model, _, _ = built("Dbrx")
    with pytest.raises(ConfigError, match=r"blocks.0.ffn.experts.mlp.w1 holds experts in one parameter"):
        foundry_fp8.export_fp8(model, "nowhere")
    rows = built("MPT-dmoe", recipe=[{"recipe": "current", "roles": ["attention"]}])[2]
    assert (
        "no rule of algorithms.fp8.recipe names it" in rows["transformer.blocks.0.ffn.experts.mlp.w1"].reason
    )
