"""FP8 checkpoints of others: what is read, forward, gradients and LoRA against the dequantised model, and what is refused."""

import copy
import json

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import foundry_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from foundry_fp8.layers.linear import FP8Linear
from tests.export.published import MODELS, publish, qwen3, split_experts

pytestmark = pytest.mark.filterwarnings(
    "ignore:The `dict` method is deprecated"
)  # transformers, of compressed-tensors

BLOCK = {"float": {"name": "block", "power_2_scales": False}, "ue8m0": "block"}
IDS = torch.randint(0, 160, (2, 24), generator=torch.Generator().manual_seed(3))


def empty(model, dtype=torch.float32):
    """A model of the same configuration, without its values."""
    twin = copy.deepcopy(model).to(dtype)
    with torch.no_grad():
        for p in twin.parameters():
            p.fill_(7)
    return twin


def reference(model, values, dtype=torch.float32):
    """The dequantised model, filled by hand."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in twin.state_dict(keep_vars=True).items():
            parts = split_experts({name: p.data})
            for key, part in parts.items():
                part.copy_(
                    values[key]
                    if key in values
                    else part.bfloat16()
                    if part.dim() > 1 or "norm" in key
                    else part
                )
    return twin.to(dtype)


def gradients(model):
    """Loss, and gradients of what trains."""
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("name", "e8m0", "dtype"),
    [
        pytest.param(
            name,
            e8m0,
            dtype,
            marks=() if e8m0 == (dtype == torch.bfloat16) else pytest.mark.full,
            id=f"{name}-{'ue8m0' if e8m0 else 'float'}-{dtype}",
        )
        for name in MODELS
        for e8m0 in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_both_ways_on_read_what_was_published(name, e8m0, dtype, tmp_path):
    model = MODELS[name]()
    values = publish(model, tmp_path, e8m0=e8m0)
    plain = reference(model, values, dtype)
    full, frozen = empty(model, dtype), empty(model, dtype).requires_grad_(False)
    assert foundry_fp8.load_fp8(tmp_path, full) == []
    kept = foundry_fp8.load_fp8(tmp_path, frozen)
    assert kept == [n for n, p in frozen.named_parameters() if isinstance(p, FrozenFP8Weight)]
    for twin in (full, frozen):
        for (key, theirs), ours in zip(plain.state_dict().items(), twin.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), key
    held = sum(
        sum(getattr(p, part).nbytes for part in p.parts)
        for p in frozen.parameters()
        if isinstance(p, FrozenFP8Weight)
    )
    elements = sum(p.numel() for p in frozen.parameters() if isinstance(p, FrozenFP8Weight))
    assert elements == sum(v.numel() for v in values.values()) and held < 1.05 * elements
    x = frozen.get_input_embeddings()(IDS).detach().requires_grad_()
    y = x.detach().clone().requires_grad_()
    for ours, theirs in ((frozen(inputs_embeds=x), plain(inputs_embeds=y)),):
        assert torch.equal(ours.logits, theirs.logits)
        ours.logits.float().square().sum().backward(), theirs.logits.float().square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    for ours, theirs in zip(gradients(full), gradients(plain.zero_grad() or plain), strict=True):
        assert torch.equal(ours, theirs)


def test_codes_and_scales_are_the_bytes_of_the_file(tmp_path):
    from tests.export.served import stored

    publish(qwen3(), tmp_path, e8m0=True)
    model = empty(qwen3()).requires_grad_(False)
    foundry_fp8.load_fp8(tmp_path, model)
    _, tensors = stored(tmp_path)
    for name, p in model.named_parameters():
        if isinstance(p, FrozenFP8Weight):
            assert torch.equal(p.codes.view(torch.uint8), tensors[name].view(torch.uint8))
            assert torch.equal(p.scale.view(torch.uint8), tensors[f"{name}_scale_inv"].view(torch.uint8))


@pytest.mark.parametrize("e8m0", [False, True], ids=["float", "ue8m0"])
def test_the_matching_recipe_multiplies_by_the_published_values(e8m0, tmp_path):
    """Frozen and full alike; any other is refused for frozen weights."""
    model = qwen3()
    values = publish(model, tmp_path, e8m0=e8m0)
    recipe = BLOCK["ue8m0" if e8m0 else "float"]
    full, frozen = empty(model), empty(model).requires_grad_(False)
    for twin in (full, frozen):
        foundry_fp8.load_fp8(tmp_path, twin)
        twin.get_input_embeddings().requires_grad_(True)
        foundry_fp8.apply_fp8(twin, recipe=recipe, backend="emulated")
    used = {}
    for name, layer in full.named_modules():
        if isinstance(layer, FP8Linear):
            layer.probe = lambda operand, x, q, name=name: used.update({name: q}) if operand == "w" else None
    ours, theirs = gradients(frozen), gradients(full)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(
        frozen.get_input_embeddings().weight.grad, full.get_input_embeddings().weight.grad
    )
    for name, q in used.items():
        torch.testing.assert_close(
            q.dequantize(), values[f"{name}.weight"], rtol=0 if e8m0 else 2**-21, atol=0
        )
    other = empty(model).requires_grad_(False)
    foundry_fp8.load_fp8(tmp_path, other)
    wrong = BLOCK["float" if e8m0 else "ue8m0"]
    with pytest.raises(ConfigError, match=r"would round again\. recipe: \{'name': 'block'"):
        foundry_fp8.apply_fp8(other, recipe=wrong, backend="emulated")
    assert not any(isinstance(m, FP8Linear) for m in other.modules())


@pytest.mark.parametrize("name", ["qwen3", pytest.param("deepseek", marks=pytest.mark.full)])
def test_lora_and_full_fine_tuning_resume_bit_for_bit(name, tmp_path):
    peft = pytest.importorskip("peft")
    model = MODELS[name]()
    publish(model, tmp_path, e8m0=True)

    def lora():
        base = empty(model).requires_grad_(False)
        foundry_fp8.load_fp8(tmp_path, base)
        torch.manual_seed(1)
        targets = ["o_proj", "down_proj"] if name == "qwen3" else ["o_proj", "kv_b_proj"]
        made = peft.get_peft_model(
            base, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        )
        foundry_fp8.apply_fp8(made, recipe="block", backend="emulated")
        return made

    def full():
        made = empty(model)
        foundry_fp8.load_fp8(tmp_path, made)
        foundry_fp8.apply_fp8(made, recipe="block", backend="emulated")
        return made

    for make in (lora, full):
        run, again = make(), make()
        losses, state, optimizers = [], None, {}
        for which in (run, again):
            optimizers[id(which)] = torch.optim.AdamW(
                [p for p in which.parameters() if p.requires_grad], lr=1e-3
            )
        for i in range(5):
            if i == 2:
                state = copy.deepcopy((run.state_dict(), optimizers[id(run)].state_dict()))
            losses.append(float(gradients(run)[0]))
            optimizers[id(run)].step(), run.zero_grad()
        again.load_state_dict(state[0]), optimizers[id(again)].load_state_dict(state[1])
        for i in range(2, 5):
            assert float(gradients(again)[0]) == losses[i]
            optimizers[id(again)].step(), again.zero_grad()
        assert losses[-1] < losses[0]
        for (key, ours), theirs in zip(run.state_dict().items(), again.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("block", ["tensor", "channel", (64, 128)], ids=str)
def test_compressed_tensors_strategies(block, tmp_path):
    model = qwen3(tied=True)
    values = publish(model, tmp_path, block=block, layout="compressed-tensors", shards=1)
    plain, frozen = reference(model, values), empty(model).requires_grad_(False)
    foundry_fp8.load_fp8(tmp_path, frozen)
    assert torch.equal(frozen(IDS).logits, plain(IDS).logits)
    assert frozen.lm_head.weight is frozen.model.embed_tokens.weight
    recipe = {"name": "current"} if block == "tensor" else "block"
    if block == "tensor":
        foundry_fp8.apply_fp8(frozen, recipe=recipe, backend="emulated")
        foundry_fp8.apply_fp8(plain, recipe=recipe, backend="emulated")
        assert torch.equal(frozen(IDS).logits, plain(IDS).logits)
    else:
        with pytest.raises(ConfigError, match="No recipe multiplies by them"):
            foundry_fp8.apply_fp8(frozen, recipe=recipe, backend="emulated")


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("e8m0", [False, True], ids=["float", "ue8m0"])
def test_transformers_fp8_layers_are_converted(trains, e8m0, tmp_path):
    """Whose own forward needs a GPU."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = qwen3()
    values = publish(model, tmp_path, e8m0=e8m0)
    plain, ours = reference(model, values), empty(model)
    foundry_fp8.load_fp8(tmp_path, ours.requires_grad_(False))
    for name, linear in list(ours.named_modules()):
        if isinstance(linear, nn.Linear) and isinstance(linear.weight, FrozenFP8Weight):
            theirs = finegrained.FP8Linear(linear.in_features, linear.out_features, block_size=(128, 128))
            theirs.weight = nn.Parameter(linear.weight.codes, requires_grad=trains)
            theirs.weight_scale_inv = nn.Parameter(linear.weight.scale, requires_grad=False)
            ours.set_submodule(name, theirs)
    with pytest.raises(ConfigError, match="matches none"):
        foundry_fp8.apply_fp8(ours, recipe="block", exclude=["nobody"], backend="emulated")
    assert isinstance(ours.model.layers[0].mlp.up_proj, finegrained.FP8Linear)
    foundry_fp8.apply_fp8(ours, recipe=BLOCK["ue8m0" if e8m0 else "float"], backend="emulated")
    weight = ours.model.layers[0].mlp.up_proj.weight
    assert (type(weight) is FrozenFP8Weight) is not trains and weight.requires_grad is trains
    assert torch.equal(ours.eval()(IDS).logits, plain.eval()(IDS).logits)


