"""What rounding does to the probabilities and to the output of an attention, on some queries of some heads.

No operand shows either. A logit is a sum of products whose errors add up in its unit, and a softmax feels that unit: rounding's relative error is the same
however large logits are, and harms where they are large. An average over heads does not show it, either, as queries of one head meet keys of that head
alone. What is left of it is what probabilities are off by, which shifts of all logits of a query do not change.

Source:
    The error of a logit that costs as much: of errors ``e`` around probabilities ``p``, the Kullback-Leibler divergence is ``Var_p(e) / 2`` in lowest order
    (Cover and Thomas, "Elements of information theory", 2.3, expanded).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.observe.operand_stats import spread

__all__ = ["AttentionPart", "Spots", "logit_error", "logit_noise", "output_error", "part_of"]

HEADS, QUERIES = 16, 8
"""How many heads are looked at, each of one row of the batch, and how many queries of each."""


@dataclasses.dataclass(frozen=True)
class Spots:
    """Where an attention is looked at: :data:`QUERIES` queries of :data:`HEADS` heads, both spread evenly.

    Attributes:
        places: Which heads, each with its row of the batch.
        queries: Which queries, ``[m]``.
        of: Of how many queries of all heads these are some.
    """

    places: Sequence[tuple[int, int]]
    queries: Tensor
    of: int

    @classmethod
    def spread(cls, q: Tensor) -> Spots:
        """Of queries ``[b, heads, q, d]``."""
        b, heads, queries, _ = q.shape
        golden = (math.sqrt(5) - 1) / 2
        places = sorted({(int(i * golden % 1.0 * b), i * heads // HEADS) for i in range(HEADS)})
        return cls(places, spread(queries, QUERIES, q.device)[0], b * heads * queries)

    def take(self, x: Tensor) -> Tensor:
        """float32 ``[n, m, d]`` of ``[b, heads, q, d]``, hp."""
        return torch.stack([x.detach()[where] for where in self.places]).index_select(1, self.queries).float()


@dataclasses.dataclass(frozen=True)
class AttentionPart:
    """Some queries of some heads, and all that they see.

    Attributes:
        q: float32 ``[n, m, d]``.
        k: float32 ``[n, k, d]``.
        v: Likewise.
        bias: What is added to logits, float32 ``[n, m, k]``; -Inf where a query does not see a key.
        softmax_scale: Multiplies logits before.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    softmax_scale: float

    def log_probabilities(self, q: Tensor, k: Tensor) -> Tensor:
        """float64 ``[n, m, k]``, of these queries and keys instead; -Inf where nothing is seen.

        Args:
            q: ``[n, m, d]``.
            k: ``[n, k, d]``.
        """
        with torch.autocast(autocast_type(q.device), enabled=False):
            logits = (q.float() @ k.float().mT).double() * self.softmax_scale + self.bias
        total = logits.logsumexp(-1, keepdim=True)
        return logits - torch.where(total == -torch.inf, 0.0, total)


def part_of(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, softmax_scale: float, spots: Spots) -> AttentionPart:  # fmt: skip
    """What is looked at of an attention.

    Args:
        q: ``[b, heads, q, d]``, hp.
        k: ``[b, kv_heads, k, d]``.
        v: Likewise.
        mask: What each query sees.
        softmax_scale: Multiplies the logits.
        spots: Where.
    """
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    rows = spread(queries, QUERIES, torch.device("cpu"))[
        0
    ].tolist()  # of the device's nobody knows without waiting
    bias = torch.zeros(len(spots.places), len(rows), keys, device=q.device)
    for m, place in enumerate(rows):
        seen, added = mask.block(place, place + 1, 0, keys, queries, keys, q.device)
        if added is not None:
            bias[:, m] += torch.stack([_of(added, *where) for where in spots.places]).float()
        if seen is not None:
            bias[:, m].masked_fill_(~torch.stack([_of(seen, *where) for where in spots.places]), -torch.inf)
    of_k, of_v = (
        torch.stack([x.detach()[i, head // group] for i, head in spots.places]).float() for x in (k, v)
    )
    return AttentionPart(spots.take(q), of_k, of_v, bias, softmax_scale)


def _of(part: Tensor, batch: int, head: int) -> Tensor:
    """The keys of one query, ``[k]`` or ``[1]``, of what broadcasts to ``[b, heads, 1, k]``."""
    part = part.reshape((1,) * (4 - part.dim()) + part.shape)
    return part[batch if part.shape[0] > 1 else 0, head if part.shape[1] > 1 else 0, 0]


def logit_error(log_p: Tensor, log_p8: Tensor) -> Tensor:
    """Of each query the Kullback-Leibler divergence of the probabilities, in nats, summed; and of how many queries; float64 ``[2]``.

    Args:
        log_p: As they are, ``[n, m, k]``; see :meth:`AttentionPart.log_probabilities`.
        log_p8: Of rounded queries and keys.
    """
    unseen = log_p == -torch.inf
    divergence = torch.where(unseen, 0.0, log_p.exp() * (log_p - log_p8)).sum(-1)
    counted = ~unseen.all(-1)
    return torch.stack([divergence.sum(), counted.double().sum()])


def logit_noise(row: Sequence[float]) -> float:
    """The standard deviation of an error of logits that costs probabilities as much, in logits: at 1 one is off by a factor e.

    Args:
        row: From :func:`logit_error`. NaN if something is not finite.
    """
    divergence, queries = row[:2]
    return (
        math.sqrt(2 * max(divergence, 0.0) / queries) if queries and not math.isnan(divergence) else math.nan
    )


def output_error(p: Tensor, v: Tensor, p8: Tensor, v8: Tensor, noise: float) -> Tensor:
    """What rounding did to ``p v``, as :func:`~foundry_fp8.observe.product_noise.product_noise` reads it, float64 ``[3]``: of each query's
    output, the error relative to it, squared, 1 at most, summed; of how many queries; what rounding alone makes of it.

    Args:
        p: ``[n, m, k]``.
        v: ``[n, k, d]``.
        p8: ``p``, rounded.
        v8: ``v``, rounded.
        noise: The relative error, squared, of rounding alone.
    """
    with torch.autocast(autocast_type(p.device), enabled=False):
        o = p @ v
        error = p8 @ v8 - o
    size, lost = (x.double().square().sum(-1) for x in (o, error))
    counted = size != 0  # true for NaN
    found = torch.where(counted, (lost / size).clamp_max(1.0), 0.0)
    return torch.stack([found.sum(), counted.double().sum(), found.new_full((), noise)])
