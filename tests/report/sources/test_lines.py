"""Whatever a line of a log holds, what it costs is that line.

Logs are generated; for longer: ``EXAMPLES=5000 python -m pytest tests/report/sources -k any``.
"""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from foundry_fp8.report.runs import read_run, read_runs
from tests.report.logs import END, batches, header, report_runs, write_log

LOSSES = [5.0, 4.0, 3.0]
DEEP = '{"kind": "batch", "step": 2, "loss": 1, "metrics": ' + '{"a":' * 5000 + "1" + "}" * 5001
DAMAGED = {
    "a number of 5,000 digits": '{"kind": "batch", "step": 2, "loss": ' + "9" * 5000 + "}",
    "such a step": '{"kind": "batch", "loss": 2, "step": ' + "9" * 5000 + "}",
    "one beyond float": '{"kind": "batch", "step": 2, "loss": 1e999}',
    "a step beyond int64": '{"kind": "batch", "step": 99999999999999999999999, "loss": 2}',
    "a step that is none": '{"kind": "batch", "step": true, "loss": 2}',
    "half a step": '{"kind": "batch", "step": 1.5, "loss": 2}',
    "a loss in words": '{"kind": "batch", "step": 2, "loss": "two"}',
    "a list of losses": '{"kind": "batch", "step": 2, "loss": [2]}',
    "metrics in a list": '{"kind": "batch", "step": 2, "loss": 2, "metrics": [1]}',
    "deep": DEEP,
    "a list": '[{"kind": "batch"}]',
    "a kind that is none": '{"kind": ["batch"], "step": 2}',
    "a configuration that is a list": '{"kind": "hparams", "values": [1]}',
    "a header of a list": '{"kind": "header", "hyperparameters": [1]}',
    "a header at a step that is none": '{"kind": "header", "step": [1]}',
    "a table of numbers": '{"kind": "table", "name": "t", "columns": 3, "rows": 4}',
    "a row that is none": '{"kind": "table", "name": "t", "columns": ["a"], "rows": [4]}',
    "zeros": "\0" * 400,
    "a stump": '{"kind": "batch", "step": 2, "lo',
}


def log(tmp_path, *lines):
    path = tmp_path / "run_log.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_line_costs_itself_and_is_named(tmp_path, damaged):
    run = read_run(
        log(tmp_path, header(recipe="block"), *batches(LOSSES), damaged, *batches([2.0], start=3), END)
    )
    assert run.step.tolist() == [1, 2, 3, 4] and run.loss.tolist() == [5.0, 4.0, 3.0, 2.0]
    assert run.problems == ["1 of 7 lines cannot be read (line 5); they are left out."]
    assert run.recipe == "block"


def test_a_new_header_behind_a_stump_counts(tmp_path):
    stump = '{"kind": "batch", "step": 4, "loss": 9.0, "met'
    resumed = stump + json.dumps(header("again", "block", step=2))
    run = read_run(
        log(tmp_path, header(recipe="block"), *batches(LOSSES), resumed, *batches([2.0], start=2), END)
    )
    assert (run.name, run.loss.tolist()) == ("again", [5.0, 4.0, 2.0])
    assert run.problems == ["1 of 7 lines cannot be read (line 5); they are left out."]


def test_two_whole_lines_without_a_break_are_two(tmp_path):
    first, second = (json.dumps(line) for line in batches([2.0, 1.0], start=3))
    run = read_run(log(tmp_path, header(), *batches(LOSSES), first + second, END))
    assert run.loss.tolist() == [5.0, 4.0, 3.0, 2.0, 1.0] and run.problems == []


def test_a_header_with_wrong_types_costs_those_fields(tmp_path):
    head = header("x", "block") | {
        "world_size": "many",
        "nodes": [],
        "parameters": "7B",
        "versions": ["torch"],
    }
    head["hyperparameters"]["fp8"] |= {
        "rows": [3, {"name": "up", "count": "x", "shape": 4}],
        "attention": 7,
        "total": {},
    }
    path = log(tmp_path, head, *batches(LOSSES), END)
    run = read_run(path)
    assert (run.devices, run.nodes, run.recipe, run.loss.tolist()) == (1, 1, "block", LOSSES)
    assert run.problems == [
        "Its header is not understood in world_size, nodes, parameters, versions, hyperparameters.fp8.total: left out."
    ]
    assert "up" in report_runs([path], tmp_path / "out", console=Console(quiet=True), title="t").read_text()


