import math

import pytest

from foundry_fp8.report.comparison import compare, config_differences, format_row, shown_columns
from foundry_fp8.report.runs import read_runs
from tests.report.logs import END, batches, header, write_log

# The first table of the AWS page: nodes, tokens/s/GPU and loss without and with FP8, its % decrease without FP8,
# % faster and % loss higher.
AWS = [
    (1, 40200, 6.205, 40800, 6.395, None, 1.49, 3.06),
    (2, 38500, 6.211, 41600, 6.338, 4.2288, 8.05, 2.04),
    (4, 39500, 6.244, 42000, 6.402, 1.7412, 6.32, 2.53),
    (8, 38200, 6.156, 41800, 6.365, 4.9751, 9.42, 3.39),
    (16, 35500, 6.024, 39500, 6.223, 11.6915, 11.26, 3.3),
    (32, 33500, 6.112, 38000, 6.264, 16.6667, 13.43, 2.48),
]


def logged(tmp_path, name, losses, **options):
    keys = {key: options.pop(key) for key in ("recipe", "world_size", "nodes", "config") if key in options}
    lines = [header(name, **keys), *batches(losses, **options), END]
    return write_log(tmp_path / name / "run_log.jsonl", lines)


def test_the_columns_are_those_of_the_aws_table(tmp_path):
    paths = []
    for nodes, speed, loss, fp8_speed, fp8_loss, *_ in AWS:
        for name, recipe, tokens, value in (
            ("bf16", None, speed, loss),
            ("fp8", "delayed", fp8_speed, fp8_loss),
        ):
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
    for nodes, speed, loss, fp8_speed, fp8_loss, decrease, faster, higher in AWS:
        without, with_fp8 = rows[f"bf16-{nodes}"], rows[f"fp8-{nodes}"]
        assert without.tokens_per_second_per_device == pytest.approx(speed)
        assert with_fp8.tokens_per_second_per_device == pytest.approx(fp8_speed)
        assert (without.final_loss, with_fp8.final_loss) == pytest.approx((loss, fp8_loss))
        # The page rounds to two digits, and once down.
        assert with_fp8.percent_faster == pytest.approx(faster, abs=0.011)
        assert with_fp8.percent_loss_higher == pytest.approx(higher, abs=0.011)
        if decrease is None:
            assert math.isnan(without.percent_decrease)
        else:
            assert without.percent_decrease == pytest.approx(decrease, abs=1e-4)


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
