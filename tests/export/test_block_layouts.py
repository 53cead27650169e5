"""Block scales on disk: bytes that come back, the libraries' own readers, a server's logits by a formula of its own, and both sides' rounding."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from safetensors.torch import save_file

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from tests.export.published import dequantised, publish, qwen3
from tests.export.served import stored
from tests.export.test_load import empty

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `dict` method is deprecated"
)  # transformers, of compressed-tensors

IDS = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(5))
LAYOUTS = {"fp8": "weight_scale_inv", "compressed-tensors": "weight_scale"}


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def trained(model, recipe, **options):
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated", evaluate="fp8", **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step(), optimizer.zero_grad()
    if recipe == "delayed":
        FP8State.of(model).update()
    return model.eval()


class Server(nn.Module):
    """``y = sum over blocks of (codes of x @ codes of w) * scale of x * scale of w``, in float64."""

    def __init__(self, weight, grid, block, bias, e8m0):
        super().__init__()
        self.weight, self.bias, self.block, self.e8m0 = (
            dequantised(weight, grid, block).double(),
            bias,
            block,
            e8m0,
        )

    def forward(self, x):
        size = self.block[1]
        flat = x.reshape(-1, x.shape[-1]).double()
        padded = nn.functional.pad(flat, (0, -flat.shape[1] % size)).unflatten(1, (-1, size))
        scale = padded.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
        scale = torch.exp2(torch.ceil(torch.log2(scale))) if self.e8m0 else scale.float().double()
        codes = (padded / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double()
        y = (codes * scale).flatten(1)[:, : flat.shape[1]] @ self.weight.t()
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype).unflatten(0, x.shape[:-1])


def served(model, folder, suffix, block, e8m0):
    """The model of ``folder`` with a server's linears, everything else as it is stored."""
    config, tensors = stored(folder)
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if f"{name}.{suffix}" in tensors:
            weight, grid = tensors[f"{name}.weight"], tensors[f"{name}.{suffix}"]
            twin.set_submodule(name, Server(weight, grid, block, module.bias, e8m0))
    return config, tensors, twin


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("power_2", [True, False])
@pytest.mark.parametrize("make", [llama, qwen3])
def test_block_is_served_as_it_was_trained(make, power_2, layout, tmp_path):
    model = trained(make(), {"name": "block", "power_2_scales": power_2})
    if not knows_blocks(layout):
        with pytest.raises(RuntimeError, match="--layout fp8"):
            foundry_fp8.export_fp8(model, tmp_path, layout=layout)
        return
    report = foundry_fp8.export_fp8(model, tmp_path, dtype="float32", layout=layout)
    assert len(report.layers) == 14 and "as training multiplied" in report.summary()
    config, tensors, server = served(model, tmp_path, LAYOUTS[layout], (128, 128), power_2)
    linears = {name: module for name, module in server.named_modules() if isinstance(module, Server)}
    seen = {}
    for name, module in linears.items():
        module.register_forward_hook(lambda _, args, y, name=name: seen.update({name: (args[0], y)}))
    with torch.no_grad():
        ours, theirs = model(IDS).logits, server(IDS).logits
        # float32 sums of 320 products in another order (2^-24 each), and at a tie an input may round the other way: which one
        # depends on the processor, and one that does makes others, so that norms are compared linear by linear.
        for name, (x, y) in seen.items():
            assert (model.get_submodule(name)(x) - y).norm() < 2e-3 * y.norm(), name
    assert len(seen) == 14 and (ours - theirs).norm() < 2e-2 * ours.norm()
    assert (ours - theirs).abs().median() < 1e-6 * ours.abs().max()
    quantization = config["quantization_config"]
    if layout == "fp8":
        assert quantization["quant_method"] == "fp8" and quantization["weight_block_size"] == [128, 128]
        assert quantization["modules_to_not_convert"] == ["lm_head"]
    else:
        group = quantization["config_groups"]["group_0"]
        assert group["weights"]["strategy"] == "block" and group["weights"]["block_structure"] in (
            "128x128",
            [128, 128],
        )
        assert (group["input_activations"]["strategy"], group["input_activations"]["group_size"]) == (
            "group",
            128,
        )
    if power_2:  # which a server on Blackwell does not round again
        scales = [value for name, value in tensors.items() if name.endswith(LAYOUTS[layout])]
        assert all((torch.frexp(scale)[0] == 0.5).all() for scale in scales)