@pytest.mark.parametrize("name", ["run_log.jsonl", "trainer_state.json", "runs.csv"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    path = log(tmp_path, header(), *batches(LOSSES), END)
    if name == "trainer_state.json":
        path = tmp_path / name
        path.write_text(
            json.dumps({"log_history": [{"step": i + 1, "loss": x} for i, x in enumerate(LOSSES)]})
        )
    elif name == "runs.csv":
        path = tmp_path / name
        path.write_text('"step", "loss"\n1,5\n2,4\n3,3\n')
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_run(path).loss.tolist() == LOSSES


@pytest.mark.parametrize("kind", ["log", "csv", "trainer"])
@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([1, 2, 3, 4, 3, 4, 5], [0, 1, 4, 5, 6]),  # resumed at 2
        ([1, 2, 3, 1, 2], [3, 4]),  # fit(reset_time=True), and stopped earlier
        ([1, 2, 2, 3], [0, 2, 3]),
        ([3, 2, 1], [2, 1, 0]),  # sorted the other way
    ],
)
def test_the_later_of_a_step_that_was_logged_twice_counts_and_it_is_said_once(tmp_path, kind, steps, kept):
    losses = [float(10 - i) for i in range(len(steps))]
    if kind == "log":
        lines = [
            {"kind": "batch", "step": s, "loss": x, "metrics": {"m": x}}
            for s, x in zip(steps, losses, strict=True)
        ]
        path = log(tmp_path, header(), *lines, END)
    elif kind == "csv":
        path = tmp_path / "runs.csv"
        path.write_text(
            "step,loss,m\n" + "".join(f"{s},{x},{x}\n" for s, x in zip(steps, losses, strict=True))
        )
    else:
        path = tmp_path / "trainer_state.json"
        history = [{"step": s, "loss": x, "m": x} for s, x in zip(steps, losses, strict=True)]
        path.write_text(json.dumps({"log_history": history}))
    run = read_run(path)
    assert run.step.tolist() == [steps[i] for i in kept]
    assert run.loss.tolist() == run.metrics["m"].values.tolist() == [losses[i] for i in kept]
    assert sum("logged again" in problem for problem in run.problems) == (len(kept) < len(steps))


def test_a_bad_line_of_a_csv_costs_that_line(tmp_path):
    path = tmp_path / "runs.csv"
    bad = [
        "2,abc,1",
        '3,"4.0',
        "x,1,1",
        "4,1,1,7",
        f"5,{'9' * 5000},1",
        "6",
        "7.5,1,1",
        f'8,"{"a" * 200_000}",1',
    ]
    path.write_text("step,loss,m\n1,5.0,1\n" + "\n".join(bad) + '\n9,4.0,oops\n10,"nan",1\n11,,1\n12,3.')
    run = read_run(path)
    assert run.step.tolist() == [1, 9, 10, 11]
    np.testing.assert_array_equal(run.loss, [5.0, 4.0, math.nan, math.nan])
    assert run.has_loss.tolist() == [True, True, True, False]
    assert run.problems == [
        "9 of 13 lines cannot be read (line 3, 4, 5, 6, 7, ...); they are left out.",
        "The loss is not finite in 1 steps, first in step 10.",
    ]


def test_a_bad_entry_of_trainers_history_costs_that_entry(tmp_path):
    path = tmp_path / "trainer_state.json"
    good = '{"step": 1, "loss": 3.0}, {"step": 2, "loss": "NaN"}, {"step": 5, "loss": 2.0}'
    bad = f'7, {{"step": 3, "loss": {"9" * 5000}}}, {{"step": [], "loss": 1}}, {{"loss": 1}}'
    path.write_text(f'{{"log_history": [{good}, {bad}], "max_steps": 5, "global_step": 5}}')
    run = read_run(path)
    np.testing.assert_array_equal(run.loss, [3.0, math.nan, 2.0])
    assert "4 of 7 lines cannot be read (line 4, 5, 6, 7); they are left out." in run.problems
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"is no trainer_state\.json"):
        read_run(path)


SAID = (
    "OSError('[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [/bold]')"
)
HOSTILE = "=1+1|<script>alert(1)</script>\x1b[31m\ud800\n# [x](y) `z`"


