"""The p5 network against all-gathers that were measured on it."""

import math

from foundry_fp8.planning.communication.legs import collective_seconds
from foundry_fp8.planning.communication.machines import NETWORKS

MEASURED = {
    16: {32: 140.06, 128: 250.18, 512: 293.89, 2048: 350.49},
    32: {32: 86.25, 128: 218.56, 512: 227.68, 2048: 341.59},
    64: {32: 47.03, 128: 145.94, 512: 265.41, 2048: 298.37},
    128: {32: 25.10, 128: 88.37, 512: 221.71, 2048: 267.24},
    256: {32: 12.43, 128: 45.83, 512: 146.96, 2048: 263.80},
}
"""GPUs: MiB: GB/s of the algorithm, out of place. Chang-Ning, github.com/crazyguitar/aws-gpu-communication-benchmark, CC BY 4.0."""


def errors(name):
    return [
        collective_seconds(mebi * 2**20, gpus, NETWORKS[name]) / (mebi * 2**20 / (speed * 1e9)) - 1
        for gpus, row in MEASURED.items()
        for mebi, speed in row.items()
    ]


def test_all_gathers_on_p5_take_what_was_measured():
    found = errors("p5-efa")
    assert math.sqrt(sum(e**2 for e in found) / len(found)) < 0.15 and max(map(abs, found)) < 0.35
    # NCCL's own latency is half of EFA's and less.
    assert min(errors("h100-3200g")) < -0.5
