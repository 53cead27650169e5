"""What reaches FP8 attention from the real masks of each host, and which of it a GPU's kernel takes; the table in docs/attention.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_fp8.backends.attention_requirements import (
    AttentionMachine,
    attention_requirement,
    attention_shape,
)
from foundry_fp8.backends.emulated.attention import EmulatedAttention
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.attention import AttentionInputs
from foundry_fp8.layers.attention_mask import AttentionMask
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.recipes import DelayedScaling
from foundry_fp8.surgery.attention_inputs import BatchMasks, compare_mask
from tests.model_zoo import fog, hugging_face, mpt
from tests.surgery.conversion import convert_attention

DOCS = Path(__file__).parents[2] / "docs" / "attention.md"
S = 16
HOPPER = AttentionMachine(capability=(9, 0), cudnn=(9, 19, 0), te=(2, 20))


HOSTS = {
    "MPT": (mpt, ("full", "right")),  # refuses to train with padding on the left itself
    "MPT, ALiBi": (lambda: mpt({"alibi": True}), ("full",)),
    "MPT, sliding window": (lambda: mpt({"sliding_window_size": 8}), ("full",)),
    "MPT, `attn_uses_sequence_id`": (
        lambda: mpt({"attn_uses_sequence_id": True}),
        ("one document", "packed"),
    ),
    "FOG": (fog, ("none", "full", "right", "left", "one document", "packed")),
    "FOG, sliding window": (lambda: fog(sliding_window=8), ("none", "right")),
    "Llama": (
        lambda: hugging_face("Llama"),
        ("none", "full", "right", "left", "position ids", "packed, own mask", "user's own"),
    ),
    "Llama, eager": (lambda: hugging_face("Llama", attn_implementation="eager"), ("none", "right")),
    "Qwen2": (
        lambda: hugging_face("Qwen2"),
        ("none", "full", "right", "left", "position ids", "packed, own mask"),
    ),
    "Mistral, window beyond the sequence": (
        lambda: hugging_face("Mistral", sliding_window=64),
        ("none", "full", "right", "left", "position ids", "packed, own mask"),
    ),
    "Mistral, sliding window": (lambda: hugging_face("Mistral", sliding_window=8), ("none", "right")),
    "OLMo2": (
        lambda: hugging_face("Olmo2"),
        ("none", "full", "right", "left", "position ids", "packed, own mask"),
    ),
    "GPT-NeoX": (
        lambda: hugging_face("GPTNeoX"),
        ("none", "full", "right", "left", "position ids", "packed, own mask"),
    ),
}
"""Each host and the batches that it is asked with."""


def batch(kind: str) -> dict[str, Any]:
    ids = torch.randint(1, 64, (2, S))
    full = torch.ones(2, S, dtype=torch.bool)
    place = torch.arange(S).expand(2, S)
    given: dict[str, dict[str, Any]] = {
        "none": {},
        "full": {"attention_mask": full},
        "right": {"attention_mask": place < torch.tensor([[S], [11]])},
        "left": {"attention_mask": place >= torch.tensor([[0], [5]])},
        "one document": {"attention_mask": full, "sequence_id": place * 0},
        "packed": {"attention_mask": full, "sequence_id": place // 6},
        "position ids": {"position_ids": place % 6},
        "packed, own mask": {
            "position_ids": place % 6,
            "attention_mask": AttentionMask(causal=True, documents=place // 6).dense(
                S, S, ids.device, torch.float32
            ),
        },
        "user's own": {
            "attention_mask": torch.where(torch.ones(2, 1, S, S).tril(2).bool(), 0.0, torch.finfo().min)
        },
    }
    return {"input_ids": ids, **given[kind]}


class Recording(EmulatedAttention):
    """Keeps the mask of each call."""

    def __init__(self) -> None:
        self.masks: list[AttentionMask] = []

    def attend(self, module: Any, given: AttentionInputs) -> Tensor:
        self.masks.append(given.mask)
        return super().attend(module, given)


def masks_of(model: nn.Module, batches: list[dict[str, Any]]) -> list[AttentionMask]:
    """What the first layer sees of each batch, in training."""
    _, converted = convert_attention(model, recipe=DelayedScaling())
    recording = Recording()
    for attention in converted.values():
        attention.backend = recording
    model.train()
    for given in batches:
        model(**given)
    layers = len(converted)
    return recording.masks[::layers]


def said(mask: AttentionMask) -> str:
    """A mask in words."""
    words = ["causal"] if mask.causal else []
    names = {"window": "window", "key_padding": "padding", "documents": "documents", "bias": "a dense mask"}
    return ", ".join(words + [word for name, word in names.items() if getattr(mask, name) is not None])


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, str], AttentionMask]:
    torch.manual_seed(0)
    found = {}
    for host, (make, kinds) in HOSTS.items():
        batches = [batch(kind) for kind in kinds]
        masks = masks_of(make(), batches)
        found.update({(host, kind): mask for kind, mask in zip(kinds, masks, strict=True)})
    return found


NAMES = {
    "none": "no mask",
    "full": "mask of ones",
    "right": "padded right",
    "left": "padded left",
    "packed": "packed by `sequence_id`",
    "position ids": "packed by position ids",
    "packed, own mask": "packed, with a dense mask",
    "user's own": "other dense mask",
}
REASONS = {
    "document masks": "documents",
    "something added to the logits": "dense mask",
    "sliding window": "window",
    "padded": "left padding",
}
"""What a reason says, by a part of it."""


def verdict(found: Availability) -> str:
    """``yes``, or why not in a word or two."""
    return (
        "yes" if found.ok else "no: " + next(word for part, word in REASONS.items() if part in found.reason)
    )


HUGGING_FACE = (
    "Llama",
    "Llama, eager",
    "Qwen2",
    "Mistral, window beyond the sequence",
    "OLMo2",
    "GPT-NeoX",
)
"""One row in the docs for all: if one of them differed, the row would be there twice."""


def table(seen: dict[tuple[str, str], AttentionMask]) -> str:
    """As in the docs: what comes out alike in one row, by host and then by batch."""
    batches: dict[tuple[str, str], dict[str, None]] = {}
    for (host, kind), mask in seen.items():
        shape = attention_shape(mask.simplified, head_dim=128, sequence=128)
        row = f"{said(mask)} | {verdict(attention_requirement(DelayedScaling(), shape, HOPPER))}"
        name = "Hugging Face" if host in HUGGING_FACE else host
        batches.setdefault((name, row), {})[NAMES.get(kind, kind)] = None
    hosts: dict[tuple[str, str], list[str]] = {}
    for (host, row), kinds in batches.items():
        hosts.setdefault((", ".join(kinds), row), []).append(host)
    lines = ["| model | batch | mask in FP8 | through cuDNN |", "|---|---|---|---|"]
    lines += [f"| {'; '.join(alike)} | {kinds} | {row} |" for (kinds, row), alike in hosts.items()]
    return "\n".join(lines)


def same_mask(dense, rules, queries, keys):
    found = compare_mask(dense, rules, queries, keys)
    return found is not None and bool(found)


def test_the_table_in_the_docs_is_what_the_hosts_do(seen: Any) -> None:
    text = DOCS.read_text()
    written = text.split("<!-- hosts -->\n")[1].split("\n<!-- /hosts -->")[0]
    assert written == table(seen), f"docs/attention.md should hold\n{table(seen)}"


@pytest.mark.parametrize("host", HOSTS)
def test_a_causal_batch_and_padding_on_the_right_run_through_transformer_engine(host: str, seen: Any) -> None:
    if "ALiBi" in host or host.endswith(", sliding window"):
        pytest.skip("cuDNN has no FP8 form on Hopper: the table says so")
    for kind in ("none", "full", "right", "one document"):
        if (host, kind) in seen:
            shape = attention_shape(seen[host, kind].simplified, head_dim=128, sequence=128)
            assert attention_requirement(DelayedScaling(), shape, HOPPER).ok, kind


def test_the_users_own_mask_stays_a_mask(seen: Any) -> None:
    assert seen["Llama", "user's own"].bias is not None and not seen["Llama", "user's own"].causal


def test_layers_left_out_keep_their_implementation() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls: list[str] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(str(module.layer_idx))
        return sdpa(module, *args, **kwargs)

    model = hugging_face("Llama")
    convert_attention(model, recipe=DelayedScaling(), exclude=["model.layers.1.*"])
    assert model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = counted
    try:
        model.train()
        model(**batch("right"))
        assert calls == ["1"]
        model.eval()
        model(**batch("right"))
        assert calls == ["1", "0", "1"]
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa


def test_a_dense_mask_is_its_rules_only_where_every_element_agrees() -> None:
    padding = torch.arange(6) < torch.tensor([[6], [4]])
    rules = AttentionMask(causal=True, key_padding=padding)
    dense = rules.dense(6, 6, torch.device("cpu"), torch.float32)
    assert same_mask(dense, rules, 6, 6) and same_mask(dense == 0, rules, 6, 6)
    assert not same_mask(dense, AttentionMask(causal=True), 6, 6)
    for change in (0.5, torch.finfo().min):
        other = dense.clone()
        other[1, 0, 3, 1] = change  # a visible key of one entry
        assert not same_mask(other, rules, 6, 6)
    left = AttentionMask(causal=True, key_padding=~padding)
    opened = left.dense(6, 6, torch.device("cpu"), torch.float32)
    opened[1, 0, 0] = 0.0  # a query that sees nothing may hold anything
    assert same_mask(opened, left, 6, 6)


class Reads(TorchDispatchMode):
    """Counts values that Python reads from tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def deferred(monkeypatch: Any) -> BatchMasks:
    """As on a GPU: masks of a kind that was seen are compared without waiting."""
    monkeypatch.setattr(BatchMasks, "defers", staticmethod(lambda device: True))
    masks = BatchMasks()
    masks._padding = torch.arange(6) < torch.tensor([[6], [4]])
    return masks


