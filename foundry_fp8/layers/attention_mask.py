"""Which keys a query sees, as rules rather than as a tensor of queries x keys."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttentionMask"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """The rules combine: a key is seen only where all of them allow it. :meth:`block` builds the part it is asked for.

    Queries are the last ``q`` of ``k`` positions (as in generation with a cache); position i of the queries stands at
    ``i + k - q`` of the keys.
    """

    causal: bool = False
    """No key after the query."""
    window: tuple[int | None, int | None] | None = None
    """Keys this far to the left and to the right of the query at most; ``None`` for no limit on that side."""
    key_padding: Tensor | None = None
    """[b, k], true or nonzero where the key is a token."""
    documents: Tensor | None = None
    """[b, k], integers: queries see keys of their own document."""
    bias: Tensor | None = None
    """Added to the logits (or bool, true where seen): anything that broadcasts to [b, heads, q, k]."""

    @property
    def only_causal(self) -> bool:
        """Whether :attr:`causal` is the one rule."""
        others = (self.window, self.key_padding, self.documents, self.bias)
        return self.causal and all(rule is None for rule in others)

    def also(self, *, causal: bool, window: tuple[int | None, int | None] | None) -> AttentionMask:
        """With these rules besides; the same object at every call, so that layers share what it remembers."""
        derived: dict[Any, AttentionMask] = self.__dict__.setdefault("_derived", {})
        if (causal, window) not in derived:
            derived[causal, window] = dataclasses.replace(self, causal=causal, window=window)
        return derived[causal, window]

    @functools.cached_property
    def simplified(self) -> AttentionMask:
        """Without padding that hides nothing from a token and documents that are one: asks the device once, then remembers.

        Padding on the right is to the right of every token's query, where a causal rule hides it anyway. So queries that are
        padding themselves may see more than they did.
        """
        padding, documents = self.key_padding, self.documents
        if padding is not None:
            tokens = padding.bool()
            hides = (~tokens[:, :-1] & tokens[:, 1:]) if self.causal else ~tokens
            padding = padding if bool(hides.any()) else None
        if documents is not None and bool((documents == documents[:, :1]).all()):
            documents = None
        return dataclasses.replace(self, key_padding=padding, documents=documents)

    def keys_seen(self, start: int, stop: int, queries: int, keys: int) -> tuple[int, int]:
        """The range of keys that queries ``start`` to ``stop`` can see by position, for skipping the others."""
        shift = keys - queries
        left, right = self.window or (None, None)
        first = 0 if left is None else max(0, start + shift - left)
        last = keys if right is None else min(keys, stop + shift + right)
        if self.causal:
            last = min(last, stop + shift)
        return min(first, max(last - 1, 0)), max(last, 1)

    def block(
        self, start: int, stop: int, first: int, last: int, queries: int, keys: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor | None]:
        """``(seen, bias)`` of queries ``start:stop`` and keys ``first:last``.

        Returns:
            ``seen``: bool, broadcasts to [b, heads, stop - start, last - first], or ``None`` where all is seen.
            ``bias``: the same part of a floating-point ``bias``, or ``None``.
        """
        rows = torch.arange(start, stop, device=device).unsqueeze(1) + (keys - queries)
        columns = torch.arange(first, last, device=device)
        rules: list[Tensor] = []
        if self.causal and last - 1 > start + keys - queries:
            rules.append(columns <= rows)
        left, right = self.window or (None, None)
        if left is not None:
            rules.append(columns >= rows - left)
        if right is not None:
            rules.append(columns <= rows + right)
        if self.key_padding is not None:
            rules.append(self.key_padding[:, None, None, first:last].bool())
        if self.documents is not None:
            of_query = self.documents[:, start + keys - queries : stop + keys - queries]
            rules.append(of_query[:, None, :, None] == self.documents[:, None, None, first:last])
        bias = None
        if self.bias is not None:
            part = self.bias if self.bias.shape[-1] == 1 else self.bias[..., first:last]
            part = part if part.shape[-2] == 1 else part[..., start:stop, :]
            if part.dtype == torch.bool:
                rules.append(part)
            else:
                bias = part
        seen = rules[0] if rules else None
        for rule in rules[1:]:
            seen = seen & rule  # type: ignore[operator]
        return seen, bias

    def dense(self, queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The whole additive mask, broadcasting to [b, heads, queries, keys]: 0 where seen, the dtype's minimum where not."""
        seen, bias = self.block(0, queries, 0, keys, queries, keys, device)
        mask = torch.zeros((), dtype=dtype, device=device) if bias is None else bias.to(dtype)
        if seen is not None:
            mask = torch.where(seen, mask, torch.finfo(dtype).min)
        return mask.expand(torch.broadcast_shapes(mask.shape, (1, 1, queries, keys)))
