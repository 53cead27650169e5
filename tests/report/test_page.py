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
from foundry_fp8.report.figures import FIGURES, smooth
from foundry_fp8.report.runs import read_runs
from foundry_fp8.report.write import report_runs
from tests.report.logs import END, batches, curve, header, monitored, write_log


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
    assert (
        set(re.findall(r'<section id="([\w-]+)">\s*<h2>[^<]*</h2>\s*<figure>\s*<div class="chart"', text))
        == drawn
    )


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
    """Each chart's data, by name."""
    found = re.findall(r'class="chart-data" data-for="chart-([\w-]+)">(.*?)</script>', page.read_text())
    return {name: json.loads(data.replace("<\\/", "</")) for name, data in found}


def test_lines_have_the_colour_of_their_precision_and_runs_of_one_their_own_dash(tmp_path):
    logs = [
        [header(f"{recipe or 'bf16'}-{seed}", recipe), *batches(curve(30, seed)), END]
        for recipe in (None, "delayed", "current", "mxfp8")
        for seed in range(3)
    ]
    page, _ = report(tmp_path, *logs)
    lines = [line for line in charts(page)["loss"]["data"] if line.get("showlegend")]
    assert len(lines) == 12
    looks = {line["name"]: (line["line"]["color"], line["line"]["dash"]) for line in lines}
    assert len(set(looks.values())) == 12
    assert (
        len(
            {
                looks[f"{name}-{seed}"][0]
                for name in ("delayed", "current", "mxfp8", "bf16")
                for seed in range(3)
            }
        )
        == 4
    )
    assert len({looks[f"delayed-{seed}"][0] for seed in range(3)}) == 1


def test_what_says_nothing_has_no_panel(tmp_path):
    def same(step):
        return {"mfu/mfu": 0.4, "mfu/hfu": 0.4}

    page, _ = report(tmp_path, [header("a"), *batches(curve(20), metrics=same), END])
    titles = [note["text"] for note in charts(page)["mfu"]["layout"]["annotations"]]
    assert titles == ["MFU (%)"]
    page, _ = report(
        tmp_path, [header("a"), *batches(curve(20)), END],
        [header("b", "delayed", backend="emulated"), *batches(curve(20)), END],
    )  # fmt: skip
    assert "speed" not in charts(page) and not (page.parent / "speed.png").exists()
    assert '<p class="verdict">FP8 delayed (emulated): +0.00 % loss on 1 device.' in page.read_text()


def test_tokens_a_second_stand_over_devices_where_runs_differ_in_them(tmp_path):
    logs = [
        [header(f"{n}-{recipe}", recipe, world_size=n), *batches(curve(20), 10 * n), END]
        for n in (8, 16, 32) for recipe in (None, "current")
    ]  # fmt: skip
    page, _ = report(tmp_path, *logs)
    lines = charts(page)["speed"]["data"]
    assert [line["x"] for line in lines] == [[8, 16, 32]] * 2
    assert [line["name"] for line in lines] == ["1K, high precision", "1K, current"]

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
    drawn = [
        (bar["name"], bar["x"], [round(y, 6) for y in bar["y"]]) for bar in charts(page)["sizes"]["data"]
    ]
    assert drawn == [
        ("high precision", ["1B", "7B"], [450.0, 500.0]),
        ("high precision", ["1B", "7B"], [45.0, 50.0]),
        ("delayed", ["1B", "7B"], [650.0, 750.0]),
        ("delayed", ["1B", "7B"], [35.0, 40.0]),
    ]
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
    marks = {mark["name"]: (mark["x"], mark["y"]) for mark in charts(page)["tasks"]["data"]}
    assert marks == {"bf16": ([50.0, 25.0], ["line/0-shot", "rest/0-shot"]), "fp8": ([48.0], ["line/0-shot"])}
    text = " ".join(page.read_text().split())
    assert "<td>fp8</td><td>48.0</td><td>–</td>" in text
    assert (page.parent / "tasks.png").stat().st_size > 5000


def test_the_guards_own_table_of_events_is_its_time_line(tmp_path):
    events = {
        "kind": "table", "name": "guard_events", "step": 30, "columns": ["batch", "unit", "action", "signal", "detail"],
        "rows": [["20", "layer_001", "alarm", "gradient", "FP8 changes it by 90 %"],
                 ["30", "model.layers.2.mlp", "demote", "delayed -> current", ""]],
    }  # fmt: skip
    page, _ = report(tmp_path, [header("a", "delayed"), *batches(curve(60), metrics=monitored), events, END])
    text = " ".join(page.read_text().split())
    assert "<td>a</td><td>20</td><td>layer_001</td><td>alarm gradient: FP8 changes it by 90 %</td>" in text
    assert "<td>model.layers.2.mlp</td><td>demote delayed -&gt; current</td>" in text
    assert text.count("guard_events") == 0
    heat, marks = charts(page)["fp8-error"]["data"]
    assert heat["y"] == [0, 1, 2, 3] and heat["customdata"][2][0] == pytest.approx(0.225)
    assert (marks["x"], marks["y"], marks["text"]) == ([30], [2], ["demote"])


def test_what_keeps_its_value_is_drawn_in_steps_and_a_single_value_as_a_point(full):
    """A line from one demoted layer at step 50 to none at step 60 would say half a layer at step 55."""
    data = re.search(r'data-for="chart-guard">(.*?)</script>', full[0].read_text(), re.S)[1]
    lines = json.loads(data)["data"]
    points = {tuple(line["x"]): line["mode"] for line in lines}
    assert points == {(50,): "markers", (50, 60): "lines"}
    assert {line["line"]["shape"] for line in lines} == {"hv"}


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


def test_the_page_loads_nothing(full):
    text = full[0].read_text()
    ours = re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.S)  # without the library that draws
    assert len(text) - len(ours) > 1_000_000
    sources = re.findall(r'(?:src|href)="([^"]*)"', ours)
    assert sources and all(source.startswith("#") for source in sources)
    assert "@import" not in ours and "url(" not in ours and "http" not in ours


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
setTimeout(() => { document.title = JSON.stringify(frames.map(view => ({
    wide: view.document.documentElement.scrollWidth - view.innerWidth,
    charts: [...view.document.querySelectorAll(".chart")].map(div => {
        const legend = div.querySelector(".legend .bg"), bar = div.querySelector(".modebar"), plot = div.querySelector(".plot, .bglayer");
        const title = div.querySelector(".annotation-text");
        return {
            beyond: box(div.querySelector(".main-svg")).right - box(div).right,
            bar: legend && bar ? box(legend).top - box(bar).bottom : 0,
            legend: legend ? Math.min(...[...div.querySelectorAll(".xy .gridlayer, .annotation-text")].map(e => box(e).top)) - box(legend).bottom : 0,
        };
    }),
}))); }, 15000);
</script>"""


@pytest.mark.full
@pytest.mark.skipif(browser() is None, reason="no Chromium on this machine")
def test_twelve_runs_are_legible_on_a_telephone_and_in_a_narrow_window(tmp_path):
    """The legend of twelve runs touches neither the toolbar nor the plot, and nothing is wider than its place."""
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
            assert chart["beyond"] <= 1 and chart["bar"] >= 0 and chart["legend"] >= 0, window
