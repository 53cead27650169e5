"""Every host of the table in docs/attention.md trains on its packed and padded batches, in emulation.

What each token may see is written here again, as a tensor, from the batch alone. Two things are held:

* gradients are those of the same model with attention by its unfused definition, in float64, under that tensor;
* each document's gradients stay the same when the tokens of all others, and of padding, are drawn anew, and add up to the whole.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.layers.attention import AttentionInputs
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.numerics.recipes import DelayedScaling
from foundry_fp8.surgery.attention import FP8AttentionState
from tests.backends.attention_definition import attention_reference
from tests.backends.test_emulated_attention import reference_quantizer
from tests.surgery.conversion import convert_attention
from tests.surgery.test_attention_inputs import HOSTS, S, batch

PACKED_OR_PADDED = ("right", "left", "packed", "position ids", "packed, own mask")
CASES = [(host, kind) for host, (_, kinds) in HOSTS.items() for kind in kinds if kind in PACKED_OR_PADDED]
QUICK = [
    ("MPT, `attn_uses_sequence_id`", "packed"),
    ("FOG, sliding window", "right"),
    ("Llama", "left"),
    ("Qwen2", "right"),
    ("Mistral, window beyond the sequence", "packed, own mask"),
    ("OLMo2", "left"),
    ("GPT-NeoX", "packed, own mask"),
]
RECIPE = DelayedScaling(amax_history_len=4)


def tokens_and_documents(kind: str) -> tuple[Tensor, Tensor]:
    """Which of [2, S] are tokens, and whose document each is: what the host keeps apart, numbered through the batch."""
    place = torch.arange(S).expand(2, S)
    tokens = torch.ones(2, S, dtype=torch.bool)
    if kind == "right":
        tokens = place < torch.tensor([[S], [11]])
    if kind == "left":
        tokens = place >= torch.tensor([[0], [5]])
    # Position ids alone keep nothing apart in transformers' sdpa and eager.
    apart = place // 6 if kind.startswith("packed") else place * 0
    return tokens, apart + torch.tensor([[0], [10]])


def seen(host: str, kind: str) -> Tensor:
    """Bool [2, 1, S, S]."""
    tokens, documents = tokens_and_documents(kind)
    query, key = torch.arange(S)[:, None], torch.arange(S)[None, :]
    found = (key <= query) & tokens[:, None, :] & (documents[:, :, None] == documents[:, None, :])
    if host.endswith(", sliding window"):
        found = found & (query - key <= (8 if host.startswith("MPT") else 7))  # Foundry's counts the query
    return found.unsqueeze(1)


class _Definition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.options = options
        return attention_reference(q, k, v, None, **options).o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        found = attention_reference(*ctx.saved_tensors, do, **ctx.options)
        return found.dq, found.dk, found.dv, None


class Definition(EmulatedAttention):
    """Unfused, under a mask of its own, whatever reached it."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = AttentionMask(bias=mask)

    def attend(self, module: Any, given: AttentionInputs) -> Tensor:
        options = {
            "quantize": reference_quantizer(module, module.recipe),
            "mask": self.mask,
            "softmax_scale": given.softmax_scale,
        }
        out: Tensor = _Definition.apply(*given[:3], options)  # type: ignore[no-untyped-call]
        return out


class Training:
    """A host with FP8 attention, and one step of it from always the same scales."""

    def __init__(self, host: str, kind: str, backend: str) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = HOSTS[host][0]().train()
        with torch.no_grad():
            for parameter in self.model.parameters():  # initial weights leave attention all but uniform
                parameter.mul_(3.0 if parameter.dim() > 1 and not host.startswith("MPT") else 1.0)
        self.batch = batch(kind)
        self.tokens, self.documents = tokens_and_documents(kind)
        self.exact = self.step(self.tokens)
        _, self.converted = convert_attention(self.model, recipe=RECIPE, backend=backend)
        state = FP8AttentionState.of(self.model)
        assert state is not None and len(self.converted) == 2
        self.state = state
        for _ in range(2):
            self.step(self.tokens)
        self.saved = state.state_dict()

    def step(self, trained: Tensor, ids: Tensor | None = None) -> dict[str, Tensor]:
        """The outputs and the gradients of a loss on the tokens ``trained``; ``ids`` in place of the batch's."""
        if hasattr(self, "saved"):
            self.state.load_state_dict(self.saved)
        self.model.zero_grad(set_to_none=True)
        given = {**self.batch, **({} if ids is None else {"input_ids": ids})}
        out = self.model(**given).logits
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)) * 1e-3
        out.backward(upstream * trained[..., None])
        found = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        return {"output": out.detach()[trained], **found}

    def by_definition(self, mask: Tensor) -> dict[str, Tensor]:
        for attention in self.converted.values():
            attention.backend = Definition(mask)
        return self.step(self.tokens)

    def documents_alone(self) -> dict[str, Tensor]:
        """The sum over documents of the gradients of each, among tokens that are not the batch's."""
        total: dict[str, Tensor] = {}
        for document in self.documents.unique():
            of_it = (self.documents == document) & self.tokens
            others = torch.randint_like(self.batch["input_ids"], 1, 64)
            found = self.step(of_it, torch.where(of_it, self.batch["input_ids"], others))
            for name, gradient in found.items():
                if name != "output":
                    total[name] = total.get(name, 0.0) + gradient
        return total


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all in ``found`` that are gradients, by norm."""
    names = [name for name in found if name != "output"]
    a, b = (torch.cat([side[name].flatten() for name in names]) for side in (found, expected))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(
    ("host", "kind"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.full) for case in CASES],
)
def test_in_emulation(host: str, kind: str) -> None:
    training, mask = Training(host, kind, "emulated"), seen(host, kind)
    found = training.step(training.tokens)
    assert 0.01 < distance(found, training.exact) < 0.25
    # Sums of another order may move a value to the next one of FP8, in few places.
    assert distance(training.documents_alone(), found) < 1e-3
    expected = training.by_definition(mask)
    assert distance(found, expected) < 1e-3
    torch.testing.assert_close(found["output"], expected["output"], rtol=1e-2, atol=1e-2)
    query = int(training.tokens[1].nonzero().max())
    mask[1, 0, query, mask[1, 0, query].nonzero().min()] = False  # one pair of many is more than that
    assert distance(training.by_definition(mask), expected) > 2e-3
