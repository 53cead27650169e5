"""Draws docs/images/plan_communication_mpt_7b.png: what ``foundry-fp8 plan communication yamls/pretrain/mpt-7b.yaml`` prints.

python docs/plan_communication.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib import pyplot

import foundry_fp8
from foundry_fp8.cli.plan_communication import workload_of
from foundry_fp8.cli.yaml_model import build_yaml_model, read_yaml
from foundry_fp8.gpus import GPUS
from foundry_fp8.planning.communication.machines import NETWORKS
from foundry_fp8.planning.communication.step import plan_communication

IMAGE = Path(__file__).parent / "images" / "plan_communication_mpt_7b.png"
YAML = Path(foundry_fp8.__file__).parent / "yamls" / "pretrain" / "mpt-7b.yaml"


def _draw(rows: list[dict[str, float | int | str]], title: str, path: Path) -> None:
    """Communication a step (beside what a step computes), and the share of a step that is not exposed."""
    matplotlib.use("Agg")
    wires = list(dict.fromkeys(str(row["wire"]) for row in rows))
    gpus = sorted({int(row["gpus"]) for row in rows})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    for kind, color in (("FSDP", "tab:red"), ("HSDP", "tab:blue")):
        for wire, style in zip(wires, ("-", "--"), strict=False):
            chosen = [row for row in rows if row["wire"] == wire and str(row["layout"]).startswith(kind)]
            for axes, key in ((left, "communication_ms"), (right, "efficiency")):
                values = [float(row[key]) for row in chosen]
                label = f"{kind}, {wire}"
                axes.plot(gpus, values, style, color=color, marker="o", markersize=3, label=label)
    left.axhline(float(rows[0]["compute_ms"]), color="gray", linewidth=0.8, label="compute")
    left.set_yscale("log")
    left.set_ylabel("communication, ms a step")
    right.set_ylim(0, 1.05)
    right.set_ylabel("step of a GPU alone / step")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [str(count) for count in gpus], rotation=45)
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
    right.legend(*left.get_legend_handles_labels(), loc="lower left")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    config = read_yaml(YAML)
    work = workload_of(config, build_yaml_model(config, "meta"))
    rows = plan_communication(work, [2**n for n in range(6, 15)], GPUS["h100"], NETWORKS["h100-3200g"])
    title = f"{work.parameters / 1e9:.2f} B parameters, {work.tokens} tokens a GPU and step, h100, h100-3200g"
    _draw(rows, title, IMAGE)
