"""Standard deviation of every hidden activation, weight and gradient at the start, by layer: µnit Scaling against SP.

    python benchmarks/unit_scaling/initial.py           results/unit_scaling_initial.json and docs/images/unit_scaling_initial.png

Also, for µS: the gradient dy of every hidden linear at several widths and tokens a step, as a multiple of 1 / (tokens x width),
how much of it E5M2 flushes with and without that scale; and what the casts flush of x by activation (GELU, SiLU, ReLU). Bytes
of the demo's corpus; SP as in transfer.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import nn

matplotlib.use("Agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import RESULTS, environment
from transfer import HEAD_DIM, SEQ, Corpus, loss_of, model_of

from foundry_fp8.layers.unit_linear import UnitLinear
from foundry_fp8.models.mus import MusConfig, MusForCausalLM
from foundry_fp8.numerics.formats import E4M3, E5M2, Float8Format, cast
from foundry_fp8.numerics.recipes import UnitScaling

FILE = RESULTS / "unit_scaling_initial.json"
IMAGE = Path(__file__).parents[2] / "docs" / "images" / "unit_scaling_initial.png"


def tensors_of(model: nn.Module, ids: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
    """x, y, dy and w of every hidden linear, and the gradient of w."""
    seen: dict[str, dict[str, torch.Tensor]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":

            def watch(m: nn.Module, args: Any, y: torch.Tensor, name: str = name) -> None:
                seen[name] = {"x": args[0].detach(), "y": y.detach(), "w": m.weight.detach()}
                y.register_hook(lambda dy: seen[name].__setitem__("dy", dy.detach()))

            hooks.append(module.register_forward_hook(watch))
    model.zero_grad()
    loss_of(model, ids).backward()
    for hook in hooks:
        hook.remove()
    for name, found in seen.items():
        # A hidden UnitLinear's dy is the gradient of its output; the GEMMs' alpha comes after it.
        found["dw"] = model.get_submodule(name).weight.grad.detach()
    return seen


def flushed(x: torch.Tensor, fmt: Float8Format) -> float:
    """The share of nonzero elements that the cast rounds to zero."""
    return float(((cast(x, fmt).float() == 0) & (x != 0)).float().mean())


def draw(result: dict[str, Any], image: Path) -> None:
    """Standard deviations by layer, and of attention's output by position."""
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.4))
    for kind, title, colour in (("mus", "µS", "tab:blue"), ("sp", "SP", "tab:orange")):
        found = dict(result["std"][kind])
        by_position, stream = found.pop("attention by position"), found.pop("stream")
        for axis, what in zip(axes, ("y", "w", "dy"), strict=False):
            axis.semilogy(
                [value[what] for value in found.values()], marker="o", markersize=3, color=colour, label=title
            )
            axis.set(
                title={"y": "outputs", "w": "weights", "dy": "gradients of outputs"}[what],
                xlabel="hidden linear",
            )
        axes[3].semilogy(range(0, 8 * len(by_position), 8), by_position, color=colour, label=title)
        print(title, "stream", [round(value, 3) for value in stream])
        print(title, "outputs", [round(value["y"], 3) for value in found.values()])
    axes[3].set(title="attention's output, last layer", xlabel="position")
    axes[0].set_ylabel("standard deviation")
    axes[0].legend()
    figure.tight_layout()
    image.parent.mkdir(exist_ok=True)
    figure.savefig(image, dpi=110)
    spread = [row["std x tokens x width"] for row in result["dy"]]
    print("dy std x tokens x width:", round(min(spread), 4), "to", round(max(spread), 4))
    print("largest |dy| x scale:", round(max(row["amax x scale"] for row in result["dy"]), 1), "of 57344")
    for what in ("flushed without scale", "flushed"):
        values = [row[what] for row in result["dy"]]
        print(what, f"{min(values):.2%} to {max(values):.2%}")
    print("x flushed, last layer:", result["activation"])


def main() -> None:
    corpus, generator = Corpus(), torch.Generator().manual_seed(0)
    ids = corpus.batch(corpus.train, 8, generator)
    result: dict[str, Any] = {"std": {}, "dy": [], "activation": {}}
    for kind in ("mus", "sp"):
        torch.manual_seed(0)
        model = model_of(kind, 256)
        seen = tensors_of(model, ids)
        result["std"][kind] = {
            name: {what: float(t.std()) for what, t in found.items()} for name, found in seen.items()
        }
        last = seen["model.layers.3.self_attn.o_proj"]["x"]
        result["std"][kind]["attention by position"] = [float(last[:, p].std()) for p in range(0, SEQ, 8)]
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        result["std"][kind]["stream"] = [float(state.std()) for state in states]
    for width in (64, 256, 512):
        for rows in (2, 8, 32):
            torch.manual_seed(0)
            batch = corpus.batch(corpus.train, rows, generator)
            seen = tensors_of(model_of("mus", width), batch)
            tokens = batch.numel()
            scale = UnitScaling.gradient_scale_for(tokens, width)
            for name, found in seen.items():
                dy = found["dy"]
                result["dy"].append(
                    {
                        "width": width,
                        "tokens": tokens,
                        "layer": name,
                        "std x tokens x width": float(dy.std()) * tokens * width,
                        "amax x scale": float(dy.abs().max()) * scale,
                        "flushed without scale": flushed(dy, E5M2),
                        "flushed": flushed(dy * scale, E5M2),
                    }
                )
    for activation in ("gelu", "silu", "relu"):
        torch.manual_seed(0)
        model = MusForCausalLM(
            MusConfig(
                hidden_size=256,
                num_hidden_layers=4,
                num_attention_heads=256 // HEAD_DIM,
                vocab_size=256,
                activation=activation,
            )
        )
        seen = tensors_of(model, ids)
        result["activation"][activation] = {
            name.rpartition(".")[2]: flushed(found["x"], E4M3)
            for name, found in seen.items()
            if ".layers.3." in name
        }
    assert any(isinstance(m, UnitLinear) for m in model.modules())
    result["environment"] = environment()
    FILE.write_text(json.dumps(result, indent=1) + "\n")

    draw(result, IMAGE)


if __name__ == "__main__":
    main()
