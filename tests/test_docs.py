"""What the documents point to is there (links, files, commands), their tables of options are the configuration's, and our
own figures are those of the committed results.
"""

import dataclasses
import json
import re
import typing
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

from foundry_fp8.config import accept

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "trainers").glob("*.md"),
        *(ROOT / "foundry_fp8").rglob("*.md"),
    ]
)


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_its_links_lead_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    assert [t for t in targets if t and not (document.parent / t).exists()] == []


def expanded(name):
    """``a{b,c}`` as a shell reads it."""
    match = re.search(r"\{(.*?)\}", name)
    if match is None:
        return [name]
    return [e for choice in match[1].split(",") for e in expanded(name.replace(match[0], choice, 1))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_files_it_names_are_there(document):
    """From the root, or (in backticks too) from the package."""
    packages = "|".join(p.name for p in (ROOT / "foundry_fp8").iterdir() if p.is_dir())
    named = re.findall(
        rf"`((?:foundry_fp8|tests|benchmarks|docs|{packages})/[\w./*{{}},-]+)`", document.read_text()
    )
    paths = [path.rstrip("/") for name in named for path in expanded(name)]
    assert [p for p in paths if not [*ROOT.glob(p), *(ROOT / "foundry_fp8").glob(p)]] == []


def test_the_makes_that_documents_and_ci_name_are_targets():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    ci = ROOT / ".github" / "workflows" / "ci.yml"
    named = {
        target
        for d in [*DOCUMENTS, ci]
        for target in re.findall(r"(?:`|: |    )make ([a-z-]+)", d.read_text())
    }
    assert {"demo", "test", "test-all", "release"} <= named
    assert named <= targets


def test_the_paths_that_workflows_name_are_there():
    """pytest ends before the first test where it is given one that is not."""
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        runs = [
            step["run"]
            for job in yaml.safe_load(workflow.read_text())["jobs"].values()
            for step in job["steps"]
            if "run" in step
        ]
        named = {
            word
            for run in runs
            for word in re.findall(r"(?<![\w./-])(?:tests|benchmarks|docs|\.ci)/[\w./-]+", run)
        }
        assert named
        assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_tier_runs_at_night_on_both_stacks():
    """The two targets that leave no test out."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"].values()
    nightly = {step.get("run") for job in jobs if "schedule" in job.get("if", "") for step in job["steps"]}
    whole = set(
        re.findall(r"^([\w-]+):.*\n\t.*\$\(PYTEST\) \$\(ARGS\)$", (ROOT / "Makefile").read_text(), re.M)
    )
    assert whole == {"test-all", "test-modern-all"}
    assert {f"make {target}" for target in whole} <= nightly


def table(text, first):
    """Cells, row by row, of the table whose header begins with the cell ``first``, without header and rule; backticks taken off."""
    lines = text[text.index(f"| {first} |") :].split("\n\n", 1)[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] for line in lines]
    assert cells
    return cells


NAMED = [e for kind in ("algorithms", "callbacks") for e in entry_points(group=f"llmfoundry_{kind}")]
OURS = [e for e in NAMED if e.value.startswith("foundry_fp8.")]


def card_of(entry):
    return (ROOT / entry.value.split(":")[0].replace(".", "/") / "README.md").read_text()


SECTIONS = ["What it does", "How to use it", "Options", "How it works", "Evidence", "Limits", "Source"]


@pytest.mark.parametrize("entry", OURS, ids=lambda e: e.name)
def test_a_card_has_seven_sections_in_one_order_on_one_page(entry):
    card = card_of(entry)
    prose = re.sub(r"^```.*?^```", "", card, flags=re.M | re.S)  # where a comment may begin with #
    assert card.startswith(f"# `{entry.name}`: ")
    assert re.findall(r"^##+ .*$", prose, re.M) == [f"## {i}. {name}" for i, name in enumerate(SECTIONS, 1)]
    assert len(card.splitlines()) <= 90
    assert [line for line in card.splitlines() if len(line) > 140] == []


@pytest.mark.parametrize("entry", OURS, ids=lambda e: e.name)
def test_options_and_defaults_of_a_card_are_those_of_its_configuration(entry):
    """One by one: some defaults contradict each other as a whole, and some are written as ``100ba``."""
    section = re.split(r"^## \d.*$", card_of(entry), flags=re.M)[3]
    first = next(word for word in ("key", "option", "Option") if f"| {word} |" in section)
    config = entry.load()().config
    plain = {
        f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(config)
    }
    rows = {row[0]: row[1] for row in table(section, first)}
    assert list(rows) == list(plain)
    hints = typing.get_type_hints(type(config), include_extras=True)
    words = {"all": plain.get("roles"), "none, required": None}  # said in words
    for name, written in rows.items():
        value = words[written] if written in words else accept(hints[name], yaml.safe_load(written), name)
        default = plain[name]
        assert (list(value) if isinstance(value, tuple) else value) == (
            list(default) if isinstance(default, tuple) else default
        ), name


MEASURED = (ROOT / "docs/results.md").read_text()
RESULTS = ROOT / "benchmarks/results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def as_written(value, cell):
    """``value`` to as many digits as ``cell`` has, written as it is."""
    sign = "+" if cell.startswith("+") else ""
    if "e" in cell:
        return f"{value:.{len(cell.split('e')[0].partition('.')[2])}e}".replace("e-0", "e-").replace(
            "e+0", "e+"
        )
    return f"{value:{sign}.{len(cell.rstrip(' %').partition('.')[2])}f}" + (
        " %" if cell.endswith("%") else ""
    )


def held(cells, values):
    assert len(cells) == len(values)
    assert cells == [
        cell if value is None else as_written(value, cell) for cell, value in zip(cells, values, strict=True)
    ]


def test_the_table_of_steps_on_an_h200():
    found = result("h200_2026-11-27")
    recipes = ("delayed", "current", "block")

    def steps(group, suffix="", what=None):
        rows = [row for row in found[group] if what in (None, row["what"])]
        by_name = {row["variant"]: f"{row['speedup']:.2f}" for row in rows}
        return [by_name.get(name + suffix, "") for name in recipes]

    from_yaml = steps("hf")
    expected = [
        from_yaml,
        steps("hf", " fuse: false"),
        steps("block"),
        *(steps("fog", what=f"fog-1.5b {tokens}") for tokens in (4096, 16384)),
    ]
    assert [cells[2:] for cells in table(MEASURED, "model, tokens")] == expected
    peer = next(row["speedup"] for row in found["hf"] if row["variant"] == "torchao tensorwise compiled")
    for page in (ROOT / "README.md", ROOT / "docs/index.md"):
        said = re.sub(r"\s+", " ", page.read_text())
        assert f"step {from_yaml[1]} times as fast as in BF16" in said
        # No other speed stands on a first page: a YAML gets none that is higher.
        assert set(re.findall(r"\b1\.\d\d\b", said.split("```")[0])) <= {*from_yaml, f"{peer:.2f}"}


def test_the_table_of_memory():
    found = result("memory_cpu_2026-11-21")["tables"]
    names = {
        "planner checkpointing": "planner, checkpoints only",
        "planner checkpointing and compression": "planner",
    }
    steps = {
        ", 1/4 above": ", a quarter above",
        ", 1/2 above": ", half above",
        ", at full's peak": " at full's peak",
    }

    def short(case):
        case = case.split(":")[0].replace("fp8", "FP8")
        for long, name in names.items():
            for step, said in steps.items():
                if case == long + step:
                    return (name + said).replace("only at", "only, at")
        return case

    rows = table(MEASURED, "case | demo: peak MiB")
    assert [row[0] for row in rows] == [short(row["case"]) for row in found["demo"]]
    for (_, *cells), demo, llama in zip(rows, found["demo"], found["llama"], strict=True):
        peaks = [
            demo["peak_bytes"] / 2**20,
            demo["time_ratio"],
            llama["peak_bytes"] / 2**20,
            llama["time_ratio"],
        ]
        held(cells, peaks)


def test_the_speeds_over_two_networks():
    """Ratios of modes of one run, at 1 and at 10 Gbit/s."""
    runs = [
        {row["mode"]: row for row in result(f"slow_network_{gbit}gbit_2026-11-26")["results"]}
        for gbit in (1, 10)
    ]
    names = {"float32": "fp32", "torch's `bf16_compress_hook": "bf16 (torch bf16_compress_hook)"}
    renamed = {**names, "the default": "default"}
    for mode, *cells in table(
        (ROOT / "docs/communication.md").read_text(), "gradients | 1 Gbit/s: x float32"
    ):
        name = renamed.get(mode, mode.replace(", error", " + error"))
        ratios = [
            rows[peer]["step_seconds"] / rows[name]["step_seconds"]
            for rows in runs
            for peer in names.values()
        ]
        held(cells, [*ratios, runs[0][name]["link_bytes_per_step"] / 1e6])


def test_the_table_of_accumulation():
    rows = {(r["data"], r["k"]): r for r in result("accumulation_2026-11-22")["rows"]}
    data = ""
    for name, k, *cells in table((ROOT / "docs/numerics.md").read_text(), "data"):
        data = name or data
        row = rows[data, int(k)]
        low = [None if row[x] is None else 100 * row[x] for x in ("fast_low", "precise_low")]
        assert [bool(cell) for cell in cells[3:]] == [x is not None for x in low]
        held(cells, [row["quantising"], row["fast"], row["precise"], *low])


def test_the_tables_of_fog():
    runs = {
        (r["task"], r["setting"], r["variant"], r["precision"]): r
        for study in ("default", "others", "minimal")
        for r in result(f"fog_stability_{study}")["runs"]
        if study != "minimal" or r["setting"] == "outlier"
    }
    text = (ROOT / "docs/fog.md").read_text()
    rows = table(text, "setting | variant")
    rows += [["outlier", *row] for row in table(text.split("A provoked outlier")[1], "variant")]
    assert len(rows) == 11 + 3
    for setting, variant, *cells in rows:
        full = runs["source", setting, variant, "fp32"]
        losses = [
            runs["source", setting, variant, precision]["held_out"] for precision in ("fp32", "fp8", "fp8dpa")
        ]
        logit, bound = re.fullmatch(r"(\S+) \((\S+)\)", cells.pop()).groups()
        seen = max(max(m["logit"]) for m in full["measured"])
        held([*cells, logit], [*losses, max(full["measured"][-1]["kurtosis_sample"]), seen])
        assert bound == ("none" if full["logit_bound"] is None else as_written(full["logit_bound"], bound))


def test_the_table_of_attentions_error():
    """In %, and in brackets with the logits' gradients in bfloat16."""
    found = result("attention_error")
    length, sink, outliers = (found[name] for name in ("length", "sink", "outliers"))
    cases = [
        length["256"],
        length["16384"],
        sink["16"],
        *(outliers[x] for x in ("8 x", "64 x", "64 x, QK norm")),
    ]
    rows = table((ROOT / "docs/attention.md").read_text(), "case | O")
    for (_, *cells), case in zip(rows, cases, strict=True):
        fp8, bfloat16 = (case[f"Transformer Engine's, {scores}"] for scores in ("fp8", "bfloat16"))
        for cell, name in zip(cells, ("o", "dq", "dk", "dv"), strict=True):
            brackets = f" ({100 * bfloat16[name]:.1f})" if name in ("dq", "dk") else ""
            assert cell == f"{100 * fp8[name]:.1f}{brackets}"


def test_the_tables_of_the_demo():
    """What % is computed from is in the committed table, to four digits."""
    found = {name: row for name, *row in table((RESULTS / "demo_cpu_2026-11-22.md").read_text(), "run")}
    once, seeds = MEASURED.split("## FP8 trains like float32")[1].split("for N = 17, 18, 19")
    for name, *row in table(once, "run | final loss"):
        assert row == found[name]
    losses = {name: [[float(x) for x in cell.split(", ")] for cell in row]
              for name, *row in table((RESULTS / "demo_cpu_2026-11-21.md").read_text(), "run | seed 17")}  # fmt: skip
    for name, *row in table(seeds, "run | 17"):
        final, held_out = (
            [
                100 * (ours[i] / theirs[i] - 1)
                for ours, theirs in zip(losses[name], losses["float32"], strict=True)
            ]
            for i in (0, 1)
        )
        held(row, [*final, sum(final) / 3, sum(held_out) / 3])


def test_the_figures_in_sentences():
    losses = result("memory_losses_cpu_2026-11-21")["train"]["relative_change"]
    int8, e4m3, noise = ([f"{100 * x:+.2f}" for x in losses[kind]] for kind in ("int8", "e4m3", "noise"))
    coat = {row["case"]: row["reduction"] for row in result("memory_coat_cpu_2026-11-21")["coat"]}
    memory = result("memory_cpu_2026-11-21")["tables"]
    (demo, demo_alone), (llama, llama_alone) = (
        [
            next(r["recompute_of_full"] for r in rows if r["case"] == f"planner {kind}, at full's peak")
            for kind in ("checkpointing and compression", "checkpointing")
        ]
        for rows in (memory["demo"], memory["llama"])
    )
    stated = [
        row["predicted_bytes"] / row["peak_bytes"] - 1
        for rows in memory.values()
        for row in rows
        if row["predicted_bytes"]
    ]
    assert max(abs(x) for x in stated) < 0.023
    slow = {row["mode"]: row["loss_last_20"] for row in result("slow_network_losses_2026-11-21")["results"]}
    changes = [
        100 * (slow[mode] / slow["fp32"] - 1)
        for mode in ("int8", "e4m3 + error feedback", "int4 + error feedback")
    ]
    assert abs(changes[0]) < 0.001
    card = (ROOT / "foundry_fp8/algorithms/activation_compression/README.md").read_text()
    for text, sentence in [
        (MEASURED, "Predicted peaks are within 2.3 % of measured ones."),
        (MEASURED, f"int8 {int8[0]}, {int8[1]} and {int8[2]} %, mean {100 * sum(losses['int8']) / 3:+.2f} %"),
        (MEASURED, f"e4m3 {e4m3[0]}, {e4m3[1]} and {e4m3[2]} %, mean {100 * sum(losses['e4m3']) / 3:+.2f} %"),
        (MEASURED, f"moves it by {noise[0]}, {noise[1]} and {noise[2]} %"),
        (MEASURED, f"by at most {100 * max(abs(x) for x in losses['perturbed']):.3f} %"),
        (MEASURED, f"reduce the peak of a step {coat['int8']:.2f}x, with FP8 linears {coat['fp8 linears, int8']:.2f}x"),
        (card, f"{coat['int8']:.2f} times less than bfloat16 with int8, {coat['fp8 linears, int8']:.2f} times with FP8"),
        (MEASURED, f"a plan adds {demo:.2f} of full's time on the demo model ({demo_alone:.2f} without compression) and {llama:.2f} on the Llama ({llama_alone:.2f})"),
        (MEASURED, f"int8 within 0.001 %, e4m3 {changes[1]:.3f} %, int4 {changes[2]:.2f} %"),
    ]:  # fmt: skip
        assert sentence in " ".join(text.split())
