"""Compression on whole models: exact forward, gradients, bytes, FP8 linears, checkpoints, bad options."""

from __future__ import annotations

import copy

import pytest
import torch

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.compression.apply import apply_activation_compression
from foundry_fp8.activations.compression.saved import compresses_inside
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from foundry_fp8.surgery.apply import apply_fp8
from tests.kept_bytes import activation_bytes
from tests.model_zoo import TRANSFORMERS_4

TOKENS = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(0))
LIMIT = {"int8": 1e-2, "e4m3": 3e-2}


def compress(model, **options):
    """With a limit as small as these models."""
    return apply_activation_compression(model, **{"min_numel": 1024, **options})


def gradients(model, autocast=False):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


ROUTES = [
    {},  # hooks and fused forms
    {"overrides": {"norm": "none", "activation": "none"}},  # hooks alone
    {"targets": ["*.mlp"]},
    {"targets": ["*.self_attn", "*layernorm"]},
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", ROUTES)
@pytest.mark.parametrize("name", LIMIT)
def test_the_forward_is_exact_and_gradients_are_within_the_format_s_error(
    make_llama, name, options, autocast
):
    model = make_llama(4, attention_dropout=0.1, tie_word_embeddings=True)
    model.train()
    loss, reference = gradients(model, autocast)
    keys = list(model.state_dict())
    report = compress(model, format=name, **options)
    ours, compressed = gradients(model, autocast)
    assert ours == loss
    assert 1e-4 < error(compressed, reference) < LIMIT[name]
    assert list(model.state_dict()) == keys
    report.undo()
    assert torch.equal(gradients(model, autocast)[1], reference)


@pytest.mark.parametrize("autocast", [False, True])
def test_exact_rounds_nothing_and_keeps_less(make_llama, autocast):
    """Recomputed norms and products are repeated bit for bit; what is left is the rounding of closed forms."""
    model = make_llama(4, attention_dropout=0.1, tie_word_embeddings=True)
    model.train()
    loss, reference = gradients(model, autocast)
    before = peak(model)
    report = compress(model, format="exact")
    ours, exact = gradients(model, autocast)
    assert ours == loss
    assert error(exact, reference) < (5e-3 if autocast else 2e-6)
    assert report.saved.packed == 0 and report.saved.left_out > 0
    assert {reason for _, action, reason in report.rows if action.startswith(("hooks", "fused"))} == {"exact"}
    assert peak(model) < 0.75 * before


@pytest.mark.parametrize("targets", [{"*.mlp": [0, 2]}, {"*.self_attn": [1]}, {"LlamaDecoderLayer": [1]}])
def test_exact_around_and_beside_checkpoints(make_llama, targets):
    """A checkpointed sub-layer's input is a norm's output: it is computed again for the recompute."""
    model = make_llama(3)
    loss, reference = gradients(model)
    apply_activation_checkpointing(model, targets=targets)
    report = compress(model, format="exact")
    ours, exact = gradients(model)
    assert ours == loss and error(exact, reference) < 2e-6 and report.saved.left_out > 0


def test_targets_with_formats_of_their_own(make_llama):
    """The first pattern that matches counts, and a sub-layer may differ from its block."""
    model = make_llama(3)
    reference = gradients(model)[1]
    formats = {"*.0.mlp": "e4m3", "*.[01]": "exact", "*.layers.1.*": "exact", "*.2.mlp": "int8"}
    report = compress(model, targets=formats)
    form = {
        name: reason for name, action, reason in report.rows if action in ("hooks", "fused mlp", "fused norm")
    }
    prefix = "model.layers."
    assert form.pop(f"{prefix}0") == form.pop(f"{prefix}1") == "exact"
    assert form.pop(f"{prefix}0.mlp") == "e4m3" and form.pop(f"{prefix}1.mlp") == "exact"
    assert form.pop(f"{prefix}2.mlp") == "int8"
    assert len(form) == 4 and set(form.values()) == {"exact"}  # two norms in each of the first two blocks
    assert 1e-4 < error(gradients(model)[1], reference) < LIMIT["e4m3"]
    report.undo()
    assert torch.equal(gradients(model)[1], reference)


def test_the_loss_alone(make_llama):
    model = make_llama(2)
    loss, reference = gradients(model)
    report = compress(model, targets=[])
    assert report.rows == (("loss_function", "fused loss", "exact"),)
    ours, lean = gradients(model)
    assert ours == loss and error(lean, reference) < 1e-6
    assert "_loss_function" in vars(model)
    report.undo()
    assert "_loss_function" not in vars(model)


def test_foundry_s_loss_module_is_fused(make_llama):
    class Trained(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_llama(2)
            self.loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-100, reduction="none")

        def forward(self, input_ids, labels):
            logits = self.model(input_ids=input_ids).logits
            self.model.loss = self.loss_fn(logits.flatten(0, 1), labels.flatten()).mean()
            return self.model

    model = Trained()
    loss, reference = gradients(model)
    report = compress(model, targets=[])
    assert ("loss_fn", "fused loss", "exact") in report.rows
    assert isinstance(model.loss_fn, torch.nn.CrossEntropyLoss)
    with LiveBytes() as meter:
        ours = model.loss_fn(torch.randn(64, 128, requires_grad=True), torch.zeros(64, dtype=torch.long))
        assert meter.live == 64 * (128 + 1) * 4 + 64 * 8 and ours.shape == (
            64,
        )  # logits, losses, targets: no log-softmax
    ours, lean = gradients(model)
    assert ours == loss and error(lean, reference) < 1e-6
    report.undo()
    assert type(model.loss_fn) is torch.nn.CrossEntropyLoss


def block_bytes(options, autocast, tokens=256, width=256):
    """Bytes a block saves, and what of that are casts of its parameters (not activations)."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=64,
    )
    model = LlamaForCausalLM(config)
    block = model.model.layers[0]
    if options is not None:
        compress(model, **options)
    x = torch.randn(2, tokens, width, requires_grad=True)
    rotation = model.model.rotary_emb(x, torch.arange(tokens)[None])

    def forward():
        with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
            return block(x, position_embeddings=rotation)[0]

    casts = sum(2 * p.numel() for p in block.parameters() if p.dim() == 2) if autocast else 0
    return activation_bytes(forward, torch.device("cpu")) - casts


def test_bytes_of_a_swiglu_block_are_at_most_0_53_of_bfloat16_and_0_30_of_float32():
    for options in ({}, {"overrides": {"norm": "none", "activation": "none"}}):
        assert block_bytes(options, autocast=False) <= 0.30 * block_bytes(None, autocast=False)
        assert block_bytes(options, autocast=True) <= 0.53 * block_bytes(None, autocast=True)


def peak(model):
    model.zero_grad(set_to_none=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)  # gradients are not activations
    with LiveBytes() as meter:
        model(input_ids=TOKENS, labels=TOKENS).loss  # noqa: B018
    with LiveBytes() as meter:
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        kept = meter.live
    del loss
    return kept


@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_fp8_linears_keep_their_input_once_and_nothing_is_quantised_twice(make_llama, recipe):
    fp8, both = make_llama(2), make_llama(2)
    for model in (fp8, both):
        apply_fp8(model, recipe=recipe, backend="emulated")
    report = compress(both)
    assert sum(action == "fp8" for _, action, _ in report.rows) == 14
    loss, reference = gradients(fp8)
    ours, compressed = gradients(both)
    assert ours == loss
    # E5M2 gradients amplify any change of their input to a rounding of theirs; the direction must hold.
    assert torch.nn.functional.cosine_similarity(compressed, reference, 0) > 0.99

    layer = both.model.layers[0]
    inputs = {}
    for name, module in layer.named_modules():
        if isinstance(module, FP8Linear):
            module.register_forward_hook(lambda m, a, o, name=name: inputs.__setitem__(name, o.grad_fn))
    both(input_ids=TOKENS, labels=TOKENS)

    def kept(name):
        node = inputs[name]
        while not hasattr(node, "saved_tensors") or len(getattr(node, "saved_tensors", ())) < 2:
            node = node.next_functions[0][0]
        return node.saved_tensors[1]

    q, k, v, gate, up, down = (
        kept(f"{part}_proj")
        for part in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up", "mlp.down")
    )
    assert q.dtype == torch.float8_e4m3fn
    assert q.data_ptr() == k.data_ptr() == v.data_ptr() and gate.data_ptr() == up.data_ptr()
    assert len({q.data_ptr(), gate.data_ptr(), down.data_ptr()}) == 3


def test_with_fp8_linears_activations_are_at_most_0_35_of_float32(make_llama):
    plain, both = make_llama(4), make_llama(4)
    apply_fp8(both, recipe="current", backend="emulated")
    compress(both)
    assert peak(both) <= 0.35 * peak(plain)


def test_a_demoted_linear_and_a_high_precision_wgrad_are_packed_by_the_hooks(make_llama):
    model = make_llama(2)
    apply_fp8(model, recipe="current", backend="emulated", wgrad="high_precision")
    reference = gradients(model)[1]
    report = compress(model, overrides={"norm": "none", "activation": "none"})
    kept_hp = report.saved.packed
    compressed = gradients(model)[1]
    assert report.saved.packed > kept_hp
    assert torch.nn.functional.cosine_similarity(compressed, reference, 0) > 0.99
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.set_recipe(None)
    before = report.saved.packed
    gradients(model)
    assert report.saved.packed > before


def test_checkpoint_boundaries_are_packed_or_left(make_llama, caplog):
    for include in (True, False):
        plain, model = make_llama(3), make_llama(3)
        for m in (plain, model):
            apply_activation_checkpointing(m, targets={"LlamaDecoderLayer": "first-2", "*.mlp": [2]})
        reference = gradients(plain)[1]
        report = compress(model, include_checkpoint_boundaries=include)
        assert [row[2] for row in report.rows if row[1] == "boundary"] == ["int8" if include else "exact"] * 3
        assert 1e-4 < error(gradients(model)[1], reference) < 1e-2
    assert caplog.text.count("Write {'overrides': {'boundary': 'exact'}} instead") == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"offload": True}, "it offloads its inputs to host memory, as they are"),
        ({"policy": "offload"}, "what it saves goes to host memory, as it is"),
    ],
)
def test_what_is_offloaded_is_left_and_reported(make_llama, options, why):
    """Of two pairs of hooks the inner ones run, which are the offloading's."""
    plain, model = make_llama(2), make_llama(2)
    for m in (plain, model):
        apply_activation_checkpointing(m, **options)
    reference = gradients(plain)[1]
    report = compress(model, overrides={"loss": "none"})
    assert [row[1:] for row in report.rows if row[1] in ("left", "boundary")] == [
        ("left", f"a checkpoint, and {why}")
    ] * 2
    assert torch.equal(gradients(model)[1], reference) and report.saved.packed == 0


def test_a_checkpoint_over_compression_is_refused_in_either_order(make_llama):
    model = make_llama(2)
    compress(model, targets=["*.mlp"])
    with pytest.raises(
        ConfigError, match=r"layers\.0\.mlp compresses what it saves .* before activation_compression"
    ):
        apply_activation_checkpointing(model)
    model = make_llama(2)
    apply_activation_checkpointing(model)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp lies inside an activation checkpoint"):
        compress(model, targets=["*.mlp"])
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp lies inside an activation checkpoint"):
        compress(model, targets={"*.[01]": "int8", "*.0.mlp": "exact"})
    assert compresses_inside(model) is None


def test_what_is_float64_passes_through(make_llama):
    """Fused norms leave a float64 model alone; hooks still see the float32 in which its norms compute."""
    model = make_llama(2).double()
    reference = gradients(model)[1]
    compress(model, targets=["*.mlp", "*.self_attn"], overrides={"loss": "none"})
    assert torch.equal(gradients(model)[1], reference)


def test_int4_and_overrides(make_llama):
    model = make_llama(2)
    reference = gradients(model)[1]
    report = compress(model, format="int4")
    coarse = error(gradients(model)[1], reference)
    report.undo()
    compress(model, format="int4", overrides={"other": "int8"}, block_size=64)
    assert 1e-2 < error(gradients(model)[1], reference) < coarse < 0.15


def test_a_copy_of_a_compressed_model_trains(make_llama):
    model = make_llama(2)
    loss = gradients(model)[0]
    compress(model)
    assert gradients(copy.deepcopy(model))[0] == loss


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "int6"}, "activation_compression.format: 'int6' is not one of int8, e4m3, int4"),
        ({"fromat": "int8"}, "fromat: unknown key.*Did you mean 'format'"),
        ({"block_size": 100}, "block_size: 100 is not an integer that is a power of two"),
        ({"block_size": True}, "block_size: True"),
        ({"targets": "*"}, "targets: '\\*' is not a list"),
        ({"targets": [], "overrides": {"loss": "none"}}, "targets: an empty list"),
        ({"targets": {"*": "int9"}}, r"targets\.\*: 'int9' is not one of int8, e4m3, int4, exact"),
        ({"overrides": {"loss": "int8"}}, "overrides.loss: 'int8' is not one of exact, none"),
        ({"targets": ["*.atn"]}, "targets: pattern '\\*.atn' matches none"),
        ({"overrides": {"nrom": "int8"}}, "overrides.nrom: 'nrom' is not one of .*Did you mean 'norm'"),
        ({"overrides": {"norm": "fp4"}}, "overrides.norm: 'fp4'"),
        ({"min_numel": -1}, "min_numel: -1"),
    ],
)
def test_bad_options_fail_at_construction(make_llama, options, message):
    with pytest.raises(ConfigError, match=message):
        compress(make_llama(2), **options)


