"""Training steps replayed as a CUDA graph replays them: the same operations on the same memory, and nothing of Python.

``tests/gpu`` captures real graphs. Here a dispatch mode records the operations of one step with their tensors; a replay runs
them again and puts each result where the first one lay. What a capture refuses (a read on the host) raises here too.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import foundry_fp8
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import DelayedScaling


class Graph(TorchDispatchMode):
    """Records what runs inside of it; :meth:`replay` runs it again."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default), (
            "waits for the device"
        )
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Run:
    """A model, its optimizer and the tensors that its steps read and write."""

    def __init__(self, recipe, device):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(device)
        foundry_fp8.apply_fp8(self.model, recipe=recipe, backend="native")
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, foreach=False)
        self.x = torch.zeros(16, 32, device=device)
        self.dy = torch.zeros(16, 32, device=device)
        self.graph = Graph()

    def feed(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.x, self.dy):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 4.0**seed)

    def step(self):
        self.model(self.x).backward(self.dy)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self):
        delayed = FP8State.of(self.model).delayed
        state = [] if delayed is None else [delayed.scale, delayed.amax_history]
        return [*state, *self.model.parameters()]


@pytest.mark.parametrize(
    ("recipe", "finished"),
    [
        pytest.param(
            recipe,
            finished,
            id=f"{name}, captured {'after the end of' if finished else 'in'} a pass",
            marks=() if name == "delayed 3" else pytest.mark.full,
        )
        for name, recipe, ends in (
            ("delayed 3", DelayedScaling(amax_history_len=3), (False, True)),
            ("delayed 1", DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"), (False, True)),
            ("current", "current", (True,)),  # without a state a pass has no end
            ("block", "block", (False,)),
        )
        for finished in ends
    ],
)
def test_replays_train_as_eager_steps_do(recipe, finished, device):
    """Replays and eager steps in any order, with and without the update at a batch's end, equal eager steps alone."""
    if device == "cuda":
        pytest.skip("the update's kernel is no operator that a dispatch mode records; tests/gpu captures it")
    eager, replayed = Run(recipe, device), Run(recipe, device)
    for run in (eager, replayed):
        run.feed(0)
        run.step()
        if finished:
            FP8State.of(run.model).update()
        run.feed(1)
    eager.step()
    with replayed.graph:
        replayed.step()
    for seed, (how, update) in enumerate(
        [("replay", False), ("replay", True), ("step", False), ("replay", True)], start=2
    ):
        for run in (eager, replayed):
            run.feed(seed % 3)
        eager.step()
        replayed.graph.replay() if how == "replay" else replayed.step()
        if update:
            for run in (eager, replayed):
                FP8State.of(run.model).update()
        for ours, theirs in zip(replayed.tensors(), eager.tensors(), strict=True):
            assert torch.equal(ours, theirs), f"step {seed}"


def test_delayed_state_never_moves(device):
    """Updates, steps and loading write into the same memory, and torch's version counter shows it."""
    run = Run(DelayedScaling(amax_history_len=3), device)
    run.feed(1)
    run.step()
    state = FP8State.of(run.model)
    tensors = state.delayed.scale, state.delayed.amax_history
    places = [t.data_ptr() for t in tensors]
    views = [slot.amax.data_ptr() for slot in run.model[2].slots.values()]
    saved = state.state_dict()
    versions = [t._version for t in tensors]
    for change in (run.step, state.update, lambda: state.load_state_dict(saved)):
        change()
        assert [t.data_ptr() for t in (state.delayed.scale, state.delayed.amax_history)] == places
        assert [slot.amax.data_ptr() for slot in run.model[2].slots.values()] == views
        assert all(t._version > version for t, version in zip(tensors, versions, strict=True))
        versions = [t._version for t in tensors]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_update_reads_nothing_on_the_host(algorithm):
    """A fake tensor has no value to read; torch.compile without breaks shows that no Python looks at one either."""
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)
    with FakeTensorMode():
        DelayedScalingState(recipe, [448.0, 57344.0]).update()
    compiled, plain = (DelayedScalingState(recipe, [448.0, 57344.0]) for _ in range(2))
    roll = torch.compile(compiled.roll, backend="aot_eager", fullgraph=True)
    for amax in (3.0, 0.0, 5.0):
        for state, finish in ((compiled, roll), (plain, plain.roll)):
            state.slot(1).record(torch.tensor(amax))
            with torch.no_grad():
                finish()
        assert torch.equal(compiled.scale, plain.scale)
        assert torch.equal(compiled.amax_history, plain.amax_history)


def test_a_backward_may_follow_the_next_forward(device):
    """Two forwards, then both backwards: dy, and the weight for dgrad, are quantised with the scales of their forward."""
    gradients = {}
    for backend in ("native", "emulated"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48, bias=False)).to(device)
        foundry_fp8.apply_fp8(model, recipe="delayed", backend=backend)
        x, dy = torch.randn(16, 32, device=device), torch.randn(16, 48, device=device)
        inputs = [(x * factor).requires_grad_() for factor in (1.0, 0.25)]
        outputs = [model(value) for value in inputs]
        for y in outputs:
            y.backward(dy)
        gradients[backend] = [model[0].weight.grad, *(value.grad for value in inputs)]
    for ours, theirs in zip(*gradients.values(), strict=True):
        allowed = 1e-5 if device == "cpu" else 1e-4  # another scale would be off by some 2 %
        assert float((ours - theirs).norm() / theirs.norm()) < allowed
