import copy

import peft
import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Block(nn.Module):
    def __init__(self, d=64):
        super().__init__()
        self.up = nn.Linear(d, 128)
        self.down = nn.Linear(128, d)
        self.gate = nn.Linear(d, 4)
        self.own = OwnForward(d, d)
        self.odd = nn.Linear(d, 50)
        self.attention = nn.MultiheadAttention(d, 2)

    def forward(self, x):
        return x + self.own(self.down(torch.relu(self.up(x))))


class Model(nn.Module):
    def __init__(self, blocks=4, d=64, device=None):
        super().__init__()
        with torch.device(device or "cpu"):
            self.embedding = nn.Embedding(96, d)
            self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))
            self.head = nn.Linear(d, 96, bias=False)
            self.lm_head = nn.Linear(d, 96)
            self.shared = self.blocks[0].up
            self.double = nn.Linear(64, 64, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_the_report_names_every_linear_and_why():
    model = Model()
    linears = [n for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear)]
    report = foundry_fp8.apply_fp8(model, recipe="current")
    in_proj = [f"blocks.{i}.attention.in_proj_weight" for i in range(4)]
    assert {row.name for row in report.rows} == {*linears, *in_proj}
    assert [row.name for row in report.rows if row.name not in in_proj] == linears
    converted = {f"blocks.{i}.{n}" for i in range(4) for n in ("up", "down")} | {"shared"}
    assert set(report.converted) == converted
    assert "tied to an embedding" in report.skipped["head"]
    assert "output heads" in report.skipped["lm_head"]
    assert "MultiheadAttention holds it as a parameter" in report.skipped["blocks.1.attention.in_proj_weight"]
    assert "out_features=4 is not a multiple of 16" in report.skipped["blocks.1.gate"]
    assert "OwnForward has a forward of its own" in report.skipped["blocks.2.own"]
    assert "out_features=50 is not a multiple of 16" in report.skipped["blocks.3.odd"]
    assert "without calling it" in report.skipped["blocks.0.attention.out_proj"]
    assert "float64" in report.skipped["double"]
    assert "9 of" in report.summary() and "current recipe on the emulated backend" in report.summary()
    # A layer under two names and a head tied to its embedding count once.
    sizes = {
        "converted": 4 * 2 * 64 * 128,
        "skipped": 4 * (4 * 64 + 64 * 64 + 50 * 64 + 4 * 64 * 64) + 2 * 96 * 64 + 64 * 64,
    }
    assert report.converted_share == pytest.approx(sizes["converted"] / sum(sizes.values()))


@pytest.mark.parametrize("options", [{}, {"exclude": ["body.2"]}], ids=["default", "exclude given"])
def test_whatever_is_called_lm_head_stays_whatever_exclude_says(options):
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    model.lm_head = nn.Sequential(nn.Linear(32, 64))
    model.lm_head_2 = nn.Linear(32, 64)
    report = foundry_fp8.apply_fp8(model, recipe="current", **options)
    heads = {name for name, why in report.skipped.items() if why == "output heads stay in high precision"}
    assert heads == {"lm_head.0", "lm_head_2"}
    assert report.converted == (["body.0", "body.2"] if not options else ["body.0"])


def test_the_table_merges_blocks_and_leaves_out_nothing():
    report = foundry_fp8.apply_fp8(Model(), recipe="current", keep_last_blocks=1)
    table = report.table()
    assert "blocks.{0-2}.up" in table and "blocks.3.up" in table
    assert "blocks.{0-2}.gate" in table and "lm_head" in table and "50 x 64" in table


def test_parameters_names_ties_hooks_and_attributes_survive():
    model = Model()
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    model.blocks[1].up._is_residual = True
    calls = []
    model.blocks[1].up.register_forward_hook(lambda *a: calls.append(1))
    foundry_fp8.apply_fp8(model, recipe="delayed")
    after = dict(model.named_parameters())
    assert list(after) == list(before) and all(after[n] is before[n] for n in before)
    assert list(model.state_dict()) == keys
    assert model.shared is model.blocks[0].up and isinstance(model.shared, FP8Linear)
    assert model.blocks[1].up._is_residual
    model(torch.randint(0, 96, (2, 8)))
    assert calls


