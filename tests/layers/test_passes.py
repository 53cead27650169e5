"""Delayed scaling where forwards and backwards do not come in pairs, or not through the root of the model."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from foundry_fp8.layers.delayed_scaling import KEPT_PASSES, DelayedScalingState
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import DelayedScaling
from foundry_fp8.surgery.apply import apply_fp8


def plain(block, x):
    return block(x)


def non_reentrant(block, x):
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def nested(block, x):
    return checkpoint(non_reentrant, block, x, use_reentrant=False)


def nested_reentrant(block, x):
    return checkpoint(reentrant, block, x, use_reentrant=True)


CHECKPOINTS = [non_reentrant, reentrant, nested]


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)) for _ in range(2)
        )
        self.run = plain

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()

    def forward(self, x):
        return self.body(x)


def made(length=4):
    torch.manual_seed(0)
    model = Model()
    apply_fp8(model, recipe={"name": "delayed", "amax_history_len": length}, backend="emulated")
    return model


def batch(seed, scale=1.0):
    return (torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) * scale).requires_grad_()


def gradients(model):
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


def pairs(model):
    """Two forwards, whose amaxes lie far apart, in one loss."""
    for seed in range(6):
        loss = model(batch(seed, 100.0)).square().mean() + model(batch(seed + 9, 0.01)).square().mean()
        loss.backward()
        yield


def pipeline(model):
    """Two microbatches in flight: the backward of one comes when the forward of the next is done."""
    flying = [model(batch(0, 50.0)), model(batch(1, 0.02))]
    for seed in range(2, 8):
        flying.pop(0).square().mean().backward()
        flying.append(model(batch(seed, 50.0 if seed % 2 else 0.02)))
        yield
    for y in flying:
        y.square().mean().backward()
    yield


@pytest.mark.parametrize("run", [non_reentrant, nested], ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", [pairs, pipeline], ids=lambda f: f.__name__)
def test_gradients_of_recomputed_blocks_are_those_of_kept_ones(run, schedule):
    """Bit for bit, whatever forwards began in between. A history of one lets scales jump at every pass."""
    kept, recomputed = made(length=1), made(length=1)
    recomputed.body.run = run
    for step, _ in enumerate(zip(schedule(kept), schedule(recomputed), strict=True)):
        assert torch.equal(gradients(kept), gradients(recomputed)), f"step {step}"


def twice(model):
    """A second backward through a forward after which others began."""
    for seed in range(4):
        old = model(batch(seed, 50.0)).square().mean()
        old.backward(retain_graph=True)
        for between in range(2):
            model(batch(seed + 9 + between, 0.02)).square().mean().backward()
        old.backward()
        yield


@pytest.mark.parametrize("run", [non_reentrant, nested], ids=lambda f: f.__name__)
def test_a_second_backward_recomputes_what_the_first_did(run):
    kept, recomputed = made(length=1), made(length=1)
    recomputed.body.run = run
    for step, _ in enumerate(zip(twice(kept), twice(recomputed), strict=True)):
        assert torch.equal(gradients(kept), gradients(recomputed)), f"step {step}"
    for model in (kept, recomputed):
        state = FP8State.of(model).delayed
        model(batch(0)).square().mean().backward()
        state.update()
        state.update()
        assert not state._retained()  # a pass is kept only as long as its graph


@pytest.mark.parametrize("run", CHECKPOINTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("schedule", [pairs, pipeline], ids=lambda f: f.__name__)
def test_a_recompute_computes_what_its_forward_did(run, schedule):
    """A reentrant checkpoint records its amaxes in the recompute, so that its training is another; but the same input still
    gives the same output in a forward and in the recompute of it."""
    model, outputs, again = made(length=1), {}, []
    model.body.run = run

    def compare(module, args, output):
        key = module.fqn, args[0].detach().numpy().tobytes()
        if key in outputs:
            again.append(torch.equal(outputs[key], output.detach()))
        outputs[key] = output.detach().clone()

    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.register_forward_hook(compare)
    for _ in schedule(model):
        pass
    assert len(again) > 10 and all(again)


@pytest.mark.parametrize("schedule", [pairs, pipeline], ids=lambda f: f.__name__)
def test_a_recompute_whose_forward_is_not_known_is_refused(schedule):
    """Of a reentrant checkpoint inside another only the outer one is of the forward's graph."""
    model = made()
    model.body.run = nested_reentrant
    for seed in range(3):  # one forward, one backward: there is one pass alone
        model(batch(seed)).square().mean().backward()
    with pytest.raises(RuntimeError, match="a reentrant checkpoint inside another"):
        list(schedule(model))


