"""The measurement: against two runs by hand, against whole gradients, and on what it cannot measure."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import foundry_fp8
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.observe import gradient_sample, precision_probe
from foundry_fp8.observe.gradient_sample import FLOOR, gradient_errors, sample, squares, weights_of
from foundry_fp8.observe.precision_probe import OutOfMemory, precision_gap
from tests.callbacks.conftest import VOCAB, build_llama
from tests.multiprocess import launch


def loss_of(model, ids):
    logits = model(input_ids=ids).logits[:, :-1].reshape(-1, VOCAB)
    return nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1))


def tokens(rows=4, seed=0):
    return torch.randint(0, VOCAB, (rows, 16), generator=torch.Generator().manual_seed(seed))


def converted(recipe="current", **options):
    model = build_llama(**options).train()
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated")
    return model


def by_hand(model, ids, fp8):
    """Loss and gradients with the layers of ``fp8`` in FP8."""
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.set_recipe(module.configured_recipe if module.fqn in fp8 else None)
    model.zero_grad(set_to_none=True)
    loss = loss_of(model, ids)
    loss.backward()
    gradients = {name: p.grad.clone().double() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return float(loss), gradients


@pytest.mark.parametrize("part", [0.5, 1.0])
def test_the_gap_is_that_of_two_runs_by_hand(part):
    """Every weight is small enough to be compared whole."""
    ids = tokens()
    names = [m.fqn for m in converted().modules() if isinstance(m, FP8Linear)]
    names = names[: int(part * len(names))]
    gap = precision_gap(converted(), loss_of, ids, fp8=names)
    (loss8, g8), (loss, g) = by_hand(converted(), ids, names), by_hand(converted(), ids, [])
    assert gap.loss == pytest.approx(loss, rel=1e-6)
    assert gap.loss_gap == pytest.approx((loss8 - loss) / loss, rel=1e-3)
    compared = {n: g[n] for n in g if g[n].dim() == 2 and g[n].numel() >= gradient_sample.SMALLEST}
    assert gap.gradient_error.keys() == compared.keys()
    flat = torch.cat([x.flatten() for x in compared.values()])
    floor = FLOOR * flat.square().mean().sqrt()
    for name, own in compared.items():
        wanted = (g8[name] - own).norm() / max(own.norm(), floor * own.numel() ** 0.5)
        assert gap.gradient_error[name] == pytest.approx(float(wanted), rel=1e-4), name
    for block in ("layer_000", "layer_001", "outside"):
        index = block.removeprefix("layer_00")
        inside = [
            n for n in compared if f"layers.{index}." in n or (block == "outside" and "layers" not in n)
        ]
        error = torch.tensor([float((g8[n] - g[n]).norm()) for n in inside]).norm()
        own = torch.tensor(
            [max(float(g[n].norm()), float(floor) * g[n].numel() ** 0.5) for n in inside]
        ).norm()
        assert gap.block_error[block] == pytest.approx(float(error / own), rel=1e-3)
    assert gap.worst == max(gap.block_error.items(), key=lambda item: item[1])


def test_without_fp8_there_is_no_gap():
    gap = precision_gap(converted(), loss_of, tokens(), fp8=[])
    assert gap.loss_gap == 0 and set(gap.gradient_error.values()) == {0.0} and gap.meaningful


def test_a_sample_of_a_large_gradient_is_near_the_whole(monkeypatch):
    ids = tokens(8)
    whole = precision_gap(converted("mxfp8", hidden_size=128, intermediate_size=256), loss_of, ids)
    monkeypatch.setattr(gradient_sample, "SAMPLE", 1024)
    part = precision_gap(converted("mxfp8", hidden_size=128, intermediate_size=256), loss_of, ids)
    assert part.gradient_error.keys() == whole.gradient_error.keys()
    for name, error in whole.gradient_error.items():
        assert part.gradient_error[name] == pytest.approx(error, rel=0.25), name
    for block, error in whole.block_error.items():
        assert part.block_error[block] == pytest.approx(error, rel=0.1), block


def test_a_gradient_that_is_zero_says_nothing():
    torch.manual_seed(0)
    used, unused = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    weights = weights_of(nn.ModuleDict({"used": used, "unused": unused}))
    used.weight.grad, unused.weight.grad = torch.randn(64, 64), torch.full((64, 64), 1e-9)
    theirs = sample(weights)
    unused.weight.grad = -unused.weight.grad  # all of it is wrong
    used.weight.grad = used.weight.grad * 1.01
    errors = {n: e / own for n, e, own in gradient_errors(squares(weights, sample(weights), theirs), weights)}
    assert errors["unused.weight"] < 1e-6
    assert errors["used.weight"] == pytest.approx(0.01, rel=1e-3)


def test_the_experts_of_a_mixture_count_together():
    experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    names = {w.name for w in weights_of(nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})}))}
    assert names == {"mlp.experts.*.weight"}


def test_one_measurement_of_several_choices_runs_high_precision_once():
    model = converted()
    probe = precision_probe.PrecisionProbe(model, loss_of)
    names = list(probe.layers)
    with probe.on(tokens()) as measure:
        found = [measure({n: probe.layers[n].configured_recipe for n in part}) for part in (names[:3], names)]
    assert probe.passes == 3
    assert found[0].worst[1] < found[1].worst[1]
    assert probe.running() == {n: probe.layers[n].configured_recipe for n in names}


def test_a_loss_that_is_not_finite_in_high_precision_is_not_meaningful():
    model = converted()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    assert not precision_gap(model, loss_of, tokens()).meaningful


def test_a_loss_that_is_not_finite_in_fp8_alone_stays_visible():
    model = converted("delayed")
    state = next(m for m in model.modules() if isinstance(m, FP8Linear)).slots["x"].state
    loss_of(model, tokens()).backward()
    model.zero_grad()
    state.update()
    with torch.no_grad():
        state.scale.fill_(torch.nan)
    gap = precision_gap(model, loss_of, tokens())
    assert gap.meaningful and gap.loss_gap != gap.loss_gap and gap.worst[1] == float("inf")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch": iter([tokens()])}, TypeError, "run once"),
        ({"fp8": {"no.such.layer": None}}, KeyError, "no.such.layer"),
        ({"loss_of": lambda model, ids: model(input_ids=ids).logits}, TypeError, "one element"),
        ({"loss_of": lambda model, ids: 1.0}, TypeError, "float"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_changes_nothing(change, error, message):
    model = converted()
    options = {"loss_of": loss_of, "batch": tokens()} | change
    before = [(m.fqn, m.recipe) for m in model.modules() if isinstance(m, FP8Linear)]
    with pytest.raises(error, match=message):
        precision_gap(model, options.pop("loss_of"), options.pop("batch"), **options)
    assert before == [(m.fqn, m.recipe) for m in model.modules() if isinstance(m, FP8Linear)]


def test_evaluation_mode_and_memory_that_runs_out():
    model = converted()
    with pytest.raises(RuntimeError, match=r"model\.train\(\)"):
        precision_gap(model.eval(), loss_of, tokens())

    def without_memory(model, ids):
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(OutOfMemory):
        precision_gap(model.train(), without_memory, tokens())


def ddp_and_plain(rank_of_failure):
    """The gap on this rank's half of a batch under DDP; of all of it without."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(converted())
    gap = precision_gap(model, loss_of, tokens()[2 * rank : 2 * rank + 2])
    message = None

    def fails(model, ids):
        if rank == rank_of_failure:
            raise ValueError("of this rank")
        return loss_of(model, ids)

    try:
        precision_gap(model, fails, tokens())
    except (ValueError, RuntimeError) as error:
        message = str(error)
    dist.barrier()
    return gap.loss, gap.loss_gap, dict(gap.block_error), message


