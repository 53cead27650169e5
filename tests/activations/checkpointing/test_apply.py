"""Checkpoints on a Hugging Face decoder: same gradients, counted recompute, bit-identical FP8, dropout, offload."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from foundry_fp8.activations.checkpointing.apply import (
    ActivationCheckpointingConfig,
    apply_activation_checkpointing,
    unwrap,
)
from foundry_fp8.activations.offload.store import host_store
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.model_structure.blocks import transformer_blocks
from foundry_fp8.planning.memory.live_bytes import LiveBytes
from foundry_fp8.surgery.apply import apply_fp8

TOKENS = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(0))


def gradients(model, autocast=False):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with torch.autocast("cpu", enabled=autocast, dtype=torch.bfloat16):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}


def assert_same(ours, reference):
    assert ours.keys() == reference.keys()
    for name, gradient in reference.items():
        assert torch.equal(ours[name], gradient), name


TARGETS = [
    {},
    {"policy": "selective"},
    {"policy": ["aten.mm", "aten._scaled_dot_product_flash_attention_for_cpu"]},
    {"targets": {"*.mlp": "every-2", "*.self_attn": "last-3"}},
    {"targets": {"LlamaDecoderLayer": "first-2", "LlamaMLP": "last-2"}, "offload": True},
    {"policy": "offload"},
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("options", TARGETS)
def test_gradients_are_bit_identical_with_dropout_on(make_llama, options, autocast):
    model = make_llama(4, attention_dropout=0.1)
    model.train()
    reference = gradients(model, autocast)
    keys = list(model.state_dict())
    apply_activation_checkpointing(model, **options)
    assert_same(gradients(model, autocast), reference)
    assert list(model.state_dict()) == keys
    assert len(transformer_blocks(model)) == 4  # a partly wrapped list is still the list of blocks


@pytest.mark.parametrize(
    ("recipe", "policy"),
    [
        ("delayed", "full"),
        ("block", "full"),
        ("delayed", "selective"),
        pytest.param("mxfp8", "selective", marks=pytest.mark.full),
        ("nvfp4", "selective"),
        ("delayed", "offload"),
        pytest.param("current", "full", marks=pytest.mark.full),
        pytest.param("mxfp8", "full", marks=pytest.mark.full),
        pytest.param("nvfp4", "full", marks=pytest.mark.full),
        pytest.param("current", "selective", marks=pytest.mark.full),
        pytest.param("block", "selective", marks=pytest.mark.full),
        pytest.param("current", "offload", marks=pytest.mark.full),
        pytest.param("block", "offload", marks=pytest.mark.full),
        pytest.param("mxfp8", "offload", marks=pytest.mark.full),
    ],
)
def test_fp8_recompute_is_bit_identical_and_records_no_amax_twice(make_llama, recipe, policy):
    plain, checkpointed = make_llama(2), make_llama(2)
    for model in (plain, checkpointed):
        apply_fp8(model, recipe=recipe, backend="emulated")
    apply_activation_checkpointing(checkpointed, policy=policy)
    for _ in range(3):  # later steps run with scales that the earlier ones have recorded
        assert_same(gradients(checkpointed), gradients(plain))
    ours = {m.fqn: m for m in checkpointed.modules() if isinstance(m, FP8Linear)}
    for module in plain.modules():
        if isinstance(module, FP8Linear):
            assert ours[module.fqn].ledger.flops == module.ledger.flops
            assert not module.ledger.recomputed_flops
            if policy == "offload":
                assert not ours[module.fqn].ledger.recomputed_flops
            elif not module.fqn.endswith("down_proj"):  # the recompute stops early, inside the last linear
                assert ours[module.fqn].ledger.recomputed_flops
            if module.slots is not None:
                for operand in ("x", "w", "dy"):
                    history = ours[module.fqn].slots[operand].amax_history
                    assert torch.equal(history, module.slots[operand].amax_history)


class Scores(nn.Module):
    """Adds to products in place, as T5 does its position bias to the scores; through a view, and not."""

    def __init__(self):
        super().__init__()
        self.inner_attention = nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)))

    def forward(self, x):
        q = self.inner_attention(x)
        q.mul_(2.0)
        scores = torch.matmul(
            q.unflatten(-1, (2, 8)).transpose(1, 2), x.unflatten(-1, (2, 8)).permute(0, 2, 3, 1)
        )
        scores += self.bias
        return x + (scores.softmax(-1) @ x.unflatten(-1, (2, 8)).transpose(1, 2)).transpose(1, 2).flatten(2)


def test_what_a_selective_checkpoint_keeps_may_be_written_to():
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([Scores(), Scores()]))
    blocks, x = model[0], torch.randn(2, 4, 16)

    def run():
        model.zero_grad()
        y = x
        for block in blocks:
            y = block(y)
        y.square().sum().backward()
        return {
            name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()
        }

    reference = run()
    apply_activation_checkpointing(model, policy="selective")
    assert_same(run(), reference)


def backward_flops(model):
    with FlopCounterMode(display=False) as counter:
        gradients(model)
    return counter.get_total_flops()


def test_what_is_recomputed_is_what_was_chosen(make_llama):
    """In units of a layer's forward FLOPs: full recomputes all of it, selective none of its matmuls, MLP its share."""
    plain = backward_flops(make_llama(4))

    def extra(**options):
        model = make_llama(4)
        apply_activation_checkpointing(model, **options)
        return backward_flops(model) - plain

    full = extra()
    assert full > 0
    assert extra(policy="selective") == 0
    assert extra(targets={"LlamaDecoderLayer": "first-2"}) == pytest.approx(full / 2)
    mlp_matmul = 2 * TOKENS.numel() * 64 * 160
    assert (
        extra(targets="LlamaMLP") == 4 * 2 * mlp_matmul
    )  # early stop: the last matmul's output is not needed
    assert extra(policy=["aten.mm"]) < full / 2