def test_twice_goes_on_and_otherwise_is_refused(make_llama):
    model = make_llama(2)
    report = compress(model)
    assert compress(model) is report
    with pytest.raises(
        ConfigError, match=r"compressed already, with other settings \(format: 'int8', here 'int4'\)"
    ):
        compress(model, format="int4")
    report.undo()
    assert compress(model, format="int4") is not report


@pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks"])
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
def test_torch_compile_is_refused(make_llama, whole):
    """A compiled graph would hand transposed weights to the hooks, which pack them."""
    model = make_llama(2)
    compress(model)
    for module in [model] if whole else model.model.layers:
        module.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"under torch\.compile.*compile_config"):
        gradients(model)
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_fp8_blocks_under_checkpoints_are_bit_identical_beside_compressed_ones(make_llama, recipe):
    """The checkpointed last blocks get the gradients, and every linear the amax history, of a model with neither."""
    plain, both = make_llama(4), make_llama(4)
    for model in (plain, both):
        apply_fp8(model, recipe=recipe, backend="emulated")
    apply_activation_checkpointing(both, targets={"LlamaDecoderLayer": "last-2"})
    compress(both, overrides={"loss": "none", "boundary": "exact"})
    assert gradients(both)[0] == gradients(plain)[0]
    late = [
        n
        for n, _ in plain.named_parameters()
        if n.startswith(("model.layers.2.", "model.layers.3.", "lm_head"))
    ]
    exact = dict(plain.named_parameters())
    ours = {n.replace("_checkpoint_wrapped_module.", ""): p for n, p in both.named_parameters()}
    assert len(late) > 18
    for name in late:
        assert torch.equal(ours[name].grad, exact[name].grad), name
    assert not torch.equal(
        ours["model.layers.0.mlp.up_proj.weight"].grad, exact["model.layers.0.mlp.up_proj.weight"].grad
    )


