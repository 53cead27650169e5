"""What a YAML says of its ranks, against Composer's own reading of it."""

import warnings

import pytest

from foundry_fp8.cli.cluster import cluster_of, wire_bytes
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.config import ConfigError
from foundry_fp8.gpus import gpu_named

READINGS = {
    "default": ({}, (2, 4)),
    "lower case": ({"mixed_precision": "pure"}, (2, 2)),
    "full": ({"mixed_precision": "FULL"}, (4, 4)),
    "dtypes": ({"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "torch.float32"}}, (2, 4)),
    "no reduce_dtype": ({"mixed_precision": {"param_dtype": "float16"}}, (2, 2)),
    "amp": ({"mixed_precision": {"param_dtype": "amp", "reduce_dtype": "float8"}}, (2, 2)),
    "reduce_dtype alone": ({"mixed_precision": {"reduce_dtype": "bfloat16"}}, (4, 2)),
}


@pytest.mark.parametrize("name", READINGS)
def test_precision_and_mixed_precision_are_read(name):
    fsdp, wanted = READINGS[name]
    assert wire_bytes(run_of({"precision": "AMP_bf16", "fsdp_config": fsdp})) == wanted
    if not isinstance(fsdp.get("mixed_precision"), dict):
        assert wire_bytes(run_of({"precision": "fp32", "fsdp_config": fsdp})) == (4, 4)


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16", "amp_fp8", "fp32"])
@pytest.mark.integration
def test_composer_reads_them_so(precision):
    composer = pytest.importorskip("composer.distributed.mosaic_parallelism")
    from composer.core import Precision

    for fsdp, _ in READINGS.values():
        mixed = fsdp.get("mixed_precision", "DEFAULT")
        with warnings.catch_warnings(action="ignore"):
            _, gathered, reduced, _ = composer.get_mixed_precision(Precision(precision), mixed)
        said = wire_bytes(run_of({"precision": precision, "fsdp_config": fsdp}))
        assert said[0] == (4 if gathered is None else gathered.itemsize)
        assert said[1] == (said[0] if reduced is None else reduced.itemsize)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fsdp_config": {"mixed_precision": "DEFUALT"}}, "mixed_precision: 'DEFUALT' is not one of PURE, DEFAULT, FULL"),
        ({"fsdp_config": {"mixed_precision": None}}, "mixed_precision: None is not one of"),
        ({"fsdp_config": {"mixed_precision": {"param_dtype": "bf61"}}}, "mixed_precision.param_dtype: 'bf61' is not one of"),
        ({"tp_config": {"tensor_parallel_degree": 2}, "fsdp_config": {}}, "plans of a YAML know no tensor parallelism"),
        ({"tp_config": {"tensor_parallel_degree": "2"}}, "tp_config.tensor_parallel_degree: '2' is not an integer"),
        ({"precision": "amp_bf61", "fsdp_config": {}}, "precision: 'amp_bf61' is not one of"),
    ],
)  # fmt: skip
def test_what_plans_do_not_know_is_refused_and_not_taken_for_something_else(config, said):
    with pytest.raises(ConfigError) as raised:
        cluster_of(run_of(config, 8))
    assert said in str(raised.value)


def test_error_feedback_keeps_the_part_of_a_node_under_two_hops():
    """Across nodes alone, a rank feeds back what it sends across: an eighth of the gradients of all."""
    options = {"algorithms": {"compressed_communication": {"gradients": "int8"}}}
    assert cluster_of(run_of(options, 8)).residual == 4  # DDP on one node: coded everywhere
    assert cluster_of(run_of(options, 32)).residual == 0.5
    hybrid = {"algorithms": {**options["algorithms"], "hybrid_sharding": {"shard": 8}}, "fsdp_config": {}}
    assert cluster_of(run_of(hybrid, 32)).residual == 4  # of an eighth already
    assert cluster_of(run_of(hybrid, 8)).residual == 0  # nothing replicates


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("h100-sxm", "h100"),
        ("H100", "h100"),
        ("a100-80g", "a100"),
        ("a100-40g", "a100-40g"),
        ("h20", "h20"),
        ("rtx4090", "rtx4090"),
    ],
)
def test_every_command_takes_every_name_of_a_gpu(given, found):
    assert gpu_named(given) == found


def test_a_gpu_that_no_command_knows_is_an_error():
    with pytest.raises(ConfigError, match="--gpu"):
        gpu_named("h1000")