@pytest.mark.multiprocess
def test_ranks_have_the_same_gap_and_all_hear_of_a_failure():
    first, second = launch.call(ddp_and_plain, 2, 1, imports=f"{launch.FSDP},transformers")
    assert first[:3] == second[:3]
    alone = precision_gap(converted(), loss_of, tokens())
    assert first[0] == pytest.approx(alone.loss, rel=1e-5)
    assert first[2] == pytest.approx(alone.block_error, rel=0.5)
    assert first[3].endswith("; rank 1 failed with ValueError: of this rank") and second[3] == "of this rank"


@pytest.mark.parametrize("trainable", [True, False])
def test_weights_that_are_all_small_are_compared_and_a_frozen_model_has_its_loss(trainable):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

        def forward(self, x):
            return (self.layer(x).tanh() * self.head).sum(-1)

    model = Small().train()
    model.layer.requires_grad_(trainable)
    foundry_fp8.apply_fp8(model, recipe="current", backend="emulated")
    gap = precision_gap(model, lambda m, x: m(x).square().mean(), torch.randn(32, 16))
    assert gap.loss_gap != 0 and set(gap.gradient_error) == ({"layer.weight"} if trainable else set())
    assert gap.worst[1] > 1e-3 if trainable else gap.worst == ("", 0.0)
