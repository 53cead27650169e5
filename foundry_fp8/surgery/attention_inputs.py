"""What a batch says of attention masks, taken where it enters the model, and matched with the dense mask that the model made of it.

Hosts fold padding, documents and often the causal rule into one tensor of queries x keys, which no fused FP8 kernel takes. The
inputs that it was made of are rules again. They stand in for the tensor only where they mean the same, element by element.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from foundry_fp8.compat.autograd import inside_backward
from foundry_fp8.compat.fake_tensor import FakeTensor
from foundry_fp8.layers.attention_mask import AttentionMask

__all__ = ["BatchMasks", "compare_mask"]

_INPUTS = ("attention_mask", "sequence_id", "position_ids")
_MEMO = "_foundry_fp8_rules"


class BatchMasks:
    """The padding and documents of the batch that runs. One instance serves a whole model."""

    def __init__(self) -> None:
        self._padding: Tensor | None = None
        self._documents: Tensor | None = None
        self._made_by_user = False
        self._answers: dict[Any, bool] = {}
        self._checks: list[_Check] = []

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
        self._read_checks()
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        padding, documents, positions = (given.get(name) for name in _INPUTS)
        # A mask that is a tensor of queries x keys already comes from the user; all that it may mean here is the documents beside it.
        self._made_by_user = padding is not None and not (isinstance(padding, Tensor) and padding.dim() == 2)
        self._padding = None if self._made_by_user else padding
        self._documents = documents if isinstance(documents, Tensor) else None
        if self._documents is None and isinstance(positions, Tensor) and positions.dim() == 2:
            # What hosts without document ids recognise packing by.
            self._documents = (positions == 0).cumsum(-1)

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
        rules = AttentionMask(causal=causal, window=window, key_padding=self._padding)
        if isinstance(dense, FakeTensor):  # a plan: transformers 5 writes any mask out there
            return rules
        memo = dense.__dict__.setdefault(_MEMO, {})
        key = (causal, window)
        if key not in memo:
            memo[key] = self._recognise(dense, rules, queries, keys, padding)
        return memo[key]

    def _recognise(
        self, dense: Tensor, alone: AttentionMask, queries: int, keys: int, padding: Tensor | None
    ) -> AttentionMask | None:
        """``alone``: the rules without documents."""
        if padding is not None and self._padding is None:
            return None
        # A batch may name documents to a model that does not keep them apart.
        named = (self._documents,) if self._made_by_user else (self._documents, None)
        meant = (one for one in dict.fromkeys(named) if one is not None or not self._made_by_user)
        candidates = [dataclasses.replace(alone, documents=documents) for documents in meant]
        given = (padding is None, self._padding is None, self._documents is None, self._made_by_user)
        kind = (alone.causal, alone.window, dense.dtype, dense.dim(), given)
        if kind in self._answers and self.defers(dense.device):
            rules = candidates[self._answers[kind]]
            found = self._same(dense, rules, queries, keys, padding)
            if found is not None:
                self._checks.append(_Check(found))
                return rules
        answers = [self._same(dense, rules, queries, keys, padding) for rules in candidates]
        true = [i for i, found in enumerate(answers) if found is not None and bool(found)]
        # Documents that are one whole sequence each do not show whether the model separates them.
        if len(true) == 1:
            self._answers[kind] = bool(true[0])
        return candidates[true[0]] if true else None

    @staticmethod
    def defers(device: torch.device) -> bool:
        """Whether a mask of a kind that was seen before is compared without waiting: its answer is read at a later batch."""
        return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()

    def _same(
        self, dense: Tensor, rules: AttentionMask, queries: int, keys: int, padding: Tensor | None
    ) -> Tensor | None:
        found = compare_mask(dense, rules, queries, keys)
        if found is None or padding is None:
            return found
        assert self._padding is not None
        if padding.shape != self._padding.shape:
            return None
        return found & (padding.bool() == self._padding.bool()).all()

    def _read_checks(self) -> None:
        """What has arrived by now; at most :data:`_WAITING` are left.

        Raises:
            RuntimeError: A mask meant something else than masks of its kind did before.
        """
        while self._checks and (len(self._checks) > _WAITING or self._checks[0].arrived):
            if not self._checks.pop(0).answer:
                raise RuntimeError(
                    "a batch before this one came with an attention mask that was taken for the rules (causal, padding, documents) of earlier "
                    "masks of its kind, and meant something else: that step was wrong. Hand the same kind of mask to every batch, or set "
                    "algorithms.fp8.attention: false."
                )


class _Check:
    """A comparison on its way from the device."""

    def __init__(self, found: Tensor) -> None:
        self._event = torch.cuda.Event() if found.device.type == "cuda" else None
        self._host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=self._event is not None)
        self._host.copy_(found, non_blocking=True)
        if self._event is not None:
            self._event.record()

    @property
    def arrived(self) -> bool:
        if self._event is None:
            return True
        # While a graph is captured an event may not be asked.
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    @property
    def answer(self) -> bool:
        if self._event is not None:
            self._event.synchronize()
        return bool(self._host)


_WAITING = 64
"""Comparisons of which nobody has read the answer."""


def compare_mask(dense: Tensor, rules: AttentionMask, queries: int, keys: int) -> Tensor | None:
    """Whether ``dense`` shows and hides exactly what ``rules`` do, and adds nothing else: 0-d bool; ``None``: no, by its shape.

    Rows in which the rules show nothing (queries that are padding) are not compared: hosts fill them in different ways.
    """
    if dense.device.type == "meta":
        return None
    for tensor in (rules.key_padding, rules.documents):
        if tensor is not None and (tensor.shape[-1] != keys or tensor.shape[0] not in (1, dense.shape[0])):
            return None
    if dense.shape[-1] not in (1, keys) or dense.shape[-2] not in (1, queries):
        return None
    seen, _ = rules.block(0, queries, 0, keys, queries, keys, dense.device)
    if seen is None:
        seen = torch.ones((), dtype=torch.bool, device=dense.device)
    shown = dense if dense.dtype == torch.bool else dense == 0
    plain = torch.ones_like(shown) if dense.dtype == torch.bool else shown | (dense <= _HIDDEN)
    seen, shown = torch.broadcast_tensors(seen, shown)
    compared = (seen == shown) | ~seen.any(-1, keepdim=True)
    return compared.all() & plain.all()


_HIDDEN = torch.finfo(torch.float16).min / 2
"""What a host adds to hide: the least number of its dtype, or -Inf."""
