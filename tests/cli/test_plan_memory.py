import json
import re

import pytest
import yaml
from typer.testing import CliRunner

from foundry_fp8.cli.main import app
from foundry_fp8.config import parse_bytes
from foundry_fp8.planning.memory import measure, planner
from tests.planned_options import plan_only


@pytest.mark.full
def test_the_command_plans_an_mpt_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "CACHE_BYTES", 2**16)  # no matter here how exact its seconds are
    run = {
        "max_seq_len": 32,
        "device_train_microbatch_size": 2,
        "model": {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 2, "n_layers": 3, "expansion_ratio": 2,
                  "max_seq_len": 32, "vocab_size": 128, "attn_config": {"attn_impl": "torch"},
                  "loss_fn": "torch_crossentropy"},
        "algorithms": {"activation_checkpointing": {"budget": 0.95}},
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    done = CliRunner().invoke(app, ["plan", "memory", str(file)])
    assert done.exit_code == 0, done.output
    assert "run.yaml: 2 x 32 tokens" in done.output and "algorithms:" in done.output
    # Without allocating anything, and with a tokenizer that nobody has: MPT is built without it.
    run |= {"tokenizer": {"name": "no/such-tokenizer"}, "algorithms": {"fp8": {"recipe": "delayed"}}}
    file.write_text(yaml.safe_dump(run))
    done = CliRunner().invoke(app, ["plan", "memory", str(file), "--device", "fake", "--budget", "1.0"])
    assert done.exit_code == 0, done.output
    assert "run.yaml: 2 x 32 tokens" in done.output and "algorithms:" in done.output
    # Lion keeps one moment and Adam two; gradients are there from the start unless the step has one microbatch.
    one_layer = run | {"model": run["model"] | {"n_layers": 1}, "algorithms": {}}
    held = []
    for name, options in (("decoupled_adamw", []), ("decoupled_lionw", ["--no-accumulate"])):
        file.write_text(yaml.safe_dump(one_layer | {"optimizer": {"name": name, "lr": 1.0e-3}}))
        arguments = [
            "plan",
            "memory",
            str(file),
            "--device",
            "fake",
            "--compression",
            "none",
            "--budget",
            "1.0",
            *options,
        ]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        held.append(parse_bytes(re.search(r"optimizer state (.*)", done.output)[1], "held"))
    count = 128 * 64 + 32 * 64 + 4 * 64 * 64 + 2 * 2 * 64 * 64  # embeddings and matrices; the rest is small
    assert held[0] - held[1] == pytest.approx((4 + 4) * count, rel=0.05)
    # MPT's default attention needs a GPU, but its plan does not.
    del one_layer["model"]["attn_config"]
    file.write_text(yaml.safe_dump(one_layer))
    arguments = ["plan", "memory", str(file), "--device", "fake", "--compression", "none", "--budget", "1.0"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "attention holds flash attention's bytes" in done.output


MPT = {"max_seq_len": 32, "device_train_microbatch_size": 2,
       "model": {"name": "mpt_causal_lm", "d_model": 64, "n_heads": 2, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 32,
                 "vocab_size": 128}}  # fmt: skip
FSDP = {"fsdp_config": {"sharding_strategy": "FULL_SHARD"}}
HUB = {"max_seq_len": 32, "device_train_microbatch_size": 1, "tokenizer": {"name": "/no/such/folder"},
       "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "/no/such/folder"}}  # fmt: skip
FAKE = ["--device", "fake"]


@pytest.mark.parametrize(
    ("run", "options", "said"),
    [
        ({**MPT, "device_train_microbatch_size": "auto"}, ["--budget", "0.5"], "device_train_microbatch_size: 'auto' is not a number; give --microbatch."),
        ({**MPT, "max_seq_len": None}, ["--budget", "0.5"], "max_seq_len: None is not"),
        (MPT, FAKE, "--budget: the YAML's activation_checkpointing has no budget either; give one, such as 0.5."),
        (MPT, ["--budget", "nan", *FAKE], "nan is not a size (20GiB)"),
        (MPT, ["--budget", "-1", *FAKE], "-1.0 is not a size (20GiB)"),
        (MPT, ["--budget", "1", "--microbatch", "0"], "--microbatch: 0 is not an integer of at least 1."),
        (HUB, ["--budget", "1", *FAKE], "give a local folder with config.json and the tokenizer."),
        ({k: v for k, v in HUB.items() if k != "tokenizer"}, ["--budget", "1", *FAKE], "tokenizer.name: missing."),
        (MPT, ["--world-size", "0"], "--world-size: 0 is not an integer of at least 1."),
        (MPT, ["--world-size", "-8"], "--world-size: -8 is not an integer of at least 1."),
        ({**MPT, **FSDP, "algorithms": {"hybrid_sharding": {"shard": 8}}}, ["--world-size", "7"],
         "hybrid_sharding.shard: 8 does not divide the 7 ranks of this job. Shard degrees that do: 1, 7."),
        (MPT, ["--world-size", "8", "--sharding", "FULLSHARD"], "Did you mean 'FULL_SHARD'?"),
        (MPT, ["--sharding", "FULL_SHARD"], "--sharding: a strategy for ranks; give --world-size too."),
        (MPT, ["--world-size", "8", "--gpu", "h10"], "Did you mean 'h100'?"),
        (MPT, ["--world-size", "8", "--device", "cpu"], "A cluster is planned with fake alone."),
        (MPT, ["--world-size", "8", "--budget", "fit"], "With --world-size give a size, such as 76GiB."),
        ({**MPT, **FSDP, "algorithms": {"hybrid_sharding": {"shard": 0}}}, ["--world-size", "8"], "algorithms.hybrid_sharding.shard: 0 is not"),
        ({**MPT, "model": {**MPT["model"], "vocab_size": 0}}, ["--budget", "1.0", *FAKE], "model.vocab_size: 0 is not an integer of at least 1."),
        ({**MPT, "fsdp_config": "FULL_SHARD"}, ["--world-size", "8"], "fsdp_config: 'FULL_SHARD' is not a mapping"),
        ({**MPT, "optimizer": {"name": "adamm"}}, ["--world-size", "8"], "optimizer: it cannot be built: "),
        ({**MPT, "fsdp_config": {"sharding_strategy": "FULL"}}, ["--world-size", "8"], "fsdp_config.sharding_strategy: 'FULL' is not one of"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(tmp_path, run, options, said):
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    done = CliRunner().invoke(app, ["plan", "memory", str(file), *options])
    assert done.exit_code == 2, done.output
    (line,) = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert said in line
    assert done.output.rstrip().endswith(line)  # nothing after it, no traceback


def test_a_cluster_is_planned_from_one_cpu(tmp_path, monkeypatch):
    """Eight ranks hold an eighth of parameters, gradients and the named optimizer's states; the budget is the GPU's memory."""
    plan_only(monkeypatch)
    held = {}
    run = {**MPT, **FSDP, "precision": "amp_bf16", "optimizer": {"name": "decoupled_adamw", "lr": 1.0e-3}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    for ranks, options in ((8, []), (64, []), (8, ["--sharding", "NO_SHARD", "--no-accumulate"])):
        done = CliRunner().invoke(
            app, ["plan", "memory", str(file), "--compression", "none", "--world-size", str(ranks), *options]
        )
        assert done.exit_code == 0, done.output
        assert "of 70.78 GiB" in done.output and f"of {ranks} ranks by arithmetic" in done.output
        assert re.search(r"(?m)^ *\d* *offload +\S+ \w+ +[1-9]\S* KiB", done.output), (
            done.output
        )  # and its bytes in host memory
        held[ranks, bool(options)] = parse_bytes(re.search(r"optimizer state (.*)", done.output)[1], "held")
    count = 128 * 64 + 32 * 64 + 2 * (4 * 64 * 64 + 2 * 2 * 64 * 64 + 4 * 64) + 64
    assert held[8, False] == pytest.approx(16 * count / 8, rel=0.02)
    assert held[64, False] == pytest.approx(16 * count / 64, rel=0.02)
    assert held[8, True] == pytest.approx(16 * count, rel=0.02)  # parameters, two moments, DDP's buckets


def test_optimizers_that_keep_less_are_shown_with_their_bytes(tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    plan_only(monkeypatch)
    file = tmp_path / "run.yaml"
    run = {**MPT, **FSDP, "optimizer": {"name": "decoupled_adamw", "lr": 1.0e-3}}
    for ranks in (1, 8):
        file.write_text(yaml.safe_dump(run))
        options = ["--compression", "none", "--world-size", str(ranks)]
        done = CliRunner().invoke(app, ["plan", "memory", str(file), *options])
        assert done.exit_code == 0, done.output
        found = re.findall(
            r"option optimizer: \{name: (\w+)\} .*: states take (.*) instead of (.*), and a step (.*) ms less",
            done.output,
        )
        assert [name for name, *_ in found] == ["adamw_8bit", "adamw_fp8"]
        for _, kept, now, less in found:
            saved = parse_bytes(now, "") - parse_bytes(kept, "")
            assert float(less) / 1e3 == pytest.approx(2 * saved / (0.8 * 3.35e12), rel=0.02, abs=5e-6)
            # Moments of 8 bits and a float32 scale for 256 of them, instead of two in float32.
            assert parse_bytes(kept, "") / parse_bytes(now, "") == pytest.approx(
                2 * (1 + 4 / 256) / 8, rel=0.02
            )
    file.write_text(yaml.safe_dump({**run, "optimizer": {"name": "adamw_8bit", "lr": 1.0e-3}}))
    done = CliRunner().invoke(app, ["plan", "memory", str(file), *options])
    assert done.exit_code == 0 and "adamw_8bit" not in done.output


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 64,
}
FOLDERS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        **SMALL,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        **SMALL,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        **SMALL,
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"],
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        **SMALL,
    },
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], "intermediate_size": 128, **SMALL},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 512,
        "n_positions": 64,
    },
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.full) for kind in FOLDERS])
def test_a_folder_with_a_configuration_alone_is_planned(tmp_path, kind):
    """No weights, whatever ``pretrained`` says; one device, a cluster, and the network."""
    from foundry_fp8.data.tokenizer import train_tokenizer

    folder = tmp_path / "model"
    train_tokenizer(["a b c"], 300, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **FOLDERS[kind]}))
    model = {
        "name": "hf_causal_lm",
        "pretrained": True,
        "pretrained_model_name_or_path": str(folder),
        "use_flash_attention_2": False,
    }
    run = {"max_seq_len": 32, "device_train_microbatch_size": 2, "precision": "amp_bf16", "model": model, "tokenizer": {"name": str(folder)},
           "fsdp_config": {"mixed_precision": "PURE"}}  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    fake = ["plan", "memory", str(file), "--compression", "none"]
    for command in (
        [*fake, "--device", "fake", "--budget", "1.0"],
        [*fake, "--world-size", "8"],
        ["plan", "communication", str(file), "--gpus", "8"],
    ):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output


