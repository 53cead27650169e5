"""Experts in one parameter (transformers 5) on disk: names, bytes, the libraries' own readers, and what is refused."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers", minversion="5", reason="transformers 4 has a module for each expert")

import transformers

import foundry_fp8
from foundry_fp8.config import ConfigError
from tests.export.published import blocks_of, deepseek, dequantised, publish, split_experts
from tests.export.served import stored
from tests.export.test_block_layouts import IDS, Server, trained
from tests.export.test_load import empty

ROW = {"name": "current", "granularity": "row"}


def sparse(kind, ffn=128, tied=False):
    """Two small layers with four experts each."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 96, "hidden_size": 128, "intermediate_size": ffn, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": tied, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
    config = transformers.Qwen3MoeConfig(
        **sizes, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=ffn
    )
    return transformers.Qwen3MoeForCausalLM(config)


def saved(model, folder):
    """What transformers itself writes of the model in high precision."""
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    twin = type(model)(config)
    twin.load_state_dict(
        {n: v for n, v in model.state_dict().items() if not n.endswith(("weight_scale", "input_scale"))}
    )
    twin.save_pretrained(folder)
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("layout", ["fp8", "compressed-tensors"])
def test_a_folder_has_the_names_of_a_checkpoint_and_the_codes_of_a_quantiser_of_its_own(
    kind, layout, tmp_path
):
    model = trained(sparse(kind, ffn=256), "block")
    report = foundry_fp8.export_fp8(model, tmp_path / "out", dtype="float32", layout=layout)
    plain, (config, tensors) = saved(model, tmp_path / "plain"), stored(tmp_path / "out")
    suffix = "_scale_inv" if layout == "fp8" else "_scale"
    assert {name for name in tensors if not name.endswith(suffix)} == plain.keys()
    assert len(report.layers) == 2 * (4 + 3 * 4)
    for name, value in plain.items():
        if name.removesuffix(".weight") not in report.layers:
            assert torch.equal(tensors[name], value), name
            continue
        codes, grid = blocks_of(value, (128, 128), True)
        assert torch.equal(tensors[name].view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(tensors[name + suffix].float(), grid.float()), name
    routers = {name.removesuffix(".weight") for name in plain if name.endswith("gate.weight")}
    quantization = config["quantization_config"]
    left = quantization["modules_to_not_convert" if layout == "fp8" else "ignore"]
    assert len(routers) == 2 and set(left) == {"lm_head", *routers}
    found = {}
    for name, value, scales in foundry_fp8.served_weights(model, dtype=torch.float32):
        found |= {name: value} if scales is None else {name: value, name + suffix: scales}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n].view(torch.uint8), t.view(torch.uint8)) for n, t in tensors.items())


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("block", "fp8"), ("mxfp8", "fp8"), ("delayed", "compressed-tensors"), ("current", "compressed-tensors"),
        (ROW, "compressed-tensors"),
    ],
    ids=str,
)  # fmt: skip
def test_transformers_reads_what_training_multiplied(kind, recipe, layout, tmp_path):
    """It holds experts in high precision: their values are those of codes and scales."""
    model = trained(sparse(kind, tied=recipe == "current"), recipe)
    foundry_fp8.export_fp8(model, tmp_path, dtype="float32", layout=layout)
    _, tensors = stored(tmp_path)
    suffix = "_scale_inv" if layout == "fp8" else "_scale"
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    parts = {n: part for n, part in saved(read, tmp_path / "again").items() if ".experts." in n}
    assert len(parts) == 2 * 3 * 4
    for name, value in parts.items():
        grid = tensors[name + suffix]
        size = {1: value.shape, 2: (1, value.shape[1])}[grid.dim()]
        size = {"block": (128, 128), "mxfp8": (1, 32)}.get(str(recipe), size)
        assert torch.equal(value, dequantised(tensors[name], grid.view(-1, grid.shape[-1]), size)), name
    with torch.no_grad():
        ours, theirs = model(IDS).logits, read(IDS).logits
    # Experts' inputs stay in high precision there; in FP8 each element is off by at most 2^-4 of itself.
    assert (ours - theirs).norm() < 2**-4 * ours.norm()