def test_text_of_others_is_shown_as_text(tmp_path):
    lines = [header(HOSTILE, "block"), *batches(LOSSES * 3), {"kind": "end", "status": f"stopped: {SAID}"}]
    lines.append({"kind": "table", "name": HOSTILE, "columns": [HOSTILE], "rows": [[HOSTILE]]})
    paths = [write_log(tmp_path / "a" / "run_log.jsonl", lines), write_log(tmp_path / "b" / "run_log.jsonl", [header("bf16"), *batches(LOSSES * 3), END])]  # fmt: skip
    console = Console(record=True, width=400, force_terminal=True)
    page = report_runs(paths, tmp_path / "out", console=console, title="t")
    shown = console.export_text(clear=False)
    assert SAID in shown and "=1+1|<script>alert(1)</script>\ufffd[31m\ufffd # [x](y) `z`" in shown
    assert "\x1b[31m" not in console.export_text(styles=True)
    for file in page.parent.glob("*.*"):
        if file.suffix != ".png":
            text = file.read_bytes().decode()
            assert "\x1b" not in text
            if file.suffix in (".html", ".md"):
                assert "<script" not in text and "&lt;script" in text
    table = (page.parent / "comparison.md").read_text()
    assert "\\[x\\](y) \\`z\\`" in table and table.count("\n| ") == 4
    cells = (page.parent / "comparison.csv").read_text()
    assert "'=1+1|" in cells and "\n=" not in cells and ",=" not in cells


def test_no_cell_of_the_csv_is_a_formula(tmp_path):
    names = ["=1", "+1", "-1", "@x", " =2", "\t=3"]
    paths = [
        write_log(tmp_path / str(i) / "run_log.jsonl", [header(name, "block"), *batches(LOSSES), END])
        for i, name in enumerate(names)
    ]
    page = report_runs(paths, tmp_path / "out", console=Console(quiet=True), title="t")
    _, *rows = (page.parent / "comparison.csv").read_text().splitlines()
    assert len(rows) == len(names) and all(row.startswith("'") for row in rows)


TEXTS = st.text(st.characters(codec=None, categories=None), max_size=12) | st.sampled_from(
    ["nan", "inf", "-Infinity", "[/x]", "<b>", "=1", "\ud800", "\x1b[0m", "batch", "header", "9" * 5000]
)
NUMBERS = (
    st.floats() | st.integers() | st.sampled_from([10**400, 1e308, -1e308, 1e-320, 2**53, 2**63, 0, -1, True])
)
VALUES = st.recursive(
    st.none() | TEXTS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["step", "loss", "seconds", "tokens", "metrics", "values", "rows", "columns", "name", "status", "versions",
     "hyperparameters", "world_size", "nodes", "parameters", "run_name", "precision", "host_peak_bytes", "format_version"]
)  # fmt: skip
METRICS = st.dictionaries(
    st.sampled_from(["mfu/mfu", "mfu/hfu", "kurtosis_token/residual/layer_000", "fp8/sqnr_db/x/worst", "guard/alarms",
                     "memory/peak_reserved_mem", "metrics/a/InContextLearningLMAccuracy", "metrics/eval/CrossEntropy"]),
    VALUES, max_size=4,
)  # fmt: skip
FP8 = st.dictionaries(
    st.sampled_from(["recipe", "backend", "rows", "attention", "total", "converted_share"]), VALUES
)
LINES = st.dictionaries(KEYS, VALUES, max_size=6) | st.fixed_dictionaries({"step": VALUES}, optional={"loss": VALUES, "metrics": METRICS})  # fmt: skip
KINDS = st.sampled_from(["batch", "batch", "header", "eval", "metrics", "hparams", "table", "end", "other"])
ANY = st.builds(lambda kind, line: {"kind": kind, **line}, KINDS, LINES) | st.builds(
    lambda fp8: {"kind": "hparams", "values": {"fp8": fp8, "model": fp8}}, FP8
)
TABLE = {"kind": "table", "name": "guard_events", "columns": ["a"], "rows": [["x"], [1, 2, 3, 4, 5], ["nan", [], {}, 0, 1]]}  # fmt: skip
sampled = pytest.mark.parametrize("examples", [3, pytest.param(12, marks=pytest.mark.full)])