def test_training_below_the_root_is_training():
    """``model.body(x)``: the same scales, histories and gradients as ``model(x)``, at the same time."""
    through_root, below = made(), made()
    for seed in range(5):
        x = batch(seed, 3.0**seed)
        through_root(x).square().mean().backward()
        below.body(x).square().mean().backward()
        assert torch.equal(gradients(through_root), gradients(below))
    ours, theirs = FP8State.of(through_root).delayed, FP8State.of(below).delayed
    assert torch.equal(ours.scale, theirs.scale) and (theirs.scale != 1).all()
    assert torch.equal(ours.amax_history, theirs.amax_history)


def test_training_block_by_block_is_training():
    through_root, apart = made(), made()
    for seed in range(5):
        x = batch(seed, 3.0**seed)
        through_root(x).square().mean().backward()
        y = x
        for block in apart.body.blocks:
            y = block(y)
        y.square().mean().backward()
        assert torch.equal(gradients(through_root), gradients(apart))


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [through_pickle, through_torch_save, copy.deepcopy])
def test_a_copy_of_the_model_trains_as_the_model_does(copied):
    model = made()
    for seed in range(3):
        model(batch(seed, 3.0**seed)).square().mean().backward()
    gradients(model)
    other = copied(model)
    for seed in range(3, 8):
        for one in (model, other):
            one(batch(seed, 3.0**seed)).square().mean().backward()
        assert torch.equal(gradients(model), gradients(other))
    ours, theirs = FP8State.of(model), FP8State.of(other)
    assert theirs is not ours and theirs.delayed is not ours.delayed
    assert torch.equal(ours.delayed.amax_history, theirs.delayed.amax_history)


def test_the_state_follows_the_model_to_its_device_in_an_evaluation_that_calls_a_method():
    """Composer's eval_forward calls no module, so that no hook of the root runs before the first layer."""
    torch.manual_seed(0)
    model = Model()
    apply_fp8(model, recipe="delayed", backend="emulated", evaluate="fp8")
    model.to("meta").eval()
    with torch.inference_mode():
        assert model.forward(torch.randn(4, 32, device="meta")).device.type == "meta"
    state = FP8State.of(model).delayed
    assert {t.device.type for t in (state.scale, state.amax_history, state.running.scales[0])} == {"meta"}
    assert not state.scale.is_inference() and not state.running.scales[0].is_inference()


def test_loaded_scales_are_those_of_the_next_forward():
    trained, fresh = made(), made()
    for seed in range(3):
        trained(batch(seed, 3.0**seed)).square().mean().backward()
    gradients(trained)
    FP8State.of(trained).update()
    fresh.load_state_dict(trained.state_dict())
    FP8State.of(fresh).load_state_dict(FP8State.of(trained).state_dict())
    with torch.no_grad():
        assert torch.equal(trained(batch(7)), fresh(batch(7)))


def test_forwards_without_a_backward_are_forgotten():
    state = DelayedScalingState(DelayedScaling(amax_history_len=2), [448.0])
    for _ in range(KEPT_PASSES + 50):
        state.begin_forward(torch.device("cpu"), trains=True)
        state.end_forward()
    assert len(state._passes) <= KEPT_PASSES + 1


def test_resuming_does_not_mind_how_sums_were_added_up_but_minds_what_makes_scales():
    saved = FP8State.of(made()).state_dict()
    saved["recipe"] |= {"fast_accumulation": (), "reduce_amax": True}
    FP8State.of(made()).load_state_dict(saved)
    saved["recipe"]["margin"] = 1
    with pytest.raises(RuntimeError, match="made by the recipe"):
        FP8State.of(made()).load_state_dict(saved)
