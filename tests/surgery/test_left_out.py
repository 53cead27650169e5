"""Heads, routers and adapters are recognised by what they are, and taken in where ``include`` names them."""

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.surgery.left_out import ADAPTER, HEAD, ROUTER, TIED, left_out
from tests.model_zoo import MODELS, TRANSFORMERS_4

OWN = "" if TRANSFORMERS_4 else ".weight"
"""transformers 5's routers are no linears; they multiply by a parameter of their own."""


class GLU(nn.Module):
    """Its gate is no router."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.down(self.gate(x).sigmoid() * self.up(x))


class MoE(nn.Module):
    """Sixteen experts with gates of their own, and a router called gate too."""

    def __init__(self, experts="experts"):
        super().__init__()
        self.gate = nn.Linear(64, 16)
        self.shared = GLU()
        self.add_module(experts, nn.ModuleList(GLU() for _ in range(16)))


def convert(model, **options):
    return foundry_fp8.apply_fp8(model, recipe="current", **options)


def test_the_gate_of_a_gated_unit_is_converted():
    assert set(convert(nn.Sequential(GLU())).converted) == {"0.gate", "0.up", "0.down"}


@pytest.mark.parametrize("experts", ["experts", "mlps"])
def test_a_router_has_an_output_for_each_expert_beside_it(experts):
    report = convert(nn.Sequential(MoE(experts)))
    assert {name for name, why in report.skipped.items() if why == ROUTER} == {"0.gate"}
    assert {"0.shared.gate", f"0.{experts}.3.gate"} <= set(report.converted)


@pytest.mark.parametrize(
    ("model", "routers"),
    [
        ("Mixtral", {"model.layers.0." + ("block_sparse_moe.gate" if TRANSFORMERS_4 else "mlp.gate.weight")}),
        ("Qwen2Moe", {f"model.layers.0.mlp.gate{OWN}"}),
        ("Olmoe", {f"model.layers.0.mlp.gate{OWN}"}),
        ("GraniteMoe", {f"model.layers.0.block_sparse_moe.router{OWN or '.layer'}"}),
        ("Dbrx", {"transformer.blocks.0.ffn.router.layer"}),
        ("Llama4", {"model.layers.0.feed_forward.router"}),
        ("JetMoe", {f"model.layers.0.{part}.router.layer" for part in ("mlp", "self_attention.experts")}),
        ("Jamba", {f"model.layers.1.feed_forward.router{OWN}"}),
        ("DeepseekV3", {"model.layers.1.mlp.gate.weight"}),
        ("SwitchTransformers", {"encoder.block.1.layer.1.mlp.router.classifier"}),
        ("MPT-dmoe", {"transformer.blocks.0.ffn.router.layer"}),
    ],
)
def test_routers_of_real_mixtures(model, routers):
    skipped = convert(MODELS[model]()[0]).skipped
    # Llama 4's is a linear of its own class, which transformers 5 gives another arithmetic.
    other = model == "Llama4" and not TRANSFORMERS_4
    assert {skipped[name] == ROUTER for name in routers} == {not other}


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        ("LlamaClassifier", {"score"}),
        ("Bert", {"bert.pooler.dense", "classifier"}),
        ("ViT", {"classifier"}),
        ("GPTNeoX", {"embed_out" if TRANSFORMERS_4 else "lm_head"}),
        ("torch", {"head"}),
        ("FOG", {"lm_head"}),
        ("MPT", {"transformer.wte.weight"}),
    ],
)
def test_heads_whatever_they_are_called(model, heads):
    skipped = convert(MODELS[model]()[0]).skipped
    assert {name for name, why in skipped.items() if why == HEAD} == heads


def test_a_head_before_its_blocks_is_recognised_by_its_name():
    model = nn.Module()
    model.head = nn.Linear(64, 96)
    model.layers = nn.ModuleList([GLU(), GLU()])
    model.layers[0].head = nn.Linear(64, 64)  # inside a block, a name says nothing
    report = convert(model)
    assert report.skipped == {"head": HEAD} and "layers.0.head" in report.converted


@pytest.mark.parametrize(
    ("name", "head", "others"),
    [
        ("resnet18", "fc", 0),
        ("alexnet", "classifier.6", 2),
        ("vgg11", "classifier.6", 2),
        ("mobilenet_v2", "classifier.1", 0),
        ("convnext_tiny", "classifier.2", 36),
    ],
)
def test_heads_of_convolutional_networks(name, head, others):
    import torchvision

    with torch.device("meta"):
        model = nn.ModuleDict(
            {"module": getattr(torchvision.models, name)()}
        )  # as ComposerClassifier holds it
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    found = left_out(model, [(n, model.get_submodule(n)) for n in linears])
    assert {n: why.reason for n, why in found.items()} == {f"module.{head}": HEAD}
    assert len(linears) == others + 1


@pytest.mark.parametrize("model", ["Llama-LoRA", "GPT2-LoRA"])
def test_adapters_stay_and_their_frozen_base_is_converted(model):
    report = convert(MODELS[model]()[0])
    adapters = {name for name, why in report.skipped.items() if why == ADAPTER}
    assert adapters and all(".lora_A." in name or ".lora_B." in name for name in adapters)
    bases = [name for name in report.converted if name.endswith(".base_layer")]
    assert len(bases) == len(adapters) / 2 and not any("lora" in name for name in report.converted)


@pytest.mark.parametrize(
    ("model", "include", "taken"),
    [
        ("Llama-LoRA", ["*", "*lora_A*"], "lora_A.default"),
        ("Llama-LoRA", ["*.lora_B.*"], "lora_B.default"),
        ("Llama", ["*", "lm_head"], "lm_head"),
        ("Gemma", ["*lm_head*"], "lm_head"),
        ("LlamaClassifier", ["*", "score"], "score"),
        *([("Olmoe", ["*", "*.mlp.gate"], "mlp.gate")] if TRANSFORMERS_4 else []),
        ("Bert", ["*.pooler.dense"], "pooler.dense"),
    ],
)
def test_include_wins_where_it_names_the_layer(model, include, taken):
    assert any(name.endswith(taken) for name in convert(MODELS[model]()[0], include=include).converted)


@pytest.mark.parametrize(
    ("model", "include"),
    [
        ("Llama-LoRA", ["*"]),
        ("Llama-LoRA", ["*.self_attn.*"]),
        ("Olmoe", ["*.mlp.*"]),
        ("LlamaClassifier", ["*", "model.*"]),
        ("Llama", ["*", "lm_h*x", "model.*"]),
    ],
)
def test_a_glob_that_takes_many_names_none_of_them(model, include):
    options = {"include": [p for p in include if "x" not in p]}
    report = convert(MODELS[model]()[0], **options)
    out = ("lora", "lm_head", "score", "mlp.gate")
    assert not any(part in f"{name}$" for name in report.converted for part in (*out[:3], f"{out[3]}$"))


def test_a_tied_head_says_so():
    model, _ = MODELS["GPT2"]()
    assert convert(model).skipped["lm_head"] == TIED


def test_what_cannot_be_converted_is_refused_by_its_reason():
    class Wrapped(torch.Tensor):
        def __tensor_flatten__(self):
            raise AssertionError

    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.LazyLinear(32))
    model[1].double()
    torch.nn.utils.parametrizations.weight_norm(model[2])
    model[3].weight = nn.Parameter(torch.zeros(32, 32).as_subclass(Wrapped))
    skipped = convert(model, include=["*"]).skipped
    assert "torch.float64" in skipped["1"]
    assert "its weight is parametrised" in skipped["2"]
    assert "its weight is a Wrapped, which wraps other tensors" in skipped["3"]
    assert "has no shape yet" in skipped["4"]


def test_a_single_layer_cannot_be_replaced_in_itself():
    with pytest.raises(ConfigError, match=r"the model is a single Linear.*Wrap it"):
        convert(nn.Linear(64, 64))
