"""How far FP8's gradients are from float32's, by parameter, at the start and after some training in float32.

    python benchmarks/unit_scaling/gradients.py --steps 200

The same weights and the same batches (six of 1024 tokens), in float32 and in FP8: ``unit`` for the µnit-scaled model, current scaling
for the standard parametrisation, each at its best rate of ``transfer.py``. Beside it, how large attention's logits and
the residual stream are.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import RESULTS, environment
from transfer import BATCH, HEAD_DIM, Corpus, fp8, groups, loss_of, model_of

FILE = RESULTS / "unit_scaling_gradients.json"
RATES = {"mus": 2.0**-5, "mus_norm": 2.0**-5, "sp": 2.0**-8}
BATCHES = 6


def gradients(model: nn.Module, batches: list[Tensor]) -> list[dict[str, Tensor]]:
    found = []
    for ids in batches:
        model.zero_grad()
        loss_of(model, ids).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return found


def logit_spread(model: nn.Module, ids: Tensor) -> list[float]:
    """Largest |q| |k| / sqrt(head size) over tokens and heads, by layer: what the logits can reach."""
    outputs: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, y: outputs.append(y.detach()))
        for name, module in model.named_modules()
        if name.endswith("qkv_proj")
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    spreads = []
    for y in outputs:
        q, k, _ = y.chunk(3, dim=-1)
        norms = (t.unflatten(-1, (-1, HEAD_DIM)).norm(dim=-1) for t in (q, k))
        spreads.append(float(torch.stack([n.amax() for n in norms]).prod() / HEAD_DIM**0.5))
    return spreads


def compare(kind: str, width: int, model: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    exact = gradients(model, batches)
    rounded = gradients(fp8(kind, copy.deepcopy(model), width), batches)
    error = {
        name: sum(float((b[name] - a[name]).norm() / a[name].norm()) for a, b in zip(exact, rounded, strict=True))
        / len(exact)
        for name in exact[0]
    }  # fmt: skip
    with torch.no_grad():
        states = model(batches[0], output_hidden_states=True).hidden_states
    stream = [float(state.std()) for state in states]
    return {"error": error, "largest logit": logit_spread(model, batches[0]), "stream": stream}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--widths", default="64,128")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    corpus = Corpus()
    apart = torch.Generator().manual_seed(5)
    batches = [corpus.batch(corpus.train, BATCH, apart) for _ in range(BATCHES)]
    rows = []
    for kind in RATES:
        for width in map(int, args.widths.split(",")):
            torch.manual_seed(17)
            model = model_of(kind, width).train()
            optimizer = torch.optim.AdamW(
                groups(kind, model, width, RATES[kind]), betas=(0.9, 0.95), weight_decay=0.0
            )
            generator = torch.Generator().manual_seed(17)
            for step in range(args.steps + 1):
                if step in (0, args.steps):
                    rows.append(
                        {"kind": kind, "width": width, "step": step, **compare(kind, width, model, batches)}
                    )
                    error = rows[-1]["error"]
                    qkv, out = (
                        [f"{v:.2f}" for n, v in error.items() if part in n] for part in ("qkv_proj", "o_proj")
                    )
                    logits = [f"{v:.0f}" for v in rows[-1]["largest logit"]]
                    stream = [f"{v:.2f}" for v in rows[-1]["stream"]]
                    shown = ("qkv", *qkv, "| o", *out, "| logits", *logits, "| stream", *stream)
                    print(kind, width, step, *shown, flush=True)
                optimizer.zero_grad()
                loss_of(model, corpus.batch(corpus.train, BATCH, generator)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    FILE.write_text(json.dumps({"rows": rows, "environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