def test_a_model_of_compressed_tensors_own_is_converted(tmp_path):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    model = qwen3()
    values = publish(model, tmp_path, block="tensor", layout="compressed-tensors", shards=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, torch_dtype=torch.float32, attn_implementation=model.config._attn_implementation
    )
    if theirs.model.layers[0].mlp.up_proj.weight.element_size() > 1:
        pytest.skip("this release has dequantised it")
    theirs.requires_grad_(False)
    foundry_fp8.apply_fp8(theirs, recipe="current", backend="emulated")
    assert isinstance(theirs.model.layers[0].mlp.up_proj.weight, FrozenFP8Weight)
    assert torch.equal(theirs.eval()(IDS).logits, reference(model, values).eval()(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_that_were_cast_are_refused(dtype, tmp_path):
    """A whole model's ``.to(dtype)`` makes high-precision numbers of codes, which their owners then multiply without the scales."""
    finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = nn.Sequential(nn.Linear(128, 128), finegrained.FP8Linear(128, 128, block_size=(128, 128)))
    model[1].requires_grad_(False)
    for p in model[1].parameters():  # not initialised
        p.copy_(torch.full(p.shape, 1.5).to(p.dtype))
    theirs = copy.deepcopy(model)
    foundry_fp8.apply_fp8(model, recipe=BLOCK["float"], backend="emulated")
    with pytest.raises(ConfigError, match=rf"^1: .*FP8 codes.*cast to {dtype}.*Load it again"):
        foundry_fp8.apply_fp8(theirs.to(dtype), recipe="block", backend="emulated")


def test_codes_of_compressed_tensors_that_were_cast_are_refused(tmp_path):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    publish(qwen3(), tmp_path, block="channel", layout="compressed-tensors", shards=1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32)
    if theirs.model.layers[0].mlp.up_proj.weight.element_size() > 1:
        pytest.skip("this release has dequantised it")
    with pytest.raises(ConfigError, match=r"q_proj: .*FP8 codes.*cast to torch.float16.*Load it again"):
        foundry_fp8.apply_fp8(nn.Sequential(theirs).half(), include=["*"], recipe="block", backend="emulated")


@pytest.mark.parametrize("block", ["tensor", "channel"])
def test_a_scale_that_happens_to_be_a_power_of_two_is_read_as_the_others(block, tmp_path):
    model = qwen3()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.clamp_(-1, 1)[:] *= 1.75 / 16
        model.model.layers[1].mlp.down_proj.weight[:, 5] = 1.75 / 16
    values = publish(model, tmp_path, block=block, layout="compressed-tensors", shards=1)
    ours = empty(model)
    foundry_fp8.load_fp8(tmp_path, ours.requires_grad_(False))
    assert len({p.scaling for p in ours.parameters() if isinstance(p, FrozenFP8Weight)}) == 1
    if block == "tensor":
        foundry_fp8.apply_fp8(ours, recipe="current", backend="emulated")
    assert torch.equal(ours.eval()(IDS).logits, reference(model, values).eval()(IDS).logits)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 96,
}
HYBRID = {
    **SIZES, "num_hidden_layers": 4, "hybrid_override_pattern": "M*E-", "num_key_value_heads": 2, "head_dim": 16, "mamba_num_heads": 4,
    "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32, "num_experts_per_tok": 2,
}  # fmt: skip
VISION = {**SIZES, "hidden_size": 32, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("GPTNeoX", SIZES),
        ("NemotronH", HYBRID),
        ("Phimoe", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 2}),
        ("Llava", {"text_config": {"model_type": "llama", **SIZES}, "vision_config": {"model_type": "clip_vision_model", **VISION}}),
    ],
)  # fmt: skip
def test_what_transformers_names_otherwise_in_checkpoints_is_found(name, sizes, tmp_path):
    """transformers 5 renames heads, routers and whole towers while it loads; experts that are not gated have no gate_up_proj."""
    transformers = pytest.importorskip("transformers")
    kind = "ForConditionalGeneration" if name == "Llava" else "ForCausalLM"
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model_of = getattr(transformers, f"{name}{kind}")
    model = model_of(getattr(transformers, f"{name}Config")(**sizes))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = model_of(model.config)
    assert foundry_fp8.load_fp8(tmp_path, ours) == []
    for key, wanted in model.state_dict().items():
        assert torch.equal(ours.state_dict()[key], wanted), key


