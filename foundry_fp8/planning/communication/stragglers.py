"""A step waits for the slowest GPU: how much slower than the mean that one is expected to be.

Two kinds of slowness, each with a source for its constants (:class:`foundry_fp8.planning.communication.machines.Network`). All GPUs spread
around their mean by ``gpu_spread``; and a host in ``1 / straggler_share`` is slower by ``straggler_slowdown`` with all of its GPUs. Of N GPUs
on H hosts, ``z(n)`` the expected largest of n standard normal numbers:

    usual     = gpu_spread z(N)
    straggler = (1 + straggler_slowdown) (1 + gpu_spread z(GPUs of a host)) - 1
    expected  = usual + (1 - (1 - straggler_share)^H) max(0, straggler - usual)
"""

from __future__ import annotations

from statistics import NormalDist

from foundry_fp8.planning.communication.machines import Network

__all__ = ["largest_of", "slowest"]


def largest_of(count: int) -> float:
    """The expected largest of ``count`` standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def slowest(gpus: int, network: Network) -> float:
    """The expected slowness of the slowest of ``gpus`` GPUs, as a share of the mean GPU's time; 0 for one, which waits for none."""
    if gpus == 1:
        return 0.0
    hosts = -(-gpus // network.gpus_per_node)
    usual = network.gpu_spread * largest_of(gpus)
    on_host = largest_of(min(gpus, network.gpus_per_node))
    straggler = (1 + network.straggler_slowdown) * (1 + network.gpu_spread * on_host) - 1
    return usual + (1 - (1 - network.straggler_share) ** hosts) * max(0.0, straggler - usual)