@pytest.mark.parametrize(
    "recipe",
    ["delayed", "block", "nvfp4", *(pytest.param(r, marks=pytest.mark.full) for r in ("current", "mxfp8"))],
)
def test_packed_boundaries_of_fp8_blocks_change_no_forward_and_no_amax_of_it(make_llama, recipe):
    """The recompute starts from a rounded input, yet what the scales are made from is the first forward."""
    plain, both = make_llama(3), make_llama(3)
    for model in (plain, both):
        apply_fp8(model, recipe=recipe, backend="emulated")
    apply_activation_checkpointing(both)
    compress(both)
    for step in range(3):
        loss, reference = gradients(plain)
        ours, compressed = gradients(both)
        assert ours == loss, step
        close = 0.95 if recipe == "nvfp4" else 0.99  # other inputs, so other random numbers
        assert torch.nn.functional.cosine_similarity(compressed, reference, 0) > close
    linears = [[m for m in model.modules() if isinstance(m, FP8Linear)] for model in (plain, both)]
    for a, b in zip(*linears, strict=True):
        assert (a.slots is None) == (b.slots is None) == (recipe != "delayed")
        for operand in ("x", "w") if a.slots is not None else ():
            assert torch.equal(a.slots[operand].amax_history, b.slots[operand].amax_history)


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=128, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def test_the_input_of_a_checkpointed_router_is_not_rounded():
    """From a rounded one the recompute sends tokens to other experts: an error where counts differ, else a wrong gradient."""
    model = mixtral()
    reference = gradients(model)[1]
    moe = "block_sparse_moe" if TRANSFORMERS_4 else "mlp"
    apply_activation_checkpointing(model, targets={f"*.{moe}": [0], "MixtralDecoderLayer": [1]})
    with pytest.raises(
        ConfigError, match=r"overrides\.boundary: the checkpoint .*\.gate.* other experts .*int4"
    ):
        compress(model, format="int4", overrides={"boundary": "int4"})
    assert compresses_inside(model) is None
    report = compress(model, format="int4")
    left = {name: reason for name, action, reason in report.rows if action == "left"}
    assert set(left) == {f"model.layers.0.{moe}", "model.layers.1"}
    assert f"router model.layers.1.{moe}.gate has to choose the same experts" in left["model.layers.1"]
    assert error(gradients(model)[1], reference) < 0.2  # int4's, of what lies outside the checkpoints
    report.undo()
    compress(model, format="exact")
    assert error(gradients(model)[1], reference) < 2e-6


