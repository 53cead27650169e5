import random
import string

import numpy as np
import pytest

from foundry_fp8.data.corpus import split_documents, standard_library_documents
from foundry_fp8.data.shards import prepare_data

SIZES = {"vocab_size": 300, "sequence_length": 16}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for i in range(60):
        words = ["".join(rng.choices(string.ascii_lowercase + "é\n", k=rng.randint(1, 8))) for _ in range(80)]
        (folder / f"m{i:02}.py").write_text(" ".join(words))
    return folder


@pytest.fixture(scope="module")
def prepared(corpus, tmp_path_factory):
    return prepare_data(tmp_path_factory.mktemp("cache"), corpus=corpus, **SIZES)


def samples(folder):
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder), shuffle=False, batch_size=1)
    return [np.array(dataset[i]["tokens"]) for i in range(len(dataset))]


def test_shards_hold_the_documents_in_order_with_an_end_token_between_them(prepared, corpus):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared.folder / "tokenizer")
    documents = dict(zip(("train", "val"), split_documents(standard_library_documents(corpus)), strict=True))
    for split, count in (("train", prepared.train_samples), ("val", prepared.val_samples)):
        found = samples(prepared.folder / split)
        assert len(found) == count > 0
        assert all(sample.shape == (16,) and sample.dtype == np.int32 for sample in found)
        expected = "".join(d.text + tokenizer.eos_token for d in documents[split])
        # A sample may end inside a character of several bytes; only the last one shows.
        text = tokenizer.decode(np.concatenate(found)).rstrip("\ufffd")
        assert expected.startswith(text)
        # What is dropped is shorter than one sample, and no token is longer than 30 characters here.
        assert len(expected) - len(text) < 16 * 30


def test_tokenizer_has_the_size_asked_for_and_loses_no_byte(prepared):
    from llmfoundry.utils.builders import build_tokenizer

    tokenizer = build_tokenizer(str(prepared.folder / "tokenizer"), {"model_max_length": 16})
    assert len(tokenizer) == prepared.vocab_size == 300
    text = "def λ(x):\n\treturn x  # \u4e2d\x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0


def test_a_second_call_finds_the_first_ones_data(prepared, corpus):
    said = []
    again = prepare_data(prepared.folder.parent, corpus=corpus, say=said.append, **SIZES)
    assert again == prepared
    assert said == []


def test_other_text_or_sizes_are_other_data(prepared, corpus, tmp_path):
    assert (
        prepare_data(tmp_path, corpus=corpus, vocab_size=300, sequence_length=8).folder.name
        != prepared.folder.name
    )
    changed = tmp_path / "corpus"
    changed.mkdir()
    for path in corpus.iterdir():
        (changed / path.name).write_text(path.read_text() + "!")
    assert prepare_data(tmp_path, corpus=changed, **SIZES).folder.name != prepared.folder.name


def test_an_interruption_leaves_nothing_and_the_next_call_succeeds(prepared, corpus, tmp_path):
    def interrupt(message):
        if message.startswith("writing"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(tmp_path, corpus=corpus, say=interrupt, **SIZES)
    assert list(tmp_path.iterdir()) == []
    assert prepare_data(tmp_path, corpus=corpus, **SIZES).train_samples == prepared.train_samples


def test_a_corpus_too_small_for_one_sample_is_an_error(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1")
    with pytest.raises(RuntimeError, match="shorter than one sample of 16 tokens"):
        prepare_data(tmp_path / "cache", corpus=folder, **SIZES)
