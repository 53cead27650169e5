"""Turns a corpus into MDS shards, cached in a folder named by a hash of the inputs; such a folder is always complete."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foundry_fp8.data.corpus import Document, corpus_digest, split_documents, standard_library_documents

__all__ = ["PreparedData", "prepare_data"]

_LAYOUT_VERSION = 3  # part of the hash
_ENCODE_BATCH = 64  # documents
_SHARD_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Where the shards are and what they hold. ``data.json`` beside them has the same values."""

    folder: Path
    """Holds ``train/`` and ``val/`` (MDS), ``tokenizer/`` and ``data.json``."""
    vocab_size: int
    """Rows the model's embedding must have."""
    sequence_length: int
    """Tokens a sample."""
    documents: int
    """Source files read."""
    corpus_bytes: int
    """Their size in UTF-8 bytes."""
    train_samples: int
    """Samples of ``sequence_length`` tokens in ``train/``."""
    val_samples: int
    """The same in ``val/``."""


def prepare_data(
    cache: Path,
    *,
    vocab_size: int,
    sequence_length: int,
    corpus: Path | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> PreparedData:
    """Return the shards of the corpus; write them first if ``cache`` does not hold them.

    They are written to a temporary folder that is renamed when it is complete. So an interrupted call leaves no incomplete
    data set, and two processes may run at once.

    Args:
        cache: Folder of prepared data sets; made if missing.
        vocab_size: Tokens of the tokenizer to train.
        sequence_length: Tokens a sample. Documents are concatenated with an end-of-text token between them and cut;
            the last incomplete sample of each split is dropped.
        corpus: A folder of Python files; the standard library if ``None``.
        say: Called with a progress message at each stage.

    Raises:
        RuntimeError: No source files, or too few for one sample in each split.
    """
    documents = standard_library_documents(corpus)
    key = hashlib.sha256(
        json.dumps([_LAYOUT_VERSION, corpus_digest(documents), vocab_size, sequence_length]).encode()
    ).hexdigest()
    folder = cache / f"python-source-{key[:16]}"
    if not (folder / "data.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            _build(building, documents, vocab_size, sequence_length, say)
            try:
                building.rename(folder)
            except OSError:
                # Another process finished first; its content is the same, as the name is a hash of the inputs.
                if not (folder / "data.json").exists():
                    raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return PreparedData(folder=folder, **json.loads((folder / "data.json").read_text()))


def _build(
    folder: Path,
    documents: Sequence[Document],
    vocab_size: int,
    sequence_length: int,
    say: Callable[[str], None],
) -> None:
    # Imported here because transformers and streaming take seconds, and cached data needs neither.
    from foundry_fp8.data.tokenizer import train_tokenizer

    train, held_out = split_documents(documents)
    corpus_bytes = sum(len(document.text.encode("utf-8")) for document in documents)
    say(f"training a tokenizer of {vocab_size} tokens on {len(train)} files ({corpus_bytes / 1e6:.1f} MB)")
    # The tokenizer is not trained on the eval files either.
    tokenizer: Any = train_tokenizer((document.text for document in train), vocab_size, folder / "tokenizer")
    say(f"writing shards of {sequence_length}-token samples")
    counts = {
        split: _write_split(folder / split, part, tokenizer, sequence_length)
        for split, part in (("train", train), ("val", held_out))
    }
    for split, count in counts.items():
        if count == 0:
            raise RuntimeError(
                f"the {split} split of this corpus ({len(documents)} files) is shorter than one sample of "
                f"{sequence_length} tokens. Give a larger corpus or a shorter sequence_length."
            )
    facts = {
        "vocab_size": len(tokenizer),
        "sequence_length": sequence_length,
        "documents": len(documents),
        "corpus_bytes": corpus_bytes,
        "train_samples": counts["train"],
        "val_samples": counts["val"],
    }
    (folder / "data.json").write_text(json.dumps(facts, indent=2) + "\n")


def _write_split(folder: Path, documents: Sequence[Document], tokenizer: Any, sequence_length: int) -> int:
    from streaming import MDSWriter

    count = 0
    with MDSWriter(
        out=str(folder), columns={"tokens": "ndarray:int32"}, size_limit=_SHARD_BYTES, hashes=["sha1"]
    ) as out:
        for sample in _samples(documents, tokenizer, sequence_length):
            out.write({"tokens": sample})
            count += 1
    return count


def _samples(documents: Sequence[Document], tokenizer: Any, sequence_length: int) -> Iterator[np.ndarray]:
    """Yield ``[sequence_length]`` int32 samples of the documents, concatenated, each followed by end-of-text."""
    buffer: list[int] = []
    for start in range(0, len(documents), _ENCODE_BATCH):
        texts = [document.text for document in documents[start : start + _ENCODE_BATCH]]
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
            buffer += encoding.ids
            buffer.append(tokenizer.eos_token_id)
        whole = len(buffer) // sequence_length * sequence_length
        for at in range(0, whole, sequence_length):
            yield np.asarray(buffer[at : at + sequence_length], dtype=np.int32)
        del buffer[:whole]
