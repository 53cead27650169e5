"""µnit Scaling's equations written down once more, in float64, from numpy-like operations alone."""

import math

import torch


def rotate(x, theta=10000.0):
    """RoPE of ``[b, s, heads, head_dim]`` by complex multiplication of the pairs (i, i + head_dim / 2)."""
    half = x.shape[-1] // 2
    frequency = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), frequency)[None, :, None, :]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


def layer_norm(x, gain, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    return gain * centred / ((centred**2).mean(-1, keepdim=True) + eps).sqrt()


def rms_norm(x, gain, eps=1e-5):
    return gain * x / ((x**2).mean(-1, keepdim=True) + eps).sqrt()


ACTIVATIONS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "relu": lambda x: x * (x > 0),
}


def logits(ids, weights, *, layers, heads, kv_heads, tau, activation, square_root=False):
    """``weights``: float64 by the names of :class:`MusForCausalLM`; ``[out, in]`` as there."""

    def hidden(x, name):
        w = weights[f"{name}.weight"]
        return torch.einsum("...i,oi->...o", x, w) / math.sqrt(w.shape[1])

    h = weights["model.embed_tokens.weight"][ids]
    b, s, d = h.shape
    for i in range(layers):
        block = f"model.layers.{i}"
        size = weights[f"{block}.self_attn.o_proj.weight"].shape[1] // heads
        qkv = hidden(h, f"{block}.self_attn.qkv_proj").view(b, s, heads + 2 * kv_heads, size)
        q, k, v = qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads], qkv[:, :, heads + kv_heads :]
        if f"{block}.self_attn.q_norm.weight" in weights:
            q, k = (
                rms_norm(x, weights[f"{block}.self_attn.{name}_norm.weight"])
                for x, name in ((q, "q"), (k, "k"))
            )
        q, k = rotate(q), rotate(k)
        group = [n * kv_heads // heads for n in range(heads)]
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k[:, :, group]) / math.sqrt(size)
        future = torch.arange(s)[:, None] < torch.arange(s)[None]
        weight = torch.exp(scores - scores.amax(-1, keepdim=True)) * ~future
        weight = weight / weight.sum(-1, keepdim=True)
        if square_root:
            weight = torch.where(future, 0.0, torch.where(future, 1.0, weight).sqrt())
        mixed = torch.einsum("bhqk,bkhc->bqhc", weight, v[:, :, group]).reshape(b, s, -1)
        branch = hidden(mixed, f"{block}.self_attn.o_proj")
        branch = layer_norm(branch, weights[f"{block}.attention_norm.weight"])
        h = math.sqrt(1 - tau) * h + math.sqrt(tau) * branch
        branch = hidden(ACTIVATIONS[activation](hidden(h, f"{block}.mlp.up_proj")), f"{block}.mlp.down_proj")
        branch = layer_norm(branch, weights[f"{block}.mlp_norm.weight"])
        h = math.sqrt(1 - tau) * h + math.sqrt(tau) * branch
    if "model.norm.weight" in weights:
        h = layer_norm(h, weights["model.norm.weight"])
    return torch.einsum("...i,oi->...o", h, weights["lm_head.weight"]) / d
