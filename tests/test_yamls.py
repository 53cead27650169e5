"""Every YAML of ``yamls/`` is what LLM Foundry takes, and its model can be built and converted without memory."""

import json
import re
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from foundry_fp8.cli.cluster import limit_of
from foundry_fp8.cli.hardware import parse_hardware
from foundry_fp8.cli.main import app
from foundry_fp8.cli.plan_communication import workload_of
from foundry_fp8.cli.plan_memory import plan_yaml
from foundry_fp8.cli.run_check import check_run
from foundry_fp8.config import parse_bytes
from foundry_fp8.gpus import GPUS
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.planning.communication.machines import NETWORKS
from foundry_fp8.planning.communication.step import plan_communication
from foundry_fp8.planning.model_shapes import MODEL_SHAPES
from foundry_fp8.surgery.apply import apply_fp8
from foundry_fp8.surgery.left_out import ADAPTER, HEAD, ROUTER
from foundry_fp8.surgery.linears import LEFT
from foundry_fp8.surgery.report import SurgeryReport
from tests.planned_options import plan_only

SHARED = "fog-8b-16k"
"""Tensor parallel, which plans of a YAML refuse (tests/cli/test_cluster.py); trained by tests/multiprocess/test_fog_training.py."""
EVERY = sorted((Path(__file__).parents[1] / "yamls").rglob("*.yaml"))
ALL = [path for path in EVERY if path.stem != SHARED]
# FOG's have tests of their own: tests/models/fog/test_yamls.py.
YAMLS = [path for path in ALL if not path.stem.startswith("fog")]

WHOLE_RUNS = [
    path for path in YAMLS if path.parent.name == "pretrain" and re.match(r"mpt-\d+b|llama|moe", path.stem)
]
"""With sharding, checkpoints and monitors, for a cluster that they name."""

LLAMA_3_8B = MODEL_SHAPES["meta-llama/Meta-Llama-3-8B"]

MUS = (("1b", 1.62e9), ("3b", 3.03e9), ("7b", 7.26e9), ("13b", 13.61e9))

CONFIGS = {
    "llama-3-70b": MODEL_SHAPES["meta-llama/Meta-Llama-3-70B"],
    "llama-3.1-405b": MODEL_SHAPES["meta-llama/Llama-3.1-405B"],
    "moe-132b": MODEL_SHAPES["mistralai/Mixtral-8x7B-v0.1"],
    "qwen3-8b-fp8-lora": MODEL_SHAPES["./Qwen3-8B-FP8"],
}
PLANNED = (*CONFIGS, "llama-3-8b-lora")
"""Slow to build; tested under -m full."""

SIZES = (
    "mpt-3b",
    "mpt-7b",
    "mpt-13b",
    *(f"{kind}-{size}" for kind in ("mus", "mpt-mus") for size in ("3b", "7b", "13b")),
)
"""Larger ones of a family whose smallest runs in the default tier."""

FOG = (("390m", 0.386e9), ("1.5b", 1.544e9), ("8b", 8.053e9))

