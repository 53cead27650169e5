"""Recipes by rules: which rule takes a layer, what the layer then computes, and what a checkpoint and the guard keep of it."""

import copy

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends import choose_backend
from foundry_fp8.backends.emulated import EmulatedBackend
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.backend import Availability
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.model_structure.roles import roles_of
from foundry_fp8.numerics.recipes import RECIPES, BlockScaling, CurrentScaling
from foundry_fp8.observe.guard.guard import DivergenceGuard
from tests.model_zoo import MODELS, TRANSFORMERS_4

HIGH = "high_precision"
DELAYED = {"name": "delayed", "amax_history_len": 4}
MIXED = [
    {"blocks": "last-1", "recipe": "block"},
    {"modules": "*.down", "recipe": "current", "gemms": {"wgrad": HIGH}},
    {"roles": ["mlp"], "recipe": DELAYED},
]


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.sigmoid(q * k) * v)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.attention = Attention(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks=4, d=64):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))
        self.head = nn.Linear(d, 32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def table(recipe, **options):
    """By layer: the recipes of fprop, dgrad and wgrad, and the last part of the rule's key."""
    report = foundry_fp8.apply_fp8(Model(), recipe=recipe, **options)
    return {row.name: (*row.gemms.values(), row.rule.removeprefix("algorithms.fp8.")) for row in report.rows}


def test_the_first_rule_that_names_a_layer_decides_and_what_none_names_stays_in_high_precision():
    found = table(MIXED)
    assert set(found) == {n for n, m in Model().named_modules() if isinstance(m, nn.Linear)}
    block, current, delayed = (("block",) * 3, ("current", "current", HIGH), ("delayed",) * 3)
    for part in ("attention.qkv", "attention.out", "up", "down"):
        assert found[f"blocks.3.{part}"] == (*block, "recipe[0]")
    for i in range(3):
        assert found[f"blocks.{i}.down"] == (*current, "recipe[1]")
        assert found[f"blocks.{i}.up"] == (*delayed, "recipe[2]")
        assert found[f"blocks.{i}.attention.qkv"] == ("",)
    assert found["head"] == ("",)


def test_the_report_says_each_layers_recipe_and_rule():
    report = foundry_fp8.apply_fp8(Model(), recipe=MIXED)
    assert report.recipe_names == "block + current + delayed" and report.skipped["head"].startswith("output")
    assert report.skipped["blocks.0.attention.qkv"] == "no rule of algorithms.fp8.recipe names it"
    found = report.to_dict()
    assert found["recipe"]["name"] == "block + current + delayed"
    assert {r["name"] for r in found["recipe"]["recipes"]} == {"block", "current", "delayed"}
    reasons = {row["name"]: row["reason"] for row in found["rows"]}
    assert reasons["blocks.{0-2}.down"] == "current, wgrad in high precision"
    lines = report.policy_table().splitlines()
    (down,) = [line for line in lines if "blocks.{0-2}.down" in line]
    assert all(word in down for word in ("current", HIGH, "recipe[1]"))


@pytest.mark.parametrize(
    "short, rules",
    [
        ({"recipe": "current", "exclude": ["*.down"]}, [{"modules": ["*.down"], "recipe": HIGH}, {"recipe": "current"}]),
        (
            {"recipe": "block", "keep_first_blocks": 1, "keep_last_blocks": 2},
            [{"blocks": "first-1, last-2", "recipe": HIGH}, {"recipe": "block"}],
        ),
        ({"recipe": DELAYED, "wgrad": HIGH}, [{"recipe": DELAYED, "gemms": {"wgrad": HIGH}}]),
        ({"recipe": "current", "include": ["*.up", "head"]}, [{"modules": ["*.up", "head"], "recipe": "current"}]),
    ],
    ids=str,
)  # fmt: skip
def test_the_other_options_are_short_for_rules(short, rules):
    models = Model(), Model()
    reports = [foundry_fp8.apply_fp8(m, **o) for m, o in zip(models, (short, {"recipe": rules}), strict=True)]
    rows = [[(row.name, row.action, row.gemms) for row in report.rows] for report in reports]
    assert rows[0] == rows[1]
    states = [FP8State.of(m).state_dict() for m in models]
    assert states[0]["recipe"] == states[1]["recipe"] and states[0]["modules"].keys() == states[1]["modules"].keys()  # fmt: skip


def test_they_stand_above_a_lists_rules():
    found = table([{"recipe": "current"}], exclude=["*.1.up"], keep_first_blocks=1, wgrad=HIGH)
    assert found["blocks.1.up"] == ("exclude",) and found["blocks.0.up"] == ("keep_first_blocks",)
    assert found["blocks.2.up"] == ("current", "current", HIGH, "recipe[0]")


def test_blocks_are_counted_in_an_encoder_and_in_a_decoder_each():
    model, _ = MODELS["T5"]()
    report = foundry_fp8.apply_fp8(model, recipe=[{"blocks": "last-1", "recipe": "current"}])
    assert {name.rpartition(".block.")[0] + name.rpartition(".block.")[2][:2] for name in report.converted} == {
        "encoder1.", "decoder1.",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "expected"),
    {
        "Qwen2Moe": {"self_attn.q_proj": "attention", **({"mlp.experts.0.up_proj": "expert"} if TRANSFORMERS_4 else {}),
                     "mlp.shared_expert.up_proj": "shared_expert", "mlp.gate": None, "mlp.shared_expert_gate": None},
        "Jamba": {"mamba.in_proj": None, "feed_forward.down_proj": "mlp"},
        "MPT": {"attn.Wqkv": "attention", "ffn.up_proj": "mlp"},
        "OPT": {"self_attn.k_proj": "attention", "fc1": "mlp"},
        "Llama-LoRA": {"mlp.down_proj.base_layer": "mlp", "self_attn.q_proj.base_layer": "attention"},
    }.items(),
    ids=str,
)  # fmt: skip
def test_roles_are_found_in_the_models_of_the_field(model, expected):
    made, _ = MODELS[model]()
    names = [name for name, m in made.named_modules() if "weight" in m._parameters]
    found = roles_of(made, names)
    for part, role in expected.items():
        named = [name for name in names if name.endswith(f".{part}")]
        assert named and {found.get(name) for name in named} == {role}, part


