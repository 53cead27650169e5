"""A byte-level BPE tokenizer, trained here and saved in the form that LLM Foundry loads without a network."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["END_OF_TEXT", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"
"""Stands between documents; also the padding token."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on ``texts`` and save it to ``folder``.

    Every byte has a token of its own, so that no text is out of vocabulary. The same texts in the same order give the same tokenizer.
    ``vocab_size`` counts :data:`END_OF_TEXT` and the 256 bytes.

    Returns:
        The tokenizer. Its ``eos``, ``bos`` and ``pad`` tokens are :data:`END_OF_TEXT`, with id 0.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Any: transformers loads its classes lazily, and type checkers see only part of them.
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(str(folder))
    return fast
