"""The host store against the same model without it, on a device that copies as late as it may; every trap of its docstring."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.checkpointing.recompute import recomputed
from foundry_fp8.activations.offload import store as store_module
from foundry_fp8.activations.offload.store import HostStore, host_store, moves
from tests.activations.offload.device import LateQueue, check, order_of_units

WIDTH = 16
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, shared=None):
        q, k = self.up(x).chunk(2, -1)  # views of one storage, saved by what follows
        out = x + self.down(
            torch.cat([q.tanh() * k, k.transpose(-1, -2).contiguous().transpose(-1, -2).sigmoid()], -1)
        )
        return out if shared is None else out + shared.tanh() * out


class Chain(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x, shared=None, store=None):
        for block in self.blocks:
            x = block(x) if shared is None else block(x, shared=shared)
        return x


def on(monkeypatch, queue):
    """The store of the CPU, which stands for a device whose copies ``queue`` makes."""
    store = HostStore(queue, CPU)
    monkeypatch.setattr(store_module, "host_store", lambda device: store)
    monkeypatch.setattr("foundry_fp8.activations.checkpointing.recompute.host_store", lambda device: store)
    return store


def batch(seed, rows=4):
    x = torch.randn(rows, 32, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    return x * 1.0  # not a leaf, as in a model


def gradients(model, loss, **options):
    wanted = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(loss, wanted, **options)


def same(ours, reference):
    return all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))


POLICIES = ["full", "selective", "offload"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_is_bit_identical_and_its_events_are_in_order(monkeypatch, policy):
    model, queue = Chain(), LateQueue()
    store = on(monkeypatch, queue)
    reference = gradients(model, model(batch(1)).square().sum())
    apply_activation_checkpointing(model, policy=policy, offload=True)
    for number, block in enumerate(model.blocks):
        inner = block._checkpoint_wrapped_module
        inner.register_forward_pre_hook(lambda *_, n=number: queue.trace.append(("enter", n)))
        inner.register_forward_hook(lambda *_, n=number: queue.trace.append(("leave", n)))
    gc.disable()
    try:
        for _ in range(3):
            queue.trace.clear()
            assert same(gradients(model, model(batch(1)).square().sum()), reference)
            check(queue.trace)
            if policy != "offload":
                # The recompute stops before a block's hook of leaving runs, or after: what counts is when it began.
                order_of_units(queue.trace, 4)
    finally:
        gc.enable()
    assert not store._flying and sum(b.numel() for b in store.free) == store.held
    if policy != "offload":  # boundaries of four blocks, and buffers for no more
        assert store.held == 4 * 4 * 32 * WIDTH * 4 and store.moved == 3 * store.held


SCHEDULES = {
    "steps": st.lists(
        st.tuples(
            st.sampled_from(["forward", "backward", "drop", "evaluate", "twice", "fail"]),
            st.integers(0, 2),
            st.integers(1, 6),
        ),
        min_size=2,
        max_size=14,
    ),
    "policy": st.sampled_from(POLICIES),
    "haste": st.sampled_from([0.0, 0.3, 1.0]),
    "frozen": st.integers(0, 4),
    "shares": st.booleans(),
}


@settings(max_examples=6, deadline=None)
@given(**SCHEDULES)
def test_any_schedule_is_bit_identical(**schedule):
    follow(**schedule)


@pytest.mark.full
@settings(max_examples=300, deadline=None)
@given(**SCHEDULES)
def test_many_schedules_are_bit_identical(**schedule):
    follow(**schedule)


def follow(steps, policy, haste, frozen, shares):
    """Accumulation, several forwards before one backward, graphs that are dropped or read twice, failures, batches of many sizes."""
    draw = random.Random(len(steps))
    queue = LateQueue(lambda: draw.random() < haste)
    with pytest.MonkeyPatch.context() as patch:
        store = on(patch, queue)
        plain, model = Chain(), Chain()
        for m in (plain, model):
            for block in m.blocks[:frozen]:
                block.requires_grad_(False)
            m.last = nn.Linear(WIDTH, WIDTH)
            m.last.load_state_dict(plain.last.state_dict())
        apply_activation_checkpointing(model, policy=policy, offload=True)
        live = []

        def run(m, rows):
            shared = batch(9, rows) if shares else None
            return m.last(m(batch(rows, rows), shared)).square().sum()

        for step, which, rows in steps:
            if step == "forward" and len(live) < 3:
                live.append((run(plain, rows), run(model, rows)))
            elif step == "evaluate":
                with torch.no_grad():
                    assert torch.equal(run(plain, rows), run(model, rows))
            elif step == "fail":
                handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    run(model, rows)
                handle.remove()
            elif live:
                theirs, ours = live.pop(which % len(live))
                if step != "drop":
                    if step == "twice" and policy != "selective":  # whose recompute torch allows once
                        assert same(
                            gradients(model, ours, retain_graph=True),
                            gradients(plain, theirs, retain_graph=True),
                        )
                    assert same(gradients(model, ours), gradients(plain, theirs))
                del theirs, ours
            check(queue.trace)
        live.clear()
        if any(step == "fail" for step, _, _ in steps):
            gc.collect()  # a traceback holds frames that hold it
        assert sum(b.numel() for b in store.free) == store.held
        run(model, 1)
        check(queue.trace)


def test_two_forwards_before_one_backward(monkeypatch):
    model, queue = Chain(), LateQueue()
    on(monkeypatch, queue)

    def loss():
        return model(batch(1)).square().sum() + model(batch(2)).sum()

    reference = gradients(model, loss())
    apply_activation_checkpointing(model, offload=True)
    assert same(gradients(model, loss()), reference)
    check(queue.trace)
    assert sum(e[0] == "back" for e in queue.trace) == 7  # all but the last of eight


def test_views_of_one_storage_are_copied_once_and_parameters_never(monkeypatch):
    queue = LateQueue()
    store = on(monkeypatch, queue)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    flat = nn.Parameter(torch.randn(2 * WIDTH * WIDTH))  # as FSDP1's, in views
    view = flat[: WIDTH * WIDTH].view(WIDTH, WIDTH)
    x = batch(0)
    y = x @ weight.T
    with store.unit():
        a, b = y.chunk(2, -1)
        z = (a * b).sum() + (y * y).sum() + (x @ view).sum() + (x @ weight.to(torch.float64).float()).sum()
    copied = [e for e in queue.trace if e[0] == "out"]
    assert len(copied) == 2 and store.moved == x.untyped_storage().nbytes() + y.untyped_storage().nbytes()
    assert all(moves(t) for t in (x, y)) and not any(
        moves(t) for t in (weight, view, flat, weight.bfloat16())
    )
    ours = torch.autograd.grad(z, (weight, flat))
    y = x @ weight.T
    a, b = y.chunk(2, -1)
    z = (a * b).sum() + (y * y).sum() + (x @ view).sum() + (x @ weight.to(torch.float64).float()).sum()
    assert same(ours, torch.autograd.grad(z, (weight, flat)))


def test_what_is_small_or_a_small_part_or_not_plain_stays():
    big = batch(0)
    assert moves(big) and moves(big.transpose(0, 1)) and moves(big.chunk(3, -1)[0])
    assert not moves(big[:, :4]) and not moves(torch.ones(255)) and not moves(torch.randn(64, 64).to_sparse())
    assert not moves(torch.randn(64, 64, dtype=torch.complex64).conj())

    class Sub(torch.Tensor):
        pass

    assert not moves(big.as_subclass(Sub))


def test_what_later_units_save_too_stays_on_the_device(monkeypatch):
    """An encoder's output goes into every block of a decoder: copying it back for each would take what it should save."""
    model, queue = Chain(), LateQueue()
    store = on(monkeypatch, queue)
    apply_activation_checkpointing(model, offload=True)
    shared = batch(3)
    loss = model(batch(1), shared).square().sum()
    assert store.moved == 5 * shared.untyped_storage().nbytes()  # four boundaries, and what is shared once
    outs = [e[2] for e in queue.trace if e[0] == "out"]
    loss.backward()
    backs = [e[2] for e in queue.trace if e[0] == "back"]
    own = [outs[0], *outs[2:]]  # the first unit saves its boundary, then what is shared
    assert backs == own[-2::-1]  # one by one, whatever unit saved first what they share


