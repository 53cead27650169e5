"""``cache_weights``: fewer quantisations, the results of none cached bit for bit, whatever changes a weight in between.

Under FSDP: ``test_fsdp.py``. In a captured graph and under nccl: ``tests/gpu``.
"""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import foundry_fp8
from foundry_fp8.backends import load_backend
from foundry_fp8.config import ConfigError
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.recipes import FOR_ANY_MODEL
from tests.backends.native.fused_pairs import activation_linear

every_recipe = pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=() if r == "block" else pytest.mark.full) for r in FOR_ANY_MODEL],
)


class CountQuantizations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "foundry_fp8" and "quantize" in func._schema.name
        return func(*args, **(kwargs or {}))


class WritesThroughData(torch.optim.Optimizer):
    """Like LLM Foundry's DecoupledLionW: no version counter moves."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(0.5)


def make(recipe, device, cache_weights, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.GELU(), nn.Linear(96, 64)).to(device)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native", cache_weights=cache_weights, **options)
    return model


def run(model, device, seed=0, call=None):
    """One microbatch: the output and every gradient."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 64, generator=generator).to(device).requires_grad_()
    y = (call or model)(x)
    model.zero_grad()
    y.backward(torch.randn(y.shape, generator=generator).to(device))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def assert_same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def optimizer_step(model):
    torch.optim.SGD(model.parameters(), 0.1).step()


def step_through_data(model):
    WritesThroughData(model.parameters()).step()


def load(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def load_other_parameters(model):
    model.load_state_dict({n: v.clone() * 1.5 for n, v in model.state_dict().items()}, assign=True)


def write_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)


def replace_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def evaluate(model):
    model.eval()
    with torch.no_grad():
        model(torch.ones(16, 64, device=model[0].weight.device))
    model.train()


CHANGES = [
    optimizer_step,
    step_through_data,
    load,
    load_other_parameters,
    write_in_place,
    replace_data,
    evaluate,
]


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(r, marks=() if r == "block" else pytest.mark.full) for r in FOR_ANY_MODEL],
)
def test_equals_uncached_after_whatever_changes_a_weight(recipe, device):
    """Two microbatches after each change: the first must not read what was kept, the second may."""
    models = []
    for cache_weights in (True, False):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(64, 96)).to(device))
        options = {"recipe": recipe, "backend": "native", "evaluate": "fp8"}
        foundry_fp8.apply_fp8(models[-1], cache_weights=cache_weights, **options)
    assert_same(*(run(model, device) for model in models))
    for number, change in enumerate(CHANGES):
        for model in models:
            change(model)
        for seed in (2 * number + 1, 2 * number + 2):
            ours, theirs = (run(model, device, seed) for model in models)
            assert all(map(torch.equal, ours, theirs)), f"after {change.__name__}"
    delayed = [FP8State.of(model).delayed for model in models]
    if delayed[0] is not None:
        assert torch.equal(delayed[0].scale, delayed[1].scale)
        assert torch.equal(delayed[0].amax_history, delayed[1].amax_history)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("current", marks=pytest.mark.full)])
def test_equals_uncached_around_a_merge_of_adapters(recipe, device):
    """PEFT merges through .data, between two forwards in training mode."""
    from peft import LoraConfig, inject_adapter_in_model

    def adapted(cache_weights):
        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["0"], init_lora_weights=False)
        model = nn.Sequential(nn.Linear(64, 96)).to(device)
        inject_adapter_in_model(config, model)
        foundry_fp8.apply_fp8(model, recipe=recipe, backend="native", cache_weights=cache_weights)
        return model

    models = [adapted(cache_weights) for cache_weights in (True, False)]
    plain = None
    for change in ((), ("merge",), ("unmerge",), ("merge", True), ("unmerge",)):
        for model in models:
            if change:
                getattr(model[0], change[0])(*change[1:])
            weight_gradients(model)  # delayed scaling's first scales
        ours, theirs = ([m(torch.ones(32, 64, device=device)), *weight_gradients(m)] for m in models)
        assert_same(ours, theirs)
        plain = ours[0] if plain is None else plain
        assert (ours[0] - plain).norm() < 0.2 * plain.norm()  # merged or not, it is one function


def weight_gradients(model):
    x = torch.ones(32, 64, device=model[0].weight.device, requires_grad=True)
    model(x).sum().backward()
    return [x.grad]


@pytest.mark.parametrize(
    "recipe", ["current", *(pytest.param(recipe, marks=pytest.mark.full) for recipe in ("block", "mxfp8"))]
)
def test_each_weight_is_quantised_once_a_step(recipe, device):
    model = make(recipe, device, True)
    for _ in range(2):
        with CountQuantizations() as quantizations:
            for seed in range(3):
                run(model, device, seed)
        # Two layers: x and dy in each of three microbatches, the weight once. Without the cache: 2 * 3 * 4.
        assert quantizations.count == 2 * (3 * 2 + 1)
        step_through_data(model)


def test_delayed_scaling_saves_the_quantisation_in_backward(device):
    """Its scale is another in every forward pass, so a weight is quantised once a microbatch, not twice."""
    model = make("delayed", device, True)
    with CountQuantizations() as quantizations:
        for seed in range(3):
            run(model, device, seed)
    assert quantizations.count == 2 * 3 * 3


@every_recipe
def test_evaluation_keeps_no_weights(recipe, device):
    model = make(recipe, device, True, evaluate="fp8").eval()
    with CountQuantizations() as quantizations, torch.no_grad():
        for _ in range(2):
            model(torch.ones(16, 64, device=device))
    assert quantizations.count == 2 * 2 * 2


@every_recipe
def test_recomputed_layers_use_it_too(recipe, device):
    plain, cached = make(recipe, device, False), make(recipe, device, True)
    for seed in range(2):
        ours = run(cached, device, seed, lambda x: checkpoint(cached, x, use_reentrant=False))
        assert_same(ours, run(plain, device, seed))


@every_recipe
def test_fused_layers_use_it_too(recipe, device):
    results, counts = [], []
    for cache_weights in (False, True):
        model = make(recipe, device, cache_weights)
        with CountQuantizations() as quantizations:
            for seed in range(2):
                results.append(
                    run(model, device, seed, lambda x, m=model: activation_linear(m[2], m[0](x), "gelu"))
                )
        counts.append(quantizations.count)
    assert_same(results[0], results[2])
    assert_same(results[1], results[3])
    assert counts[1] < counts[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "emulated"},
            r"cache_weights: not with the emulated backend: it quantises",
        ),
        ({"cache_weights": "yes"}, r"algorithms\.fp8\.cache_weights: 'yes' is not true or false"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        foundry_fp8.apply_fp8(nn.Linear(32, 32), **{"cache_weights": True, "recipe": "current"} | options)


def test_transformer_engine_refuses_with_its_reason():
    assert "scale of the first microbatch" in load_backend("transformer_engine").lacks["cache_weights"]
