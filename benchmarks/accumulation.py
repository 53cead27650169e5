"""What Hopper's accumulation adds to the error of an FP8 GEMM, next to the error of quantising its operands.

    python benchmarks/accumulation.py [--save NAME]

64 x 64 outputs of current scaling, E4M3 x E4M3, sums of K products, by the bit-level model of
``foundry_fp8/backends/emulated/hopper.py``. Quantising: of the exact product of the quantised operands against that of the
unquantised ones. Accumulating: of Hopper's sums against the exact product of the same quantised operands, both relative in
Frobenius norm. Low: how far the sums come out below the exact ones on the average, for data of one sign.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from common import environment, save
from torch import Tensor

from foundry_fp8.backends.emulated.hopper import hopper_mm
from foundry_fp8.backends.emulated.quantizers import quantize_operand
from foundry_fp8.numerics.recipes import CurrentScaling

ROWS = 64
DATA: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "both Gaussian": (lambda x: x, lambda w: w),
    "x after GELU": (torch.nn.functional.gelu, lambda w: w),
    "both of one sign": (torch.abs, torch.abs),
}


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


def measure(k: int, name: str) -> dict[str, object]:
    torch.manual_seed(k)
    of_x, of_w = DATA[name]
    x, w = of_x(torch.randn(ROWS, k)), of_w(torch.randn(ROWS, k))
    recipe = CurrentScaling()
    a, b = quantize_operand(x, "x", recipe, along=1), quantize_operand(w, "w", recipe, along=1)
    exact = a.data.double() @ b.data.double().t()
    quantised = exact * (a.scale_inv.double() * b.scale_inv.double())
    sums = {mode: hopper_mm(a, b, fast=mode == "fast") for mode in ("fast", "precise")}
    row: dict[str, object] = {"data": name, "k": k}
    row["quantising"] = relative(quantised, x.double() @ w.double().t())
    for mode, ours in sums.items():
        row[mode] = relative(ours, exact)
        row[f"{mode}_low"] = float(((exact - ours) / exact).mean()) if "one sign" in name else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", default=None, metavar="NAME", help="write results/NAME.json")
    args = parser.parse_args()
    rows = [measure(k, name) for name in DATA for k in (256, 1024, 4096, 16384)]
    print(
        f"{'data':18}{'K':>7}{'quantising':>12}{'fast':>10}{'precise':>10}{'fast low':>10}{'precise low':>13}"
    )
    for row in rows:
        low = [
            f"{row[f'{mode}_low']:.3%}" if row[f"{mode}_low"] is not None else ""
            for mode in ("fast", "precise")
        ]
        errors = "".join(
            f"{row[key]:>{width}.2e}" for key, width in (("quantising", 12), ("fast", 10), ("precise", 10))
        )
        print(f"{row['data']:18}{row['k']:>7}{errors}{low[0]:>10}{low[1]:>13}")
    if args.save:
        save(args.save, {"benchmark": "accumulation", "environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
