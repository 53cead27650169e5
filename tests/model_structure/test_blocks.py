"""What counts as a transformer block, in the shapes that models really have."""

import itertools

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from foundry_fp8.activations.checkpointing.targets import select
from foundry_fp8.config import ConfigError
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks, transformer_stacks
from foundry_fp8.observe.kurtosis_taps import find_taps
from foundry_fp8.surgery.apply import apply_fp8
from tests.model_zoo import MODELS

STACKS = {
    "Llama": [["model.layers.0", "model.layers.1"]],
    "GPT2": [["transformer.h.0", "transformer.h.1"]],
    "MPT": [["transformer.blocks.0", "transformer.blocks.1"]],
    "T5": [["encoder.block.0", "encoder.block.1"], ["decoder.block.0", "decoder.block.1"]],
    "Bart": [
        ["model.encoder.layers.0", "model.encoder.layers.1"],
        ["model.decoder.layers.0", "model.decoder.layers.1"],
    ],
    "Jamba": [[f"model.layers.{i}" for i in range(4)]],
    "Mamba": [["backbone.layers.0", "backbone.layers.1"]],
    "Mixtral": [["model.layers.0", "model.layers.1"]],
    "VideoMAE": [["videomae.encoder.layer.0", "videomae.encoder.layer.1"]],
}


def names(model: nn.Module) -> list[list[str]]:
    return [[name for name, _ in stack] for stack in transformer_stacks(model)]


@pytest.mark.parametrize("name", STACKS)
def test_the_stacks_of_real_models(name):
    model, _ = MODELS[name]()
    assert names(model) == STACKS[name]
    assert [n for n, _ in transformer_blocks(model)] == [*itertools.chain(*STACKS[name])]


def test_jamba_keeps_a_whole_layer_not_an_expert():
    model, _ = MODELS["Jamba"]()
    report = apply_fp8(model, recipe="current", keep_first_blocks=1)
    kept = {name for name, why in report.skipped.items() if "keep_first_blocks" in why}
    assert kept and all(name.startswith("model.layers.0.") for name in kept)
    assert not any(name.startswith("model.layers.0.") for name in report.converted)
    assert any(name.startswith("model.layers.1.feed_forward.experts.") for name in report.converted)
    # The monitors count the same blocks.
    assert {tap.layer for tap in find_taps(model) if tap.role == "qkv_input"} == {2}  # the one that attends
    assert {s.name for s in select(model, None, "full", "key")} == {f"model.layers.{i}" for i in range(4)}


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_an_encoder_and_a_decoder_keep_blocks_at_both_their_ends(name):
    model, _ = MODELS[name]()
    stacks = STACKS[name]
    report = apply_fp8(model, recipe="current", keep_first_blocks=1)
    assert all(not n.startswith(f"{stack[0]}.") for stack in stacks for n in report.converted)
    assert all(any(n.startswith(f"{stack[1]}.") for n in report.converted) for stack in stacks)
    assert {s.name for s in select(model, None, "full", "key")} == {*itertools.chain(*stacks)}


def test_keeping_all_blocks_of_all_stacks_is_an_error():
    model, _ = MODELS["T5"]()
    with pytest.raises(ConfigError, match="leave nothing of the model's 4 transformer blocks"):
        apply_fp8(model, recipe="current", keep_first_blocks=1, keep_last_blocks=1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 512)


def test_lists_of_heads_and_of_experts_are_no_blocks():
    model = nn.Module()
    model.experts = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 128)) for _ in range(8)
    )  # the largest list of all
    model.heads = nn.ModuleList(nn.Sequential(nn.Linear(16, 999)) for _ in range(3))
    model.layers = nn.ModuleList(nn.Sequential(Attention()) for _ in range(2))
    assert names(model) == [["layers.0", "layers.1"]]
    del model.layers
    assert names(model) == [
        ["heads.0", "heads.1", "heads.2"]
    ]  # nothing attends: the largest list that is not of experts
    assert names(nn.Sequential(nn.Linear(4, 4))) == []


def test_mixed_classes_and_a_checkpoint_around_one_are_one_stack():
    model = nn.Module()
    model.layers = nn.ModuleList([Mixer(), nn.Sequential(Attention()), checkpoint_wrapper(Mixer())])
    assert names(model) == [["layers.0", "layers.1", "layers.2"]]
    blocks = transformer_blocks(model)
    assert block_index_of("layers.1.0.qkv", blocks) == 1 and block_index_of("layers.10", blocks) is None
