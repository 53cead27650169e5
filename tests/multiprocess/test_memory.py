import pytest

from tests.multiprocess import launch

TRANSFORMERS = f"{launch.FSDP},transformers.models.llama.modeling_llama"


@pytest.mark.multiprocess
@pytest.mark.full
def test_checkpointing_and_compression_under_ddp_fsdp1_fsdp2():
    codes, outputs = launch.run("run_memory.py", 2, imports=TRANSFORMERS, check=False)
    assert codes == [0, 0], outputs
    assert all("all good" in output for output in outputs)


@pytest.mark.multiprocess
@pytest.mark.full
def test_plans_for_fsdp_units():
    results = launch.run("run_memory_plan.py", 2, imports=TRANSFORMERS)
    assert set(results) == {"fsdp1", "fsdp2"}
    for kind, found in results.items():
        assert len(found["predicted"]) > 20
        for option, (predicted, measured) in found["predicted"].items():
            assert predicted == pytest.approx(measured, rel=0.05), (kind, option)
        planned, fresh = found["losses"]
        assert planned == fresh, kind
        assert found["static"] == pytest.approx(found["unsharded"] / 2, rel=0.01), kind


@pytest.mark.multiprocess
@pytest.mark.full
def test_composer_or_the_algorithm_wraps_the_chosen_modules_only(tmp_path):
    results = launch.run("run_memory_composer.py", 2, imports=f"{launch.COMPOSER},{TRANSFORMERS}")
    assert len(results) == 16
    for kind in ("ddp", "fsdp1", "fsdp2"):
        planned, plain = results.pop(f"{kind} budget")
        assert planned[0], f"{kind}: nothing was changed"
        assert planned[1] == pytest.approx(plain[2], rel=1e-3), kind
    for label, (ours, plain) in results.items():
        names, reentrant, loss, total = ours
        assert [name.split("inner.")[1] for name in names] == ["model.layers.0", "model.layers.2.mlp"], label
        assert not any(reentrant), label
        if "compressed" in label:
            assert loss == pytest.approx(plain[2], rel=1e-3), label
        else:
            assert (loss, total) == (plain[2], plain[3]), label


@pytest.mark.multiprocess
@pytest.mark.full
def test_what_is_planned_on_one_device_for_two_is_what_two_ranks_hold():
    """DDP, FSDP1 and FSDP2 by both strategies, float32 and mixed precision, with and without checkpoints, fresh and resumed."""
    results = launch.run("run_memory_cluster.py", 2, imports=TRANSFORMERS)
    assert len(results) == 16
    for case, (predicted, measured) in results.items():
        assert set(measured) == {"fresh", "resumed"}
        for label, peak in measured.items():
            assert predicted == pytest.approx(peak, rel=0.05), (case, label)
