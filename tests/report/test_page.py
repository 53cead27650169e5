import csv
import html
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest
from rich.console import Console

from foundry_fp8.report.comparison import compare
from foundry_fp8.report.figures import FIGURES
from foundry_fp8.report.loss_curves import smooth
from foundry_fp8.report.runs import read_runs
from tests.report.logs import END, batches, curve, header, monitored, report_runs, write_log


def report(tmp_path, *logs):
    paths = [write_log(tmp_path / str(i) / "run_log.jsonl", lines) for i, lines in enumerate(logs)]
    console = Console(record=True, width=120)
    page = report_runs(paths, tmp_path / "report", console=console, title="A <title>")
    return page, console.export_text()


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Three runs, everything logged; the third diverges and its log is cut."""
    diverged = [*curve(100, 2)[:70], 9.0, 40.0, math.nan, math.nan]
    return report(
        tmp_path_factory.mktemp("full"),
        [header("bf16", config={"seed": 1}), *batches(curve(), metrics=monitored), END],
        [
            header("fp8-delayed", "delayed", config={"seed": 2}),
            *batches(curve(100, 1), metrics=monitored),
            END,
        ],
        [header("fp8-mxfp8", "mxfp8"), *batches(diverged, 150, metrics=monitored)],
    )


def test_every_figure_is_in_the_page_and_beside_it(full):
    page, _ = full
    text = page.read_text()
    drawn = {spec.name for spec in FIGURES} - {"sizes", "tasks"}  # several models, evaluations: below
    assert {path.stem for path in page.parent.glob("*.png")} == drawn
    shown = re.findall(
        r'<section id="([\w-]+)">\s*<h2>[^<]*</h2>\s*<figure>\s*<div class="chart" id="chart-\1"><svg viewBox="0 0 ',
        text,
    )
    assert set(shown) == drawn and len(shown) == text.count("<svg")


def test_the_table_is_also_written_as_csv_markdown_and_json(full):
    folder = full[0].parent
    lines = list(csv.DictReader((folder / "comparison.csv").open()))
    found = json.loads((folder / "comparison.json").read_text())
    assert (
        [line["run"] for line in lines]
        == [run["run"] for run in found["runs"]]
        == ["bf16", "fp8-delayed", "fp8-mxfp8"]
    )
    assert float(lines[1]["percent_loss_higher"]) == found["runs"][1]["percent_loss_higher"]
    assert found["runs"][0]["percent_faster"] is None and found["runs"][2]["problems"]
    text = (folder / "comparison.md").read_text()
    assert text.startswith(found["verdict"]) and "| bf16 | amp_bf16 |" in text


def charts(page):
    """The figures of a page, by name, drawn again from its logs."""
    rows = compare(read_runs(sorted(page.parents[1].glob("*/run_log.jsonl"))))
    return {spec.name: figure for spec in FIGURES if (figure := spec.draw(rows)) is not None}


def svg(page, name):
    """What the page shows of a figure."""
    return re.search(rf'id="chart-{name}">(.*?</svg>)', page.read_text(), re.S)[1]


def texts(page, name):
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg(page, name))]


def named(axes):
    """Lines by the name of their run."""
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def test_lines_have_the_colour_of_their_precision_and_runs_of_one_their_own_dash(tmp_path):
    logs = [
        [header(f"{recipe or 'bf16'}-{seed}", recipe), *batches(curve(30, seed)), END]
        for recipe in (None, "delayed", "current", "mxfp8")
        for seed in range(3)
    ]
    page, _ = report(tmp_path, *logs)
    lines = named(charts(page)["loss"].axes[0])
    assert len(lines) == 12
    looks = {name: (line.get_color(), line.get_marker()) for name, line in lines.items()}
    assert len(set(looks.values())) == 12 and len({colour for colour, _ in looks.values()}) == 4
    assert len({looks[f"delayed-{seed}"][0] for seed in range(3)}) == 1
    # In the page the same, and each run of a precision has a dash of its own.
    strokes = re.findall(r'style="fill: none;([^"]*stroke-width: 1.4[^"]*)"', svg(page, "loss"))
    pens = {tuple(re.findall(r"stroke(?:-dasharray)?: ([#\w.,]+)", stroke)) for stroke in strokes}
    assert len(pens) == 12 and {pen[-1] for pen in pens} == {colour.lower() for colour, _ in looks.values()}
    assert set(lines) <= set(texts(page, "loss"))


def test_the_curves_are_the_means_of_what_was_logged(tmp_path):
    """Each step, the mean over 2 % of the steps, and how much higher that is than the baseline's, in %."""
    losses = [curve(200, 0), [*curve(150, 1), math.nan, math.inf]]
    page, _ = report(
        tmp_path, [header("bf16"), *batches(losses[0]), END], [header("fp8", "current"), *batches(losses[1]), END]
    )  # fmt: skip
    above, below = charts(page)["loss"].axes

    def mean(values, step, window):
        return np.mean(values[max(0, step - window) : step])

    smoothed = [
        [mean(values, step, window) for step in range(1, len(values) + 1)]
        for values, window in zip(losses, (4, 3), strict=True)
    ]
    for name, expected in zip(("bf16", "fp8"), smoothed, strict=True):
        line = named(above)[name]
        assert line.get_xdata().tolist() == list(range(1, len(expected) + 1))
        np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-12)
    thin = [line for line in above.lines if line.get_linewidth() < 1]
    assert [line.get_ydata().tolist() for line in thin] == [
        pytest.approx(values, nan_ok=True) for values in losses
    ]
    crosses = next(line for line in above.lines if line.get_marker() == "x")
    assert crosses.get_xdata().tolist() == [151, 152]
    # Both smoothed over 2 % of the steps that both have.
    baseline = [mean(losses[0], step, 3) for step in range(1, 153)]
    percent = [100 * (here / there - 1) for here, there in zip(smoothed[1], baseline, strict=True)]
    np.testing.assert_allclose(below.lines[0].get_ydata(), percent, rtol=1e-9, atol=1e-9)