def test_fewer_bytes_are_kept(make_llama):
    def kept(**options):
        model = make_llama(6)
        if options:
            apply_activation_checkpointing(model, **options)
        with LiveBytes() as meter:
            model(input_ids=TOKENS, labels=TOKENS).loss  # noqa: B018
            loss = model(input_ids=TOKENS, labels=TOKENS).loss
            live = meter.live
        del loss
        return live

    model_none = kept()
    selective, full = kept(policy="selective"), kept(policy="full")
    half = kept(targets={"LlamaDecoderLayer": "every-2"})
    assert full < selective < model_none
    assert half == pytest.approx((full + model_none) / 2, rel=0.02)


def test_applying_twice_changes_nothing(make_llama):
    model = make_llama(2)
    assert len(apply_activation_checkpointing(model).selected) == 2
    modules = [name for name, _ in model.named_modules()]
    assert apply_activation_checkpointing(model).selected == ()
    assert [name for name, _ in model.named_modules()] == modules


def test_a_key_value_cache_would_be_filled_twice_and_is_switched_off(make_llama):
    model = make_llama(2)
    assert model.config.use_cache
    apply_activation_checkpointing(model)
    assert not model.config.use_cache


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "selectiv"}, "policy: 'selectiv'.*Did you mean 'selective'"),
        ({"policy": ["aten.mmm"]}, r"policy\[0\]: 'aten.mmm' is not an op.*Did you mean 'aten.mm'"),
        ({"policy": []}, "policy"),
        ({"budget": "20GB/s"}, "budget: '20GB/s' is not a size"),
        ({"budget": 1.5}, "budget: 1.5 is not a size"),
        ({"budget": True}, "budget: True"),
        ({"budget": "fit", "targets": "LlamaMLP"}, "the budget chooses targets"),
        ({"offload": "yes"}, "offload: 'yes'"),
    ],
)
def test_bad_options_fail_at_construction(options, message):
    with pytest.raises(ConfigError, match=message):
        ActivationCheckpointingConfig(**options)


