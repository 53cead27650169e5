import pytest

from tests.multiprocess import launch

LOGGED = {
    "comm/wire_bytes",
    "comm/uncompressed_bytes",
    "comm/compression_ratio",
    "comm/collectives",
    "comm/quantize_seconds",
    "comm/collective_seconds",
    "comm/quantization_error",
}


@pytest.mark.multiprocess
@pytest.mark.integration
def test_trainer_attaches_once_logs_bytes_resumes_exactly_and_shards_hybrid(tmp_path):
    """DDP with two fits and two microbatches; HSDP of FSDP2 and FSDP1, sharded checkpoints; gradients against DDP's."""
    results = launch.run("run_composer.py", 4, tmp_path, "here", imports=launch.COMPOSER)
    cases = ("ddp", "hsdp2", "hsdp1", "hsdp2-plain", "hsdp1-one", "hsdp1-one-full", "hsdp2-one")
    for name in cases:
        assert results[name]["bit_exact"], (name, results[name])
        # A state of the same keys before the first batch and after the last, without a tensor.
        assert results[name]["constant"] and results[name]["size"] < 1000, (name, results[name])
    for name, least in (("ddp", 2.5), ("hsdp2", 2.5), ("hsdp1", 1.2), ("hsdp2-one", 2.5)):
        logged = results[name]["logged"]
        assert logged.keys() == LOGGED
        assert least < logged["comm/compression_ratio"] < 4, (name, logged)
        assert 1e-3 < logged["comm/quantization_error"] < 1e-2  # int8, blocks of 32
        assert abs(results[name]["ratio"] - 1) < 1e-2 and 1e-4 < results[name]["direction"] < 3e-2, name
    # Uncompressed HSDP is DDP to float32 rounding: the mesh that Composer drops is in force, gloo averages, and shard groups of one
    # rank are reduced across replicas.
    for name in ("hsdp2-plain", "hsdp1-one", "hsdp1-one-full"):
        assert abs(results[name]["ratio"] - 1) < 1e-6 and results[name]["direction"] < 1e-6, (
            name,
            results[name],
        )
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