def test_a_run_may_have_any_name(tmp_path):
    names, charted = ["_lr", "$x_1$ & <b>"], ("mfu/", "kurtosis", "memory/")

    def metrics(step):
        return {key: value for key, value in monitored(step).items() if key.startswith(charted)}

    page, _ = report(tmp_path, *([header(name), *batches(curve(20), metrics=metrics), END] for name in names))
    for chart in ("loss", "mfu", "kurtosis", "memory"):
        assert set(names) <= set(texts(page, chart))


def test_what_says_nothing_has_no_panel(tmp_path):
    def same(step):
        return {"mfu/mfu": 0.4, "mfu/hfu": 0.4}

    page, _ = report(tmp_path, [header("a"), *batches(curve(20), metrics=same), END])
    assert [axes.get_title("left") or axes.get_title() for axes in charts(page)["mfu"].axes] == ["MFU (%)"]
    assert [text for text in texts(page, "mfu") if re.search("[A-Za-z]", text)] == ["step", "MFU (%)", "a"]
    page, _ = report(
        tmp_path, [header("a"), *batches(curve(20)), END],
        [header("b", "delayed", backend="emulated"), *batches(curve(20)), END],
    )  # fmt: skip
    assert "speed" not in charts(page) and not (page.parent / "speed.png").exists()
    assert '<p class="verdict">FP8 is fine: loss within the noise of this run (+0.00 %,' in page.read_text()
    assert "1 device" in page.read_text() and "x as fast" not in page.read_text()


