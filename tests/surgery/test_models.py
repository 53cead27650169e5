"""Every model of the zoo, converted: the report against what an independent trace saw, gradients, and the reverse."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import foundry_fp8
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.grouped_linear import FP8GroupedLinear
from foundry_fp8.surgery.first_batch import ForwardTrace, as_run
from foundry_fp8.surgery.report import SurgeryReport, SurgeryRow, kind_of
from tests.model_zoo import MODELS, TRANSFORMERS_4

RAN_OTHERWISE = (
    {"VideoMAE": {"query", "key", "value"}}
    if TRANSFORMERS_4
    else {"Mamba": {"dt_proj"}, "Jamba": {"dt_proj"}}
)
"""Converted layers whose owners multiply by the weight themselves."""


class Multiplied(TorchDispatchMode):
    """The parameters that reach a matrix product or a convolution below autograd, by their storage."""

    OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mv", "addmv", "_grouped_mm")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr(): p for p in model.parameters() if p.dim() > 1}
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in self.OPERATORS:
            operands = [a for a in args if isinstance(a, Tensor)]
            found = (self.parameters.get(a.untyped_storage().data_ptr()) for a in operands)
            self.seen |= {id(p) for p in found if p is not None}
        return func(*args, **(kwargs or {}))


def weight_of(model: nn.Module, row: SurgeryRow) -> nn.Parameter:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters[row.name] if row.name in parameters else parameters[f"{row.name}.weight"]


def loss_of(output: Any) -> Tensor:
    """Of every output, so that every layer has a gradient; far from symmetric."""
    logits = output if isinstance(output, Tensor) else output.logits
    return (logits * torch.linspace(-1, 1, logits[0].numel()).view(logits.shape[1:])).pow(2).mean()


def step(model: nn.Module, batch: dict[str, Any]) -> list[Tensor | None]:
    """The loss and all gradients."""
    model.zero_grad()
    loss = loss_of(model(**batch))
    loss.backward()
    return [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


Products = dict[FP8GemmLayer, list[dict[str, Any]]]


def watch_products(model: nn.Module) -> Products:
    """For each call of each converted layer: ``x``, ``y``, ``dy``, and ``dx`` where there is one; of experts ``w``, ``dw``, ``sizes`` too."""
    found: Products = collections.defaultdict(list)

    def before(module: FP8GemmLayer, args: Any) -> Any:
        call = {"x": args[0].detach().clone()}
        found[module].append(call)
        x = args[0].clone()  # its gradient is this layer's alone
        if x.requires_grad:
            x.register_hook(lambda dx: call.update(dx=dx))
        if isinstance(module, FP8GroupedLinear):
            call |= {"w": args[1].detach(), "sizes": args[2]}
            args[1].register_hook(lambda dw: call.update(dw=dw))
        return (x, *args[1:])

    def after(module: FP8GemmLayer, args: Any, y: Tensor) -> None:
        call = found[module][-1]
        call["y"] = y.detach().clone()
        if y.requires_grad:
            y.register_hook(lambda dy: call.update(dy=dy))

    for module in model.modules():
        if isinstance(module, FP8GemmLayer):
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)
    return found


def rounding_error(x: Tensor, mantissa: int, largest: float, least: float) -> Tensor:
    """The most by which current scaling moves each element: half a step, relative, or absolute among the subnormals."""
    half_step = x.abs() * 2.0 ** -(mantissa + 1)
    subnormal = 0.5 * least * x.abs().max() / largest if x.numel() else 0.0
    return half_step.clamp(min=float(subnormal)) * (1 + 1e-5)


def assert_product(found: Tensor, a: Tensor, da: Tensor, b: Tensor, db: Tensor, name: str) -> None:
    """``found`` is ``a @ b`` with operands moved by ``da`` and ``db`` at most, added up in float32."""
    exact = a @ b
    size = a.abs() @ b.abs()
    bound = da @ b.abs() + a.abs() @ db + da @ db + size * (a.shape[1] + 1) * 2.0**-23 + 1e-12
    excess = ((found.double() - exact).abs() - bound).max() if exact.numel() else 0
    assert excess <= 0, f"{name}: {float(excess)} beyond its bound, values up to {float(exact.abs().max())}"
    # And not by luck of a bound that allows anything.
    assert exact.numel() == 0 or size.mean() == 0 or bound.mean() < 0.5 * size.mean()


def by_expert(calls: list[dict[str, Any]]) -> list[tuple[Tensor, Tensor, list[dict[str, Any]]]]:
    """Of each expert its weight, the weight's gradient, and its rows of each call."""
    found = []
    for call in (c for c in calls if "dy" in c):
        rows = [call[key].split(list(call["sizes"])) for key in ("x", "y", "dy", "dx")]
        for expert, (x, y, dy, dx) in enumerate(zip(*rows, strict=True)):
            found.append((call["w"][expert], call["dw"][expert], [{"x": x, "y": y, "dy": dy, "dx": dx}]))
    return found


