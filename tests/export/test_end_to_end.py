"""An FP8 checkpoint of others, fine-tuned with LoRA and in full, resumed, exported, and read: by transformers, and by a server written by hand."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("compressed_tensors")
pytest.importorskip("peft")
pytest.importorskip("transformers")

import peft
import transformers

import foundry_fp8
from foundry_fp8.layers.linear import FP8Linear
from tests.export.published import deepseek, dequantised, publish, qwen3, split_experts
from tests.export.served import stored
from tests.export.test_block_layouts import knows_blocks
from tests.export.test_load import BLOCK, IDS, empty

NEW = int(transformers.__version__.split(".")[0]) > 4
WHOLE = {
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 128,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
SHAPES = {
    # (model, whether every size is a multiple of 128: transformers reads no short last block)
    "deepseek, whole": (lambda: deepseek(256, **WHOLE), True),
    "deepseek, ragged": (lambda: deepseek(256), False),
    "qwen3, whole": (lambda: qwen3(hidden_size=256, intermediate_size=384), True),
    "qwen3, ragged": (qwen3, False),
}
TARGETS = ["o_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"]


def start(make, folder, way, recipe):
    """A run's model and optimizer."""
    model = empty(make())
    if way == "lora":
        model.requires_grad_(False)
    foundry_fp8.load_fp8(folder, model)
    if way == "lora":
        torch.manual_seed(1)
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
        )
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated", evaluate="fp8")
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def train(model, optimizer, steps):
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        optimizer.step(), optimizer.zero_grad()


class Server(nn.Module):
    """Codes of a token's blocks of 128 against a weight's values, in float64; ``e8m0``: by scales that are powers of two."""

    def __init__(self, weight, e8m0):
        super().__init__()
        self.weight, self.e8m0 = weight.double(), e8m0

    def forward(self, x):
        blocks = x.reshape(-1, x.shape[-1]).double().split(128, 1)
        codes = []
        for block in blocks:
            scale = (block.abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
            scale = torch.exp2(torch.ceil(torch.log2(scale))) if self.e8m0 else scale.float().double()
            codes.append((block / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale)
        return (torch.cat(codes, 1) @ self.weight.t()).to(x.dtype).unflatten(0, x.shape[:-1])


class Experts(nn.Module):
    """An expert at a time."""

    def __init__(self, values, prefix, e8m0):
        super().__init__()
        parts = ("gate_proj", "up_proj", "down_proj")
        self.of = [[Server(values[f"{prefix}.{e}.{part}.weight"], e8m0) for part in parts] for e in range(4)]

    def forward(self, x, chosen, weights):
        y = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(self.of):
            token, choice = torch.where(chosen == e)
            if len(token):
                made = down(nn.functional.silu(gate(x[token])) * up(x[token]))
                y.index_add_(0, token, made * weights[token, choice, None])
        return y


def served(model, values, e8m0, frozen_experts):
    """``model``, plain, with a server's layers; experts whose codes are kept ran in high precision."""
    twin = copy.deepcopy(model).eval()
    for name, module in list(twin.named_modules()):
        if f"{name}.weight" in values:
            twin.set_submodule(name, Server(values[f"{name}.weight"], e8m0))
        elif name.endswith(".experts") and not isinstance(module, nn.ModuleList) and not frozen_experts:
            twin.set_submodule(name, Experts(values, name, e8m0))
    return twin


QUICK = (("deepseek, whole", "lora"), ("qwen3, ragged", "full"))
"""Each model, each shape and each way once; every cell in the full tier."""


@pytest.mark.parametrize("e8m0", [False, True], ids=["float", "ue8m0"])
@pytest.mark.parametrize(
    ("shape", "way"),
    [
        pytest.param(shape, way, marks=() if (shape, way) in QUICK else pytest.mark.full)
        for shape in SHAPES
        for way in ("lora", "full")
    ],
)
def test_a_published_checkpoint_trains_resumes_and_is_served(shape, way, e8m0, tmp_path):
    make, whole = SHAPES[shape]
    if e8m0 and not knows_blocks(""):
        pytest.skip("this huggingface_hub writes no E8M0")
    recipe = BLOCK["ue8m0" if e8m0 else "float"]
    publish(make(), tmp_path / "in", e8m0=e8m0)
    run, optimizer = start(make, tmp_path / "in", way, recipe)
    train(run, optimizer, 2)
    torch.save((run.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    train(run, optimizer, 2)
    again, its = start(make, tmp_path / "in", way, recipe)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(state[0]), its.load_state_dict(state[1])
    train(again, its, 2)
    run, again = (m.merge_and_unload() if way == "lora" else m for m in (run, again))
    report = foundry_fp8.export_fp8(run, tmp_path / "out", dtype="float32", layout="fp8")
    foundry_fp8.export_fp8(again, tmp_path / "again", dtype="float32", layout="fp8")
    (config, tensors), (_, resumed) = stored(tmp_path / "out"), stored(tmp_path / "again")
    assert tensors.keys() == resumed.keys() == stored(tmp_path / "in")[1].keys()
    for name, value in tensors.items():
        assert torch.equal(value.view(torch.uint8), resumed[name].view(torch.uint8)), name
    moved = [n for n, v in stored(tmp_path / "in")[1].items() if v.dtype == torch.float8_e4m3fn
             and not torch.equal(v.view(torch.uint8), tensors[n].view(torch.uint8))]  # fmt: skip
    targets = [n for n in report.layers if n.rpartition(".")[2] in TARGETS]
    assert sorted(n.removesuffix(".weight") for n in moved) == sorted(
        targets if way == "lora" else report.layers
    )
    assert config["quantization_config"]["weight_block_size"] == [128, 128]

    values = {
        name: dequantised(value, tensors[f"{name}_scale_inv"], (128, 128))
        for name, value in tensors.items()
        if value.dtype == torch.float8_e4m3fn
    }
    assert {name.removesuffix(".weight") for name in values} == report.layers.keys()
    plain = empty(make())
    foundry_fp8.load_fp8(tmp_path / "out", plain)
    filled = split_experts(dict(plain.named_parameters()))
    assert all(torch.equal(filled[name], values[name]) for name in values)
    seen = {}
    for name, layer in run.named_modules():
        if isinstance(layer, FP8Linear):
            layer.register_forward_hook(
                lambda _, x, y, name=name: seen.update({name: (x[0].detach(), y.detach())})
            )
    with torch.no_grad():
        ours, theirs = run.eval()(IDS).logits, served(plain, values, e8m0, way == "lora")(IDS).logits
        # float32 sums of at most 384 products in another order: sqrt(384) * 2^-24 of a row. A float scale is rounded once here and once there, so
        # that an input at a tie may round the other way, 2^-4 of itself and at most of its row, and what follows has other inputs.
        assert e8m0 is False or (ours - theirs).norm() < 1e-6 * ours.norm()
        assert seen.keys() == {n for n in report.layers if ".experts." not in n or not NEW}
        for name, (x, y) in seen.items():
            found = Server(values[f"{name}.weight"], e8m0)(x)
            rows = (found - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-30)
            assert rows.max() < (3e-6 if e8m0 else 2**-4) and rows.median() < 3e-6, name
        if whole and NEW:
            read = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "out", dtype=torch.float32, attn_implementation=plain.config._attn_implementation
            ).eval()
            for (name, wanted), found in zip(
                plain.state_dict().items(), read.state_dict().values(), strict=True
            ):
                assert torch.equal(found, wanted), name
            assert torch.equal(read(IDS).logits, plain.eval()(IDS).logits)
