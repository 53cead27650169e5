"""A run of Hugging Face's Trainer: ``run_trainer.py FOLDER WRAP PRECISION HOST [kill STEP | resume STEP]``; rank 0 writes what it ended with.

HOST ``trainer`` trains the whole model, ``init`` one that Trainer makes itself, ``sft`` adapters in TRL's SFTTrainer.
"""

import os
import signal
import sys
import warnings

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from foundry_fp8.integrations.transformers import FP8Callback
from tests.callbacks.conftest import build_llama
from tests.model_zoo import TRANSFORMERS_4

GUARD = {"interval": 2, "rows": 2, "gradient_limit": 0.05, "finer": False}
STEPS = 7
FSDP = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}


class KillAfter(TrainerCallback):
    """The machine goes away in the middle of a step."""

    def __init__(self, step):
        self.step = step

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def shard_on_cpu():
    """Let Accelerate shard over ranks on a CPU, as it does over those on GPUs."""
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def dataset():
    ids = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def sft_of(options, callbacks):
    import datasets
    import peft
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2")
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in dataset()])
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return trl.SFTTrainer(
        model=build_llama(), args=trl.SFTConfig(**options), train_dataset=data, processing_class=tokenizer,
        callbacks=callbacks, peft_config=adapters,
    )  # fmt: skip


def trainer_of(folder, wrap, precision, host, callbacks):
    sharded = {}
    if wrap.startswith("fsdp"):
        sharded = FSDP
        os.environ |= {"FSDP_VERSION": wrap[-1], "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    # Accelerate 1.8 loads no sharded state of a fresh optimizer under FSDP2, and Trainer 4.51 none at all on several CPU ranks.
    optimizer = "sgd" if wrap != "none" and TRANSFORMERS_4 else "adamw_torch"
    options = {
        "output_dir": folder, "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "save_steps": 4, "logging_steps": 1, "learning_rate": 3e-2, "report_to": "none", "use_cpu": True,
        "disable_tqdm": True, "bf16": precision == "bf16", "ddp_find_unused_parameters": False, "optim": optimizer, "data_seed": 1, **sharded,
    }  # fmt: skip
    arguments = TrainingArguments(**options)
    assert arguments.device.type == "cpu"
    if sharded:
        shard_on_cpu()
    if host == "sft":
        return sft_of(options, callbacks)
    model = {"model_init": lambda: build_llama()} if host == "init" else {"model": build_llama()}
    return Trainer(**model, args=arguments, train_dataset=dataset(), callbacks=callbacks)


def main():
    warnings.simplefilter("ignore")  # of Trainer, Accelerate and torch, to their users
    folder, wrap, precision, host, *then = sys.argv[1:]
    if os.environ["WORLD_SIZE"] == "1":  # Accelerate takes a group of one for several
        for variable in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
            os.environ.pop(variable)
    fp8 = FP8Callback(recipe="delayed", backend="emulated", guard=GUARD, announce=False)
    kill = [KillAfter(int(then[1]))] if then[:1] == ["kill"] else []
    trainer = trainer_of(folder, wrap, precision, host, [fp8, *kill])
    resume = f"{folder}/checkpoint-{then[1]}" if then[:1] == ["resume"] else None
    trainer.train(resume_from_checkpoint=resume)
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in trainer.model.named_parameters()
    }
    if int(os.environ.get("RANK", 0)) == 0:
        state = fp8.run.state.collected()
        losses = [entry for entry in trainer.state.log_history if "loss" in entry or "guard" in entry]
        for entry in losses:
            entry.pop("num_tokens", None)  # TRL counts anew after a resume
        found = {"weights": weights, "state": state, "losses": losses, "demoted": fp8.guard.demoted}
        torch.save(found, f"{folder}/end.pt")


if __name__ == "__main__":
    main()
