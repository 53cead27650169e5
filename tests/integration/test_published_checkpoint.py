"""A FineGrainedFP8 folder as the model of a YAML, through LLM Foundry's own train entry."""

import copy

import pytest
import torch
import yaml

pytest.importorskip("peft")

from llmfoundry.utils.builders import build_composer_model
from transformers import AutoTokenizer
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.config import ConfigError
from foundry_fp8.integrations.llmfoundry import ComposerFP8CausalLM
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from tests.export.published import KINDS, publish, qwen3
from tests.export.served import stored
from tests.integration.foundry_runs import config, train, weights

pytestmark = pytest.mark.integration
LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["o_proj"]}


def made(folder, lora):
    model = {"pretrained_model_name_or_path": str(folder), "pretrained": True}
    return model | ({"peft_config": copy.deepcopy(LORA)} if lora else {})


def run(root, folder, recipe, lora, **changes):
    model = {"name": "hf_fp8_causal_lm", **made(folder, lora)}
    return train(config(root, model=model, algorithms={"fp8": {"recipe": recipe}}, **changes))


def plain(name):
    return name.removeprefix("model.").replace("base_model.model.", "").replace(".base_layer", "")


CELLS = [(kind, lora) for kind in KINDS for lora in (False, True)]
TWINS = [cell for cell in CELLS if cell != ("float", True)]


@pytest.mark.parametrize(
    ("kind", "lora"), [pytest.param(*c, marks=[pytest.mark.full] if c in TWINS else []) for c in CELLS]
)
def test_a_folder_trains_from_a_yaml_and_resumes_bit_exactly(kind, lora, root, tmp_path):
    options, recipe = KINDS[kind]
    values = publish(qwen3(vocab_size=512), tmp_path / "in", **options)
    start = build_composer_model(
        "hf_fp8_causal_lm", made(tmp_path / "in", lora), AutoTokenizer.from_pretrained(root / "tokenizer")
    )
    found = {plain(name): p for name, p in start.named_parameters()}
    for name, value in values.items():  # as the independent writer has them
        p = found[name]
        assert torch.equal(p.dequantize() if isinstance(p, FrozenFP8Weight) else p, value), name
    whole = run(root, tmp_path / "in", recipe, lora, save_folder=str(tmp_path / "runs"), save_interval="2ba")
    tensors = stored(tmp_path / "in")[1]
    kept = {plain(n): p for n, p in whole.state.model.named_parameters() if isinstance(p, FrozenFP8Weight)}
    assert len(kept) == 14 * lora
    for name, weight in kept.items():
        assert torch.equal(weight.codes.view(torch.uint8), tensors[name].view(torch.uint8)), name
    ends = weights(whole)
    moved = {plain(n) for n, p in ends.items() if plain(n) in values and not torch.equal(p, values[plain(n)])}
    assert moved == (set() if lora else set(values))
    assert not lora or all(p.abs().sum() > 0 for n, p in ends.items() if "lora_B" in n)
    resumed = run(root, tmp_path / "in", recipe, lora, load_path=str(tmp_path / "runs" / "ep0-ba2-rank0.pt"))
    for name, value in weights(resumed).items():
        assert torch.equal(value, ends[name]), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_device": "meta"}, "model.init_device: 'meta'"),
        ({"pretrained": False}, "model.pretrained: False"),
        ({"load_in_8bit": True}, "model.load_in_8bit: hf_fp8_causal_lm does not take it"),
    ],
)
def test_what_it_does_not_take_is_named(changes, said, root, tmp_path):
    given = {
        "tokenizer": AutoTokenizer.from_pretrained(root / "tokenizer"),
        "pretrained_model_name_or_path": str(tmp_path),
        **changes,
    }
    with pytest.raises(ConfigError, match=said):
        ComposerFP8CausalLM(**given)


def test_doctor_builds_it_from_the_configuration(root, tmp_path):
    """No weights are read: a folder with config.json alone will do."""
    publish(qwen3(vocab_size=512), tmp_path / "in")
    for file in (tmp_path / "in").glob("*.safetensors*"):
        file.unlink()
    given = config(root, model={"name": "hf_fp8_causal_lm", **made(tmp_path / "in", True)})
    given["algorithms"] = {"fp8": {"recipe": {"name": "block", "power_2_scales": False}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "run.yaml"), "--hardware", "h100x8"])
    assert done.exit_code == 0, done.output
    assert "0 of 14 layers gain" in done.output