def recognised(masks: BatchMasks, dense: Tensor, padding: Tensor | None = None) -> AttentionMask | None:
    return masks.rules(dense, 6, 6, causal=True, window=None, padding=padding)


def test_masks_of_a_known_kind_are_compared_without_waiting(deferred: BatchMasks) -> None:
    def dense() -> Tensor:
        rules = AttentionMask(causal=True, key_padding=deferred._padding)
        return rules.dense(6, 6, torch.device("cpu"), torch.float32)

    assert recognised(deferred, dense(), deferred._padding) is not None
    for padded in (5, 2):
        deferred._padding = torch.arange(6) < torch.tensor([[6], [padded]])
        with Reads() as reads:
            found = recognised(deferred, dense(), deferred._padding)
        assert found is not None and found.key_padding is deferred._padding and reads.count == 0
    deferred._read_checks()
    recognised(deferred, dense() + 0.5, deferred._padding)
    with pytest.raises(RuntimeError, match="meant something else: that step was wrong"):
        deferred._read_checks()


def test_documents_of_one_whole_sequence_leave_the_question_open(deferred: BatchMasks) -> None:
    """Whether the model keeps documents apart shows at the first batch that has two in a row."""
    place = torch.arange(6).expand(2, 6)
    for apart in (place * 0, place // 3):
        deferred._documents = apart
        rules = AttentionMask(causal=True, key_padding=deferred._padding)  # a model that does not
        found = recognised(deferred, rules.dense(6, 6, torch.device("cpu"), torch.float32))
        assert found is not None and (found.documents is None) == bool(apart.any())
    assert list(deferred._answers.values()) == [True]


def test_documents_given_by_position_ids_are_recognised_where_the_host_keeps_them_apart() -> None:
    """Hosts that fold them into their mask (transformers from 4.53 on): here one that does, and one that does not."""

    class Host(nn.Module):
        def forward(
            self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None
        ) -> None: ...

    host = Host()
    masks = BatchMasks.of(host)
    place = torch.arange(6).expand(2, 6)
    host(place, position_ids=place % 3)
    apart = AttentionMask(causal=True, documents=place // 3)
    for rules in (apart, AttentionMask(causal=True)):
        found = recognised(masks, rules.dense(6, 6, torch.device("cpu"), torch.float32))
        assert found is not None and (found.documents is None) == (rules.documents is None)
        assert found.documents is None or torch.equal(found.documents, place // 3 + 1)


@pytest.mark.parametrize("name", ["MPT", "Llama"])
def test_flash_attention_is_refused_at_conversion_with_what_to_do(name: str) -> None:
    """Its packed documents travel in cu_seqlens; the conversion needs no flash-attn to say so."""
    if name == "MPT":
        model = mpt()
        for block in model.transformer.blocks:  # type: ignore[union-attr]
            block.attn.attn_impl = "flash"
    else:
        model = hugging_face("Llama")
        model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match="packed documents travel outside of the mask; FP8 attention stands in for"
    ):
        convert_attention(model, recipe=DelayedScaling())