def test_tokens_a_second_stand_over_devices_where_runs_differ_in_them(tmp_path):
    logs = [
        [header(f"{n}-{recipe}", recipe, world_size=n), *batches(curve(20), 10 * n), END]
        for n in (8, 16, 32) for recipe in (None, "current")
    ]  # fmt: skip
    page, _ = report(tmp_path, *logs)
    lines = named(charts(page)["speed"].axes[0])
    assert list(lines) == ["1K, high precision", "1K, current"]
    for line in lines.values():
        assert list(line.get_xdata()) == [8, 16, 32]
        np.testing.assert_allclose(line.get_ydata(), 10.0)
    assert set(lines) <= set(texts(page, "speed"))
    assert (page.parent / "speed.png").stat().st_size > 5000


def test_flops_and_mfu_stand_by_model_size_and_precision(tmp_path):
    """Databricks' figures 1 and 2, from logs: means after warm-up, of the run on the most devices, models from small to large."""

    def logging(tflops, mfu):
        warm = {"mfu/tflops_per_device": 1.0, "mfu/mfu": 0.01}
        return lambda step: warm if step <= 4 else {"mfu/tflops_per_device": tflops, "mfu/mfu": mfu}

    logs = [
        [header(f"{size}-{recipe}-{devices}", recipe, parameters=size * 10**9, world_size=devices),
         *batches(curve(40), metrics=logging(tflops * (0.9 if devices == 8 else 1), mfu)), END]
        for size, recipe, devices, tflops, mfu in (
            (7, None, 64, 500, 0.50), (7, "delayed", 64, 750, 0.40), (1, None, 64, 450, 0.45), (1, "delayed", 64, 650, 0.35),
            (1, "delayed", 8, 650, 0.35),
        )
    ]  # fmt: skip
    page, _ = report(tmp_path, *logs)
    tflops, mfu = charts(page)["sizes"].axes
    assert [label.get_text() for label in mfu.get_xticklabels()] == ["1B", "7B"]
    drawn = [
        (
            bars.get_label(),
            [round(bar.get_height(), 6) for bar in bars],
            [round(bar.get_center()[0]) for bar in bars],
        )
        for axes in (tflops, mfu)
        for bars in axes.containers
    ]
    assert drawn == [
        ("high precision", [450.0, 500.0], [0, 1]),
        ("delayed", [650.0, 750.0], [0, 1]),
        ("high precision", [45.0, 50.0], [0, 1]),
        ("delayed", [35.0, 40.0], [0, 1]),
    ]
    assert {"450", "500", "650", "750", "45", "50", "35", "40"} <= set(texts(page, "sizes"))
    assert (page.parent / "sizes.png").stat().st_size > 5000
    found = json.loads((page.parent / "comparison.json").read_text())["runs"]
    assert [(run["run"], run["tflops_per_device"]) for run in found][:2] == [
        ("1-delayed-8", pytest.approx(585.0)),
        ("1-None-64", 450.0),
    ]


def test_scores_of_downstream_tasks_stand_beside_the_loss(tmp_path):
    def evaluated(name, recipe, *scores):
        evals = [
            {"kind": "eval", "step": 20, "label": task, "metrics": {f"metrics/{task}/InContextLearning{kind}Accuracy": value}}
            for (task, kind), value in zip((("line/0-shot", "MultipleChoice"), ("rest/0-shot", "LM")), scores, strict=False)
        ]  # fmt: skip
        return [header(name, recipe), *batches(curve(20)), *evals, END]

    page, terminal = report(
        tmp_path,
        evaluated("bf16", None, 0.5, 0.25),
        evaluated("fp8", "current", 0.48),
        [header("not evaluated", "block"), *batches(curve(20)), END],
    )
    assert "Task score" in terminal
    found = json.loads((page.parent / "comparison.json").read_text())["runs"]
    # The mean is over what all evaluated runs have.
    assert [run["task_score"] for run in found] == [50.0, 48.0, None]
    assert found[0]["tasks"] == {"line/0-shot": 0.5, "rest/0-shot": 0.25}
    axes = charts(page)["tasks"].axes[0]
    tasks = [label.get_text() for label in axes.get_yticklabels()]
    marks = {
        name: {tasks[int(y + 0.5)]: x for x, y in zip(mark.get_xdata(), mark.get_ydata(), strict=True)}
        for name, mark in named(axes).items()
    }
    assert marks == {"bf16": {"line/0-shot": 50.0, "rest/0-shot": 25.0}, "fp8": {"line/0-shot": 48.0}}
    text = " ".join(page.read_text().split())
    assert "<td>fp8</td><td>48.0</td><td>–</td>" in text
    assert (page.parent / "tasks.png").stat().st_size > 5000


