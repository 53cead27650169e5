"""``foundry-fp8 doctor RUN.yaml`` on LLM Foundry's own kinds of YAML, and on what goes wrong with them."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from foundry_fp8.cli.hardware import parse_hardware
from foundry_fp8.cli.init import add_fp8
from foundry_fp8.cli.main import app
from foundry_fp8.cli.run_check import check_run

YAMLS = Path(__file__).parent / "foundry_yamls"
HERE = parse_hardware("h100x16")
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 512,
}  # fmt: skip
DBRX = {
    "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
    "vocab_size": 512, "attn_config": {"kv_n_heads": 2, "rope_theta": 5e5},
    "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Folders with a config.json alone and a tokenizer, as somebody offline has them."""
    from foundry_fp8.data.tokenizer import train_tokenizer

    root = tmp_path_factory.mktemp("hub")
    for name, config in (("llama", TINY), ("dbrx", DBRX)):
        train_tokenizer(["a b c"], 300, root / name)
        (root / name / "config.json").write_text(json.dumps(config))
    return root


@pytest.fixture
def run(tmp_path, hub):
    """``run(stem, **changes)``: the findings by topic of that YAML with FP8 added and dotted keys changed."""

    def check(stem, hardware=HERE, **changes):
        text, _ = add_fp8((YAMLS / f"{stem}.yaml").read_text(), hardware)
        config = OmegaConf.create(text)
        if config.model.name == "hf_causal_lm":
            config.variables.model_name = str(hub / ("dbrx" if "dbrx" in stem else "llama"))
            config.model.use_flash_attention_2 = False
        for key, value in changes.items():
            OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
        path = tmp_path / f"{stem}.yaml"
        OmegaConf.save(config, path)
        found = {}
        for finding in check_run(path, hardware):
            found.setdefault(finding.topic, []).append(finding)
        return found

    return check


def errors(found):
    return [f.text for findings in found.values() for f in findings if f.level == "error"]


@pytest.mark.parametrize(
    "stem",
    [
        pytest.param(path.stem, marks=[] if path.stem in ("mpt-125m", "dbrx-lora") else pytest.mark.full)
        for path in sorted(YAMLS.glob("*.yaml"))
    ],
)
def test_the_stock_examples_will_run(run, stem):
    found = run(stem, global_train_batch_size=32, device_train_microbatch_size=2)
    assert errors(found) == []
    assert [f.text for f in found["algorithms"]] == ["gradient_clipping, fp8, hybrid_sharding"]
    assert "16 devices on 2 nodes, 2 sequences each, in 1 microbatches of 2" in found["ranks"][0].text
    conversion, *experts = found["conversion"]
    assert conversion.text.startswith("FP8: ") and "current, native or transformer_engine;" in conversion.text
    if stem == "mpt-125m":
        assert "FP8: 48 of 49 linears (68.7 % of GEMM weights)" in conversion.text
        assert "RUN_NAME" in " ".join(f.text for f in found["clash"])
        assert "0.13 B parameters" in found["memory"][0].text
    if stem == "1b_local_data":
        assert any("tokens attend other documents" in f.text for f in found["attention"])
    if stem == "dbrx-lora":
        assert "experts in one parameter (6 do)" in experts[0].text and experts[0].level == "warning"
        assert "10 of 17 linears" in conversion.text
        assert "M of them trained" in found["memory"][0].text


def test_options_may_be_null(run):
    found = run("mpt-125m", loggers__run_log=None, callbacks__mfu_monitor=None)
    assert errors(found) == [] and found["conversion"]


def test_a_folder_with_a_config_alone_needs_no_weights(run):
    found = run("hf-llama-3.1-8B", model__pretrained=True, global_train_batch_size=16)
    assert "model" not in found and "FP8: 14 of 15 linears" in found["conversion"][0].text


def test_a_backend_without_kernels_for_the_recipe_is_not_promised(run):
    found = run("mpt-125m", parse_hardware("b200x16"), algorithms__fp8__recipe="nvfp4")
    assert errors(found) == [] and ", nvfp4, transformer_engine;" in found["conversion"][0].text


