import pytest

from foundry_fp8.data.corpus import corpus_digest, split_documents, standard_library_documents


def test_corpus_is_the_sorted_source_without_packages_and_tests(tmp_path):
    for name in (
        "b.py",
        "a.py",
        "json/decoder.py",
        "site-packages/x.py",
        "test/t.py",
        "lib/tests/t.py",
        "a.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    (tmp_path / "empty.py").write_text("")
    documents = standard_library_documents(tmp_path)
    assert [d.name for d in documents] == ["a.py", "b.py", "json/decoder.py"]
    assert documents[0].text == "# a.py"


def test_corpus_survives_bytes_that_are_not_utf8(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    assert standard_library_documents(tmp_path)[0].text == "# caf\ufffd"


def test_the_standard_library_of_this_interpreter_is_megabytes():
    assert sum(len(d.text) for d in standard_library_documents()) > 5e6


def test_a_folder_without_source_is_an_error_that_names_it(tmp_path):
    with pytest.raises(RuntimeError, match=rf"{tmp_path} holds no Python source.*--corpus"):
        standard_library_documents(tmp_path)


def test_split_is_disjoint_complete_and_stable_when_a_file_is_added(tmp_path):
    for i in range(200):
        (tmp_path / f"m{i}.py").write_text(f"x = {i}")
    before = split_documents(standard_library_documents(tmp_path))
    names = [{d.name for d in part} for part in before]
    assert names[0].isdisjoint(names[1])
    assert len(names[0] | names[1]) == 200
    # One in 20 by hash: 10 of 200 expected, standard deviation 3.1.
    assert 1 <= len(names[1]) <= 22
    (tmp_path / "a_new_first_file.py").write_text("y = 1")
    after = split_documents(standard_library_documents(tmp_path))
    assert names[1] <= {d.name for d in after[1]}
    assert names[0] <= {d.name for d in after[0]}


def test_digest_distinguishes_names_texts_and_boundaries(tmp_path):
    digests = set()
    for index, files in enumerate(
        ({"a.py": "xy"}, {"b.py": "xy"}, {"a.py": "xz"}, {"a.py": "x", "y.py": "y"})
    ):
        folder = tmp_path / str(index)
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text)
        digests.add(corpus_digest(standard_library_documents(folder)))
    assert len(digests) == 4
