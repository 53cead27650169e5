"""The networks of ``foundry-fp8 plan communication``: their constants, each with its source."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from foundry_fp8.config import Config, Positive, PositiveNumber, at_least, at_most

__all__ = ["NETWORKS", "Network"]

Seconds = Annotated[float, at_least(0)]
Share = Annotated[float, at_least(0), at_most(1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network(Config):
    """Constants of the cost model; replace any by a measured one (``dataclasses.replace``, ``--set``)."""

    key = "--set "

    gpus_per_node: Positive = 8
    """GPUs that NVLink joins: a server, or a whole rack."""
    inside_bus: PositiveNumber = 360e9
    """Ring bus bandwidth inside a node, bytes/s."""
    across_bus: PositiveNumber = 340e9
    """Ring bus bandwidth of a ring that crosses nodes (all NICs of a node together), bytes/s."""
    base_seconds: Seconds = 8.4e-6
    """Latency of a collective, beside that of its ring steps."""
    inside_seconds: Seconds = 3.4e-6
    """Latency of a ring step over NVLink."""
    across_seconds: Seconds = 14.0e-6
    """Latency of a ring step over the network."""
    overlap_slowdown: Share = 0.189
    """Share by which computation takes longer while communication runs (the mean over A100, H100, MI210 and MI250, arXiv 2507.03114)."""
    gpu_spread: Share = 0.0148
    """Standard deviation of GPU speeds over their mean; a step waits for the slowest GPU. From the mean spread of 8 % between GPUs of
    one model (arXiv 2208.11035), read as the whiskers of a box plot, which span 5.4 standard deviations."""
    straggler_share: Share = 0.005
    """Share of hosts slower than that spread explains: about 0.5 % (MegaScale, arXiv 2402.15627, as quoted by others)."""
    straggler_slowdown: Share = 0.10
    """Share by which such a host is slower: the same forward takes about 10 % longer (MegaScale, section 6.3)."""
    source: str = ""


_MODEL = (
    "overlap: arXiv 2507.03114; spread of GPUs: arXiv 2208.11035; stragglers: MegaScale, arXiv 2402.15627"
)
_NCCL = f"latencies: NCCL src/graph/tuning.cc, ring, Simple protocol; {_MODEL}"
_EFA = (  # fitted (tests/planning/communication/test_machines.py) to all 35 measurements from 32 MiB to 2 GiB; there is no reason to leave some out
    "across nodes: fitted to the all-gathers that github.com/crazyguitar/aws-gpu-communication-benchmark (data/nccl_all_gather.csv, "
    "CC BY 4.0) measured on 2 to 32 p5.48xlarge; 80 % of NVLink 4 (assumed); other latencies: NCCL src/graph/tuning.cc"
)

NETWORKS = {
    "h100-3200g": Network(
        source=f"8 x 400 Gbit/s a node, 85 % of 400 GB/s; 80 % of NVLink 4 (assumed); {_NCCL}"
    ),
    "p5-efa": Network(across_bus=325e9, across_seconds=51e-6, source=f"{_EFA}; {_MODEL}"),
    "h100-1600g": Network(across_bus=170e9, source=f"4 x 400 Gbit/s a node, 85 % (assumed); {_NCCL}"),
    "b200-3200g": Network(
        inside_bus=720e9, source=f"8 x 400 Gbit/s a node, 85 %; 80 % of NVLink 5 (assumed); {_NCCL}"
    ),
    "b300-6400g": Network(
        inside_bus=720e9, across_bus=680e9, source=f"8 x 800 Gbit/s a node, 85 % (assumed); {_NCCL}"
    ),
    "gb200-nvl72": Network(
        gpus_per_node=72,
        inside_bus=720e9,
        across_bus=72 * 42.5e9,
        source=f"72 GPUs in one NVLink domain, 400 Gbit/s each across, 85 % (assumed); {_NCCL}",
    ),
    "a100-1600g": Network(
        inside_bus=230e9, across_bus=170e9, source=f"8 x 200 Gbit/s a node, 85 % (assumed); {_NCCL}"
    ),
    "a100-400g": Network(
        inside_bus=230e9, across_bus=42.5e9, source=f"4 x 100 Gbit/s a node, 85 % (assumed); {_NCCL}"
    ),
    "ethernet-100g": Network(
        across_bus=10.6e9, source=f"one 100 Gbit/s port a node, 85 % (assumed); {_NCCL}"
    ),
}