# Parameters of each model; MPT: 12 l d^2 + 13 l d + (vocabulary + positions) d, its final norm included.
PARAMETERS = {
    "mpt-125m": 125e6,
    "mpt-1b": 1.3e9,
    "mpt-3b": 2.65e9,
    "mpt-7b": 6.66e9,
    "mpt-13b": 12.85e9,
    "llama-3-8b": 8.03e9,
    "llama-3-8b-lora": 8.03e9 + 0.168e9,  # 64 (in + out) for each linear of 32 blocks
    "qwen3-8b-fp8-lora": 8.19e9 + 0.175e9,
    "llama-3-70b": 70.6e9,
    "llama-3.1-405b": 405.9e9,
    "moe-132b": 132e9,
    "mpt-gqa": 3.4e6,
    **{f"fog-{size}": n for size, n in FOG},
    "fog": 5.0e6,
    **{f"{kind}-{size}": n for size, n in MUS for kind in ("mus", "mpt-mus")},
    "mus": 3.93e6,
    "mpt-mus": 3.93e6,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """What a hub has, to these tests: for each YAML a folder with a config.json and a small tokenizer."""
    from foundry_fp8.data.tokenizer import train_tokenizer

    root = tmp_path_factory.mktemp("hub")
    train_tokenizer(["a b c"], 300, root / "tokenizer")

    def folder(stem, **changes):
        found = root / stem
        shutil.copytree(root / "tokenizer", found, dirs_exist_ok=True)
        (found / "config.json").write_text(json.dumps({**CONFIGS.get(stem, LLAMA_3_8B), **changes}))
        return found

    return folder


def load(path, folders):
    """The YAML with what this machine lacks replaced: a hub, a pretrained checkpoint, the flash-attn package, a GPU."""
    config = OmegaConf.load(path)
    model_folder = folders(path.stem)
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
    config.model.name = config.model.name.replace("hf_fp8_", "hf_")  # no weights are there
    return config


def each(paths, quick):
    return [
        pytest.param(
            path, id=f"{path.parent.name}/{path.stem}", marks=[] if quick(path.stem) else pytest.mark.full
        )
        for path in paths
    ]


@pytest.mark.parametrize("path", each(YAMLS, lambda stem: stem not in (*PLANNED, *SIZES)))
def test_foundry_takes_the_yaml_and_its_model_converts(path, folders):
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

    config = load(path, folders)
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
    per_block = 4 + 16 * 3 if "moe" in path.stem else 7 if "llama" in path.stem or "qwen" in path.stem else 4
    layers = train.model.get("n_layers") or model.config.num_hidden_layers
    fp8 = (config.get("algorithms") or {}).get("fp8") or {}
    kept = fp8.get("keep_first_blocks", 0) + fp8.get("keep_last_blocks", 0)
    rules = fp8["recipe"] if isinstance(fp8.get("recipe"), list) else []
    kept += sum(rule.get("blocks") == "last-1" for rule in rules)
    assert len(report.converted) == per_block * (layers - kept)
    kept_blocks = {LEFT.format(rule=f"algorithms.fp8.keep_{side}_blocks") for side in ("first", "last")}
    kept_blocks |= {
        LEFT.format(rule=f"algorithms.fp8.recipe[{i}]") for i, rule in enumerate(rules) if "blocks" in rule
    }
    assert not {*report.skipped.values()} - {HEAD, ROUTER, ADAPTER} - kept_blocks

    # The network at the stated cluster, without compression and with it: somewhere it fits, and most of the time computes.
    rows = plan_communication(
        workload_of(OmegaConf.to_container(config, resolve=True), model),
        [gpus_of(path)],
        GPUS["h100"],
        NETWORKS["h100-3200g"],
    )
    assert max(row["efficiency"] for row in rows if row["fits"]) > 0.3

    # At the stated cluster: float32 parameters, gradients and two moments of what is trained, over a shard group.
    if path in WHOLE_RUNS:
        assert PLANNED_FOR.search(path.read_text())
        shard = config.algorithms.hybrid_sharding.shard
        ranks = 8 if shard == "node" else shard
        assert gpus_of(path) % ranks == 0
        assert 16 * parameters / ranks < 0.6 * 80e9
        per_step = gpus_of(path) * config.device_train_microbatch_size
        assert config.global_train_batch_size % per_step == 0


LAYERS = {"llama-3-8b": 32, "llama-3-8b-lora": 32, "llama-3-70b": 80, "llama-3.1-405b": 126, "moe-132b": 40}
"""Of models that take minutes to plan: every layer costs the same, and the whole model runs several times."""
KEPT = 3
"""Layers that such a model is planned with."""

PLANNED_FOR = re.compile(r"^# Planned for (?:1 to )?(\d+) nodes? of 8 (H100 80GB|H200 141GB)", re.M)


def gpus_of(path):
    """Of the cluster that the YAML names; eight where it names none."""
    planned = PLANNED_FOR.search(path.read_text())
    return 8 * int(planned[1]) if planned else 8


def shortened(path, config, folders):
    """Take all but :data:`KEPT` layers from the YAML's model; returns the bytes that the others hold on a rank.

    All alike, with nothing kept but their inputs (bfloat16): float32 parameters, gradients, two moments and error feedback's residuals
    over a shard group.
    """
    shape = {**CONFIGS.get(path.stem, LLAMA_3_8B), **config.model.get("config_overrides", {})}
    assert shape.get("num_hidden_layers", LAYERS[path.stem]) == LAYERS[path.stem]
    folders(path.stem, num_hidden_layers=KEPT)
    if "config_overrides" in config.model:
        config.model.config_overrides.num_hidden_layers = KEPT
    shard = OmegaConf.select(config, "algorithms.hybrid_sharding.shard") or gpus_of(path)
    missing = LAYERS[path.stem] - KEPT
    of_input = 2 * config.device_train_microbatch_size * config.max_seq_len * shape["hidden_size"]
    of_parameters = 20 * PARAMETERS[path.stem] / LAYERS[path.stem] / (8 if shard == "node" else shard)
    return int(missing * (of_input + of_parameters))


def kind_of_gpu(path):
    planned = PLANNED_FOR.search(path.read_text())
    return planned[2].split()[0].lower() if planned else "h100"


def test_a_plan_with_fp8_attention_says_where_auto_leaves_it(folders, tmp_path, monkeypatch):
    plan_only(monkeypatch)
    (path,) = (path for path in ALL if path.stem == "fog")
    config = load(path, folders)
    OmegaConf.update(config, "algorithms.fp8", {"recipe": "delayed", "attention": True}, force_add=True)
    OmegaConf.save(config, tmp_path / "fog.yaml")
    options = ["--device", "fake", "--compression", "none", "--budget", "1.0"]
    done = CliRunner().invoke(app, ["plan", "memory", str(tmp_path / "fog.yaml"), *options])
    assert "on a GPU without Transformer Engine or cuDNN's frontend auto leaves it in BF16" in done.output, (
        done.output
    )


@pytest.mark.parametrize(
    "path", each([path for path in ALL if path.parent.name != "demo"], lambda stem: False)
)
def test_a_rank_of_the_stated_cluster_holds_the_run(path, folders, tmp_path):
    """From one CPU, nothing allocated: a plan within 95 % of a GPU's memory, everything but activations where arithmetic puts it.

    The deepest models are planned with a few of their layers in what the others leave of that memory when they keep the least.
    """
    run = tmp_path / path.name
    config = load(path, folders)
    limit = int(parse_bytes(limit_of(kind_of_gpu(path)), "limit"))
    if path.stem in LAYERS:
        limit -= shortened(path, config, folders)
    # Flash attention, as the YAML has it: a plan needs no GPU for that.
    if OmegaConf.select(config, "model.attn_config.attn_impl") is not None:
        config.model.attn_config.attn_impl = "flash"
    if OmegaConf.select(config, "model.use_flash_attention_2") is not None:
        config.model.use_flash_attention_2 = True
    OmegaConf.save(config, run)
    said = plan_yaml(
        run,
        budget=f"{limit}B",
        microbatch=None,
        device="",
        compression="none",
        world_size=gpus_of(path),
        gpu=kind_of_gpu(path),
    )
    peak, of = re.search(r"predicted peak (.*?) of (.*?),", said).groups()
    assert parse_bytes(of, "of") == pytest.approx(limit, rel=1e-3)
    assert parse_bytes(peak, "peak") <= limit * 1.001
    assert "ranks by arithmetic" in said


@pytest.mark.parametrize("path", each(ALL, lambda stem: stem in ("mpt-125m", "mus")))
def test_doctor_finds_no_error_at_the_stated_cluster(path):
    hardware = parse_hardware(f"{kind_of_gpu(path)}x{gpus_of(path)}")
    findings = check_run(path, hardware)
    assert [finding.text for finding in findings if finding.level == "error"] == []


@pytest.mark.parametrize("path", each(ALL, lambda stem: stem == "mpt-1b"))
def test_both_planners_take_the_yaml(path, folders, tmp_path):
    """The network at the cluster that it names; the memory of one device where no cluster is named (the others are above)."""
    file = tmp_path / path.name
    OmegaConf.save(load(path, folders), file)
    commands = [["communication", str(file), "--gpus", str(max(gpus_of(path), 8))]]
    if path.parent.name == "demo":
        commands.append(["memory", str(file), "--device", "fake", "--compression", "none", "--budget", "1.0"])
    for command in commands:
        done = CliRunner().invoke(app, ["plan", *command])
        assert done.exit_code == 0, done.output
        assert "FSDP 1x" in done.output or "predicted peak" in done.output


@pytest.mark.parametrize(
    "path", each([path for path in ALL if path.parent.name != "demo"], lambda stem: stem == "llama-3-8b")
)
def test_the_network_of_the_yaml_as_it_ships_is_planned_without_a_hub(path):
    """No folder, no tokenizer; a number of ranks that its shards do not divide is named with the shards that do."""
    done = CliRunner().invoke(app, ["plan", "communication", str(path), "--gpus", "64,256,1024"])
    assert done.exit_code == 0, done.output
    rows = {int(line.split()[0]) for line in done.output.splitlines() if re.match(r" +\d+ (FSDP|HSDP)", line)}
    shard = OmegaConf.select(OmegaConf.load(path), "algorithms.hybrid_sharding.shard")
    divided = {count for count in (64, 256, 1024) if not isinstance(shard, int) or count % shard == 0}
    assert rows == divided
    left_out = f"hybrid_sharding.shard: {shard} does not divide the 64 ranks of this job. Shard degrees that do: 1, 2, 4,"
    assert (left_out in done.output) == (len(divided) < 3)


# A block's share of a model's width, not of its depth: targets count blocks.
TINY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
DEPTH = {"mpt-1b": 4, "llama-3-70b": 4, "llama-3.1-405b": 4, "moe-132b": 2}
"""Of those whose YAML counts no blocks."""


def scaled_down(path, folders, root):
    """The YAML's own run with a narrow model, short sequences, local data, one CPU process, two batches."""
    config = load(path, folders)
    config.variables.max_seq_len = 64
    name = config.model.name
    changes = {
        "run_name": path.stem, "max_duration": "2ba", "eval_interval": 0, "global_train_batch_size": 4,
        "device_train_microbatch_size": 2, "device_eval_batch_size": 2, "precision": "fp32", "fsdp_config": None,
        "model.init_device": "cpu", "scheduler.t_warmup": "1ba", "save_folder": None, "python_log_level": "warning",
        "log_to_console": False, "eval_loader": None,
    }  # fmt: skip
    if name == "mpt_causal_lm":
        layers = DEPTH.get(path.stem, config.model.n_layers)
        changes |= {
            "model.d_model": 64,
            "model.n_heads": 4,
            "model.n_layers": layers,
            "model.vocab_size": 512,
        }
        config.tokenizer.name = str(root / "tokenizer")
    else:
        tiny = {**TINY_LLAMA, "num_hidden_layers": DEPTH.get(path.stem, 32)}
        if "config_overrides" in config.model:
            changes |= {f"model.config_overrides.{key}": value for key, value in tiny.items()}
        folder = folders(path.stem, **tiny)
        shutil.copytree(root / "tokenizer", folder, dirs_exist_ok=True)
        config.tokenizer.name = str(folder)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    loader = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
    config.train_loader = OmegaConf.merge(config.train_loader, loader)
    if config.train_loader.name == "text":
        config.train_loader.dataset.update({"local": str(root / "data"), "remote": None})
    else:
        rows = [{"prompt": f"What is {i} + 1?", "response": f" {i + 1}"} for i in range(8)]
        (root / "task").mkdir(exist_ok=True)
        (root / "task" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config.variables.data_dir = str(root / "task")
    return config


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    from tests.integration.foundry_runs import make_data

    return make_data(tmp_path_factory.mktemp("foundry"))


@pytest.mark.integration
@pytest.mark.parametrize(
    "path",
    each([*WHOLE_RUNS, *(p for p in YAMLS if p.parent.name == "finetune")], lambda stem: stem == "mpt-1b"),
)
def test_the_first_steps_of_the_run_and_its_bf16_twin(path, folders, root, capsys):
    from foundry_fp8.report.runs import read_run
    from tests.integration.foundry_runs import train

    config = scaled_down(path, folders, root)
    trainer = train(config)
    algorithm = trainer.state.algorithms[0]
    assert trainer.state.timestamp.batch == 2 and len(algorithm.report.converted) > 0
    assert f"FP8: {len(algorithm.report.converted)} of" in capsys.readouterr().err
    assert [c.failed for c in trainer.state.callbacks if hasattr(c, "failed")] == [None, None]
    trainer.close()

    OmegaConf.update(config, "algorithms.fp8.enabled", False)
    config.run_name = f"{path.stem}-bf16"
    twin = train(config)
    assert not any(isinstance(module, FP8Linear) for module in twin.state.model.modules())
    assert "FP8: off (algorithms.fp8.enabled: false)" in capsys.readouterr().err
    twin.close()
    here, there = (read_run(Path("runs") / name) for name in (path.stem, f"{path.stem}-bf16"))
    assert (there.recipe, there.backend) == ("high precision", None) and here.same_model(there)
    assert here.loss[0] != there.loss[0] and here.loss[0] == pytest.approx(there.loss[0], rel=0.02)


def test_the_finetuning_data_is_read_from_local_files(folders, tmp_path):
    from llmfoundry.data.dataloader import build_dataloader
    from llmfoundry.utils.builders import build_tokenizer

    rows = [{"prompt": f"What is {i} + 1?", "response": f" {i + 1}"} for i in range(8)]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = next(path for path in YAMLS if path.parent.name == "finetune")
    config = load(path, folders)
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
