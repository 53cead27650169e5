"""The mechanisms of the fifteenth held-out half's healthy runs do what they say."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "guard"))
import train
from case import Case
from practices.fifteenth import BlocksShared, BornAgain, ExpertsPruned, Flooded, Mixout, SharpnessAware

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))


def whole(**fields):
    return train.Model(Case(name="x", label="healthy", about="", model=fields)).eval()


def host(**fields):
    return whole(**fields).model


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def loss(model):
    return F.cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def grads(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_blocks_share_until_they_part():
    model, mechanism = host(variant="fog-max", num_hidden_layers=3), BlocksShared("*.layers.?", 4)
    mechanism.install(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, blocks = SimpleNamespace(optimizers=[optimizer]), model.model.layers
    for step in range(6):
        mechanism.step(step, model)
        mechanism.train(step, state)
        optimizer.zero_grad()
        loss(model).backward()
        before = [b.self_attn.o_proj.weight.grad.clone() for b in blocks]
        assert not torch.allclose(before[0], before[1])
        optimizer.step()
        after = [b.self_attn.o_proj.weight.grad for b in blocks]
        for ours, theirs in zip(after, before, strict=True):
            torch.testing.assert_close(ours, sum(before) / 3 if step < 4 else theirs)
        alike = [
            torch.equal(p, q) for p, q in zip(blocks[0].parameters(), blocks[2].parameters(), strict=True)
        ]
        assert all(alike) if step < 4 else not all(alike)
        assert not torch.equal(
            blocks[0].self_attn.o_proj.weight, weights(host())["model.layers.0.self_attn.o_proj.weight"]
        )


def test_it_is_born_again():
    model, mechanism = host(kind="opt"), BornAgain(2, 0.5)
    first = weights(model)
    mechanism.install(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = SimpleNamespace(optimizers=[optimizer])
    for step in range(2):
        mechanism.step(step, model)
        mechanism.train(step, state)
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    learned, taught = weights(model), logits(model).detach()
    assert optimizer.state
    mechanism.step(2, model)
    mechanism.train(2, state)
    assert not optimizer.state
    for name, value in weights(model).items():
        assert torch.equal(value, first[name])
    assert any(not torch.equal(learned[name], first[name]) for name in first)
    torch.testing.assert_close(logits(mechanism.former), taught)
    optimizer.zero_grad()
    noted = loss(model)
    noted.backward()
    ours = grads(model)
    assert all(p.grad is None for p in mechanism.former.parameters())
    assert len(list(model.parameters())) == len(first)  # the former self is no part of it
    plain = host(kind="opt")
    torch.testing.assert_close(noted, loss(plain))  # what is noted is the tokens' loss alone
    both = loss(plain) + 0.5 * F.cross_entropy(logits(plain).flatten(0, 1), taught.softmax(-1).flatten(0, 1))
    both.backward()
    for name, grad in grads(plain).items():
        torch.testing.assert_close(ours[name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_weights_are_mixed_out():
    model, mechanism = host(kind="mpt"), Mixout("*.ffn.up_proj", 1, 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = SimpleNamespace(optimizers=[optimizer])
    weight = model.transformer.blocks[0].ffn.up_proj.weight
    old, masks = weight.detach().clone(), []
    for step in range(4):
        own = weight.detach().clone()
        mechanism.step(step, model)
        mechanism.train(step, state)
        mixed = weight.detach().clone()
        if step < 2:  # at ``start`` there is nothing that it could have been instead
            torch.testing.assert_close(mixed, old if step == 1 else own)
        else:
            kept = mechanism.kept[0][2] == 0
            torch.testing.assert_close(mixed[kept], old[kept])
            assert kept.float().mean().item() == pytest.approx(0.3, abs=0.02)
            torch.testing.assert_close(mixed[~kept], (old + (own - old) / 0.7)[~kept])
            masks.append(kept)
        optimizer.zero_grad()
        loss(model).backward()
        seen = weight.grad.clone()
        with torch.no_grad():
            weight.grad.add_(0.1)
            seen.add_(0.1)
        optimizer.step()
        if step >= 2:
            expected = torch.where(masks[-1], 0.0, seen / 0.7)
            torch.testing.assert_close(own - weight.detach(), expected, atol=1e-6, rtol=1e-4)
        if step == 0:
            old = weight.detach().clone()
    assert not torch.equal(*masks)


def test_experts_are_pruned():
    model = host(kind="mixture", num_local_experts=5)
    mechanism = ExpertsPruned("*.block_sparse_moe.gate", 2, 3)
    plain = logits(model).detach()
    mechanism.install(model)
    routed = {}
    for name, module in model.named_modules():
        if name.endswith("block_sparse_moe"):
            module.register_forward_hook(
                lambda m, args, output, name=name: routed.__setitem__(f"{name}.gate", output[1].detach())
            )
    for step in range(3):
        mechanism.step(step, model)
        got = logits(model).detach()
        if step < 2:
            torch.testing.assert_close(got, plain)
            counts = {
                name: odds.topk(2, -1).indices.flatten().bincount(minlength=5)
                for name, odds in routed.items()
            }
            assert all(torch.equal(mechanism.counts[n], (step + 1) * c) for n, c in counts.items())
    assert not torch.allclose(got, plain)
    assert len(routed) == 2
    for name, odds in routed.items():
        gone = odds.isinf().all(0)
        assert gone.sum() == 2 and odds[:, ~gone].isfinite().all()
        assert counts[name][gone].max() <= counts[name][~gone].min()
    loss(model).backward()
    for name, gone in mechanism.pruned.items():
        experts = model.get_submodule(name.removesuffix("gate") + "experts")
        for expert, is_gone in zip(experts, gone, strict=True):
            assert all(p.grad is None or p.grad.isfinite().all() for p in expert.parameters())
            assert is_gone == (expert.w1.weight.grad is None or not expert.w1.weight.grad.any())
        assert model.get_submodule(name).weight.grad.isfinite().all()


@pytest.mark.parametrize("level", [1.0, 9.0])
def test_what_is_below_is_flooded(level):
    plain, model, mechanism = host(), host(), Flooded(level)
    mechanism.install(model)
    theirs, ours = loss(plain), loss(model)
    torch.testing.assert_close(ours, theirs)
    assert 1.0 < theirs.item() < 9.0
    ((theirs - level).abs() + level).backward()
    ours.backward()
    assert mechanism.turned == (level == 9.0)
    for name, grad in grads(plain).items():
        torch.testing.assert_close(grads(model)[name], grad, atol=1e-7, rtol=1e-5, msg=name)


def test_gradients_are_those_uphill():
    ours, theirs, mechanism = whole(), whole(), SharpnessAware(0.2, 1)
    own = weights(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    state = SimpleNamespace(optimizers=[optimizer], model=ours, batch=IDS)
    mechanism.train(0, state)
    assert not mechanism.kept
    mechanism.train(1, state)
    assert all(p.grad is None for p in ours.parameters())
    moved = weights(ours)
    theirs.loss(theirs(IDS), IDS).backward()
    first = grads(theirs)
    norm = sum(grad.square().sum() for grad in first.values()).sqrt()
    for name, grad in first.items():
        torch.testing.assert_close(moved[name], own[name] + 0.2 * grad / norm, msg=name)
    assert sum((moved[n] - own[n]).square().sum() for n in own).sqrt().item() == pytest.approx(0.2, rel=1e-3)
    up = ours.loss(ours(IDS), IDS)
    assert up > theirs.loss(theirs(IDS), IDS)
    up.backward()
    optimizer.step()  # at a rate of zero: where they were
    for name, value in weights(ours).items():
        assert torch.equal(value, own[name])
    assert not mechanism.kept
