"""FP8 in a loop of your own: FSDP2, the guard, and a checkpoint from which a run goes on bit for bit.

torchrun --nproc-per-node 2 examples/plain.py CHECKPOINT STEPS      # goes on from CHECKPOINT if it is there
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
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
    model = LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False)).train()
    fp8 = foundry_fp8.FP8Run(recipe="delayed", guard={"interval": 2, "gradient_limit": 0.05})
    fp8.convert(model, precision="fp32")  # before FSDP and torch.compile
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fp8.start(model, loss_of)

    if os.path.exists(folder):
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments, "fp8": fp8}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    for step in range(fp8.step, steps):
        batch = torch.randint(
            0, 64, (4, 16), generator=torch.Generator().manual_seed(2 * step + dist.get_rank())
        )
        for event in fp8.begin_step(batch):
            print(event)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        fp8.end_step(mean / dist.get_world_size())
        print(f"step {step}: loss {loss.item():.6f}")

    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "fp8": fp8}, checkpoint_id=folder)
    return weights, fp8.state_dict()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(sys.argv[1], int(sys.argv[2]))
    dist.destroy_process_group()