def test_a_buffer_serves_what_is_smaller_and_is_replaced_by_what_is_larger():
    store = HostStore(LateQueue(), CPU)
    a, b = store.take(100), store.take(50)
    assert store.held == 150
    store.give(a), store.give(b)
    assert store.take(40) is b and store.take(40) is a and store.held == 150
    store.give(a), store.give(b)
    c = store.take(200)
    assert c.numel() == 200 and store.held == 250  # 100 went, 50 is free
    sizes = random.Random(0)
    store = HostStore(LateQueue(), CPU)
    for _ in range(200):  # batches of any length: no more than as many of the longest
        taken = [store.take(sizes.randrange(1, 1000)) for _ in range(3)]
        for buffer in taken:
            store.give(buffer)
    assert store.held <= 3 * 1000


@pytest.mark.parametrize("policy", POLICIES)
def test_writing_to_what_was_saved_is_an_error(monkeypatch, policy):
    """Its copy may have been made before or after; plain autograd refuses too."""

    class Writes(Chain):
        def forward(self, x):
            for i, block in enumerate(self.blocks):
                y = block(x)
                if i == self.written:
                    with torch.no_grad():
                        x.add_(1.0)
                x = y
            return x

    for written in (0, 3):
        model = Writes()
        model.written = written
        on(monkeypatch, LateQueue())
        with pytest.raises(RuntimeError, match="modified"):
            model(batch(1)).sum().backward()
        apply_activation_checkpointing(model, policy=policy, offload=True)
        with pytest.raises(RuntimeError, match="modified in place"):
            model(batch(1)).sum().backward()


def test_one_store_a_device_and_plain_copies_on_a_cpu():
    store = host_store(torch.device("cpu"))
    assert store is host_store(torch.device("cpu"))
    model = Chain()
    reference = gradients(model, model(batch(1)).sum())
    before = store.moved
    apply_activation_checkpointing(model, offload=True)
    assert same(gradients(model, model(batch(1)).sum()), reference) and store.moved > before


def test_hooks_around_see_nothing_of_it(monkeypatch):
    """Of two pairs of hooks the inner ones run."""
    store = on(monkeypatch, LateQueue())
    block = Block()
    seen = []
    with saved_tensors_hooks(lambda x: (seen.append(x.shape), x)[1], lambda x: x):
        recomputed(block, batch(0), policy="full", offload=True)
    assert store.moved and not seen


def test_what_is_on_another_device_stays():
    """A table in host memory beside a GPU's activations: pinned buffers are in order with that GPU's copies alone."""
    store = HostStore(LateQueue(), torch.device("meta"))
    x = torch.randn(64, 64, requires_grad=True)
    with store.unit():
        y = x.sin()
    y.sum().backward()
    assert store.moved == 0 and torch.equal(x.grad, x.detach().cos())