def assert_products(products: Products) -> int:
    """fprop, dgrad and wgrad of every layer within the rounding of their FP8 operands; how many layers had a gradient."""
    checked = 0
    for module, calls in products.items():
        if isinstance(module, FP8GroupedLinear):
            experts = by_expert(calls)
            checked += any([assert_layer(w, None, dw, rows, module.fqn) for w, dw, rows in experts])
            continue
        dw = module.weight.grad
        if module.weight.requires_grad:
            assert dw is not None, module.fqn
            dw = dw if module.matrix is module.weight else dw.t()
        bias = None if module.bias is None else module.bias.detach()
        checked += assert_layer(module.matrix.detach(), bias, dw, calls, module.fqn)
    return checked


def assert_layer(
    weight: Tensor, bias: Tensor | None, dw: Tensor | None, calls: list[dict[str, Any]], name: str
) -> bool:
    """The products of one weight; whether it had a gradient."""
    w = weight.double()
    dw_exact, wgrad_bound = torch.zeros_like(w), torch.zeros_like(w)
    for call in calls:
        if "dy" not in call:  # the first frozen layers of a model with adapters
            continue
        x, y, dy = (call[key].reshape(-1, call[key].shape[-1]).double() for key in ("x", "y", "dy"))
        e4m3, e5m2 = (3, 448.0, 2.0**-9), (2, 57344.0, 2.0**-16)
        ex, ew, edy = rounding_error(x, *e4m3), rounding_error(w, *e4m3), rounding_error(dy, *e5m2)
        y = y if bias is None else y - bias.double()
        assert_product(y, x, ex, w.t(), ew.t(), f"fprop of {name}")
        if "dx" in call:
            assert_product(call["dx"].reshape(x.shape), dy, edy, w, ew, f"dgrad of {name}")
        dw_exact += dy.t() @ x
        wgrad_bound += edy.t() @ x.abs() + dy.t().abs() @ ex + edy.t() @ ex
        wgrad_bound += dy.t().abs() @ x.abs() * (len(x) + 1) * 2.0**-23
    if dw is None:
        return False
    assert ((dw.double() - dw_exact).abs() <= wgrad_bound * (1 + 1e-5) + 1e-12).all(), f"wgrad of {name}"
    return bool(dw_exact.abs().max() > 0)