@pytest.mark.parametrize("recipe", FOR_ANY_MODEL)
def test_checkpoints_are_interchangeable_with_the_unconverted_model(recipe):
    plain, converted = Model(), Model()
    foundry_fp8.apply_fp8(converted, recipe=recipe)
    converted.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(converted.state_dict(), strict=True)
    for a, b in zip(plain.state_dict().values(), converted.state_dict().values(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_meta_model_converts_and_materialises():
    model = Model(device="meta")
    foundry_fp8.apply_fp8(model, recipe="delayed", device="cpu")
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    model(torch.randint(0, 96, (2, 8))).sum().backward()
    assert model.blocks[0].up.weight.grad.isfinite().all()


def test_an_optimizer_made_before_the_conversion_trains_the_converted_model():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    foundry_fp8.apply_fp8(model, recipe="current")
    before = model.blocks[0].up.weight.detach().clone()
    model(torch.randint(0, 96, (2, 8))).pow(2).mean().backward()
    optimizer.step()
    assert not torch.equal(before, model.blocks[0].up.weight)


def test_patterns_and_kept_blocks_choose():
    report = foundry_fp8.apply_fp8(
        Model(),
        recipe="current",
        include=["blocks.*"],
        exclude=["*.down"],
        keep_first_blocks=1,
        keep_last_blocks=2,
    )
    # `shared` is block 0's module under another name, and include does not name it
    assert report.converted == ["blocks.1.up"]
    assert "include does not name it" in report.skipped["shared"]
    assert "exclude leaves it in high precision" in report.skipped["blocks.1.down"]


@pytest.mark.parametrize("pattern", ["*.down", "*.down.base_layer", "*.1.down"])
def test_patterns_name_what_peft_adapts_as_the_plain_model_does(pattern):
    """PEFT puts ``base_layer`` behind the name of every linear that it adapts."""

    def adapted():
        return peft.get_peft_model(Model(), peft.LoraConfig(target_modules=["down", "up"]))

    rows = foundry_fp8.apply_fp8(adapted(), recipe="current", exclude=[pattern]).rows
    left = {row.name for row in rows if row.name.endswith("down.base_layer") and row.action != "converted"}
    assert len(left) == (1 if ".1." in pattern else 4)
    model = adapted()
    foundry_fp8.apply_fp8(model, recipe=[{"modules": pattern, "recipe": "block"}, {"recipe": "current"}])
    linears = {name: module for name, module in model.named_modules() if isinstance(module, FP8Linear)}
    assert {name for name, linear in linears.items() if linear.recipe.name == "block"} == left


def test_what_several_blocks_share_has_one_answer():
    """Zamba's blocks share their attention. Left out under one name, it runs in high precision under all, and the report says so."""

    def model():
        made = nn.Module()
        made.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))
        made.layers[0].shared = made.layers[2].shared = nn.Sequential(nn.Linear(32, 32))
        return made

    shared = {"layers.0.shared.0", "layers.2.shared.0"}
    for options, out in (
        ({}, set()),
        ({"keep_last_blocks": 1}, {"layers.2.0", *shared}),
        ({"keep_first_blocks": 1}, {"layers.0.0", *shared}),
        ({"exclude": ["layers.2.*"]}, {"layers.2.0", *shared}),
        ({"include": ["layers.0.*"]}, {"layers.1.0", "layers.2.0"}),
    ):
        converted = model()
        report = foundry_fp8.apply_fp8(converted, recipe="current", **options)
        named = dict(converted.named_modules(remove_duplicate=False))
        runs = {n for n, m in named.items() if isinstance(m, FP8Linear)}
        assert {n for n, m in named.items() if isinstance(m, nn.Linear)} - runs == out, options
        assert {row.name for row in report.rows if row.action == "converted"} == runs, options


def test_a_pattern_with_an_index_does_not_take_another_index():
    report = foundry_fp8.apply_fp8(Model(blocks=11), recipe="current", include=["blocks.1.*"])
    assert report.converted == ["blocks.1.up", "blocks.1.down"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": "curent"}, r"algorithms\.fp8\.recipe: 'curent' is not one of.*Did you mean 'current'"),
        ({"recpie": "current"}, r"algorithms\.fp8\.recpie: unknown key.*Did you mean 'recipe'"),
        ({"backend": "te"}, r"algorithms\.fp8\.backend: 'te' is not one of auto, transformer_engine"),
        ({"include": "*"}, r"algorithms\.fp8\.include: '\*' is not a list"),
        ({"include": ["*.upp"]}, r"algorithms\.fp8\.include: pattern '\*\.upp' matches none"),
        ({"exclude": ["nothing"]}, r"algorithms\.fp8\.exclude: pattern 'nothing' matches none"),
        ({"keep_first_blocks": -1}, r"keep_first_blocks: -1 is not an integer"),
        ({"keep_first_blocks": 2, "keep_last_blocks": 2}, "leave nothing of the model's 4"),
        ({"exclude": ["*.up", "*.down", "shared"]}, "no linear layer was converted"),
        ({"wgrad": "bf16"}, r"algorithms\.fp8\.wgrad: 'bf16' is not one of fp8, high_precision"),
        ({"evaluate": True}, r"algorithms\.fp8\.evaluate: True"),
    ],
)
def test_bad_options_fail_before_anything_changes(options, message):
    model = Model()
    with pytest.raises(ConfigError, match=message):
        foundry_fp8.apply_fp8(model, **{"recipe": "current", **options})
    assert not any(isinstance(m, FP8Linear) for m in model.modules())


