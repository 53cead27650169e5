"""FP8 in Hugging Face's Trainer: one callback.

python examples/trainer.py FOLDER        # goes on from the last checkpoint in FOLDER if there is one
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from foundry_fp8.integrations.transformers import FP8Callback

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def train(folder, steps=6):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))
    ids = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=2, save_steps=4, logging_steps=1,
        learning_rate=1e-2, report_to="none", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[FP8Callback(recipe="delayed", guard={"interval": 2})],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return trainer


if __name__ == "__main__":
    train(sys.argv[1])
