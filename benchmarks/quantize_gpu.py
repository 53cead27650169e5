"""The quantise kernels as a share of this machine's copy bandwidth.

    python benchmarks/quantize_gpu.py [--save quantize_h100_2026-11-21]

Bytes are those the algorithm has to move (docs/kernels.md counts them); "share" is bytes over seconds over what a plain copy
reaches here, measured first. The target is 0.85 on 4096 x 4096 and larger. Every kernel is compared with its torch
expression before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from gpu_common import DEVICE, SMOKE, TOLERANCE, ceilings, finish, machine, parser, require_device, timed

from foundry_fp8.kernels import blockwise, tensorwise
from foundry_fp8.kernels.delayed import update_delayed_
from foundry_fp8.kernels.gated import activation_backward
from foundry_fp8.kernels.norms import norm_backward, norm_statistics
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.numerics.formats import E4M3, E5M2

SIZES = ((70, 96),) if SMOKE else ((2048, 2048), (4096, 4096), (8192, 4096), (8192, 14336))


def kernels(rows: int, columns: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Name -> (launch, bytes an element)."""
    x = torch.randn(rows, columns, device=DEVICE).bfloat16()
    up, dy = torch.randn_like(x), torch.randn_like(x)
    scale, slot = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    weight = torch.rand(columns, device=DEVICE)
    identity, swiglu = Producer.identity(x), Producer.activation("silu", x, up=up)
    _, rstd = norm_statistics(x, 1e-5, centered=False)
    norm = Producer.norm(x, rstd, weight)

    def check(ours: Any, reference: Any, names: tuple[str, ...]) -> None:
        for name in names:
            a, b = getattr(ours, name), getattr(reference, name)
            differ = float((a.view(torch.uint8) != b.view(torch.uint8)).float().mean())
            assert differ <= TOLERANCE, f"{name}: {differ:.2%} of the bytes differ from the reference"

    delayed = {"scale": scale, "amax_slot": slot}
    check(
        tensorwise.quantize_tensorwise(identity, E4M3),
        tensorwise.quantize_tensorwise_reference(identity, E4M3),
        ("data", "data_t"),
    )
    for options in ({}, {"square": True}, {"group": 32}):
        check(
            blockwise.quantize_blockwise(identity, E4M3, **options),
            blockwise.quantize_blockwise_reference(identity, E4M3, **options),
            ("data", "gemm_scale", "data_t", "gemm_scale_t"),
        )
    block = blockwise.quantize_blockwise
    measure, amaxes = tensorwise.Measure(identity, identity), [(identity.pointers, slot)] * 2
    return {
        "delayed, both layouts": (lambda: tensorwise.quantize_tensorwise(identity, E4M3, **delayed), 2 + 2),
        "delayed, both, bias gradient": (
            lambda: tensorwise.quantize_tensorwise(identity, E5M2, column_sum=True, **delayed),
            2 + 2,
        ),
        "delayed, rows": (
            lambda: tensorwise.quantize_tensorwise(identity, E4M3, columns=False, **delayed),
            2 + 1,
        ),
        "delayed, transposed": (
            lambda: tensorwise.quantize_tensorwise(identity, E4M3, rows=False, **delayed),
            2 + 1,
        ),
        "current, both layouts": (lambda: tensorwise.quantize_tensorwise(identity, E4M3), 4 + 2),
        "two amaxes": (lambda: measure(*amaxes), 2 + 2),
        "1 x 128, both layouts": (lambda: block(identity, E4M3), 2 + 2 + 8 / 128),
        "1 x 128, rows": (lambda: block(identity, E4M3, columns=False), 2 + 1 + 4 / 128),
        "128 x 128, both layouts": (lambda: block(identity, E4M3, square=True), 2 + 2),
        "1 x 32 E8M0, both layouts": (lambda: block(identity, E4M3, group=32), 2 + 2 + 2 / 32),
        "rmsnorm statistics": (lambda: norm_statistics(x, 1e-5, centered=False), 2),
        "rmsnorm to delayed": (lambda: tensorwise.quantize_tensorwise(norm, E4M3, **delayed), 2 + 2),
        "swiglu to delayed": (lambda: tensorwise.quantize_tensorwise(swiglu, E4M3, **delayed), 4 + 2),
        "swiglu to 1 x 128": (lambda: block(swiglu, E4M3), 4 + 2 + 8 / 128),
        "rmsnorm backward": (lambda: norm_backward(dy, x, rstd, weight), 4 + 2),
        "swiglu backward": (lambda: activation_backward(dy, swiglu), 6 + 4),
    }


def main() -> None:
    """Measure and print."""
    options = parser(__doc__).parse_args()
    require_device()
    limits = ceilings(options.repeats)
    rows = []
    for size in SIZES:
        found = kernels(*size)
        times = timed({name: launch for name, (launch, _) in found.items()}, options.repeats)
        for name, (_, per_element) in found.items():
            rate = size[0] * size[1] * per_element / times[name].seconds
            rows.append(
                {
                    "kernel": name,
                    "size": f"{size[0]} x {size[1]}",
                    "us": times[name].seconds * 1e6,
                    "GB/s": rate / 1e9,
                    "share": rate / limits["copy_bytes_per_s"],
                    "spread": times[name].spread,
                }
            )
    tensors, length = (12, 16) if SMOKE else (3 * 32 * 7, 1024)
    history = torch.rand(length, tensors, device=DEVICE)
    scale, fp8_max = torch.ones(tensors, device=DEVICE), torch.full((tensors,), 448.0, device=DEVICE)
    time = timed(
        {"update": lambda: update_delayed_(scale, history.add_(1.0), fp8_max, use_max=True)}, options.repeats
    )["update"]
    rows.append(
        {"kernel": "delayed update, whole model", "size": f"{length} x {tensors}", "us": time.seconds * 1e6}
    )
    finish(options.save, {"machine": machine(), "ceilings": limits, "rows": rows})


if __name__ == "__main__":
    main()