@pytest.mark.parametrize(
    ("changes", "topic", "message"),
    [
        ({"global_train_batch_size": 24}, "ranks", "24 is not a multiple of 16 devices"),
        ({"precision": "amp_fp8"}, "clash", "Set precision: amp_bf16"),
        ({"global_sed": 17}, "clash", "LLM Foundry has no key 'global_sed'"),
        ({"max_sequence_len": 17}, "clash", "Did you mean 'max_seq_len'?"),
        ({"algorithms__fp8__recipe": "mxfp8"}, "conversion", "mxfp8 needs Blackwell"),
        ({"algorithms__fp8__recipe": [{"blocks": "last-15%", "recipe": "high_precision"}, {"recipe": "nvfp4"}]}, "conversion", "nvfp4 needs Blackwell"),
        ({"algorithms__fp8": {"recipe": "nvfp4", "backend": "native"}}, "conversion", "native: it has no kernels for the scales of nvfp4"),
        ({"algorithms__fp8": {"recipe": {"name": "current", "granularity": "row"}, "backend": "transformer_engine"}}, "conversion",
         "transformer_engine: Transformer Engine has no scales of rows"),
        ({"algorithms__fp8": {"recipe": "nvfp4", "backend": "emulated", "attention": True}}, "conversion", "the nvfp4 recipe has no FP8 attention"),
        ({"algorithms__fp8__recipe": "curent"}, "algorithms", "Did you mean 'current'"),
        ({"algorithms__fp8__exclude": ["*.nothing"]}, "conversion", "matches none of the model's"),
        ({"callbacks__mfu_monitr": {}}, "callbacks", "mfu_monitr"),
        ({"loggers__neptune": {}}, "loggers", "neptune is not installed"),
        ({"algorithms__hybrid_sharding__shard": 3}, "ranks", "3 does not divide the 16 ranks"),
        ({"algorithms__activation_checkpointing": {"targets": {"no_such": "first-2"}}}, "checkpointing", "no_such"),
        ({"compile_config": {}, "algorithms__activation_compression": {}}, "clash", "does not run under torch.compile"),
        ({"algorithms__fp8__frozen_weights": "fp8"}, "clash", "frozen_weights: fp8 does not run under FSDP"),
        ({"model__n_heads": 7}, "model", "cannot be built"),
        pytest.param({"model__n_layers": 96, "model__d_model": 12288, "model__n_heads": 96}, "memory", "shard over more ranks", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_what_would_fail_is_found_before_the_start(run, changes, topic, message):
    found = run("mpt-125m", **changes)
    assert any(message in f.text and f.level == "error" for f in found[topic]), found


@pytest.mark.parametrize("kind", ["mus", "mpt-mus"])
def test_a_unit_scaled_run_gets_a_warning_for_what_it_lacks(kind, tmp_path):
    """One warning for the norm after the last block, one for weight decay, none where both are there."""
    stock = Path(__file__).parents[2] / "yamls" / "demo" / f"{kind}.yaml"

    def said(**changes):
        config = OmegaConf.load(stock)
        for key, value in changes.items():
            OmegaConf.update(config, key.replace("__", "."), value, merge=False, force_add=True)
        OmegaConf.save(config, tmp_path / "run.yaml")
        found = [f for f in check_run(tmp_path / "run.yaml", HERE) if f.topic == "unit scaling"]
        assert all(f.level == "warning" for f in found)
        return [f.text for f in found]

    off, on = {
        "mus": ({"model__final_norm": False}, "model.final_norm: true"),
        "mpt-mus": ({"model__norm_type": "no_norm"}, "model.norm_type: mus_norm"),
    }[kind]
    assert said() == []
    (norm,) = said(**off)
    assert norm.startswith("no norm after the last block") and on in norm
    for changes in (
        {"optimizer__weight_decay": 0.0},
        {"optimizer": {"name": "decoupled_lionw", "lr": 1e-3}},
        {"optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1}},
    ):
        (decay,) = said(**changes)
        assert decay.startswith("no decoupled weight decay: weights grow")
    assert said(optimizer={"name": "decoupled_adamw", "lr": 1e-3}) == []  # Composer's default is 1e-5
    assert len(said(**off, optimizer__weight_decay=0.0)) == 2


@pytest.mark.parametrize(("d_model", "level", "left"), [(768, "error", 48), (1152, "warning", 12)])
def test_auto_may_leave_out_what_is_too_small(run, d_model, level, left):
    """On a GPU alone, which this machine need not have. Of blocks of width 1152 all but the projection of the heads gain."""
    found = run("mpt-125m", algorithms__fp8__recipe="auto", model__d_model=d_model)["conversion"]
    (said,) = [finding for finding in found if "auto leaves" in finding.text]
    assert (said.level, f"{left} of these 48 linears" in said.text) == (level, True), said.text
    assert ("ends the run" in said.text) == (level == "error")


def test_the_command_prints_a_line_each_and_ends_with_2_where_the_run_would_fail(tmp_path):
    path = tmp_path / "run.yaml"
    shutil.copy(YAMLS / "mpt-125m.yaml", path)
    CliRunner().invoke(app, ["init", str(path)])
    good = CliRunner().invoke(app, ["doctor", str(path)])
    assert good.exit_code == 0, good.output
    # What the README shows of it.
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    for part in (
        "FP8: 48 of 49 linears (68.7 % of GEMM weights), current, ",
        "; model.transformer.wte.weight stays bf16; log: runs/",
    ):
        assert part in good.output and part in readme
    assert "GenerationMixin" not in good.output
    bad = CliRunner().invoke(app, ["doctor", str(path), "--hardware", "h100x24", "--json"])
    assert bad.exit_code == 2
    assert any("not a multiple of 24" in finding["text"] for finding in json.loads(bad.output))
    path.write_text("model: {name: mpt_causal_lm}\n")
    none = CliRunner().invoke(app, ["doctor", str(path)])
    assert none.exit_code == 2 and "max_seq_len" in none.output