def test_the_guards_own_table_of_events_is_its_time_line(tmp_path):
    events = {
        "kind": "table", "name": "guard_events", "step": 30, "columns": ["batch", "unit", "action", "signal", "detail"],
        "rows": [["20", "layer_001", "alarm", "gradient", "FP8 changes it by 90 %"],
                 ["30", "model.layers.2.mlp", "demote", "delayed -> current", ""]],
    }  # fmt: skip

    def of_the_guard(step):
        found = monitored(step).items()
        return {key: value for key, value in found if key.startswith(("fp8_error/", "guard/"))}

    page, _ = report(
        tmp_path, [header("a", "delayed"), *batches(curve(60), metrics=of_the_guard), events, END]
    )
    text = " ".join(page.read_text().split())
    assert "<td>a</td><td>20</td><td>layer_001</td><td>alarm gradient: FP8 changes it by 90 %</td>" in text
    assert "<td>model.layers.2.mlp</td><td>demote delayed -&gt; current</td>" in text
    assert text.count("guard_events") == 0
    axes = charts(page)["fp8-error"].axes[0]
    cells = axes.images[0].get_array()  # blocks by measurements: steps 10, 20, ... 60
    assert cells.shape == (4, 6) and cells[2, 0] == pytest.approx(0.225)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["10", "30", "60"]
    assert axes.get_xticks().tolist() == [0, 2, 5]
    (mark,) = axes.lines
    assert (mark.get_xdata(), mark.get_ydata(), mark.get_marker()) == ([2], [2], "v")
    assert "at most 0.338" in texts(page, "fp8-error")


def test_what_keeps_its_value_is_drawn_in_steps_and_a_single_value_as_a_point(full):
    """A line from one demoted layer at step 50 to none at step 60 would say half a layer at step 55."""
    lines = [line for axes in charts(full[0])["guard"].axes for line in axes.lines]
    assert {tuple(line.get_xdata()) for line in lines} == {(50,), (50, 60)}
    assert {line.get_drawstyle() for line in lines} == {"steps-post"}
    assert all(line.get_marker() in "os^" and line.get_markevery()[0] == 0 for line in lines)


def test_attention_in_fp8_is_distinguished_and_listed(tmp_path):
    head = header("fp8dpa", "delayed")
    head["hyperparameters"]["fp8"]["attention"] = [
        {"name": "blocks.0.attn", "action": "converted", "reason": "delayed, in a FOG attention"},
        {"name": "blocks.1.attn", "action": "skipped", "reason": "head_dim is 64"},
    ]
    plain = header("fp8", "delayed")
    page, console = report(tmp_path, [head, *batches(curve(20)), END], [plain, *batches(curve(20)), END])
    text = " ".join(page.read_text().split())
    assert "<td>delayed, FP8DPA, native</td>" in text and "<td>delayed, native</td>" in text
    assert "delayed, FP8DPA, native" in " ".join(console.split())
    assert text.count("(80.0 % of their elements), and the GEMMs of 1 of 2 attentions.") == 1
    assert "<li>1 in high precision: head_dim is 64</li>" in text
    assert "<td>blocks.0.attn</td><td>1</td><td></td><td>converted: delayed, in a FOG attention</td>" in text


def test_a_figure_that_no_run_logged_says_how_to_get_it(tmp_path):
    page, _ = report(tmp_path, [header("a"), *batches(curve(20)), END])
    text = page.read_text()
    assert "Divergence guard</b>: Not logged. Add callbacks: {divergence_guard: {}}" in text
    assert 'id="guard"' not in text


