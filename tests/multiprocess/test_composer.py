import pytest

from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]
LOGGED = {
    "comm/wire_bytes",
    "comm/uncompressed_bytes",
    "comm/compression_ratio",
    "comm/collectives",
    "comm/quantize_seconds",
    "comm/collective_seconds",
    "comm/quantization_error",
}
RATIOS = {"ddp": (2.5, 4), "hsdp2": (2.5, 4), "hsdp1": (1.2, 2), "hsdp2-one": (2.5, 4)}
"""Bounds of uncompressed bytes over bytes sent, by case that compresses; the others are DDP in other words. FSDP1 gathers in full
precision, which has to count: without its gathers the ratio would be 3.8."""


def check(name, found):
    assert found["bit_exact"], (name, found)
    # A state of the same keys before the first batch and after the last, without a tensor.
    assert found["constant"] and found["size"] < 1000, (name, found)
    if name in RATIOS:
        logged = found["logged"]
        assert logged.keys() == LOGGED
        least, most = RATIOS[name]
        assert least < logged["comm/compression_ratio"] < most, (name, logged)
        assert 1e-3 < logged["comm/quantization_error"] < 1e-2  # int8, blocks of 32
        assert abs(found["ratio"] - 1) < 1e-2 and 1e-4 < found["direction"] < 3e-2, name
    else:
        # Uncompressed HSDP is DDP to float32 rounding: the mesh that Composer drops is in force, gloo averages, and shard groups
        # of one rank are reduced across replicas.
        assert abs(found["ratio"] - 1) < 1e-6 and found["direction"] < 1e-6, (name, found)


def test_trainer_attaches_once_logs_bytes_and_resumes_exactly(tmp_path):
    """DDP with two fits and two microbatches, FSDP1 with a shard group of one rank; gradients against DDP's."""
    results = launch.run("run_composer.py", 2, tmp_path, "sample", imports=launch.COMPOSER)
    assert results.keys() == {"ddp", "hsdp1-one"}
    for name, found in results.items():
        check(name, found)


@pytest.mark.full
def test_every_layout_resumes_with_other_settings_and_on_other_ranks(tmp_path):
    """HSDP of FSDP2 and FSDP1 too, with sharded checkpoints."""
    results = launch.run("run_composer.py", 4, tmp_path, "all", imports=launch.COMPOSER)
    for name in ("ddp", "hsdp2", "hsdp1", "hsdp2-plain", "hsdp1-one", "hsdp1-one-full", "hsdp2-one"):
        check(name, results[name])
    for change in ("changed", "added", "removed"):
        for kind in ("monolithic", "sharded"):
            found = results[f"{change} {kind}"]
            assert found["loaded"] and found["trained"] and found["constant"], (change, kind, found)
    assert "single_auto_sync" in results["forced_sync"]
    assert "no fsdp_config" in results["no_fsdp"]

    elsewhere = launch.run("run_composer.py", 2, tmp_path, "elsewhere", imports=launch.COMPOSER)
    assert elsewhere.keys() == {"ddp", "hsdp2", "hsdp1", "hsdp2-one"}
    for source, found in elsewhere.items():
        assert found["loaded"] and found["trained"] and found["size"] < 1000, (source, found)