@pytest.mark.parametrize(
    "rules, message",
    [
        ([], r"recipe: an empty list"),
        (["current"], r"recipe\[0\]: 'current' is not a mapping"),
        ([{"recipe": "curent"}], r"recipe\[0\]\.recipe: 'curent' is not one of.*Did you mean 'current'"),
        ([{"recipe": "auto"}], r"recipe\[0\]\.recipe: auto chooses for the whole model"),
        ([{"modules": "*.up"}], r"recipe\[0\]\.recipe: missing"),
        ([{"recipe": "block", "module": "*"}], r"recipe\[0\]\.module: unknown key.*Did you mean 'modules'"),
        ([{"recipe": "block", "roles": ["experts"]}], r"recipe\[0\]\.roles\[0\]: 'experts'.*Did you mean 'expert'"),
        ([{"recipe": "block", "roles": ["expert"]}], r"recipe\[0\]: no effect: it names no linear layer.*roles attention, mlp"),
        ([{"recipe": "block", "gemms": {"wgard": HIGH}}], r"gemms\.wgard: 'wgard'.*Did you mean 'wgrad'"),
        ([{"recipe": "block", "gemms": {"fprop": HIGH, "dgrad": HIGH, "wgrad": HIGH}}], r"no linear layer was converted .*recipe\[0\] leaves it in high precision"),
        ([{"recipe": "block", "gemms": {"wgrad": "mxfp8"}}], r"gemms\.wgrad: 'mxfp8' is not one of fp8, dequantized, high_precision"),
        ([{"recipe": HIGH, "gemms": {"wgrad": HIGH}}], r"recipe\[0\]\.gemms: the rule's recipe is high_precision"),
        ([{"recipe": "block", "blocks": "frist-2"}], r"recipe\[0\]\.blocks: 'frist-2' is not an integer n"),
        ([{"recipe": "block", "blocks": "range-7-9"}], r"recipe\[0\]: no effect: it names no linear layer; the model has 4"),
        ([{"recipe": "block", "modules": ["*.upp"]}], r"recipe\[0\]\.modules: pattern '\*\.upp' matches none"),
        ([{"recipe": "block"}, {"modules": "*.up", "recipe": HIGH}], r"recipe\[1\]: no effect: rules above it name all of its layers: algorithms\.fp8\.recipe\[0\]"),
        ([{"recipe": "delayed"}, {"blocks": 1, "recipe": DELAYED}], r"recipe: delayed with other fields"),
        ([{"blocks": "first-100%", "recipe": HIGH}, {"recipe": "block"}], "leave nothing of the model's 4"),
        ([{"recipe": HIGH}], "every rule is high_precision"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_rules_fail_before_anything_changes_and_name_their_key(rules, message):
    model = Model()
    with pytest.raises(ConfigError, match=rf"(?s){message}"):
        foundry_fp8.apply_fp8(model, recipe=rules)
    assert not any(isinstance(m, FP8Linear) for m in model.modules())


def test_what_names_layers_besides_the_rules_is_refused():
    with pytest.raises(ConfigError, match=r"algorithms\.fp8\.include: the rules"):
        foundry_fp8.apply_fp8(Model(), recipe=[{"recipe": "block"}], include=["*.up"])
    model, _ = MODELS["Llama"]()
    rules = [{"roles": ["mlp"], "recipe": "current"}, {"recipe": "delayed"}]
    with pytest.raises(ConfigError, match=r"attention\.recipe: the linears run 2"):
        foundry_fp8.apply_fp8(model, recipe=rules, attention=True)


def test_blocks_in_high_precision_keep_their_attention():
    model, _ = MODELS["Llama"]()
    rules = [{"blocks": "first-1", "recipe": HIGH}, {"recipe": "delayed"}]
    report = foundry_fp8.apply_fp8(model, recipe=rules, attention=True)
    assert [row.action for row in report.attention] == ["skipped", "converted"]


def test_a_recipe_that_the_hardware_does_not_run_is_an_error_with_the_nearest_that_it_does(monkeypatch):
    def availability(self, recipe, device):
        return Availability(recipe.name in ("delayed", "current"), "too old", "Buy one.")

    monkeypatch.setattr(EmulatedBackend, "availability", availability)
    rules = [{"roles": ["mlp"], "recipe": "mxfp8"}, {"recipe": "current"}]
    with pytest.raises(RuntimeError, match=r"(?s)mxfp8 recipe and the current recipe.*nearest recipe that emulated runs there is current"):  # fmt: skip
        foundry_fp8.apply_fp8(Model(), recipe=rules)
    with pytest.raises(RuntimeError, match=r"cannot run the block recipe.*runs there is current"):
        choose_backend("emulated", [CurrentScaling(), BlockScaling()], torch.device("cpu"))


def batches(steps=3):
    torch.manual_seed(1)
    return [(torch.randn(32, 64), torch.randn(32, 32) / 32) for _ in range(steps)]


def test_each_layer_computes_what_it_would_in_a_model_of_its_recipe_alone():
    """Bit for bit: output, gradients, and in the third step with the scales of the first two."""
    model = Model()
    foundry_fp8.apply_fp8(model, recipe=MIXED)
    layers = dict(FP8State.of(model).modules)
    alone = {}
    for name, layer in layers.items():
        plain = nn.Linear(layer.in_features, layer.out_features)
        plain.load_state_dict(layer.state_dict())
        alone[name] = nn.Sequential(plain)
        recipe = layer.configured_recipe
        foundry_fp8.apply_fp8(alone[name], recipe=recipe, wgrad=layer.wgrad)
    seen = {}

    def see(layer, inputs, output):
        x = seen.setdefault(layer.fqn, {"x": inputs[0].detach().clone(), "y": output.detach().clone()})
        output.register_hook(lambda g: x.update(dy=g.clone()))

    for layer in layers.values():
        layer.register_forward_hook(see)
    for x, dy in batches():
        seen.clear()
        model.zero_grad()
        model(x.requires_grad_()).backward(dy)
        for name, found in seen.items():
            one = alone[name]
            one.zero_grad()
            x1 = found["x"].requires_grad_()
            y1 = one(x1)
            y1.backward(found["dy"])
            assert torch.equal(y1, found["y"]), name
            assert torch.equal(one[0].weight.grad, layers[name].weight.grad), name
            assert torch.equal(one[0].bias.grad, layers[name].bias.grad), name
    assert len(seen) == len(layers) == 10


@pytest.mark.parametrize("saved_from, loaded_by", [(MIXED, MIXED), ("current", [{"recipe": "current"}])])
def test_resume_is_bit_exact(saved_from, loaded_by, tmp_path):
    def steps(model, optimizer, part):
        for x, dy in batches(6)[part]:
            optimizer.zero_grad()
            model(x).backward(dy)
            optimizer.step()
        FP8State.of(model).update()

    models = [Model(), Model()]
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    for model, recipe in zip(models, (saved_from, loaded_by), strict=True):
        foundry_fp8.apply_fp8(model, recipe=recipe)
    steps(models[0], optimizers[0], slice(0, 3))
    torch.save({"model": models[0].state_dict(), "fp8": FP8State.of(models[0]).state_dict()}, tmp_path / "c")
    saved = torch.load(tmp_path / "c", weights_only=True)
    models[1].load_state_dict(saved["model"])
    FP8State.of(models[1]).load_state_dict(saved["fp8"])
    for model, optimizer in zip(models, optimizers, strict=True):
        steps(model, optimizer, slice(3, 6))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


@pytest.mark.parametrize(
    "other, message",
    [
        ([MIXED[0], MIXED[2]], r"another policy, in which blocks\.\d\.down runs .*'current'.* and here .*'delayed'"),
        (MIXED[:2], r"another policy, in which blocks\.\d\.up runs .*'delayed'.* and here high precision"),
        ([MIXED[0], {**MIXED[1], "gemms": {"wgrad": "dequantized"}}, MIXED[2]], r"down runs .*and here .*'wgrad': 'dequantized'"),
        ([MIXED[0], {**MIXED[1], "gemms": {}}, MIXED[2]], r"down runs .*'wgrad': 'high_precision'.* and here .*'wgrad': 'fp8'"),
        (DELAYED, r"made by the recipe policy, this run uses .*'delayed'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_checkpoint_of_another_policy_is_refused_as_one_of_another_recipe_is(other, message):
    models = [Model(), Model()]
    for model, recipe in zip(models, (MIXED, other), strict=True):
        foundry_fp8.apply_fp8(model, recipe=recipe)
    state = copy.deepcopy(FP8State.of(models[0]).state_dict())
    with pytest.raises(RuntimeError, match=rf"(?s){message}.*load_ignore_keys"):
        FP8State.of(models[1]).load_state_dict(state)


def test_the_guard_demotes_by_and_returns_to_each_layers_own_recipe():
    model = Model()
    foundry_fp8.apply_fp8(model, recipe=MIXED)
    layers = FP8State.of(model).modules
    own = {name: (layer.configured_recipe, layer.wgrad) for name, layer in layers.items()}
    x, y = batches(1)[0]

    def loss_of(module, batch):
        return (module(batch[0]) - batch[1]).pow(2).mean()

    options = {"interval": 1, "quiet_batches": 1, "gradient_limit": 100.0, "loss_limit": 100.0, "rows": 32}
    guard = DivergenceGuard(model, loss_of, **options)
    finer = {"delayed": "current", "current": "block", "block": "None"}
    for name in layers:
        recipe = guard.finer(name)
        assert finer[own[name][0].name] == (recipe.name if recipe else "None")
        layers[name].set_recipe(recipe)
    restored = DivergenceGuard(model, loss_of, **options)
    restored.load_state_dict(guard.state_dict())
    assert restored.demoted == list(layers)
    for _ in range(4):
        restored.before_step((x, y))
        loss_of(model, (x, y)).backward()
        restored.after_step(1.0)
    assert restored.demoted == []
    assert {name: (layer.recipe, layer.wgrad) for name, layer in layers.items()} == own
    assert {recipe.name for recipe, _ in own.values()} == {"delayed", "current", "block"}


def test_one_delayed_recipe_has_state_for_its_layers_alone():
    model = Model()
    foundry_fp8.apply_fp8(model, recipe=MIXED)
    state = FP8State.of(model)
    assert set(state.state_dict()["modules"]) == {f"blocks.{i}.up" for i in range(3)}
    assert [name for name, layer in state.modules.items() if layer.slots] == [
        f"blocks.{i}.up" for i in range(3)
    ]
    assert {type(layer.recipe) for layer in state.modules.values()} == {RECIPES[n] for n in ("block", "current", "delayed")}  # fmt: skip
