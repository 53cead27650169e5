"""AdamW with 8-bit moments: under LLM Foundry's names, its bytes, what it says, and what it refuses."""

import logging
import sys

import pytest
import torch
from llmfoundry import registry
from torch import nn

from foundry_fp8.planning.memory.optimizer_state import optimizer_bytes
from tests.integration.foundry_runs import config, make_data, train

pytest.importorskip("torchao")  # which the modern stack lacks
NAMES = ("adamw_8bit", "adamw_fp8")


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step for each shape, which takes longer than all of these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


def stepped(name, size=64, steps=1, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, 4 * size), nn.ReLU(), nn.Linear(4 * size, size))
    kind = torch.optim.AdamW if name == "adamw" else registry.optimizers.get(name)
    optimizer = kind(model.parameters(), lr=1e-3, **settings)
    predicted = optimizer_bytes([optimizer])
    x = torch.randn(steps, 32, size)
    for batch in x:
        optimizer.zero_grad()
        (model(batch) - batch.roll(1, -1)).square().mean().backward()
        optimizer.step()
    return model, optimizer, predicted


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_its_bytes_before_the_first_step(name):
    """Two moments of a byte an element and a float32 scale for each 256, and biases in float32."""
    model, optimizer, predicted = stepped(name)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    tables = {"adamw_8bit": 2 * 2 * 256 * 4, "adamw_fp8": 0}[name]  # of codes, one for each moment
    assert optimizer_bytes([optimizer]) == 2 * matrices * (1 + 4 / 256) + 8 * vectors + tables
    assert predicted == pytest.approx(optimizer_bytes([optimizer]), rel=0.15)  # vectors counted as matrices
    assert predicted == round(2 * (1 + 4 / 256) * matrices) + round(2 * (1 + 4 / 256) * vectors)


@pytest.mark.parametrize("name", NAMES)
def test_it_steps_as_adamw_does_to_the_rounding_of_its_moments(name):
    """E4M3 and the codes keep a moment to 1/16 at worst: an update of lr m / sqrt(v) moves by less than a tenth of lr."""
    ours, reference = stepped(name, steps=20)[0], stepped("adamw", steps=20)[0]
    start = stepped(name, steps=0)[0]
    for a, b, c in zip(ours.parameters(), reference.parameters(), start.parameters(), strict=True):
        assert (a - b).norm() < 0.1 * (b - c).norm()


def test_the_second_step_says_what_is_in_8_bits(caplog):
    caplog.set_level(logging.INFO, "foundry_fp8")
    stepped("adamw_8bit", size=64, steps=2)
    stepped("adamw_8bit", size=16, steps=2)
    logged = [(r.levelname, r.getMessage()) for r in caplog.records if "moments' elements" in r.getMessage()]
    assert [level for level, _ in logged] == ["INFO", "WARNING"]
    assert "99.0 %" in logged[0][1] and " 0.0 %" in logged[1][1]


def test_without_torchao_the_name_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "foundry_fp8.models.low_bit_adamw", raising=False)
    with pytest.raises(ImportError, match=r"optimizer.name: .*pip install 'foundry-fp8\[torchao\]'"):
        import foundry_fp8.models.low_bit_adamw  # noqa: F401


def test_a_run_resumes_bit_exactly(tmp_path):
    root = make_data(tmp_path)
    optimizer = {"name": "adamw_8bit", "lr": 3.0e-3, "weight_decay": 0.1}
    whole = train(config(root, optimizer=optimizer, save_folder=str(tmp_path / "saved"), save_interval="2ba"))
    path = str(tmp_path / "saved" / "ep0-ba2-rank0.pt")
    resumed = train(config(root, optimizer=optimizer, load_path=path))
    for a, b in zip(whole.state.model.parameters(), resumed.state.model.parameters(), strict=True):
        assert torch.equal(a, b)
    whole.close()
    resumed.close()


@pytest.mark.parametrize("name", NAMES)
def test_moments_in_blocks_of_another_size_are_refused_with_both_ways_on(name):
    saved = stepped(name)[1].state_dict()
    stepped(name)[1].load_state_dict(saved)
    ways = r"optimizer.block_size: .* blocks of 256, this run says 128. Set it to 256, .*load_ignore_keys: \[state/optimizers\]"
    with pytest.raises(RuntimeError, match=ways):
        stepped(name, block_size=128)[1].load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:.* is not in the state_dict")
@pytest.mark.parametrize(
    "names",
    [
        ("decoupled_adamw", "adamw_8bit"),
        pytest.param(("adamw_8bit", "decoupled_adamw"), marks=pytest.mark.full),
    ],
)
def test_after_another_optimizer_it_goes_on_from_the_weights_with_moments_of_its_own(names, tmp_path):
    """Composer keeps states by the optimizer's class; no float32 moments stay in an 8-bit run, and no codes reach AdamW."""
    root, (older, newer) = make_data(tmp_path), names
    whole = {"name": older, "lr": 3.0e-3}
    train(config(root, optimizer=whole, save_folder=str(tmp_path), save_interval="2ba")).close()
    path = tmp_path / "ep0-ba2-rank0.pt"
    still = {"name": newer, "lr": 0.0, "weight_decay": 0.0}
    load = {"load_path": str(path), "load_ignore_keys": ["state/schedulers"]}  # which hold the older rate
    resumed = train(config(root, optimizer=still, **load))
    saved = torch.load(path, weights_only=False)["state"]["model"]
    for name, parameter in resumed.state.model.named_parameters():
        assert torch.equal(parameter, saved[name])
    states = list(resumed.state.optimizers[0].state.values())
    assert {int(state["step"]) for state in states} == {2}
    assert any(hasattr(state["exp_avg"], "codes") for state in states) == (newer == "adamw_8bit")
