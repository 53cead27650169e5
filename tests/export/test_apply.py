"""Exported folders: the layout on disk, the library's own reader, and the logits of what a server computes."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.models.mus import MusConfig, MusForCausalLM
from foundry_fp8.models.mus.adapters import use_unit_lora
from tests.export.served import emulated, load, stored

pytestmark = [
    pytest.mark.filterwarnings("ignore:The `dict` method is deprecated"),  # transformers, of that package
]

IDS = torch.arange(48).view(2, 24) * 7 % 96
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def llama(tied=False):
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
            tie_word_embeddings=tied,
            attention_bias=True,
        )
    )


def mus(**options):
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 96}
    model = MusForCausalLM(MusConfig(**sizes, tau=0.3, **options))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def trained(model, recipe, dtype, **options):
    """A step in FP8, so that weights and histories are those of a run."""
    model = model.to(dtype)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated", evaluate="fp8", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    FP8State.of(model).update()
    return model.eval()


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


UNIT = {"name": "unit", "gradient_scale": 4096}


@DTYPES
@pytest.mark.parametrize("qk_norm", ["none", "rms"])
def test_a_unit_scaled_model_is_served_as_it_was_trained_bit_for_bit(qk_norm, dtype, tmp_path):
    model = trained(mus(qk_norm=qk_norm), UNIT, dtype)
    report = foundry_fp8.export_fp8(model, tmp_path, dtype=name_of(dtype))
    assert len(report.layers) == 8 and "bit for bit" in report.summary()
    served, names = emulated(load(tmp_path))
    assert len(names) == 8
    with torch.no_grad():
        assert torch.equal(served.to(dtype)(IDS).logits, model(IDS).logits)


def test_the_folder_has_the_published_layout(tmp_path):
    """Names, dtypes and shapes as compressed-tensors' documentation and vLLM's reader have them."""
    model = trained(mus(), UNIT, torch.float32)
    foundry_fp8.export_fp8(model, tmp_path)
    config, tensors = stored(tmp_path)
    quantization = config["quantization_config"]
    assert (quantization["quant_method"], quantization["format"]) == ("compressed-tensors", "float-quantized")
    assert quantization["quantization_status"] == "compressed" and quantization["ignore"] == ["lm_head"]
    (group,) = quantization["config_groups"].values()
    for operand in ("weights", "input_activations"):
        said = {key: group[operand][key] for key in ("num_bits", "type", "strategy", "symmetric", "dynamic")}
        assert said == {
            "num_bits": 8,
            "type": "float",
            "strategy": "tensor",
            "symmetric": True,
            "dynamic": False,
        }
    layers = {name.removesuffix(".weight_scale") for name in tensors if name.endswith("weight_scale")}
    assert len(layers) == 8
    for name in layers:
        weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        assert weight.dtype == torch.float8_e4m3fn and weight.shape == model.get_submodule(name).weight.shape
        assert (scale.dtype, scale.shape) == (torch.float32, (1,))
        assert (
            float(scale) == pytest.approx(weight.shape[1] ** -0.5)
            and float(tensors[f"{name}.input_scale"]) == 1
        )
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(tensors.pop(name), parameter.detach().bfloat16()), name
    assert (
        len(tensors) == 3 * 8
        and config.get("dtype", config.get("torch_dtype")) == "bfloat16"
        and config["hidden_multiplier"] == 1
    )


@DTYPES
@pytest.mark.parametrize("recipe", ["delayed", "current", {"name": "current", "granularity": "row"}], ids=str)
def test_an_ordinary_model_is_served_with_its_scales(recipe, dtype, tmp_path):
    model = trained(llama(), recipe, dtype)
    report = foundry_fp8.export_fp8(model, tmp_path, dtype=name_of(dtype))
    static = recipe == "delayed"
    assert len(report.layers) == 14
    assert all((layer["input_scale"] is not None) == static for layer in report.layers.values())
    group = stored(tmp_path)[0]["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] is not static
    strategies = [group[operand]["strategy"] for operand in ("weights", "input_activations")]
    assert strategies == (["tensor"] * 2 if isinstance(recipe, str) else ["channel", "token"])
    served, names = emulated(load(tmp_path))
    assert set(names) == set(report.layers)
    with torch.no_grad():
        trained_fp8, from_server = model(IDS).logits.float(), served.to(dtype)(IDS).logits.float()
        for layer in model.modules():
            if hasattr(layer, "evaluate"):
                layer.evaluate = "high_precision"
        without = model(IDS).logits.float()
    error = (from_server - trained_fp8).norm() / trained_fp8.norm()
    fp8 = (without - trained_fp8).norm() / trained_fp8.norm()
    # The server multiplies by the reciprocal of a reciprocal: an ulp of the scale, which moves the inputs that lie at a tie.
    assert error < 0.25 * fp8 and fp8 > 0.01, (error, fp8)


def test_the_librarys_own_forward_computes_nearly_the_same(tmp_path):
    """Its fake quantisation: scales folded into float32 weights and inputs, other roundings, other sums."""
    model = trained(mus(), UNIT, torch.float32)
    foundry_fp8.export_fp8(model, tmp_path, dtype="float32")
    loaded = load(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=0.02)
    for name, module in model.named_modules():
        if hasattr(module, "evaluate"):
            q = module.weight.detach().to(torch.float8_e4m3fn).float() * module.output_multiplier
            assert torch.equal(loaded.get_submodule(name).weight.float(), q), name


def test_scales_rounded_to_powers_of_two_are_distinguished(tmp_path):
    model = trained(llama(), {"name": "current", "power_2_scales": True}, torch.float32)
    report = foundry_fp8.export_fp8(model, tmp_path)
    assert all(
        float(layer["weight_scale"]).hex().startswith("0x1.0000000000000p")
        for layer in report.layers.values()
    )
    assert "otherwise than training did" in report.summary()


def test_tied_embeddings_are_stored_once_and_nothing_changes_in_the_model(tmp_path):
    model = trained(llama(tied=True), "current", torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    foundry_fp8.export_fp8(model, tmp_path)
    assert "lm_head.weight" not in stored(tmp_path)[1]
    assert not hasattr(model.config, "quantization_config") and model.config.torch_dtype is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Holder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


def test_what_holds_the_model_and_what_wraps_its_layers_change_no_name(tmp_path):
    from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing

    model = trained(mus(), UNIT, torch.float32)
    foundry_fp8.export_fp8(model, tmp_path / "plain")
    apply_activation_checkpointing(model, targets={"musblock": 2})
    foundry_fp8.export_fp8(Holder(model), tmp_path / "held")
    plain, held = (stored(tmp_path / folder) for folder in ("plain", "held"))
    assert plain[0] == held[0] and plain[1].keys() == held[1].keys()


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96, n_positions=32))


def adapted():
    model = get_peft_model(mus(), use_unit_lora(LoraConfig(target_modules=["qkv_proj"])))
    foundry_fp8.apply_fp8(model, recipe="unit")
    return model


def renamed(model):
    model.config.model_type = "somebodys_own"
    return model


def test_a_delayed_model_that_has_seen_nothing_has_no_scales(tmp_path):
    model = llama()
    foundry_fp8.apply_fp8(model, recipe="delayed")
    with pytest.raises(RuntimeError, match=r"q_proj: no input was ever seen.*load the FP8 state"):
        foundry_fp8.export_fp8(model, tmp_path / "out")


def test_a_weight_that_is_not_finite_is_not_served(tmp_path):
    model = trained(llama(), "current", torch.float32)
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("inf")
    with pytest.raises(RuntimeError, match=r"layers\.1\.mlp\.up_proj: its weight holds an Inf"):
        foundry_fp8.export_fp8(model, tmp_path / "out")


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: llama(), "no layer of the model is converted"),
        (lambda: nn.Sequential(nn.Linear(32, 32)), "holds no Hugging Face model"),
        (lambda: trained(llama(), "mxfp8", torch.float32), "no scales as those of mxfp8. --layout fp8"),
        (lambda: adapted(), r"has adapters \(.*lora_.*Merge them first"),
        (
            lambda: trained(gpt2(), "current", torch.float32),
            r"h\.0\.attn\.c_attn: it holds its weight as \[in, out\]",
        ),
        (
            lambda: trained(llama(tied=True), "current", torch.float32, include=["*", "lm_head"]),
            "lm_head shares its weight",
        ),
        (lambda: renamed(trained(mus(), UNIT, torch.float32)), "has no place to say so"),
    ],
    ids=[
        "high_precision",
        "not_hugging_face",
        "mxfp8",
        "lora",
        "transposed",
        "tied",
        "architecture",
    ],
)
def test_what_the_layout_cannot_say_is_refused(make, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        foundry_fp8.export_fp8(make(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_that_was_taken_out_of_fp8_is_served_in_high_precision(tmp_path):
    """As the guard does; also one that stays in FP8 by another name of the group."""
    model = trained(llama(), "current", torch.float32)
    demoted = model.get_submodule("model.layers.1.mlp.down_proj")
    demoted.set_recipe(None)
    report = foundry_fp8.export_fp8(model, tmp_path)
    config, tensors = stored(tmp_path)
    assert "model.layers.1.mlp.down_proj" not in report.layers
    assert "model.layers.1.mlp.down_proj" in config["quantization_config"]["ignore"]
    assert torch.equal(tensors["model.layers.1.mlp.down_proj.weight"], demoted.weight.detach().bfloat16())
    assert "model.layers.1.mlp.down_proj.weight_scale" not in tensors
    _, names = emulated(load(tmp_path))
    assert "model.layers.1.mlp.down_proj" not in names and len(names) == 13


@pytest.mark.parametrize("out", ["k_proj", "v_proj", "up_proj", "gate_proj"])
def test_parts_of_a_fused_projection_that_disagree_are_refused(out, tmp_path):
    model = trained(llama(), "current", torch.float32, exclude=[f"*.{out}"])
    with pytest.raises(ConfigError, match=rf"{out} ran in high precision and .*exclude: \[.*{out}"):
        foundry_fp8.export_fp8(model, tmp_path)
    assert not any(tmp_path.iterdir())
    whole = ("q_proj", "k_proj", "v_proj") if out in ("k_proj", "v_proj") else ("gate_proj", "up_proj")
    model = trained(llama(), "current", torch.float32, exclude=[f"*.{part}" for part in whole])
    assert len(foundry_fp8.export_fp8(model, tmp_path).layers) == 14 - 2 * len(whole)


def test_what_a_folder_holds_is_kept(tmp_path):
    model = trained(llama(), "current", torch.float32)
    folder, own = tmp_path / "served", tmp_path / "own"
    folder.mkdir(), own.mkdir()
    (own / "config.json").write_text("of somebody else")
    (folder / "config.json").symlink_to(own / "config.json")
    (folder / "model.safetensors").write_bytes(b"the user's own")
    (folder / "notes.txt").write_text("the user's own")
    with pytest.raises(ConfigError, match=r"holds files \(config.json, model.safetensors, notes.txt\)"):
        foundry_fp8.export_fp8(model, folder)
    assert (folder / "model.safetensors").read_bytes() == b"the user's own"
    foundry_fp8.export_fp8(model, folder, overwrite=True)
    assert (own / "config.json").read_text() == "of somebody else"  # nothing was written through the link
    assert (folder / "notes.txt").read_text() == "the user's own" and not (
        folder / "config.json"
    ).is_symlink()
    assert len(emulated(load(folder))[1]) == 14
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "served"]


def test_an_export_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    import huggingface_hub

    def full(tensors, folder, **_):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "save_torch_state_dict", full)
    model = trained(llama(), "current", torch.float32)
    with pytest.raises(OSError, match="No space left"):
        foundry_fp8.export_fp8(model, tmp_path / "served")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_said_before_anything_is_read(tmp_path, monkeypatch):
    import importlib.util

    from foundry_fp8.export import quantization_config

    find = importlib.util.find_spec
    monkeypatch.setattr(
        quantization_config.importlib.util,
        "find_spec",
        lambda name: None if name == "compressed_tensors" else find(name),
    )
    with pytest.raises(RuntimeError, match=r"foundry-fp8\[export\]"):
        foundry_fp8.export_fp8(nn.Linear(2, 2), tmp_path)


def test_linears_are_targets_by_class_and_by_name(tmp_path):
    """Releases of vLLM differ in which they match."""
    foundry_fp8.export_fp8(trained(llama(), "current", torch.float32), tmp_path)
    (group,) = stored(tmp_path)[0]["quantization_config"]["config_groups"].values()
    assert group["targets"][0] == "Linear" and all(
        target.startswith("re:") for target in group["targets"][1:]
    )