SECOND = "model-00002-of-00002.safetensors"
WEIGHT = "model.layers.0.mlp.up_proj.weight"
SCALE = f"{WEIGHT}_scale_inv"


def retyped(folder, key, dtype):
    edited(folder, key, lambda tensors: tensors.update({key: tensors[key].to(dtype)}))


def without(folder, key):
    edited(folder, key, lambda tensors: tensors.pop(key))


def rescaled(folder, factor):
    edited(folder, SCALE, lambda tensors: tensors.update({SCALE: tensors[SCALE] * factor}))


def edited(folder, key, change):
    """Rewrite the file that holds ``key``."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if key in tensors:
            change(tensors)
            save_file(tensors, file, metadata={"format": "pt"})


def damaged(change):
    def make(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        change(config, folder)
        path.write_text(json.dumps(config))

    return make


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda c, f: c["quantization_config"].update(quant_method="gptq"), "'gptq'.*are read"),
        (lambda c, f: c["quantization_config"].update(weight_block_size=[64, 128]), r"scales \[.*do not fit"),
        (lambda c, f: c["quantization_config"].update(weight_block_size=[0, 128]), "'fp8'.*are read"),
        (lambda c, f: (f / SECOND).unlink(), rf"{SECOND} cannot be read \(.*Download it again"),
        (lambda c, f: (f / SECOND).write_bytes(b""), rf"{SECOND} cannot be read \(.*Download it again"),
        (lambda c, f: c.pop("quantization_config"), "None.*are read"),
        (lambda c, f: retyped(f, SCALE, torch.int32), r"scales \[3, 2\] torch\.int32 do not fit"),
        (lambda c, f: retyped(f, WEIGHT, torch.bfloat16), r"do not fit a weight \[320, 192\] torch\.bfloat16"),
        (lambda c, f: retyped(f, WEIGHT, torch.float8_e5m2), r"do not fit a weight \[320, 192\] torch\.float8_e5m2"),
        (lambda c, f: rescaled(f, 0.0), r"up_proj.weight: its scale is 0 where codes are not.*consolidation"),
        (lambda c, f: rescaled(f, float("nan")), r"up_proj.weight: its scale is not finite"),
        (lambda c, f: rescaled(f, -1.0), r"up_proj.weight: its scale is not finite, or negative"),
        (lambda c, f: without(f, SCALE), "up_proj.weight is torch.float8_e4m3fn, and no weight_scale_inv"),
        (lambda c, f: without(f, "model.norm.weight"), "no tensor there is for model.norm.weight"),
    ],
    ids=["method", "block", "empty block", "shard", "empty shard", "plain", "scale", "high precision", "e5m2", "zero", "nan", "negative", "no scale", "no tensor"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(damage, said, tmp_path):
    publish(qwen3(), tmp_path)
    damaged(damage)(tmp_path)
    with pytest.raises(ConfigError, match=said):
        foundry_fp8.load_fp8(tmp_path, empty(qwen3()))


def test_blocks_of_zeros_have_a_scale_of_zero(tmp_path):
    model = qwen3()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:128] = 0
    publish(model, tmp_path)
    edited(tmp_path, SCALE, lambda tensors: tensors[SCALE][0].zero_())
    ours = empty(model)
    foundry_fp8.load_fp8(tmp_path, ours)
    up = ours.model.layers[0].mlp.up_proj.weight
    assert not up[:128].any() and up[128:].all()


def test_what_is_no_folder_here_is_said(tmp_path):
    with pytest.raises(
        ConfigError, match=r"Qwen/Qwen3-8B-FP8: no config\.json can be read.*snapshot_download"
    ):
        foundry_fp8.load_fp8("Qwen/Qwen3-8B-FP8", empty(qwen3()))


def test_files_that_the_index_does_not_name_are_not_read(tmp_path):
    """As Mistral's folders have the model twice."""
    from safetensors.torch import save_file

    values = publish(qwen3(), tmp_path)
    save_file({"layers.0.wq": torch.zeros(3)}, tmp_path / "consolidated.safetensors")
    model = empty(qwen3())
    foundry_fp8.load_fp8(tmp_path, model)
    assert torch.equal(model.state_dict()[WEIGHT], values[WEIGHT])