def saved_shapes(function):
    """What hooks around ``function`` are given."""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (seen.append(tuple(x.shape)), x)[1], lambda x: x):
        function()
    return seen


def test_a_checkpoint_gives_the_hooks_around_it_what_it_is_called_with_by_keyword(make_llama):
    """Hugging Face calls attention so. Masks and position tables, which blocks share, are none of the hooks' business."""
    model = make_llama(1)
    apply_activation_checkpointing(model, targets={"*.self_attn": [0]})
    attention = model.model.layers[0].self_attn
    x = torch.randn(2, 64, 64, requires_grad=True)
    rotation = model.model.rotary_emb(x, torch.arange(64)[None])

    def call():
        return attention(hidden_states=x, position_embeddings=rotation, attention_mask=None)[0]

    assert [shape for shape in saved_shapes(call) if shape != (0,)] == [
        (2, 64, 64)
    ]  # older torch: a dummy too
    (ours,) = torch.autograd.grad(call().sum(), x)
    attention = attention._checkpoint_wrapped_module
    assert torch.equal(ours, torch.autograd.grad(call().sum(), x)[0])


def test_a_cache_of_keys_is_handed_on_and_not_copied(make_llama):
    """transformers registers it with torch's tree functions, which would make another one of its parts."""
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    model = make_llama(1)
    apply_activation_checkpointing(model)
    cache = DynamicCache()
    x = torch.randn(2, 8, 64)
    rotation = model.model.rotary_emb(x, torch.arange(8)[None])
    parameters = inspect.signature(LlamaDecoderLayer.forward).parameters
    name = next(name for name in ("cache", "past_key_values", "past_key_value") if name in parameters)
    with torch.no_grad():
        model.model.layers[0](x, position_embeddings=rotation, **{name: cache}, use_cache=True)
    assert cache.get_seq_length() == 8


@pytest.mark.parametrize(
    ("policy", "whole"),
    [
        pytest.param("full", True, id="full, the model"),
        pytest.param("selective", False, id="selective, its blocks"),
        pytest.param("full", False, id="full, its blocks", marks=pytest.mark.full),
        pytest.param("selective", True, id="selective, the model", marks=pytest.mark.full),
    ],
)
def test_checkpoints_are_compiled(make_llama, policy, whole):
    model = make_llama(1 if whole else 2, use_cache=False)
    reference = gradients(model)
    apply_activation_checkpointing(model, policy=policy)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if whole:
        model.compile(backend="aot_eager")
    else:
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    compiled = gradients(model)
    assert not torch._dynamo.utils.counters["graph_break"]
    for name, gradient in reference.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.full
@pytest.mark.parametrize("options", [{"offload": True}, {"policy": "offload"}])
def test_offload_breaks_the_graph_of_a_compiled_model_and_moves_what_it_says(make_llama, options):
    reference = gradients(make_llama(2, use_cache=False))
    model = make_llama(2, use_cache=False)
    apply_activation_checkpointing(model, **options)
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    store = host_store(torch.device("cpu"))
    before = store.moved
    compiled = gradients(model)
    assert store.moved > before
    for name, gradient in reference.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


def test_a_block_that_stands_in_several_places_is_recomputed_in_all_of_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            shared, own = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
            self.blocks = nn.ModuleList([shared, own, shared])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model, calls = Model(), []
    keys, shared = list(model.state_dict()), model.blocks[0]
    shared[0].register_forward_hook(lambda *_: calls.append(1))
    apply_activation_checkpointing(model)
    assert model.blocks[0] is model.blocks[2] and list(model.state_dict()) == keys
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert len(calls) == 4  # two forwards, two recomputes
    unwrap(model)
    assert model.blocks[0] is shared and model.blocks[2] is shared
