"""A folder with an FP8 checkpoint as a run's model: TRL's SFTTrainer by its path, a model of load_fp8, and LLM Foundry's hf_causal_lm."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("compressed_tensors")
pytest.importorskip("tokenizers")

from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import foundry_fp8
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight
from foundry_fp8.layers.linear import FP8Linear
from tests.export.published import KINDS, publish, qwen3
from tests.export.served import stored
from tests.export.test_load import IDS

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainers
SIZES = {"hidden_size": 256, "intermediate_size": 384}


def tokenizer():
    words = Tokenizer(WordLevel({str(i): i for i in range(160)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def fine_tuned(model, recipe, lora, folder):
    """The trainer after two steps, and the losses."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from foundry_fp8.integrations.transformers import FP8Callback

    torch.manual_seed(0)
    rows = Dataset.from_list([{"input_ids": IDS[i % 2].roll(i).tolist()} for i in range(4)])
    args = SFTConfig(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[], learning_rate=1e-3,
        bf16=False, gradient_checkpointing=False, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    peft = LoraConfig(r=4, target_modules=["o_proj"]) if lora else None
    callback = FP8Callback(recipe=recipe, backend="emulated")
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer(), callbacks=[callback], peft_config=peft)  # fmt: skip
    trainer.train()
    return trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_trl_trains_from_a_folder_and_from_a_loaded_model_alike(kind, lora, tmp_path):
    pytest.importorskip("trl")
    options, recipe = KINDS[kind]
    publish(qwen3(**SIZES), tmp_path / "in", **options)
    tokenizer().save_pretrained(tmp_path / "in")
    by_path, losses = fine_tuned(str(tmp_path / "in"), recipe, lora, tmp_path / "runs")
    assert sum(isinstance(m, FP8Linear) for m in by_path.model.modules()) == 14
    config = AutoConfig.from_pretrained(tmp_path / "in")
    del config.quantization_config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).requires_grad_(not lora)
    foundry_fp8.load_fp8(tmp_path / "in", model)
    loaded, theirs = fine_tuned(model, recipe, lora, tmp_path / "runs")
    # transformers keeps a compressed-tensors folder's dtype, bfloat16 scales among it.
    assert losses == pytest.approx(theirs, rel=1e-6 if kind != "tensor" else 5e-3) and losses[1] < losses[0]
    assert sum(isinstance(p, FrozenFP8Weight) for p in loaded.model.parameters()) == 14 * lora
    tuned = loaded.model.merge_and_unload() if lora else loaded.model
    report = foundry_fp8.export_fp8(tuned, tmp_path / "out", layout=options.get("layout", "fp8"))
    before, after = stored(tmp_path / "in")[1], stored(tmp_path / "out")[1]
    moved = {n for n in report.layers if not torch.equal(*(t[f"{n}.weight"].view(torch.uint8) for t in (before, after)))}  # fmt: skip
    assert moved == ({n for n in report.layers if n.endswith("o_proj")} if lora else report.layers.keys())


def test_hf_causal_lm_of_a_folder_trains_beside_its_codes(tmp_path):
    """compressed-tensors' layout: transformers 4 reads FineGrainedFP8 on GPUs alone."""
    composer = pytest.importorskip("composer")
    pytest.importorskip("llmfoundry")
    from llmfoundry.utils.builders import build_composer_model

    from foundry_fp8.algorithms.fp8 import FP8

    options, recipe = KINDS["tensor"]
    publish(qwen3(), tmp_path, **options)
    yaml = {"pretrained": True, "pretrained_model_name_or_path": str(tmp_path), "use_flash_attention_2": False, "init_device": "cpu"}  # fmt: skip
    model = build_composer_model("hf_causal_lm", yaml, tokenizer())
    for p in model.parameters():  # which transformers 4 makes float16
        p.data = p.data.float() if p.element_size() == 2 else p.data
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": torch.ones_like(IDS)}
    trainer = composer.Trainer(
        model=model, train_dataloader=[batch] * 3, max_duration="3ba", device="cpu", device_train_microbatch_size=2, progress_bar=False,
        optimizers=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        algorithms=[FP8(recipe=recipe, backend="emulated")],
    )  # fmt: skip
    first = float(model(batch).loss)
    trainer.fit()
    assert float(trainer.state.loss) < first
    tensors = stored(tmp_path)[1]
    kept = {
        n.removeprefix("model."): p for n, p in model.named_parameters() if isinstance(p, FrozenFP8Weight)
    }
    assert len(kept) == 14
    for name, weight in kept.items():
        assert torch.equal(weight.codes.view(torch.uint8), tensors[name].view(torch.uint8)), name
