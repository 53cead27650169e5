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
    results = launch.run("run_composer.py", 4, str(tmp_path), imports=launch.COMPOSER)
    for name in ("ddp", "hsdp2", "hsdp1", "hsdp2-plain"):
        assert results[name]["bit_exact"], (name, results[name])
    for name in ("ddp", "hsdp2", "hsdp1"):
        logged = results[name]["logged"]
        assert logged.keys() == LOGGED
        assert 3 < logged["comm/compression_ratio"] < 4
        assert 1e-3 < logged["comm/quantization_error"] < 1e-2  # int8, blocks of 32
    # Uncompressed HSDP is DDP to float32 rounding: the mesh that Composer drops is in force, and gloo averages.
    assert abs(results["hsdp2-plain"]["ratio"] - 1) < 1e-6 and results["hsdp2-plain"]["direction"] < 1e-6
    assert results["ddp"]["direction"] < 2e-2 and results["hsdp2"]["direction"] < 3e-2
    assert abs(results["ddp"]["ratio"] - 1) < 1e-2 and abs(results["hsdp2"]["ratio"] - 1) < 1e-2
    assert "single_auto_sync" in results["forced_sync"]
    assert "no fsdp_config" in results["no_fsdp"]
