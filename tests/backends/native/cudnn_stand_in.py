"""In place of cuDNN: what its two FP8 graphs compute, in float64 with torch, on the memory that is handed over.

Written after the frontend's documentation, not after the code under test: tensors are read by their uid's meaning with the sizes and strides that
a graph has. Two things differ from :mod:`tests.backends.attention_definition`, after ``sdpa_fp8_bwd.h``: dP holds the softmax's
scale when it is rounded and measured, and rowsum(dO O) stands for rowsum(S dS). What the hardware's kernels do inside may differ further.
"""

import torch

from foundry_fp8.backends.attention_requirements import AttentionMachine
from foundry_fp8.backends.native import attention, cudnn_graphs

HOPPER = AttentionMachine(capability=(9, 0), cudnn=(9, 19, 0))
SMALL_HEADS = AttentionMachine(capability=(10, 0), cudnn=(9, 19, 0))
"""Takes multiples of 16, which test models have."""


def stand_in(monkeypatch, machine=HOPPER):
    """The kinds of calls that reached cuDNN from now on, in order."""
    calls = []

    def run(kind, sizes, tensors):
        calls.append(kind)
        (forward if kind == "forward" else backward)(sizes, {role.name: t for role, t in tensors.items()})

    monkeypatch.setattr(cudnn_graphs, "run", run)
    monkeypatch.setattr(attention, "machine_here", lambda: machine)
    return calls


def view(sizes, tensor, heads):
    """[b, heads, tokens, d] of memory that lies as [b, tokens, heads, d], whatever shape it has."""
    b, s, d = sizes.batch, sizes.tokens, sizes.head_dim
    return tensor.as_strided((b, heads, s, d), (s * heads * d, d, heads * d, 1))


def rounded(x, scale, out):
    """To FP8 as the hardware does: NaN stays, what is too large saturates."""
    largest = torch.finfo(out.dtype).max
    out.copy_((x * scale.double()).clamp(-largest, largest).float().to(out.dtype))


def largest(x, out):
    out.copy_(torch.fmax(out, x.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax().float()))


def in_fp8(x, scale, descale, dtype):
    out = torch.empty(x.shape, dtype=dtype)
    rounded(x, scale, out)
    return out.double() * descale.double()


def read(sizes, t, name):
    heads = sizes.kv_heads if name in ("k", "v") else sizes.heads
    x = view(sizes, t[name], heads).double() * t[f"descale_{name}"].double()
    return x.repeat_interleave(sizes.heads // heads, 1)


def probabilities(sizes, t):
    q, k = read(sizes, t, "q"), read(sizes, t, "k")
    logits = q @ k.transpose(2, 3) * sizes.softmax_scale
    if sizes.causal:
        place = torch.arange(sizes.tokens)
        logits = logits.masked_fill(place > place[:, None], -torch.inf)
    return logits, logits.softmax(-1)


def forward(sizes, t):
    logits, s = probabilities(sizes, t)
    t["stats"].copy_(logits.logsumexp(-1, keepdim=True).view(t["stats"].shape))
    largest(s, t["amax_s"])
    o = in_fp8(s, t["scale_s"], t["descale_s"], t["q"].dtype) @ read(sizes, t, "v")
    largest(o, t["amax_o"])
    rounded(o, t["scale_o"], view(sizes, t["o"], sizes.heads))


def backward(sizes, t):
    logits, _ = probabilities(sizes, t)
    s = (logits - t["stats"].double()).exp()
    do, v = read(sizes, t, "do"), read(sizes, t, "v")
    of_row = (do * read(sizes, t, "o")).sum(-1, keepdim=True)
    dp = s * (do @ v.transpose(2, 3) - of_row) * sizes.softmax_scale
    largest(dp, t["amax_dp"])
    dp = in_fp8(dp, t["scale_dp"], t["descale_dp"], t["do"].dtype)
    s = in_fp8(s, t["scale_s"], t["descale_s"], t["q"].dtype)

    def of_group(x):
        return x.unflatten(1, (sizes.kv_heads, -1)).sum(2)

    found = {
        "dq": dp @ read(sizes, t, "k"),
        "dk": of_group(dp.transpose(2, 3) @ read(sizes, t, "q")),
        "dv": of_group(s.transpose(2, 3) @ do),
    }
    for name, x in found.items():
        largest(x, t[f"amax_{name}"])
        rounded(x, t[f"scale_{name}"], view(sizes, t[name], x.shape[1]))
