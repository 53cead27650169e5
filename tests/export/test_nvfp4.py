"""NVFP4 on disk: what the layers multiplied, the libraries' own reader, and a server's logits, by formulas written from the layout's description."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.recipes import parse_recipe
from tests.export.served import stored
from tests.export.test_block_layouts import IDS, knows_blocks, llama, trained
from tests.export.test_load import empty

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `dict` method is deprecated"
)  # transformers, of compressed-tensors

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUPS = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]


def phi3(tied=True):
    """q, k and v in one linear, gate and up in another, and a tied head."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Phi3ForCausalLM(Phi3Config(**sizes, vocab_size=96, pad_token_id=0, tie_word_embeddings=tied))


MODELS = {"llama": llama, "tied": lambda: llama(True), "phi3": phi3}


def codes_of(tensors, name):
    packed = tensors[f"{name}.weight_packed"]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).int()  # the first in the low half
    return E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)


def multiplied(tensors, name):
    """What vLLM multiplies: codes times an E4M3 scale for 16 of a row times the reciprocal of the global scale."""
    scale = tensors[f"{name}.weight_scale"].float() * tensors[f"{name}.weight_global_scale"].reciprocal()
    return codes_of(tensors, name) * scale.repeat_interleave(16, 1)


def in_training(layer, dtype=torch.float32):
    return quantize(layer.weight.detach().to(dtype), "w", layer.recipe, along=1)


def fp8_linears(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, FP8Linear)}