def test_the_page_loads_nothing_and_nothing_in_it_has_anothers_name(full):
    text = full[0].read_text()
    names = re.findall(r'\bid="([^"]*)"', text)
    others = [name for name in names if "-image" not in name]  # an image is named by what is in it
    assert len(others) == len(set(others))
    sources = re.findall(r'(?:src|href)="([^"]*)"', text) + re.findall(r"url\(([^)]*)\)", text)
    inside = [source for source in sources if not source.startswith("data:image/png;base64,")]
    assert len(sources) > len(inside) > 0
    assert {source[:1] for source in inside} == {"#"} and {source[1:] for source in inside} <= set(names)
    assert "@import" not in text and "http" not in text and "<script" not in text
    assert text.count("<style") == 1  # the page's: a figure's would be for all of the page


def test_figures_take_the_pages_colours_of_light_and_dark_and_are_the_same_each_time(full, tmp_path):
    page = full[0]
    for path in page.parent.glob("*.png"):
        shown = svg(page, path.stem)
        assert "var(--ink)" in shown and "var(--muted)" in shown
        assert not re.search("#1a1a1a|#6b6b6b|#d9d9d9", shown)
        # The first path is the figure's background.
        assert re.search(r'<path [^>]*style="([^"]*)"', shown)[1] == "fill: none"
    logs = sorted(page.parents[1].glob("*/run_log.jsonl"))
    again = report_runs(logs, tmp_path / "again", console=Console(quiet=True), title="A <title>")
    assert again.read_text() == page.read_text()


def test_the_page_says_what_the_terminal_says(full):
    page, terminal = full
    text = page.read_text()
    for part in (
        "fp8-delayed",
        "Tokens/s per device",
        "The loss is not finite in 2 steps, first in step 73.",
    ):
        assert part in text
        assert part in " ".join(terminal.split())
    assert "A &lt;title&gt;" in text
    assert "output heads stay" in text
    assert "seed" in text


def test_runs_with_nothing_in_common_still_make_a_page(tmp_path):
    page, terminal = report(
        tmp_path, [header("empty")], [header("one", "block"), *batches([5.0])], batches([3.0, 2.0])
    )
    text = page.read_text()
    assert "No step was logged." in terminal
    assert "The log has no header" in text
    assert (page.parent / "loss.png").stat().st_size > 5000


def test_a_run_that_is_nan_from_the_start_still_makes_a_page(tmp_path):
    page, _ = report(
        tmp_path,
        [header("nan"), *batches([math.nan] * 20), END],
        [header("ok", "block"), *batches(curve(20)), END],
    )
    assert (page.parent / "loss.png").exists()


def test_smoothing_does_not_spread_nan_beyond_its_window():
    values = np.arange(100.0)
    values[50] = math.nan
    out = smooth(values, 0.04)
    assert out[:4].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert np.flatnonzero(np.isnan(out)).tolist() == [50, 51, 52, 53]
    assert out[60] == np.mean([57, 58, 59, 60])


def test_kurtosis_cells_stand_at_their_layer_and_step(tmp_path):
    only = lambda step: {"kurtosis_token/residual/layer_002": 50.0} if step == 20 else monitored(step)  # noqa: E731
    path = write_log(tmp_path / "run_log.jsonl", [header("a"), *batches(curve(40), metrics=only), END])
    spec = next(spec for spec in FIGURES if spec.name == "kurtosis")
    figure = spec.draw(compare(read_runs([path])))
    images = {axes.get_ylabel(): axes.images[0] for axes in figure.axes if axes.images}
    values = images["residual"].get_array()
    assert values.shape == (4, 4)
    assert values[2].tolist() == pytest.approx([3 + 2 * 10 / 20, 50.0, 3 + 2 * 30 / 20, 3 + 2 * 40 / 20])
    # The other layers logged nothing at step 20.
    assert np.isnan(np.ma.filled(values[0], np.nan)[1])