@pytest.mark.full
def test_frozen_weights_in_fp8_are_an_option_with_bytes_and_seconds(tmp_path):
    """LoRA's base: shown where it is kept in high precision, counted where it is not, never under FSDP."""
    from foundry_fp8.data.tokenizer import train_tokenizer

    folder, file = tmp_path / "model", tmp_path / "run.yaml"
    train_tokenizer(["a b c"], 300, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **FOLDERS["llama"]}))
    peft = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"]}
    model = {
        "name": "hf_causal_lm",
        "pretrained": True,
        "pretrained_model_name_or_path": str(folder),
        "use_flash_attention_2": False,
        "peft_config": peft,
    }
    run = {"max_seq_len": 32, "device_train_microbatch_size": 2, "model": model, "tokenizer": {"name": str(folder)},
           "algorithms": {"fp8": {"recipe": "block", "backend": "emulated"}}}  # fmt: skip
    count = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)  # two blocks, two key heads of four

    def plan(run, *options):
        file.write_text(yaml.safe_dump(run))
        options = options or ("--device", "fake", "--budget", "1.0")
        return CliRunner().invoke(app, ["plan", "memory", str(file), "--compression", "none", *options])

    done = plan(run)
    assert done.exit_code == 0, done.output
    kept, now, more = re.search(
        r"option fp8.frozen_weights: fp8 .*: frozen weights take (.*) instead of (.*), and a microbatch (.*) ms more",
        done.output,
    ).groups()
    assert parse_bytes(kept, "") == pytest.approx(count, rel=0.01)
    assert parse_bytes(now, "") == pytest.approx(4 * count, rel=0.01)
    assert float(more) == pytest.approx(1e3 * 2 * 5 * count / (0.8 * 3.35e12), abs=0.005)
    held = parse_bytes(re.search(r"optimizer state (.*)", done.output)[1], "")

    on = run | {"algorithms": {"fp8": {**run["algorithms"]["fp8"], "frozen_weights": "fp8"}}}
    published = run | {"model": {**model, "name": "hf_fp8_causal_lm"}}
    high_precision = plan(run, "--world-size", "2")
    for kept in (on, published):
        done = plan(kept)
        assert done.exit_code == 0 and "option fp8.frozen_weights" not in done.output, done.output
        less = held - parse_bytes(re.search(r"optimizer state (.*)", done.output)[1], "")
        assert less == pytest.approx(3 * count, rel=0.02)
        done = plan(kept, "--world-size", "2")  # DDP
        assert done.exit_code == 0, done.output
        both = (
            parse_bytes(re.search(r"optimizer state (.*)", d.output)[1], "") for d in (high_precision, done)
        )
        assert next(both) - next(both) == pytest.approx(3 * count, rel=0.02)
        doctor = CliRunner().invoke(app, ["doctor", str(file), "--hardware", "h100x2"])
        said = re.search(r"trained: (.*) a GPU of", doctor.output)
        assert parse_bytes(said[1], "") == parse_bytes(re.search(r"optimizer state (.*)", done.output)[1], "")
        done = plan(kept | {"fsdp_config": {}}, "--world-size", "2")
        assert done.exit_code == 2 and "kept in FP8" in done.output, done.output
    native = run["algorithms"]["fp8"] | {"backend": "native"}
    for cache, factor in (({}, 1), ({"cache_weights": True}, 2), ({"cache_weights": False}, 0)):
        done = plan(run | {"algorithms": {"fp8": native | cache}})
        said = re.search(r"fp8.cache_weights: \w+ keeps (.* \w+) more", done.output)
        assert (parse_bytes(said[1], "") if said else 0) == pytest.approx(factor * count, rel=0.01), (
            done.output
        )
    sharded = plan(run | {"fsdp_config": {"mixed_precision": "PURE"}}, "--world-size", "2")
    assert sharded.exit_code == 0 and "option fp8.frozen_weights" not in sharded.output


