import math

import pytest

from foundry_fp8.report.comparison import compare, config_differences, format_row, shown_columns
from foundry_fp8.report.runs import read_runs
from tests.report.logs import END, batches, header, write_log

# The first table of the AWS page, whole: nodes, then tokens/s/GPU, % decrease and loss without and with FP8, % faster and
# % loss higher.
AWS = [
    (1, (40200, None, 6.205), (40800, None, 6.395), 1.49, 3.06),
    (2, (38500, 4.2288, 6.211), (41600, -3.4825, 6.338), 8.05, 2.04),
    (4, (39500, 1.7412, 6.244), (42000, -4.4776, 6.402), 6.32, 2.53),
    (8, (38200, 4.9751, 6.156), (41800, -3.98, 6.365), 9.42, 3.39),
    (16, (35500, 11.6915, 6.024), (39500, 1.7412, 6.223), 11.26, 3.3),
    (32, (33500, 16.6667, 6.112), (38000, 5.4726, 6.264), 13.43, 2.48),
]


def logged(tmp_path, name, losses, **options):
    keys = {
        key: options.pop(key)
        for key in ("recipe", "world_size", "nodes", "config", "parameters")
        if key in options
    }
    lines = [header(name, **keys), *batches(losses, **options), END]
    return write_log(tmp_path / name / "run_log.jsonl", lines)


def test_the_columns_are_those_of_the_aws_table(tmp_path):
    paths = []
    for nodes, without, with_fp8, *_ in AWS:
        for name, recipe, (tokens, _, value) in (("bf16", None, without), ("fp8", "delayed", with_fp8)):
            devices = 8 * nodes
            paths.append(
                logged(
                    tmp_path,
                    f"{name}-{nodes}",
                    [value] * 20,
                    recipe=recipe,
                    world_size=devices,
                    nodes=nodes,
                    tokens_per_second=tokens * devices,
                )
            )
    rows = {row.run.name: row for row in compare(read_runs(paths))}
    assert list(rows)[:4] == ["bf16-1", "fp8-1", "bf16-2", "fp8-2"]
    for nodes, without, with_fp8, faster, higher in AWS:
        for name, (speed, decrease, loss) in (("bf16", without), ("fp8", with_fp8)):
            row = rows[f"{name}-{nodes}"]
            assert row.tokens_per_second_per_device == pytest.approx(speed)
            assert row.final_loss == pytest.approx(loss)
            if decrease is None:
                assert math.isnan(row.percent_decrease)
            else:  # the page rounds to four digits, and once to two
                assert row.percent_decrease == pytest.approx(
                    decrease, abs=1e-4 if decrease != -3.98 else 1e-2
                )
        # The page rounds to two digits, and once down.
        assert rows[f"fp8-{nodes}"].percent_faster == pytest.approx(faster, abs=0.011)
        assert rows[f"fp8-{nodes}"].percent_loss_higher == pytest.approx(higher, abs=0.011)


def test_runs_of_another_model_are_no_baseline(tmp_path):
    paths = [
        logged(tmp_path, "1b", [1.0] * 9, tokens_per_second=36500, parameters=1_000_000_000),
        logged(
            tmp_path, "7b-fp8", [1.0] * 9, tokens_per_second=10000, recipe="delayed", parameters=7_000_000_000
        ),
        logged(tmp_path, "7b-16", [1.0] * 9, tokens_per_second=9000, world_size=16, parameters=7_000_000_000),
    ]
    rows = {row.run.name: row for row in compare(read_runs(paths))}
    assert rows["7b-fp8"].baseline is None and math.isnan(rows["7b-fp8"].percent_faster)
    assert rows["7b-16"].percent_decrease == pytest.approx(100 * (1 - 9000 / 16 / 10000))


def test_losses_are_compared_over_the_steps_that_both_runs_have(tmp_path):
    paths = [
        logged(tmp_path, "long", [float(100 - i) for i in range(100)]),
        logged(tmp_path, "short", [float(101 - i) for i in range(50)], recipe="mxfp8"),
    ]
    long, short = compare(read_runs(paths))
    assert long.final_loss == pytest.approx(5.5)
    # Steps 46 to 50: 55..51 in the long run (mean 53), one more in the short one.
    assert short.percent_loss_higher == pytest.approx(100 * (54 / 53 - 1))


def test_a_run_without_a_partner_on_as_many_devices_has_no_percentages(tmp_path):
    paths = [
        logged(tmp_path, "bf16", [1.0] * 9, world_size=8),
        logged(tmp_path, "fp8", [1.0] * 9, world_size=16, recipe="block"),
    ]
    row = compare(read_runs(paths))[1]
    assert math.isnan(row.percent_faster)
    assert format_row(row)[5] == "–"


def test_columns_that_no_run_fills_are_not_shown(tmp_path):
    rows = compare(read_runs([logged(tmp_path, "bf16", [1.0] * 9)]))
    assert shown_columns([format_row(row) for row in rows]) == [0, 1, 3, 6]


def test_a_difference_that_rounds_to_zero_has_no_minus(tmp_path):
    paths = [logged(tmp_path, "a", [1.0] * 9), logged(tmp_path, "b", [0.99999] * 9, recipe="current")]
    assert format_row(compare(read_runs(paths))[1])[7] == "+0.00"


def test_configuration_differences_are_dotted_keys_and_leave_out_the_conversion(tmp_path):
    configs = [
        {"optimizer": {"lr": 1e-3, "betas": [0.9]}, "seed": 1},
        {"optimizer": {"lr": 2e-3, "betas": [0.9]}, "seed": 1, "algorithms": {"fp8": {"recipe": "block"}}},
    ]
    paths = [
        logged(tmp_path, str(i), [1.0] * 3, config=config, recipe="block" if i else None)
        for i, config in enumerate(configs)
    ]
    assert config_differences(read_runs(paths)) == [
        ("optimizer.lr", ["0.001", "0.002"]),
        ("algorithms.fp8.recipe", ["–", "block"]),
    ]