def test_an_adapter_in_fp8_is_refused(tmp_path):
    """PEFT gives adapters their base's dtype."""
    model = empty(qwen3()).requires_grad_(False)
    model.adapter = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn))
    with pytest.raises(ConfigError, match=r"adapter trains in torch\.float8_e4m3fn.*Cast it to bfloat16"):
        foundry_fp8.apply_fp8(model, recipe="block", backend="emulated")


def test_a_sharded_model_is_refused(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    publish(qwen3(), tmp_path)
    model = empty(qwen3())
    try:
        from tests.one_rank import one_rank

        one_rank()
    except pytest.skip.Exception:  # without Composer
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    shard = distribute_tensor(model.lm_head.weight.data, init_device_mesh("cpu", (1,)), [Shard(0)])
    model.lm_head.weight = nn.Parameter(shard)
    with pytest.raises(ConfigError, match=r"sharded already\. Load first, then fully_shard"):
        foundry_fp8.load_fp8(tmp_path, model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_the_meta_device_is_filled(tied, tmp_path):
    model = qwen3(tied)
    values = publish(model, tmp_path)
    with torch.device("meta"):
        ours = type(model)(model.config).requires_grad_(False)
    with pytest.raises(ConfigError, match="include_buffers=False"):
        foundry_fp8.load_fp8(tmp_path, ours)
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights(include_buffers=False):
        ours = type(model)(model.config).requires_grad_(False)
    foundry_fp8.load_fp8(tmp_path, ours)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is tied
    assert torch.equal(ours.eval()(IDS).logits, reference(model, values).eval()(IDS).logits)
