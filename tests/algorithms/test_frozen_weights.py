"""``frozen_weights: fp8`` in a Composer run over LoRA, beside monitors, compression and checkpoints; saved and resumed."""

from types import SimpleNamespace

import pytest
import torch
from composer import Trainer
from composer.core import Event, Precision
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from composer.utils.parallelism import FSDPConfig

from foundry_fp8.algorithms.activation_compression import ActivationCompression
from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.callbacks.divergence_guard import DivergenceGuard
from foundry_fp8.callbacks.fp8_monitor import FP8Monitor
from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor
from foundry_fp8.callbacks.mfu_monitor import MFUMonitor
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.frozen_weight import FrozenFP8Weight

TOKENS = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(2))


class Model(ComposerModel):
    def __init__(self):
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
            use_cache=False,
        )  # fmt: skip
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        self.model = get_peft_model(LlamaForCausalLM(config).bfloat16(), lora)

    def forward(self, batch):
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"])

    def loss(self, outputs, batch):
        return outputs.loss

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch)


def run(folder, until, load=None, **fp8):
    logger, model = InMemoryLogger(), Model()
    rows = [{"input_ids": row} for row in TOKENS]
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=8),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration=until,
        algorithms=[
            FP8(recipe="block", backend="emulated", announce=False, **fp8),
            ActivationCompression(format="exact"),
        ],
        callbacks=[
            FP8Monitor(interval=1),
            DivergenceGuard(interval=1),
            KurtosisMonitor(interval=1),
            MFUMonitor(),
        ],
        loggers=[logger],
        device="cpu",
        precision="fp32",
        device_train_microbatch_size=4,
        progress_bar=False,
        run_name="mine",
        save_folder=str(folder),
        save_interval="1ba",
        save_overwrite=True,
        load_path=load,
    )
    trainer.fit()
    losses = [float(value) for _, value in logger.data["loss/train/total"]]
    found = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer.close()
    return losses, found, model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frozen")
    return folder, run(folder / "kept", "4ba", frozen_weights="fp8"), run(folder / "plain", "4ba")


def test_a_run_is_the_one_that_keeps_the_weights(runs):
    _, (losses, trained, model), (theirs, also, _) = runs
    assert losses == theirs and len(losses) == 4
    assert all(torch.equal(trained[name], also[name]) for name in also)
    kept = [p for p in model.parameters() if isinstance(p, FrozenFP8Weight)]
    assert len(kept) == 2 * 7 and all(p.codes.element_size() == 1 for p in kept)


@pytest.mark.parametrize("fp8", [{"frozen_weights": "fp8"}, {}], ids=["the same", "without"])
def test_it_resumes_bit_for_bit_and_a_run_without_it_takes_its_checkpoint(runs, tmp_path, fp8):
    folder, (losses, trained, _), _ = runs
    again, also, model = run(tmp_path, "4ba", load=str(folder / "kept" / "ep0-ba2-rank0.pt"), **fp8)
    assert again == losses[2:]
    assert all(torch.equal(trained[name], also[name]) for name in also)
    assert any(isinstance(p, FrozenFP8Weight) for p in model.parameters()) == bool(fp8)


def test_a_checkpoint_of_plain_tensors(runs):
    folder, *_ = runs
    states = [
        torch.load(folder / name / "ep0-ba2-rank0.pt", weights_only=False)["state"]["model"]
        for name in ("kept", "plain")
    ]
    ours, theirs = ({k: (v.shape, v.dtype, type(v)) for k, v in state.items()} for state in states)
    assert ours == theirs and set(type(v) for v in states[0].values()) == {torch.Tensor}


def test_fsdp_is_refused():
    state = SimpleNamespace(fsdp_config=FSDPConfig(), precision=Precision.AMP_BF16)
    with pytest.raises(ConfigError, match=r"algorithms\.fp8\.frozen_weights: fp8 does not run under FSDP"):
        FP8(frozen_weights="fp8").apply(Event.INIT, state, None)


def test_fsdp_beside_published_codes_is_refused(tmp_path):
    """Which FSDP1 would flatten without a word; the model is as it was."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    import foundry_fp8
    from foundry_fp8.run.settings import Run
    from tests.export.published import publish, qwen3

    publish(qwen3(), tmp_path)
    model = qwen3().requires_grad_(False)
    foundry_fp8.load_fp8(tmp_path, model)
    run = foundry_fp8.FP8Run(recipe={"name": "block", "power_2_scales": False}, backend="emulated")
    with pytest.raises(
        ConfigError, match=r"a trainer's FSDP does not shard the frozen weights' FP8 codes. Use DDP"
    ):
        run.convert(model, Run(fsdp=FSDPConfig()))
    assert isinstance(model, transformers.Qwen3ForCausalLM) and not any(
        "FP8" in type(m).__name__ for m in model.modules()
    )
