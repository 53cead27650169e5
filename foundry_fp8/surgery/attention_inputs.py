"""What a batch says of attention masks, taken where it enters the model, and matched with the dense mask that the model made of it.

Hosts fold padding, documents and often the causal rule into one tensor of queries x keys, which no fused FP8 kernel takes. The
inputs that it was made of are rules again. They stand in for the tensor only where they mean the same, element by element.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.layers.attention_mask import AttentionMask

__all__ = ["BatchMasks", "same_mask"]

_INPUTS = ("attention_mask", "sequence_id")
_MEMO = "_foundry_fp8_rules"


class BatchMasks:
    """The padding and documents of the batch that runs. One instance serves a whole model."""

    def __init__(self) -> None:
        self._padding: Tensor | None = None
        self._documents: Tensor | None = None
        self._known = False

    @classmethod
    def of(cls, model: nn.Module) -> BatchMasks:
        """Listen where ``model`` or its parts take token ids and an ``attention_mask``."""
        masks = cls()
        for module in model.modules():
            parameters = inspect.signature(module.forward).parameters
            if "attention_mask" in parameters and {"input_ids", "inputs_embeds"} & set(parameters):
                module.register_forward_pre_hook(masks._capture, with_kwargs=True)
        return masks

    @torch.compiler.disable
    def _capture(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if inside_backward():
            return
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        padding, documents = (given.get(name) for name in _INPUTS)
        # A mask that is a tensor of queries x keys already comes from the user; nothing is known of its meaning.
        self._known = padding is None or (isinstance(padding, Tensor) and padding.dim() == 2)
        self._padding = padding if self._known else None
        self._documents = documents if isinstance(documents, Tensor) else None

    @torch.compiler.disable
    def rules(
        self,
        dense: Tensor,
        queries: int,
        keys: int,
        *,
        causal: bool,
        window: tuple[int | None, int | None] | None,
        padding: Tensor | None = None,
    ) -> AttentionMask | None:
        """The rules that ``dense`` means, or ``None`` where it means something else. Layers that share ``dense`` share the answer.

        Args:
            dense: Additive or boolean, broadcasts to [b, heads, queries, keys].
            queries: How many.
            keys: How many.
            causal: Whether the host has put the causal rule into ``dense``.
            window: The sliding window that the host has put into it.
            padding: [b, k], what the host hands over as padding besides.
        """
        memo = dense.__dict__.setdefault(_MEMO, {})
        key = (causal, window)
        if key not in memo:
            memo[key] = self._recognise(dense, queries, keys, causal, window, padding)
        return memo[key]

    def _recognise(
        self,
        dense: Tensor,
        queries: int,
        keys: int,
        causal: bool,
        window: tuple[int | None, int | None] | None,
        padding: Tensor | None,
    ) -> AttentionMask | None:
        if not self._known:
            return None
        if padding is not None and (
            self._padding is None or not torch.equal(padding.bool(), self._padding.bool())
        ):
            return None
        # A batch may name documents to a model that does not keep them apart.
        for documents in dict.fromkeys((self._documents, None)):
            rules = AttentionMask(
                causal=causal, window=window, key_padding=self._padding, documents=documents
            )
            if same_mask(dense, rules, queries, keys):
                return rules
        return None


def same_mask(dense: Tensor, rules: AttentionMask, queries: int, keys: int) -> bool:
    """Whether ``dense`` shows and hides exactly what ``rules`` do, and adds nothing else. Waits for the device.

    Rows in which the rules show nothing (queries that are padding) are not compared: hosts fill them in different ways.
    """
    if isinstance(dense, FakeTensor) or dense.device.type == "meta":
        return False
    for tensor in (rules.key_padding, rules.documents):
        if tensor is not None and (tensor.shape[-1] != keys or tensor.shape[0] not in (1, dense.shape[0])):
            return False
    if dense.shape[-1] not in (1, keys) or dense.shape[-2] not in (1, queries):
        return False
    seen, _ = rules.block(0, queries, 0, keys, queries, keys, dense.device)
    if seen is None:
        seen = torch.ones((), dtype=torch.bool, device=dense.device)
    shown = dense if dense.dtype == torch.bool else dense == 0
    plain = torch.ones_like(shown) if dense.dtype == torch.bool else shown | (dense <= _HIDDEN)
    seen, shown = torch.broadcast_tensors(seen, shown)
    compared = (seen == shown) | ~seen.any(-1, keepdim=True)
    return bool(compared.all() & plain.all())


_HIDDEN = torch.finfo(torch.float16).min / 2
"""What a host adds to hide: the least number of its dtype, or -Inf."""