def test_converting_twice_goes_on_and_otherwise_is_an_error():
    model = Model()
    report = foundry_fp8.apply_fp8(model, recipe="current")
    modules = list(model.modules())
    assert foundry_fp8.apply_fp8(model, recipe="current") is report
    assert list(model.modules()) == modules
    with pytest.raises(ConfigError, match=r"converted to FP8 already, with other settings \(recipe: .*here"):
        foundry_fp8.apply_fp8(model, recipe="block")
    around = nn.Sequential(model, nn.Linear(32, 32))
    assert foundry_fp8.apply_fp8(around, recipe="current") is report


def test_a_gpu_backend_on_a_cpu_is_an_error_with_a_reason():
    with pytest.raises(
        RuntimeError,
        match=r"algorithms\.fp8\.backend: transformer_engine cannot run the current recipe on cpu",
    ):
        foundry_fp8.apply_fp8(Model(), recipe="current", backend="transformer_engine")


class TestState:
    def trained(self, recipe="delayed", seed=0):
        torch.manual_seed(seed)
        model = Model()
        foundry_fp8.apply_fp8(model, recipe=recipe)
        for _ in range(3):
            model(torch.randint(0, 96, (2, 16))).pow(2).sum().backward()
        FP8State.of(model).update()
        return model

    @pytest.mark.parametrize("recipe", FOR_ANY_MODEL)
    def test_resume_is_bit_exact_and_loads_with_weights_only(self, recipe, tmp_path):
        model = self.trained(recipe)
        torch.save({"model": model.state_dict(), "fp8": FP8State.of(model).state_dict()}, tmp_path / "c.pt")
        saved = torch.load(tmp_path / "c.pt", weights_only=True)
        resumed = Model()
        foundry_fp8.apply_fp8(resumed, recipe=recipe)
        resumed.load_state_dict(saved["model"])
        FP8State.of(resumed).load_state_dict(saved["fp8"])
        ids = torch.randint(0, 96, (2, 16))
        for m in (model, resumed):
            m.zero_grad()
            m(ids).pow(2).sum().backward()
        for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
            assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad)

    def test_state_is_fixed_shape_float32_by_module_name(self):
        state = FP8State.of(self.trained()).state_dict()
        assert set(state["modules"]) == {f"blocks.{i}.{n}" for i in range(4) for n in ("up", "down")}
        for entry in state["modules"].values():
            assert entry["scale"].shape == (3,) and entry["amax_history"].shape == (1024, 3)
            assert entry["scale"].dtype == entry["amax_history"].dtype == torch.float32

    @pytest.mark.parametrize(
        "damage, message",
        [
            (lambda s: s.pop("modules"), "not readable.*modules"),
            (lambda s: s.update(version=7), "version 7"),
            (lambda s: s["recipe"].update(margin=3), "made by the recipe"),
            (lambda s: s["modules"].pop("blocks.0.up"), "another model or selection"),
            (lambda s: s["modules"]["blocks.0.up"].update(scale=torch.ones(2)), "blocks.0.up has shapes"),
            (lambda s: s["modules"]["blocks.0.up"]["scale"].fill_(torch.nan), "blocks.0.up is damaged"),
            (lambda s: s["modules"]["blocks.0.up"]["scale"].fill_(0.0), "blocks.0.up is damaged"),
            (lambda s: s["modules"]["blocks.0.up"]["amax_history"].fill_(-1), "blocks.0.up is damaged"),
        ],
    )
    def test_foreign_or_damaged_state_is_refused_with_the_way_out(self, damage, message):
        state = copy.deepcopy(FP8State.of(self.trained()).state_dict())
        damage(state)
        fresh = self.trained(seed=1)
        before = FP8State.of(fresh).delayed.scale.clone()
        with pytest.raises(RuntimeError, match=rf"(?s){message}.*load_ignore_keys"):
            FP8State.of(fresh).load_state_dict(state)
        assert torch.equal(FP8State.of(fresh).delayed.scale, before)
