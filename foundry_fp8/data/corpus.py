"""The demo's corpus: the source files of the Python standard library of the interpreter that runs.

About 10 MB of code and English that every machine has, so that the demo needs no network. The files differ a little
from one Python version to the next; :func:`corpus_digest` distinguishes corpora.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["Document", "corpus_digest", "split_documents", "standard_library_documents"]

# Installed packages are not the standard library; test suites are there in some distributions only; character tables
# and the dump of the language reference are not prose that a small model can learn from.
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One source file."""

    name: str
    """Path below the library's root, with forward slashes."""
    text: str
    """The whole file."""


def standard_library_documents(root: Path | None = None) -> list[Document]:
    """Read the corpus, sorted by name, so that every call gives the same order.

    Where ``root`` is ``None``, that of the running interpreter.

    Raises:
        RuntimeError: The folder holds no Python source (a stripped or zipped standard library).
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _LEFT_OUT.isdisjoint(parts):
            # errors="replace": a few files hold bytes that are not UTF-8 on purpose.
            text = path.read_text(encoding="utf-8", errors="replace")
            if text:
                documents.append(Document(name="/".join(parts), text=text))
    if not documents:
        raise RuntimeError(
            f"{root} holds no Python source files, so there is no corpus. Give another folder with --corpus."
        )
    return documents


def corpus_digest(documents: Iterable[Document]) -> str:
    """SHA-256 over names and texts, in order: two corpora with one digest are the same corpus."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            data = part.encode("utf-8")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Split into train and eval documents, one in 20 (by a hash of the name) going to eval.

    A hash of the name, not a position, so that a file added to the library moves no other file.
    """
    train: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        bucket = int.from_bytes(hashlib.sha256(document.name.encode("utf-8")).digest()[:4], "little")
        (held_out if bucket % 20 == 0 else train).append(document)
    return train, held_out
