"""Checkpointing, compression and a planned budget through LLM Foundry's own train entry, on one rank."""

import pytest
import torch

from foundry_fp8.activations.compression.saved import compresses_inside
from foundry_fp8.config import ConfigError
from foundry_fp8.model_structure.wrappers import checkpoint_wrappers
from tests.integration.foundry_runs import config, hugging_face, train, weights

pytestmark = pytest.mark.integration


SEED_TARGETS = {"mptblock": "first-1", "grouped_query_attention": "last-1"}
OFFLOADED = {
    "targets": [
        {"target": "*.blocks.0", "blocks": "first-1", "policy": "offload"},
        {"target": "*.attn", "blocks": "last-1"},
    ],
    "offload": True,
}


@pytest.mark.parametrize(
    "checkpoints",
    [
        pytest.param({"targets": SEED_TARGETS}, id="recomputed", marks=pytest.mark.full),
        pytest.param(OFFLOADED, id="offloaded"),
    ],
)
def test_targets_change_nothing_but_memory_with_fp8_and_resume(root, delayed_run, tmp_path, checkpoints):
    both = {"activation_checkpointing": checkpoints, "fp8": {"recipe": "delayed"}}
    plain = delayed_run.weights
    run = train(
        config(root, algorithms=both, save_folder=str(tmp_path), save_interval="2ba", save_overwrite=True)
    )
    assert [name for name, _ in checkpoint_wrappers(run.state.model)] == [
        "model.transformer.blocks.0",
        "model.transformer.blocks.1.attn",
    ]
    resumed = train(config(root, algorithms=both, load_path=str(tmp_path / "ep0-ba2-rank0.pt")))
    for other in (weights(run), weights(resumed)):
        assert plain.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in plain.items())


def test_compression_comes_after_checkpoints_whatever_the_order(root):
    algorithms = {
        "activation_compression": {"min_numel": 1024},
        "activation_checkpointing": {"targets": SEED_TARGETS},
    }
    run = train(config(root, algorithms=algorithms, max_duration="2ba"))
    report = next(a for a in run.state.algorithms if type(a).__name__ == "ActivationCompression").report
    checkpoints = [name for name, _ in checkpoint_wrappers(run.state.model)]
    assert len(checkpoints) == 2
    assert sorted(row[0] for row in report.rows if row[1] == "boundary") == sorted(checkpoints)
    assert report.saved.packed > 0
    plain = weights(train(config(root, algorithms=None, max_duration="2ba")))
    for name, value in weights(run).items():
        assert (value - plain[name]).abs().max() < 1e-2, name


@pytest.mark.full
def test_a_budget_is_planned_on_the_first_microbatch_of_a_hugging_face_model(root):
    planned = {"activation_checkpointing": {"budget": 0.97}}
    changes = {"model": hugging_face(root, "llama"), "max_duration": "2ba"}
    run = train(config(root, algorithms=planned, **changes))
    model = run.state.model
    lean_loss = any("_loss_function" in vars(module) for module in model.modules())
    assert lean_loss or list(checkpoint_wrappers(model)) or compresses_inside(model) is not None
    plain = weights(train(config(root, algorithms=None, **changes)))
    for name, value in weights(run).items():
        assert (value - plain[name]).abs().max() < 1e-2, name


def test_a_plan_is_kept_for_what_it_was_made_for_alone():
    """The state alone; a run that resumes is below, in the full tier."""
    from foundry_fp8.algorithms.activation_checkpointing import ActivationCheckpointing

    saved = ActivationCheckpointing(budget=0.9).state_dict()
    assert (
        saved["budget"] == 0.9
        and saved["plan"] is None
        and saved["repr"] == "ActivationCheckpointing(budget=0.9)"
    )
    plan = {
        "activation_checkpointing": {
            "targets": [{"target": "*.attn", "blocks": "range-0-1", "policy": "full"}]
        }
    }
    for options, kept in (({"budget": 0.9}, plan), ({"budget": 0.8}, None), ({}, None)):
        resumed = ActivationCheckpointing(**options)
        resumed.load_state_dict(saved | {"plan": plan})
        assert resumed.state_dict()["plan"] == kept
    # A plan that rounds is none for a run that no longer asks for it.
    rounds = ActivationCheckpointing(budget=0.9, compression="int8").state_dict() | {"plan": plan}
    for options in ({}, {"compression": "int8", "offload": True}):
        resumed = ActivationCheckpointing(budget=0.9, **options)
        resumed.load_state_dict(rounds)
        assert resumed.state_dict()["plan"] is None


@pytest.mark.full
def test_a_resumed_run_keeps_its_plan(root, tmp_path, monkeypatch):
    """Measured anew, other seconds could give another plan; the run that goes on and the run that resumes are the same, bit for bit."""
    planned = {"activation_checkpointing": {"budget": 0.9, "compression": "int8"}}
    run = train(
        config(root, algorithms=planned, save_folder=str(tmp_path), save_interval="2ba", save_overwrite=True)
    )

    def measured_again(*_, **__):
        raise AssertionError("planned again")

    from foundry_fp8.planning.memory import planner

    monkeypatch.setattr(planner, "plan_memory", measured_again)
    resumed = train(config(root, algorithms=planned, load_path=str(tmp_path / "ep0-ba2-rank0.pt")))
    assert [n for n, _ in checkpoint_wrappers(run.state.model)] == [
        n for n, _ in checkpoint_wrappers(resumed.state.model)
    ]
    assert all(
        torch.equal(a, b) for a, b in zip(weights(run).values(), weights(resumed).values(), strict=True)
    )
    other = {"activation_checkpointing": {"budget": 0.8, "compression": "int8"}}
    with pytest.raises(AssertionError, match="planned again"):
        train(config(root, algorithms=other, load_path=str(tmp_path / "ep0-ba2-rank0.pt")))


def test_a_budget_and_compression_do_not_mix(root):
    algorithms = {"activation_checkpointing": {"budget": 0.9}, "activation_compression": {}}
    with pytest.raises(ConfigError, match="plans compression itself"):
        train(config(root, algorithms=algorithms, max_duration="1ba"))


def test_bad_targets_fail_before_training(root):
    algorithms = {"activation_checkpointing": {"targets": {"mptblok": "first-1"}}}
    with pytest.raises(ConfigError, match="'mptblok' names nothing in this model"):
        train(config(root, algorithms=algorithms, max_duration="1ba"))
