"""Every YAML of ``yamls/`` is what LLM Foundry takes, and its model can be built and converted without memory."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from foundry_fp8.surgery.apply import apply_fp8
from foundry_fp8.surgery.report import SurgeryReport

ALL = sorted((Path(__file__).parents[1] / "yamls").rglob("*.yaml"))
# FOG's have tests of their own: tests/models/fog/test_yamls.py.
YAMLS = [path for path in ALL if not path.stem.startswith("fog")]

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

MUS = (("1b", 1.62e9), ("3b", 3.03e9), ("7b", 7.26e9), ("13b", 13.61e9))

FOG = (("390m", 0.386e9), ("1.5b", 1.544e9), ("8b", 8.053e9))

# Parameters of each model; MPT: 12 l d^2 + 13 l d + (vocabulary + positions) d, its final norm included.
PARAMETERS = {
    "mpt-125m": 125e6,
    "mpt-1b": 1.3e9,
    "mpt-3b": 2.65e9,
    "mpt-7b": 6.66e9,
    "mpt-13b": 12.85e9,
    "llama-3-8b": 8.03e9,
    "mpt-gqa": 3.4e6,
    **{f"fog-{size}-{v}": n for size, n in FOG for v in ("max", "opt", "flash")},
    "fog": 5.0e6,
    **{f"{kind}-{size}": n for size, n in MUS for kind in ("mus", "mpt-mus")},
    "mus": 3.93e6,
    "mpt-mus": 3.93e6,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """What ``meta-llama/Meta-Llama-3-8B`` is to these tests: its config.json, and a small tokenizer."""
    from foundry_fp8.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("llama-3-8b")
    train_tokenizer(["a b c"], 300, folder)
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return folder


def load(path, model_folder):
    """The YAML with what this machine lacks replaced: a hub, a pretrained checkpoint, the flash-attn package, a GPU."""
    config = OmegaConf.load(path)
    # Only what the YAML calls by name; a key that is not there must not be added.
    for key, value in (
        ("tokenizer.name", str(model_folder)),
        ("model.pretrained_model_name_or_path", str(model_folder)),
        ("model.pretrained", False),
        ("model.use_flash_attention_2", False),
        ("model.attn_config.attn_impl", "torch"),
        ("model.init_device", "meta"),
    ):
        if OmegaConf.select(config, key) is not None:
            OmegaConf.update(config, key, value)
    if config.model.name == "mpt_causal_lm":
        config.model.loss_fn = "torch_crossentropy"
    return config


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_foundry_takes_the_yaml_and_its_model_converts(path, model_folder):
    from llmfoundry.utils.builders import (
        build_algorithm,
        build_callback,
        build_composer_model,
        build_logger,
        build_scheduler,
        build_tokenizer,
    )
    from llmfoundry.utils.config_utils import (
        TRAIN_CONFIG_KEYS,
        TrainConfig,
        make_dataclass_and_log_config,
        process_init_device,
    )

    config = load(path, model_folder)
    logged, train = make_dataclass_and_log_config(config, TrainConfig, TRAIN_CONFIG_KEYS, transforms="all")
    algorithms = [build_algorithm(name, kwargs) for name, kwargs in (train.algorithms or {}).items()]
    assert algorithms
    for name, kwargs in (train.callbacks or {}).items():
        build_callback(name, kwargs, train_config=logged)
    for name, kwargs in train.loggers.items():
        build_logger(name, kwargs)
    build_scheduler(train.scheduler.pop("name"), train.scheduler)

    tokenizer = build_tokenizer(train.tokenizer["name"], train.tokenizer.get("kwargs", {}))
    train.model.pop("init_device")
    model = build_composer_model(
        name=train.model.pop("name"),
        tokenizer=tokenizer,
        cfg={**train.model, "init_device": "meta"},
        init_context=process_init_device({"init_device": "meta"}, train.fsdp_config),
    )
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == pytest.approx(PARAMETERS[path.stem], rel=0.02)
    assert {p.device.type for p in model.parameters()} == {"meta"}

    report = apply_fp8(
        model, device="cpu", **{"recipe": "auto", **((config.get("algorithms") or {}).get("fp8") or {})}
    )
    assert isinstance(report, SurgeryReport)
    # Every linear of every block, and nothing else, by the model's own count; MPT multiplies by its embedding at the end.
    per_block = 7 if "llama" in path.stem else 4
    layers = train.model.get("n_layers") or model.config.num_hidden_layers
    assert len(report.converted) == per_block * layers
    assert set(report.skipped) < {"model.lm_head", "model.transformer.wte.weight"}


def test_the_finetuning_data_is_read_from_local_files(model_folder, tmp_path):
    from llmfoundry.data.dataloader import build_dataloader
    from llmfoundry.utils.builders import build_tokenizer

    rows = [{"prompt": f"What is {i} + 1?", "response": f" {i + 1}"} for i in range(8)]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = next(path for path in YAMLS if path.parent.name == "finetune")
    config = load(path, model_folder)
    config.variables.data_dir = str(tmp_path)
    config.variables.max_seq_len = 64
    values = OmegaConf.to_container(config, resolve=True)
    tokenizer = build_tokenizer(values["tokenizer"]["name"], values["tokenizer"]["kwargs"])
    for loader in ("train_loader", "eval_loader"):
        # No worker processes in a test.
        options = {**values[loader], "num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        batch = next(iter(build_dataloader(options, tokenizer, 4).dataloader))
        text = tokenizer.decode(batch["input_ids"][0], skip_special_tokens=True)
        assert "+ 1?" in text
        # Only the response is learnt.
        learnt = batch["labels"][0][batch["labels"][0] != -100]
        assert "What" not in tokenizer.decode(learnt)
