"""FP8 in a loop with Accelerate: its checkpoints hold the FP8 state once it is registered.

accelerate launch examples/accelerate_loop.py FOLDER STEPS      # goes on from FOLDER if it is there
"""

import os
import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import foundry_fp8

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def train(folder, steps):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).train()
    fp8 = foundry_fp8.FP8Run(recipe="delayed", guard={"interval": 2, "gradient_limit": 0.05})
    fp8.convert(model, device=accelerator.device, precision="fp32")  # before prepare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    fp8.start(model, loss_of)
    accelerator.register_for_checkpointing(fp8)
    if os.path.exists(folder):
        accelerator.load_state(folder)

    for step in range(fp8.step, steps):
        seed = torch.Generator().manual_seed(2 * step + accelerator.process_index)
        batch = torch.randint(0, 64, (4, 16), generator=seed).to(accelerator.device)
        fp8.begin_step(batch)
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        fp8.end_step(accelerator.reduce(loss.detach(), "mean"))
    accelerator.save_state(folder)
    return accelerator.get_state_dict(model), fp8.state_dict()


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