def test_a_long_runs_heat_map_keeps_its_largest_value(tmp_path):
    logged = lambda step: {"kurtosis_token/residual/layer_000": 900.0 if step == 1234 else 3.0}  # noqa: E731
    path = write_log(tmp_path / "run_log.jsonl", [header("a"), *batches([3.0] * 2000, metrics=logged), END])
    figure = next(spec for spec in FIGURES if spec.name == "kurtosis").draw(compare(read_runs([path])))
    cells = figure.axes[0].images[0].get_array()
    assert cells.shape == (1, 400) and cells.max() == 900.0 and np.argmax(cells) == 1233 // 5


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine")
def test_a_browser_shows_figures_and_text(full, tmp_path):
    from matplotlib.image import imread

    shot = tmp_path / "shot.png"
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=20000",
        "--blink-settings=preferredColorScheme=1",
        "--window-size=1100,5200",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={shot}",
        full[0].resolve().as_uri(),
    ]
    subprocess.run(command, check=True, capture_output=True)
    image = imread(shot)[..., :3]
    assert image.shape[:2] == (5200, 1100)
    # White paper with ink on it: in every fifth of the page's first 4000 rows.
    assert (image > 0.98).all(-1).mean() > 0.6
    for part in np.array_split(image[:4000], 5):
        assert 0.005 < (part < 0.75).any(-1).mean() < 0.5
    # The curves are there in their own colours (0072B2 and CC79A7), not only text.
    for colour in ((0x00, 0x72, 0xB2), (0xCC, 0x79, 0xA7)):
        assert (np.abs(image[:4000] * 255 - colour).max(-1) < 12).sum() > 300


MEASURED = """<script>
const frame = width => { const made = document.createElement("iframe"); made.width = width; made.height = 3000; made.src = PAGE;
                         document.body.append(made); return made.contentWindow; };
const frames = [390, 640].map(frame), box = element => element.getBoundingClientRect();
const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3;
setTimeout(() => { document.title = JSON.stringify(frames.map(view => ({
    wide: view.document.documentElement.scrollWidth - view.innerWidth,
    charts: [...view.document.querySelectorAll(".chart")].map(div => {
        const boxes = [...div.querySelectorAll("text")].map(box), svg = box(div.querySelector("svg"));
        return {
            name: div.id,
            texts: boxes.length,
            beyond: Math.max(...boxes.map(b => Math.max(b.right - svg.right, svg.left - b.left)), svg.right - box(div).right),
            height: Math.min(...boxes.map(b => Math.min(b.height, b.width ? Infinity : 0))),
            over: boxes.filter((a, i) => boxes.some((b, k) => k > i && over(a, b))).length,
        };
    }),
}))); }, 8000);
</script>"""


@pytest.mark.full
@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine")
def test_twelve_runs_are_legible_on_a_telephone_and_in_a_narrow_window(tmp_path):
    """No text covers another, none is cut off or tiny, and nothing is wider than its place."""
    logs = [
        [
            header(f"mpt-7b-{recipe or 'bf16'}-{seed}-of-64gpus", recipe),
            *batches(curve(30, seed), metrics=monitored),
            END,
        ]
        for recipe in (None, "delayed", "current", "mxfp8")
        for seed in range(3)
    ]
    page, _ = report(tmp_path, *logs)
    outside = tmp_path / "frames.html"
    outside.write_text(f"<body>{MEASURED.replace('PAGE', json.dumps(page.resolve().as_uri()))}</body>")
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--virtual-time-budget=40000",
        "--window-size=1200,3200", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", outside.as_uri(),
    ]  # fmt: skip
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    narrow, wider = json.loads(html.unescape(re.search("<title>(.*?)</title>", shown)[1]))
    for window in (narrow, wider):
        assert window["wide"] <= 0 and len(window["charts"]) >= 5
        for chart in window["charts"]:
            assert (
                chart["texts"] > 5 and chart["beyond"] <= 1 and chart["over"] == 0 and chart["height"] > 8
            ), chart