def widest(name, layers):
    """Whether no other linear of its fused group has a larger weight."""
    parent, _, leaf = name.rpartition(".")
    group = next((g for g in GROUPS if leaf in g), (leaf,))
    amax = {part: layers[f"{parent}.{part}"].weight.detach().abs().max() for part in group}
    return amax[leaf] == max(amax.values())


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_the_folder_holds_what_the_layers_multiplied(kind, square, tmp_path):
    """Codes bit for bit; values too but in those parts of a fused group whose global scale is another's."""
    model = trained(MODELS[kind](), {"name": "nvfp4", "square_weights": square}, exclude=["*.1.*"])
    report = foundry_fp8.export_fp8(model, tmp_path, dtype="float32")
    config, tensors = stored(tmp_path)
    layers = fp8_linears(model)
    assert set(report.layers) == set(layers) and len(layers) == (4 if kind == "phi3" else 7)
    moved = []
    for name, layer in layers.items():
        q, shape = in_training(layer), layer.weight.shape
        packed, scale = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
        assert (packed.dtype, packed.shape) == (torch.uint8, (shape[0], shape[1] // 2))
        assert (scale.dtype, scale.shape) == (torch.float8_e4m3fn, (shape[0], shape[1] // 16))
        assert tensors[f"{name}.weight_global_scale"].shape == (1,)
        assert torch.equal(codes_of(tensors, name), q.data.float()), name
        if kind == "phi3" or widest(name, layers):
            assert torch.equal(multiplied(tensors, name), q.dequantize()), name
            with torch.no_grad():  # ones are NVFP4 numbers, up to the rounding of 6 * 448 * (1 / 2688)
                columns = layer(torch.eye(shape[1])).t()
            torch.testing.assert_close(columns, q.dequantize(), rtol=2**-22, atol=0)
        else:
            moved.append(name)
            # A scale that is rounded to E4M3 once more: half a step in 8, or of a subnormal.
            torch.testing.assert_close(multiplied(tensors, name), q.dequantize(), rtol=2**-4, atol=1e-6)
    assert len(moved) == (0 if kind == "phi3" else 3)
    assert ("one global scale" in report.summary()) is bool(moved)
    quantization = config["quantization_config"]
    assert quantization["format"] == "nvfp4-pack-quantized" and quantization["ignore"] == sorted(
        ["lm_head", *(n.replace(".0.", ".1.") for n in layers)]
    )
    (group,) = quantization["config_groups"].values()
    wanted = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    assert wanted.items() <= group["weights"].items() and group["input_activations"] is None


def test_parts_that_a_server_fuses_have_one_global_scale(tmp_path):
    """vLLM takes the largest of a group's and multiplies all blocks by it: a part with a smaller one would be served too small."""
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(3)
        model.model.layers[0].mlp.up_proj.weight[5, 7] = 0.5
    model = trained(model, "nvfp4")
    report = foundry_fp8.export_fp8(model, tmp_path, dtype="float32")
    _, tensors = stored(tmp_path)
    for number in range(2):
        for where, group in zip(("self_attn", "mlp"), GROUPS, strict=True):
            names = [f"model.layers.{number}.{where}.{part}" for part in group]
            largest = max(model.get_submodule(name).weight.detach().abs().max() for name in names)
            for name in names:
                assert torch.equal(
                    tensors[f"{name}.weight_global_scale"], (torch.tensor(2688.0) / largest).view(1)
                ), name
                moved = multiplied(tensors, name) - in_training(model.get_submodule(name)).dequantize()
                share = float(moved.norm() / model.get_submodule(name).weight.detach().norm())
                assert report.layers[name]["moved"] == pytest.approx(share, rel=1e-3, abs=1e-7), name
                assert share <= 2**-4  # half a step of E4M3's; quantised anew they would be 0.09 away


@pytest.mark.parametrize("kind", MODELS)
def test_the_librarys_own_reader_reads_it(kind, tmp_path):
    """compressed-tensors makes bfloat16 values of them; what stayed in high precision is as it was."""
    if not knows_blocks("compressed-tensors"):
        pytest.skip("compressed-tensors 0.10 reads no NVFP4 into transformers")
    from transformers import AutoModelForCausalLM

    model = trained(MODELS[kind](), "nvfp4", exclude=["*.1.*"])
    foundry_fp8.export_fp8(model, tmp_path, dtype="float32")
    _, tensors = stored(tmp_path)
    twin = copy.deepcopy(model)
    for name, layer in fp8_linears(model).items():
        plain = nn.Linear(*layer.weight.shape[::-1], bias=False)
        plain.weight.data = multiplied(tensors, name)
        twin.set_submodule(name, plain)
    for parameter in twin.parameters():  # and no buffer
        parameter.data = parameter.data.bfloat16()
    read = AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.bfloat16).eval()
    with torch.no_grad():  # its first forward dequantises
        theirs, ours = read(IDS).logits, twin.eval()(IDS).logits
    for name in fp8_linears(model):
        weight = read.get_submodule(name).weight
        assert torch.equal(weight, twin.get_submodule(name).weight), name
    assert torch.equal(theirs, ours)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) is (kind != "llama")


def test_each_expert_has_its_own_global_scale(tmp_path):
    """And gate and up one, as the parameter of transformers 5 has that holds both."""
    pytest.importorskip("transformers", minversion="5", reason="transformers 4 has a module for each expert")
    from tests.export.test_experts import sparse

    model = sparse("mixtral")
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[2].mul_(3)
    model = trained(model, "nvfp4")
    foundry_fp8.export_fp8(model, tmp_path, dtype="float32")
    _, tensors = stored(tmp_path)
    names = {"w1": ("gate_up_proj", 0), "w3": ("gate_up_proj", 1), "w2": ("down_proj", 0)}
    for at, layer in enumerate(model.model.layers):
        for expert in range(4):
            for part, (parameter, half) in names.items():
                held = getattr(layer.mlp.experts, parameter).detach()[expert]
                whole = quantize(held, "w", parse_recipe("nvfp4")).dequantize()
                wanted = whole.chunk(2)[half] if parameter == "gate_up_proj" else whole
                found = multiplied(tensors, f"model.layers.{at}.block_sparse_moe.experts.{expert}.{part}")
                assert torch.equal(found, wanted), (at, expert, part)


def test_a_model_that_the_library_read_is_not_converted(tmp_path):
    if not knows_blocks("compressed-tensors"):
        pytest.skip("compressed-tensors 0.10 reads no NVFP4 into transformers")
    from transformers import AutoModelForCausalLM

    foundry_fp8.export_fp8(trained(llama(), "nvfp4"), tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"q_proj holds packed codes .*run_compressed=False"):
        foundry_fp8.apply_fp8(read, recipe="nvfp4", backend="emulated")


def test_served_weights_and_the_mismatch_are_those_of_the_folder(tmp_path):
    model = trained(llama(), "nvfp4")
    foundry_fp8.export_fp8(model, tmp_path)
    _, tensors = stored(tmp_path)
    found = {name: value for name, value, scales in foundry_fp8.served_weights(model) if scales is None}
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        same = value.view(torch.uint8), found[name].view(torch.uint8)
        assert value.dtype == found[name].dtype and torch.equal(*same), name
    foundry_fp8.export_fp8(model, tmp_path / "float32", dtype="float32")
    _, tensors = stored(tmp_path / "float32")
    server = copy.deepcopy(model)
    for name, layer in fp8_linears(model).items():
        plain = nn.Linear(*layer.weight.shape[::-1], bias=False)
        plain.weight.data = multiplied(tensors, name)
        server.set_submodule(name, plain)
    with torch.no_grad():
        p, q = (m(IDS).logits.double().log_softmax(-1) for m in (model, server))
    wanted = float((p.exp() * (p - q)).sum(-1).mean())
    assert wanted > 0
    assert foundry_fp8.rollout_mismatch(model, {"input_ids": IDS}) == pytest.approx(wanted, rel=1e-3)


def test_what_ran_otherwise_stays_as_it_is_and_what_is_not_there_is_refused(tmp_path):
    model = trained(llama(), "nvfp4")
    model.get_submodule("model.layers.1.mlp.down_proj").set_recipe(None)
    foundry_fp8.export_fp8(model, tmp_path / "out")
    config, tensors = stored(tmp_path / "out")
    assert "model.layers.1.mlp.down_proj" in config["quantization_config"]["ignore"]
    assert tensors["model.layers.1.mlp.down_proj.weight"].dtype == torch.bfloat16
    with pytest.raises(
        ConfigError, match=r"fp8 has no scales as those of nvfp4.*--layout compressed-tensors"
    ):
        foundry_fp8.export_fp8(model, tmp_path / "other", layout="fp8")
    with pytest.raises(ConfigError, match=r"nvfp4-pack-quantized.*are read. Load others"):
        foundry_fp8.load_fp8(tmp_path / "out", empty(llama()))
    model.get_submodule("model.layers.1.self_attn.k_proj").set_recipe(None)
    with pytest.raises(ConfigError, match=r"k_proj ran in high precision and .*q_proj.*exclude"):
        foundry_fp8.export_fp8(model, tmp_path / "parts")