def test_logits_are_those_of_a_server_written_by_hand(tmp_path):
    """An expert at a time, in float64: what it multiplies is read from the folder."""
    model = trained(sparse("qwen3_moe", ffn=256), "block")
    foundry_fp8.export_fp8(model, tmp_path, dtype="float32", layout="fp8")
    _, tensors = stored(tmp_path)
    twin = copy.deepcopy(model)

    def server(name, bias=None):
        return Server(tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"], (128, 128), bias, True)

    class Experts(nn.Module):
        def __init__(self, name):
            super().__init__()
            self.of = [
                [server(f"{name}.{e}.{part}_proj") for part in ("gate", "up", "down")] for e in range(4)
            ]

        def forward(self, x, chosen, weights):
            y = torch.zeros_like(x)
            for e, (gate, up, down) in enumerate(self.of):
                token, choice = torch.where(chosen == e)
                made = down(nn.functional.silu(gate(x[token])) * up(x[token]))
                y.index_add_(0, token, made * weights[token, choice, None])
            return y

    for name, module in list(twin.named_modules()):
        if f"{name}.weight_scale_inv" in tensors:
            twin.set_submodule(name, server(name, module.bias))
    for i, block in enumerate(twin.model.layers):
        block.mlp.experts = Experts(f"model.layers.{i}.mlp.experts")
    with torch.no_grad():
        ours, theirs = model(IDS).logits, twin(IDS).logits
    # As for linears (test_block_layouts): sums in another order, and an input at a tie.
    assert (ours - theirs).norm() < 2e-3 * ours.norm()
    assert (ours - theirs).abs().median() < 1e-6 * ours.abs().max()


@pytest.mark.parametrize("e8m0", [False, True], ids=["float", "ue8m0"])
@pytest.mark.parametrize("ffn", [192, 256], ids=["ragged", "whole"])
def test_import_then_export_gives_the_bytes_of_experts_back(ffn, e8m0, tmp_path):
    publish(deepseek(ffn), tmp_path / "in", e8m0=e8m0)
    model = empty(deepseek(ffn), torch.bfloat16).requires_grad_(False)
    model.model.layers[1].mlp.gate.e_score_correction_bias = torch.zeros(4)
    foundry_fp8.load_fp8(tmp_path / "in", model)
    report = foundry_fp8.export_fp8(model, tmp_path / "out", layout="fp8")
    (_, before), (_, after) = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys() and sum(".experts." in name for name in report.layers) == 12
    for name, value in before.items():
        assert after[name].dtype == value.dtype, name
        assert torch.equal(after[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: trained(sparse("qwen3_moe", ffn=192), "block"), r"gate_up_proj: a block of 128 rows lies in gate.*multiple of 128"),
        (lambda: trained(sparse("mixtral"), "block", exclude=["*.experts.down_proj"]), r"w2 ran in high precision.*experts\.\*"),
    ],
    ids=["block of two", "half"],
)  # fmt: skip
def test_what_no_server_reads_is_refused(make, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        foundry_fp8.export_fp8(make(), tmp_path / "out", layout="fp8")
    assert not (tmp_path / "out").exists()


def test_experts_that_checkpoints_hold_together_are_refused(tmp_path):
    """Llama 4's are ``[experts, in, out]`` on disk too."""
    config = transformers.Llama4TextConfig(
        vocab_size=96, hidden_size=128, intermediate_size=128, intermediate_size_mlp=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_local_experts=4, num_experts_per_tok=1, pad_token_id=0,
    )  # fmt: skip
    model = trained(transformers.Llama4ForCausalLM(config), "block")
    said = r"experts\.gate_up_proj holds experts in one parameter"
    with pytest.raises(ConfigError, match=said):
        foundry_fp8.export_fp8(model, tmp_path / "out", layout="fp8")
    with pytest.raises(ConfigError, match=said):
        list(foundry_fp8.served_weights(model))


def test_experts_out_of_fp8_are_served_so(tmp_path):
    model = trained(sparse("mixtral", ffn=192), "block", exclude=["*.experts.*"])
    foundry_fp8.export_fp8(model, tmp_path / "out", dtype="float32", layout="fp8")
    plain, (config, tensors) = saved(model, tmp_path / "plain"), stored(tmp_path / "out")
    experts = {name for name in plain if ".experts." in name}
    assert len(experts) == 24 and all(torch.equal(tensors[name], plain[name]) for name in experts)
    assert {name.removesuffix(".weight") for name in experts} < set(
        config["quantization_config"]["modules_to_not_convert"]
    )
    assert len(split_experts({n: p for n, p in model.named_parameters() if n.endswith("_proj")})) == 24