@pytest.mark.skipif(not TRANSFORMERS_4, reason="transformers 5 keeps experts in one parameter")
def test_a_list_of_modules_takes_no_hooks():
    model = mixtral()
    with pytest.raises(ConfigError, match=r"'\*\.experts' matches none"):
        compress(model, targets=["*.experts"])
    report = compress(model, targets=["*.experts.*"])
    gradients(model)
    assert report.saved.packed > 0


def test_the_report_says_whether_anything_is_rounded(make_llama):
    assert str(compress(make_llama(2), format="exact")).startswith(
        "activation compression (nothing is rounded): 2 x hooks exact"
    )
    assert "(rounded to int8): 2 x hooks int8, 2 x fused mlp int8, 4 x fused norm int8" in str(
        compress(make_llama(2))
    )


def test_what_a_checkpoint_is_called_with_by_keyword_is_packed(make_llama):
    """Hugging Face calls attention so."""
    plain, model = make_llama(2), make_llama(2)
    for m in (plain, model):
        apply_activation_checkpointing(m, targets=["*.self_attn"])
    reference = gradients(plain)[1]
    report = compress(model, targets=["*.self_attn"], overrides={"loss": "none"})
    assert 1e-4 < error(gradients(model)[1], reference) < 3e-2
    assert report.saved.original == 2 * TOKENS.numel() * 64 * 4


def test_transformers_own_checkpoints_are_refused(make_llama):
    """Compression inside of one keeps the block's tensors from it, so that nothing is recomputed."""
    model = make_llama(2)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(
        ConfigError, match=r"model runs under transformers' own .*gradient_checkpointing_disable"
    ):
        compress(model)
    assert compresses_inside(model) is None
    model.gradient_checkpointing_disable()
    _, reference = gradients(model)
    apply_activation_checkpointing(model)
    compress(model, format="exact")
    assert error(gradients(model)[1], reference) < 1e-6
