import json

import pytest

from foundry_fp8.data.corpus import Document
from tests.integrations.test_examples import example

tasks = example("downstream_tasks")
LINES, NAME, TASKS, write_tasks = tasks.LINES, tasks.NAME, tasks.TASKS, tasks.write_tasks

WORDS = ["counter", "handler", "reader", "writer", "buffer", "message", "element", "result_value"]


def document(number):
    """Lines that look alike, with names that come again."""
    lines = [f"import module_{number}"]
    for i in range(60):
        a, b = WORDS[(i + number) % 8], WORDS[(3 * i + number) % 8]
        lines.append(f"{'    ' * (i % 3)}{a} = make_{number}_{i}({b}, {a}) + {b}")
    return Document(name=f"m{number}.py", text="\n".join(lines))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    documents = [document(number) for number in range(6)]
    folder = tmp_path_factory.mktemp("tasks")
    assert write_tasks(folder, documents, 20) == 20
    assert write_tasks(folder / "again", documents, 20) == 20
    for name in TASKS:
        assert (folder / f"{name}.jsonl").read_text() == (folder / "again" / f"{name}.jsonl").read_text()
    found = {name: list(map(json.loads, (folder / f"{name}.jsonl").open())) for name in TASKS}
    return found, [document.text for document in documents]


def test_the_right_line_is_the_one_that_follows_and_the_others_are_of_other_files(questions):
    found, texts = questions
    golds = set()
    for question in found["next_line"]:
        right = question["choices"][question["gold"]]
        (text,) = [text for text in texts if question["query"] + right in text]
        assert LINES[0] <= question["query"].count("\n") <= LINES[1]
        for number, line in enumerate(question["choices"]):
            assert (line in text.split("\n")) is (number == question["gold"])
            assert len(line) - len(line.lstrip()) == len(right) - len(right.lstrip())
        golds.add(question["gold"])
    assert golds == {0, 1, 2, 3}


def test_a_name_to_copy_stands_in_the_context(questions):
    found, texts = questions
    for question in found["copied_name"]:
        assert any(question["context"] + question["continuation"] in text for text in texts)
        before, _, begun = question["context"].rpartition("\n")
        name = NAME.findall(begun + question["continuation"])[-1]
        assert name.endswith(question["continuation"]) and name in NAME.findall(before)


def test_one_of_two_names_is_the_one_that_stood_there(questions):
    found, texts = questions
    for question in found["which_name"]:
        there = [
            any(option + question["continuation"] in text for text in texts)
            for option in question["context_options"]
        ]
        assert there[question["gold"]] and question["context_options"][0] != question["context_options"][1]
    assert {question["gold"] for question in found["which_name"]} == {0, 1}


def test_documents_without_a_name_twice_have_no_questions(tmp_path):
    assert write_tasks(tmp_path, [Document(name="a.py", text="x = 1\n")], 5) == 0