def test_a_dry_run_plans_with_what_compression_keeps(tmp_path, monkeypatch):
    """Packed and exact, blocks keep less than as they are: what a CPU measures on real tensors."""
    monkeypatch.setattr(measure, "CACHE_BYTES", 2**16)  # bytes are asked for, not seconds
    monkeypatch.setattr(planner, "ROUNDS", 1)
    plan_only(monkeypatch, "exact", "int8")
    model = {
        **MPT["model"],
        "d_model": 256,
        "attn_config": {"attn_impl": "torch"},
        "loss_fn": "torch_crossentropy",
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**MPT, "device_train_microbatch_size": 8, "model": model}))
    kept = {}
    for device in ("fake", "cpu"):
        options = ["--device", device, "--budget", "1.0", "--compression", "int8"]
        done = CliRunner().invoke(app, ["plan", "memory", str(file), *options])
        assert done.exit_code == 0, done.output
        kept[device] = dict(re.findall(r"(?m)^ *\d* *(none|exact|int8)  +(\S+ \w+)", done.output))
    fake, real = ([parse_bytes(of[form], form) for form in ("none", "exact", "int8")] for of in kept.values())
    assert fake == pytest.approx(real, rel=1e-3)
    none, exact, int8 = fake
    assert int8 < exact < none