@pytest.mark.parametrize(
    ("recipe", "layout"), [("block", "fp8"), ("block", "compressed-tensors"), ("mxfp8", "fp8")]
)
@pytest.mark.parametrize("kind", ["llama", "tied", "qwen3"])
def test_the_librarys_own_reader_reads_the_weights(kind, recipe, layout, tmp_path):
    """Sizes are multiples of the blocks: transformers takes a short last block for smaller blocks."""
    from transformers import AutoModelForCausalLM
    from transformers import __version__ as release

    if int(release.split(".")[0]) < 5 and layout == "fp8":
        pytest.skip("transformers 4 reads it on GPUs alone")
    if not knows_blocks(layout):
        pytest.skip("this compressed-tensors has no blocks")
    make = {
        "llama": llama,
        "tied": lambda: llama(True),
        "qwen3": lambda: qwen3(hidden_size=256, intermediate_size=384),
    }[kind]
    model = trained(make(), recipe)
    foundry_fp8.export_fp8(model, tmp_path, dtype="float32", layout=layout)
    _, tensors = stored(tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32)
    block = (1, 32) if recipe == "mxfp8" else (128, 128)
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            wanted = dequantised(tensors[f"{name}.weight"], tensors[f"{name}.{LAYOUTS[layout]}"], block)
            theirs = read.get_submodule(name)
            if theirs.weight.element_size() == 1:
                assert torch.equal(
                    theirs.weight.view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8)
                )
                assert torch.equal(theirs.weight_scale, tensors[f"{name}.{LAYOUTS[layout]}"])
            else:
                assert torch.equal(theirs.weight, wanted)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) is (kind == "tied")
    if recipe == "block" and layout == "fp8":
        ours = make()
        foundry_fp8.load_fp8(tmp_path, ours)
        assert torch.equal(ours.eval()(IDS).logits, read.eval()(IDS).logits)


def knows_blocks(layout):
    """Whether this compressed-tensors has dynamic inputs by group; the pinned stack's has not, nor its huggingface_hub E8M0."""
    from compressed_tensors import __version__

    return layout == "fp8" or tuple(map(int, __version__.split(".")[:2])) > (0, 10)


@pytest.mark.parametrize(
    ("case", "apply"),
    [("float", False), ("float", True), ("ue8m0", False), ("ue8m0", True), ("tensor", False), ("tensor", True), ("channel", False)],
)  # fmt: skip
def test_import_then_export_gives_the_bytes_back(case, apply, tmp_path):
    kinds = {
        "float": {},
        "ue8m0": {"e8m0": True},
        "tensor": {"block": "tensor", "layout": "compressed-tensors"},
        "channel": {"block": "channel", "layout": "compressed-tensors"},
    }
    publish(qwen3(tied=True), tmp_path / "in", **kinds[case])
    model = empty(qwen3(tied=True), torch.bfloat16).requires_grad_(False)
    foundry_fp8.load_fp8(tmp_path / "in", model)
    if apply:
        recipe = {"float": {"name": "block", "power_2_scales": False}, "ue8m0": "block", "tensor": "current"}[
            case
        ]
        foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated")
    if case == "ue8m0" and not knows_blocks(""):
        with pytest.raises(RuntimeError, match=r"writes no torch.float8_e8m0fnu.*newer"):
            foundry_fp8.export_fp8(model, tmp_path / "out", layout="fp8")
        return
    layout = kinds[case].get("layout", "fp8")
    foundry_fp8.export_fp8(model, tmp_path / "out", layout=layout)
    (was, before), (now, after) = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name].dtype == value.dtype and torch.equal(
            after[name].view(torch.uint8), value.view(torch.uint8)
        ), name
    if layout == "fp8":
        for key in ("quant_method", "weight_block_size", "scale_fmt", "modules_to_not_convert"):
            assert was["quantization_config"].get(key) == now["quantization_config"].get(key)


def test_served_weights_are_those_of_the_export(tmp_path):
    model = trained(llama(), "block")
    foundry_fp8.export_fp8(model, tmp_path, layout="fp8")
    _, tensors = stored(tmp_path)
    found = {}
    for name, value, scales in foundry_fp8.served_weights(model):
        found |= {name: value} if scales is None else {name: value, f"{name}_scale_inv": scales}
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert value.dtype == found[name].dtype and torch.equal(
            value.view(torch.uint8), found[name].view(torch.uint8)
        ), name