def drawn(examples):
    return settings(max_examples=int(os.environ.get("EXAMPLES", examples)), deadline=None)


@sampled
def test_any_log_makes_a_report_or_a_sentence(tmp_path, examples):
    @drawn(examples)
    @given(st.lists(ANY | st.binary(max_size=40), min_size=1, max_size=6), st.integers(0, 40))
    @example([TABLE], 0)
    @example([{"kind": "batch", "step": 5, "loss": 3.4e38}, {"kind": "batch", "step": 6, "loss": -3.4e38}], 0)
    @example([{"kind": "header", "world_size": 2**30, "nodes": 5}], 0)
    def holds(lines, cut):
        a_report_or_a_sentence(tmp_path, lines, cut)

    holds()


def a_report_or_a_sentence(tmp_path, lines, cut):
    """With a whole run before it, it is read; what it does to the figures and tables, none may fail."""
    wild = []
    for line in lines:
        data = line if isinstance(line, bytes) else json.dumps(line).encode()
        wild.append(data.replace(b"\r", b"").replace(b"\n", b""))
    path = tmp_path / "a" / "run_log.jsonl"
    write_log(path, [header("fp8", "block"), *batches(LOSSES * 4)])
    path.write_bytes(path.read_bytes() + b"\n".join(wild)[: -cut or None])
    other = write_log(tmp_path / "b" / "run_log.jsonl", [header("bf16"), *batches(LOSSES * 4), END])
    try:
        runs = read_runs([path, other])
    except ValueError as error:
        assert "newer foundry-fp8" in str(error)
        return
    for run in runs:
        assert (np.diff(run.step) > 0).all()
        json.dumps(run.header["hyperparameters"], ensure_ascii=False).encode()
    page = report_runs([path, other], tmp_path / "out", console=Console(record=True, width=200), title="t")
    json.loads((page.parent / "comparison.json").read_text(), parse_constant=lambda text: pytest.fail(text))


@sampled
def test_any_csv_keeps_its_good_lines(tmp_path, examples):
    @drawn(examples)
    @given(
        st.lists(st.lists(TEXTS | NUMBERS.map(str), max_size=5), max_size=5), st.sampled_from(["", "\ufeff"])
    )
    def holds(lines, mark):
        keeps_its_good_lines(tmp_path, lines, mark)

    holds()


def keeps_its_good_lines(tmp_path, lines, mark):
    path = tmp_path / "runs.csv"
    wild = [",".join(cells).replace("\n", " ").replace("\r", " ").replace("\0", " ") for cells in lines]
    wild = [" ".join(line.splitlines()) for line in wild]
    text = "\n".join([f"{mark}step,loss,m,devices", "1,2.5,1,1", *wild])
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    run = read_runs([path])[0]
    assert len(run.step) >= 1 and (np.diff(run.step) > 0).all()
    report_runs([path], tmp_path / "out", console=Console(quiet=True), title="t")


ENTRY = st.dictionaries(
    st.sampled_from(["step", "loss", "epoch", "eval_loss", "grad_norm", "num_input_tokens_seen", "learning_rate", "fp8/x"]), VALUES, max_size=5,
)  # fmt: skip
STATE = st.dictionaries(
    st.sampled_from(["stateful_callbacks", "global_step", "max_steps", "log_history", "epoch"]),
    VALUES,
    max_size=4,
)


@sampled
def test_any_state_of_trainer_makes_a_report_or_a_sentence(tmp_path, examples):
    @drawn(examples)
    @given(st.lists(ENTRY | VALUES, max_size=5), STATE, VALUES)
    def holds(entries, state, asked):
        a_state_makes_a_report_or_a_sentence(tmp_path, entries, state, asked)

    holds()


def a_state_makes_a_report_or_a_sentence(tmp_path, entries, state, asked):
    whole = [{"step": step, "loss": 3.0} for step in (1, 2)]
    state = {
        "stateful_callbacks": {"FP8Callback": {"args": asked}},
        "log_history": [*whole, *entries],
        **state,
    }
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state))
    try:
        run = read_run(path)
    except ValueError as error:
        assert "trainer_state.json" in str(error)
        return
    assert len(run.step) >= 1 and (np.diff(run.step) > 0).all()
    report_runs([path], tmp_path / "out", console=Console(quiet=True), title="t")