def assert_report(report: SurgeryReport, model: nn.Module, multiplied: set[int], *, exact: bool) -> None:
    """A row for each weight that was multiplied; with ``exact`` for no other, and the share is theirs."""
    listed = {id(weight_of(model, row)) for row in report.rows if row.action != "unused"}
    names = {id(p): name for name, p in model.named_parameters()}

    def kind(name: str) -> str:
        return re.sub(r"expert_\d+", "expert", kind_of(name))

    assert multiplied <= listed, [names[i] for i in multiplied - listed]
    if exact:
        kinds = {kind(names[i]) for i in multiplied}  # an expert may get no token
        assert {kind(names[i]) for i in listed} == kinds
        converted = {id(weight_of(model, row)) for row in report.rows if row.action == "converted"}
        sizes = {id(p): p.numel() for name, p in model.named_parameters() if kind(name) in kinds}
        assert report.converted_share == pytest.approx(sum(sizes[i] for i in converted) / sum(sizes.values()))


def in_the_plain_class(model: nn.Module, folder: Path) -> nn.Module:
    """What somebody without this package makes of its checkpoint."""
    if not hasattr(model, "save_pretrained"):
        plain = type(model)()
        plain.load_state_dict(model.state_dict(), strict=True)
        return plain.eval()
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def logits_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    output = model(**batch)
    return (output if isinstance(output, Tensor) else output.logits).detach()


TWINS = ("MPT-dmoe", "MPT-glu", "Mixtral", "Olmoe", "Qwen2Moe", "Qwen2", "Mistral", "Gemma", "Bart")
"""Of which a quicker host of the same kind is in the default tier."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in TWINS else ()) for name in MODELS]
)
def test_model(name: str, tmp_path: Path) -> None:
    model, batch = MODELS[name]()
    model.train()
    with Multiplied(model) as multiplied:
        exact = step(model, batch)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    keys = list(model.state_dict())

    report = foundry_fp8.apply_fp8(model, recipe="current")
    after = dict(model.named_parameters(remove_duplicate=False))
    assert list(model.state_dict()) == keys
    assert after.keys() == parameters.keys() and all(after[n] is p for n, p in parameters.items())
    assert_report(report, model, multiplied.seen, exact=False)

    # In high precision the converted model is the model: its layers compute what they did.
    layers = [m for m in model.modules() if isinstance(m, FP8GemmLayer)]
    for layer in layers:
        layer.set_recipe(None)
    for a, b in zip(step(model, batch), exact, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().max()))
    for layer in layers:
        layer.set_recipe(layer.configured_recipe)
        layer.ledger.calls.clear()

    # In FP8 each product is as near as the rounding of its operands, and the report says what ran.
    products, trace = watch_products(model), ForwardTrace(model)
    trace.arm()
    step(model, batch)
    ran, warnings = as_run(report, trace)
    expected = RAN_OTHERWISE.get(name, set())
    assert {kind.split(":")[0].rpartition(".")[2] for kind in warnings} == expected
    assert {n.rpartition(".")[2] for n in set(report.converted) - set(ran.converted)} == expected
    assert_report(ran, model, multiplied.seen, exact=True)
    assert {row.precision for row in ran.rows if row.action == "converted"} == {"fp8"}
    assert {row.precision for row in ran.rows if row.action == "skipped"} <= {"fp32", ""}
    trained = {m: c for m, c in products.items() if isinstance(m, FP8GroupedLinear) or m.weight.requires_grad}
    used = [m for m, calls in trained.items() if any(len(c["x"]) for c in calls)]
    assert assert_products(products) >= 0.9 * len(used)

    # Its checkpoint is that of the plain class; adapters merge into the converted layers.
    model.eval()
    if hasattr(model, "merge_and_unload"):
        with torch.no_grad():
            for part, parameter in model.named_parameters():
                if "lora_B" in part:
                    parameter.normal_(0, 0.02)
        expected = logits_of(model, batch)
        model = model.merge_and_unload()
        torch.testing.assert_close(logits_of(model, batch), expected, rtol=1e-4, atol=1e-6)
    loaded = in_the_plain_class(model, tmp_path / "checkpoint")
    assert not any(isinstance(module, FP8GemmLayer) for module in loaded.modules())
    torch.testing.assert_close(logits_of(loaded, batch), logits_of(model, batch), rtol=1e-4, atol=1e-6)