@pytest.mark.parametrize("recipe", ["block", "mxfp8", {"name": "current", "granularity": "row"}], ids=str)
def test_both_sides_agree_to_the_last_bit(recipe):
    model = trained(llama(), recipe)
    assert foundry_fp8.rollout_mismatch(model, {"input_ids": IDS}) == 0.0
    assert foundry_fp8.rollout_mismatch(model.train(), {"input_ids": IDS}) == 0.0


def test_a_mismatch_is_that_of_a_server_written_by_hand(tmp_path):
    """Scales of another format: prime-rl measured more of it with UE8M0 scales against float ones."""
    model = trained(llama(), {"name": "block", "power_2_scales": False})
    foundry_fp8.export_fp8(model, tmp_path, dtype="float32", layout="fp8")
    found = {}
    for scales in ("float", "ue8m0"):
        server = served(model, tmp_path, "weight_scale_inv", (128, 128), scales == "ue8m0")[2]
        with torch.no_grad():
            p, q = (m(IDS).logits.double().log_softmax(-1) for m in (model, server))
        wanted = float((p.exp() * (p - q)).sum(-1).mean())
        found[scales] = foundry_fp8.rollout_mismatch(model, {"input_ids": IDS}, scales=scales)
        assert found[scales] == pytest.approx(wanted, rel=0.05, abs=1e-9)
    assert found["float"] == 0.0 < found["ue8m0"]
    tensorwise = trained(llama(), "current")  # a server takes a scale a token
    assert foundry_fp8.rollout_mismatch(tensorwise, {"input_ids": IDS}) > 1e-8
    with pytest.raises(ConfigError, match="no layer of the model runs in FP8"):
        foundry_fp8.rollout_mismatch(llama(), {"input_ids": IDS})


def test_codes_by_blocks_that_no_recipe_has_are_refused(tmp_path):
    publish(qwen3(), tmp_path / "in", block=(64, 128), layout="compressed-tensors")
    model = empty(qwen3()).requires_grad_(False)
    foundry_fp8.load_fp8(tmp_path / "in", model)
    with pytest.raises(ConfigError, match=r"codes of model\.layers\.0\..* with scales by .*64, 128.*in full"):
        foundry_fp8.export_fp8(model, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("e8m0", [False, True], ids=["float", "ue8m0"])
def test_what_masters_that_did_not_move_give_back(e8m0, dtype, tmp_path):
    """UE8M0: the values, and the bytes but in blocks that their publisher scaled for a larger amax. Float scales: the codes, and scales that
    the masters' rounding and the two divisions moved."""
    published = qwen3()
    publish(published, tmp_path / "in", e8m0=e8m0, shards=1)
    _, before = stored(tmp_path / "in")
    name = "model.layers.0.mlp.up_proj.weight"
    if e8m0:  # codes of at most 224, where a quantiser of amax / 448 would take half the scale
        before[name][:128, :128] = before[name][:128, :128].float().clamp(-224, 224).to(torch.float8_e4m3fn)
        save_file(before, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    model = empty(published, dtype)
    foundry_fp8.load_fp8(tmp_path / "in", model)
    foundry_fp8.apply_fp8(model, recipe={"name": "block", "power_2_scales": e8m0}, backend="emulated")
    foundry_fp8.export_fp8(model, tmp_path / "out", dtype=str(dtype).removeprefix("torch."), layout="fp8")
    _, after = stored(tmp_path / "out")
    assert before.keys() == after.keys()
    moved = 0
    for key, scale in after.items():
        if not key.endswith("_scale_inv"):
            continue
        codes = key.removesuffix("_scale_inv")
        was, now = before[key].float(), scale.float()
        values = [dequantised(x[codes], s, (128, 128)) for x, s in ((before, was), (after, now))]
        same = before[codes].float() == after[codes].float()
        if e8m0:
            assert torch.equal(*values)
            moved += int((was != now).sum())
            assert bool(same.all()) is (codes != name)
        else:
            assert bool(same.all())
            torch.testing.assert_close(now, was, rtol=2**-22 if dtype == torch.float32 else 2**-8, atol=0)
    assert moved == e8m0
