"""The mechanisms of the twelfth held-out half do what they say."""

import itertools
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
from practices.twelfth import DepthDrawn, GradientsProjected, InputsSampled, Relufied, Rewound, UnitWeights

IDS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))


def whole(**fields):
    return train.Model(Case(name="x", label="healthy", about="", model=fields))


def host(**fields):
    return whole(**fields).model.eval()


def loss(model):
    return F.cross_entropy(model(IDS).logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


def test_mlps_have_relu():
    model, mechanism = host(kind="mpt"), Relufied("*.ffn", 3)
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(2))
    for step, activation in ((2, F.gelu), (3, F.relu), (4, F.relu)):
        mechanism.step(step, model)
        for name, ffn in model.named_modules():
            if name.endswith(".ffn"):
                expected = F.linear(activation(F.linear(hidden, ffn.up_proj.weight)), ffn.down_proj.weight)
                torch.testing.assert_close(ffn(hidden), expected)


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_inputs_are_sampled(kind):
    model, mechanism = whole(kind=kind), InputsSampled(lambda step: float(step))
    embedding = model.model.get_input_embeddings()
    mechanism.install(model.model)
    read = []
    embedding.register_forward_hook(lambda module, args, output: read.append(args[0]))
    with torch.no_grad():  # a model that is sure of token 7
        model.model.get_output_embeddings().register_forward_hook(
            lambda module, args, output: output + 1e3 * F.one_hot(torch.tensor(7), 64)
        )
    model.train()
    state = SimpleNamespace(model=model, batch=IDS.clone())
    mechanism.train(0, state)
    model(state.batch)
    assert len(read) == 1 and torch.equal(read[0], IDS)
    read.clear()
    mechanism.train(1, state)
    assert model.training and torch.equal(state.batch, IDS)
    model(state.batch)
    assert torch.equal(read[0], IDS)  # the first pass
    assert torch.equal(read[1][:, 0], IDS[:, 0]) and (read[1][:, 1:] == 7).all()
    mechanism.train(0, state)
    for share in (0.25, 0.75):
        sampled = mechanism.sampled(model, IDS[:, :1].repeat(50, 32) * 0, share)
        assert (sampled[:, 1:] == 7).float().mean().item() == pytest.approx(share, abs=0.03)


def test_depth_is_drawn():
    model, mechanism = host(num_hidden_layers=3), DepthDrawn("model.layers.1", 4)
    mechanism.install(model)
    runs = []
    model.model.layers[1].mlp.register_forward_hook(lambda *args: runs.append(0))
    drawn = []
    for step in range(30):
        mechanism.step(step, model)
        runs.clear()
        logits = model(IDS, use_cache=False).logits.detach()
        drawn.append(len(runs))
        assert len(runs) == mechanism.times
    assert set(drawn) == {1, 2, 3, 4}
    deep = host(num_hidden_layers=2 + drawn[-1])
    ours = model.model.layers
    deep.model.embed_tokens, deep.lm_head, deep.model.norm = (
        model.model.embed_tokens,
        model.lm_head,
        model.model.norm,
    )
    for theirs, source in zip(deep.model.layers, [ours[0], *[ours[1]] * drawn[-1], ours[2]], strict=True):
        theirs.load_state_dict(source.state_dict())
    torch.testing.assert_close(deep(IDS, use_cache=False).logits, logits)


def test_gradients_are_projected():
    model = host(num_hidden_layers=1)
    mechanism = GradientsProjected("*.layers.*_proj", 4, 3, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    state = SimpleNamespace(optimizers=[optimizer])
    weights = {name: p for name, p in model.named_parameters() if name.endswith("_proj.weight")}
    assert len(weights) == 4
    sides = []
    for step in range(6):
        mechanism.step(step, model)
        mechanism.train(step, state)
        optimizer.zero_grad()
        loss(model).backward()
        before = {name: w.detach().clone() for name, w in weights.items()}
        grads = {name: w.grad.clone() for name, w in weights.items()}
        head = model.lm_head.weight.detach().clone() - 1e-2 * model.lm_head.weight.grad
        optimizer.step()
        torch.testing.assert_close(model.lm_head.weight.detach(), head)
        side = {}
        for name, weight in weights.items():
            change = weight.detach() - before[name]
            change = change if change.shape[0] <= change.shape[1] else change.T
            assert torch.linalg.matrix_rank(change, rtol=1e-3) <= 4 and change.any()
            side[name] = torch.linalg.svd(change)[0][:, :4]
            if step == 0:  # Adam's first step: signs of what is left of the gradient
                grad = grads[name] if weight.shape[0] <= weight.shape[1] else grads[name].T
                basis = torch.linalg.svd(grad)[0][:, :4]
                expected = -1e-2 * 0.5 * basis @ (basis.T @ grad).sign()
                torch.testing.assert_close(change, expected, atol=1e-5, rtol=1e-2)
        sides.append(side)

    def same(a, b):
        return all(torch.linalg.svdvals(a[name].T @ b[name]).min() > 0.99 for name in weights)

    assert same(sides[0], sides[2]) and same(sides[3], sides[5]) and not same(sides[2], sides[3])


def test_a_run_goes_back():
    model = whole(num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mechanism, state = Rewound((5, 9), 3), SimpleNamespace(model=model, optimizers=[optimizer])

    def now():
        moments = [
            optimizer.state[p][k].clone() for p in optimizer.state for k in ("exp_avg", "exp_avg_sq", "step")
        ]
        return [p.detach().clone() for p in model.parameters()] + moments

    seen = []
    for step in range(11):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        mechanism.train(step, state)
        assert optimizer.param_groups[0]["lr"] == 1e-2 / (step + 1)
        seen.append(now())
        optimizer.zero_grad()
        loss(model.model).backward()
        optimizer.step()

    def same(a, b):
        return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    assert same(seen[5], seen[2]) and same(seen[9], seen[6])
    assert [same(a, b) for a, b in itertools.pairwise(seen)] == [False] * 10


def test_weights_are_on_the_sphere():
    model, mechanism = (
        host(num_hidden_layers=2),
        UnitWeights(("*.qkv_proj", "*.gate_up_proj"), ("*.o_proj", "*.down_proj")),
    )
    head = model.lm_head.weight.detach().clone()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    mechanism.step(0, model)
    assert torch.equal(model.lm_head.weight, head)
    for block in model.model.layers:
        for linear, side in (
            (block.self_attn.qkv_proj, 1), (block.mlp.gate_up_proj, 1), (block.self_attn.o_proj, 0), (block.mlp.down_proj, 0),
        ):  # fmt: skip
            assert linear.weight.shape[side] == 64
            torch.testing.assert_close(
                linear.weight.norm(dim=side), torch.ones(linear.weight.shape[1 - side])
            )
    old, new = (p["model.layers.0.mlp.down_proj.weight"] for p in (before, dict(model.named_parameters())))
    torch.testing.assert_close(F.normalize(old, dim=0), new.detach())
