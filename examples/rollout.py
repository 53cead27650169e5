"""Reinforcement learning's two sides: an FP8 trainer sends codes and scales to the server that rolls out, and both round alike.

python examples/rollout.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foundry_fp8

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def train(steps):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16()
    foundry_fp8.apply_fp8(model, recipe="block")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, batch = {}, torch.arange(64).view(2, 32)
    for step in range(steps):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step(), optimizer.zero_grad()
        for name, codes, scales in foundry_fp8.served_weights(model):  # under FSDP2 on every rank
            engine[name] = codes  # of layers in high precision the weight itself
            if scales is not None:
                engine[f"{name}_scale_inv"] = scales
        alike = foundry_fp8.rollout_mismatch(model, {"input_ids": batch})
        float_scales = foundry_fp8.rollout_mismatch(model, {"input_ids": batch}, scales="float")
        print(f"step {step}: KL {alike:.2e}; a server with float32 scales {float_scales:.2e}")
    return engine, alike, float_scales


if __name__ == "__main__":
    train(3)
