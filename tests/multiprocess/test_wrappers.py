"""The matrix of docs/communication.md: wrapper x what is compressed x fp32, accumulation, resume; and what else a step has."""

import pytest

from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess
KINDS = {
    "ddp",
    "fsdp1-FULL_SHARD",
    "fsdp1-SHARD_GRAD_OP",
    "fsdp1-NO_SHARD",
    "fsdp1-HYBRID_SHARD",
    "fsdp2",
    "hsdp2",
}
REPLICATES = {"ddp", "fsdp1-NO_SHARD", "fsdp1-HYBRID_SHARD", "hsdp2"}
# Largest error of the gradient's direction: int8 rounds once per shot (5e-3 each with blocks of 32, and a second, weaker
# one through the activations where weights are rounded); e4m3 has 3 mantissa bits (2.4e-2 a pass).
DIRECTION = {"none": 1e-6, "gradients": 1.5e-2, "parameters": 1e-2, "both": 5e-2}
# Least ratio of uncompressed to sent bytes, gathers included. Vectors travel exactly, of which this small model has many.
LEAST_RATIO = {"gradients": 2.5, "parameters": 1.4, "both": 2.0}


@pytest.mark.full
def test_cells_of_the_matrix():
    """The quick twin: the rows of tests/combinations/test_pairs.py that compress."""
    results = launch.run("run_wrappers.py", 4)
    assert results.keys() == KINDS
    wrong = []
    for kind, cells in results.items():
        assert {"none/fp32", "gradients/fp32", "gradients/accumulation", "gradients/resume"} <= cells.keys()
        assert ("parameters/resume" in cells) == (kind not in ("ddp", "fsdp1-NO_SHARD"))
        for cell, got in cells.items():
            what, how = cell.split("/")
            if how == "resume":
                replicates = what != "parameters" and kind in REPLICATES
                if not got["bit_exact"] or (got["residuals"] > 0) != replicates:
                    wrong.append((kind, cell, got))
                continue
            bound = DIRECTION[what] * (2 if what == "parameters" and kind.startswith("fsdp1") else 1)
            ok = abs(got["ratio"] - 1) < max(bound, 1e-6) and got["direction"] < bound and got["same"]
            ok &= got.get("state_exact", True) and got["calls"] > 0
            if what == "none":
                ok &= got["sent"] == got["logical"]
            else:
                ok &= got["direction"] > 1e-4  # something was compressed
                gathers = kind not in ("ddp", "fsdp1-NO_SHARD")
                least = 1.1 if gathers and what == "gradients" else LEAST_RATIO[what]
                ok &= got["logical"] / got["sent"] > least
            if not ok:
                wrong.append((kind, cell, got))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.integration
@pytest.mark.full
def test_autocast_clipping_loss_scaling_and_activation_checkpointing():
    imports = "torch.distributed.fsdp,composer.algorithms.gradient_clipping"
    results = launch.run("run_wrapper_features.py", 4, imports=imports)
    assert results.keys() == KINDS
    for kind, found in results.items():
        under_autocast = found["autocast"]
        assert 1e-4 < under_autocast["direction"] < DIRECTION["gradients"] and under_autocast["same"], kind
        assert abs(under_autocast["ratio"] - 1) < DIRECTION["gradients"], kind
        # What was reduced, halved; clip_grad_norm_ adds 1e-6 to the norm.
        clipped = found["clipping"]
        assert clipped["direction"] < 1e-6 and abs(clipped["ratio"] - 1) < 1e-4 and clipped["same"], kind

        scaled = found["loss_scaling"]
        assert all(scaled["seen"]), (kind, "one rank's overflow is seen on all")
        assert all(scaled["skipped"]) and scaled["scale"] == [2.0**15] * 4, kind
        assert all(scaled["residuals_finite"]) and all(scaled["moved"]), kind
        # The residual that the next step carries is of twice the loss scale: twice the error.
        assert scaled["after"]["direction"] < 2 * DIRECTION["gradients"] and scaled["after"]["same"], kind

        recomputed = found["checkpointing"]
        assert recomputed["sent"] == recomputed["sent_again"] and all(recomputed["equal"]), (kind, recomputed)


@pytest.mark.full
def test_legs_parameter_by_parameter():
    """Vectors stay exact; frozen and unused parameters; rounding at random; replicas that differ; time limits of groups."""
    results = launch.run("run_legs.py", 4)
    cells = results["every_parameter"]
    assert len(cells) == 8 + 5
    for cell, got in cells.items():
        # Exact: but for the order of a float32 sum.
        assert got["vectors"] < 1e-5 and got["same"], (cell, got)
        assert 1e-4 < got["matrices"] < (0.35 if "int4" in cell else 0.03), (cell, got)
    # The same gathers and reductions under FSDP1 and FSDP2, but for padding.
    for old, new in (("fsdp1-FULL_SHARD", "fsdp2"), ("fsdp1-HYBRID_SHARD", "hsdp2")):
        assert cells[f"{old} int8"]["logical"] == pytest.approx(cells[f"{new} int8"]["logical"], rel=0.1)
        assert cells[f"{old} int8"]["sent"] == pytest.approx(cells[f"{new} int8"]["sent"], rel=0.1)

    assert all(error < 0.03 for error in results["without_a_gradient"].values()), results[
        "without_a_gradient"
    ]

    for kind, found in results["stochastic"].items():
        assert found["nearest"] == 0.0, kind
        # Four ranks draw for 64 x 26 elements, five times: the mean's deviation is 1e-3 * sqrt(7) / sqrt(4 * 1664 * 5).
        assert found["mean"] == pytest.approx(1e-3, rel=0.1), kind
        assert found["resumed"] and found["differs"], kind

    for kind, ranks in results["replicas"].items():
        copies = kind in REPLICATES | {"hsdp2-4x1"}
        for compared, _, changed, attached, kept in ranks:
            assert (compared > 0) == copies, (kind, compared)
            assert kept == "Compression", (kind, kept)
            if copies:
                assert "differ between replicas" in changed and "key.check_replicas: false" in changed, (
                    changed
                )
                assert "compressed_communication" in attached and "differ" in attached, attached
            else:
                assert changed == 0 and attached == "Compression", (kind, changed, attached)
        if copies:  # of the rank that was changed
            assert ranks[3][1] in ranks[3][2], (kind, ranks[3])

    clamped = results["clamped"]
    assert "shard groups of one rank" in clamped["refused"]
    assert clamped["compared"] > 0 and "differ between replicas" in clamped["drifted"]

    limits = results["limits"]
    assert limits["groups"] == [limits["wanted"]] * 4
    assert limits["queues"] == [7.0, 7.0]
    assert limits["mesh"] == [[0, 1], [2, 3]] and limits["ranks"] == [[0, 2], [0, 1]]


def test_two_hops_under_ddp_resume_bit_exactly():
    """Two nodes of three ranks. DDP's first backward after the resume has other buckets than the one that it repeats."""
    results = launch.run("run_two_hop_resume.py", 6, per_node=3)
    for case, found in results.items():
        assert found["buckets_differ"], case
        assert all(found["bit_exact"]), case
        # Each rank has the residual of what it sends across: a third of the blocks.
        assert all(0 < numel < found["parameters"] / 2 for numel in found["residual_numel"]), case
        assert found["direction"] < found["bound"], case
