"""What torch puts around a layer: refused by name in FP8, as ``nn.Linear``'s in high precision; a parametrisation runs once a forward."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import foundry_fp8


def layer_of(recipe="current", **options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
    model = copy.deepcopy(plain)
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="emulated", **options)
    return model, plain


X = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def functional(model, x):
    parameters = dict(model.named_parameters())
    return torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).square().mean())(parameters)[
        "0.weight"
    ]


def batched(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    return torch.autograd.grad(y, x, torch.eye(y.numel()).view(-1, *y.shape)[:4], is_grads_batched=True)[0]


def forward_mode(model, x):
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.unpack_dual(model(torch.autograd.forward_ad.make_dual(x, x))).tangent


TRANSFORMS = {
    "functional_call": functional,
    "grad of the input": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
    "jacrev": lambda model, x: torch.func.jacrev(lambda x: model(x).sum(0))(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: model(x).sum())(x[:1]),
    "is_grads_batched": batched,
    "forward mode": forward_mode,
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_transform_is_refused_in_fp8_and_runs_in_evaluation(name, recipe):
    model, plain = layer_of(recipe)
    with pytest.raises(
        RuntimeError,
        match=r"^([02]|the model): torch.func .*Use backward\(\) and a loop.*algorithms.fp8.exclude",
    ):
        TRANSFORMS[name](model, X)
    assert torch.equal(TRANSFORMS[name](model.eval(), X), TRANSFORMS[name](plain.eval(), X))
    model.train()(X).sum().backward()  # and nothing is left behind


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name_and_their_values_run():
    model, plain = layer_of()
    x = torch.nested.nested_tensor([X[:3], X[3:]], layout=torch.jagged)
    with pytest.raises(RuntimeError, match=r"0: a nested tensor .* x.values\(\)"):
        model(x)
    assert torch.equal(model.eval()(x).values(), plain(x).values())
    assert model.train()(x.values()).shape == (8, 16)


class Noisy(nn.Module):
    """Another weight whenever it is asked."""

    calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight + torch.full_like(weight, float(self.calls))


@pytest.mark.parametrize("evaluate", [False, True])
def test_a_parametrisation_registered_after_the_conversion_runs_once_a_forward(evaluate):
    model, _ = layer_of()
    noisy = Noisy()
    parametrize.register_parametrization(model[0], "weight", noisy)
    model.train(not evaluate)
    before = noisy.calls
    model(X).square().mean().backward()
    assert noisy.calls == before + 1
    with parametrize.cached():  # the user's own
        model(X), model(X)
    assert noisy.calls == before + 2


@pytest.mark.parametrize("kind", ["spectral", "weight"])
def test_its_gradients_are_those_of_the_weight_that_it_gave(kind):
    model, _ = layer_of()
    plain, _ = layer_of()
    norm = parametrizations.spectral_norm if kind == "spectral" else parametrizations.weight_norm
    norm(model[0])
    reference = copy.deepcopy(model[0].parametrizations).train()
    weight = reference.weight()
    plain[0].weight = nn.Parameter(weight.detach().clone())
    for one in (model, plain):
        one(X).square().mean().backward()
    found = [p.grad for p in model[0].parametrizations.weight.parameters()]
    expected = torch.autograd.grad(weight, list(reference.weight.parameters()), plain[0].weight.grad)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_what_trains_also_evaluates(weights, inputs, bias):
    model = nn.Sequential(nn.Linear(32, 16, bias=bias, dtype=weights))
    foundry_fp8.apply_fp8(model, recipe="current", backend="emulated")
    x = X.to(inputs)
    trained = model(x)
    evaluated = model.eval()(x)
    assert trained.dtype == evaluated.dtype == inputs
    expected = nn.functional.linear(x, model[0].weight.to(inputs), model[0].bias.to(inputs) if bias else None)
    assert torch.equal(evaluated, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8", "nvfp4", "block"])
def test_an_onnx_export_of_fp8_is_refused_by_name(recipe, tmp_path):
    model, _ = layer_of(recipe, evaluate="fp8")
    model.eval()
    with pytest.raises(RuntimeError, match=r"0: ONNX has no FP8 GEMMs. Export with evaluate: high_precision"):
        torch.onnx.export(model, (X,), tmp_path / "a.onnx", dynamo=False)
