"""What conversion proves on the machine before it changes anything."""

import pytest
import torch
import triton.language as tl
from torch import nn
from triton.runtime import interpreter

import foundry_fp8
from foundry_fp8.backends.native import NativeBackend, self_check
from foundry_fp8.backends.native.scaling import SCALINGS
from foundry_fp8.backends.native.self_check import check_kernels
from foundry_fp8.kernels import block_gemm, blockwise, grouped, tensorwise
from foundry_fp8.numerics.recipes import RECIPES, BlockScaling, CurrentScaling, DelayedScaling
from tests.kernels.interpreter import convert_float

check = check_kernels.__wrapped__  # without its memory of what passed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("delayed", "block") else pytest.mark.full)
        for name, cls in RECIPES.items()
        if cls.kind in SCALINGS
    ],
)
def test_the_kernels_of_every_recipe_pass(name, device):
    check(RECIPES[name](), torch.bfloat16, torch.device(device), True, True)


def broken(monkeypatch, module, name, output):
    """The kernel's launch, with one element of one output another."""
    launch = getattr(module, name)

    def wrong(*args, **kwargs):
        result = launch(*args, **kwargs)
        tensor = getattr(result, output) if output else result
        if tensor is not None:
            tensor.view(-1)[77:78].view(torch.uint8)[-1] ^= 4
        return result._replace(**{output: tensor}) if output else tensor

    monkeypatch.setattr(module, name, wrong)


@pytest.mark.parametrize(
    ("recipe", "module", "name", "output", "said"),
    [
        (CurrentScaling(), tensorwise, "quantize_tensorwise", "data_t", "data_t of x"),
        (BlockScaling(), blockwise, "quantize_blockwise", "gemm_scale_t", "gemm_scale_t of x"),
    ],
)
def test_one_wrong_element_is_an_error_that_names_it(recipe, module, name, output, said, monkeypatch, device):
    broken(monkeypatch, module, name, output)
    with pytest.raises(RuntimeError, match=rf"kernel {name} is wrong .*Triton \d.*{said}.* 1 of \d+ differ"):
        check(recipe, torch.bfloat16, torch.device(device), False)


def test_a_wrong_cast_of_experts_is_an_error_that_names_it(monkeypatch, device):
    cast = grouped.quantize_groups

    def wrong(*args, **kwargs):
        made = cast(*args, **kwargs)
        made[1].view(-1)[77:78].view(torch.uint8)[-1] ^= 4
        return made

    monkeypatch.setattr(grouped, "quantize_groups", wrong)
    given = CurrentScaling(), torch.bfloat16, torch.device(device), False
    check(*given)
    with pytest.raises(
        RuntimeError, match=r"kernel quantize_groups is wrong .* the experts' columns of x .* 1 of \d+ differ"
    ):
        check(*given, True)


@pytest.mark.parametrize("recipe", [CurrentScaling(), pytest.param(DelayedScaling(), marks=pytest.mark.full)])
def test_what_rounds_twice_may_take_the_neighbour(recipe, monkeypatch, device):
    """sm_89's conversion, through float16. Elsewhere that is an error."""
    if device != "cpu":
        pytest.skip("a GPU converts as it does")

    def twice(values, source, target, rounding):
        if str(target).startswith("fp8"):
            values, source = convert_float(values, source, tl.float16, rounding), tl.float16
        return convert_float(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", twice)
    with pytest.raises(RuntimeError, match=r"data of .* differ"):
        check(recipe, torch.bfloat16, torch.device(device), False)
    monkeypatch.setattr(self_check, "_rounds_twice", lambda device: True)
    check(recipe, torch.bfloat16, torch.device(device), False)


def test_the_scale_of_finite_values_is_checked(monkeypatch, device):
    """An Inf makes it 1, whatever the division gives."""
    right = tensorwise.quantize_tensorwise_reference

    def doubled(*args, **kwargs):
        found = right(*args, **kwargs)
        stats = torch.where(found.stats[1].isfinite(), found.stats * 2, found.stats)
        return found._replace(stats=stats)

    monkeypatch.setattr(tensorwise, "quantize_tensorwise_reference", doubled)
    with pytest.raises(RuntimeError, match="stats of x of the current recipe"):
        check(CurrentScaling(), torch.bfloat16, torch.device(device), False)


def test_a_wrong_product_is_an_error(monkeypatch, device):
    from foundry_fp8.backends.native import products

    right = products.block_gemm
    monkeypatch.setattr(products, "block_gemm", lambda *args, **kwargs: right(*args, **kwargs) * 1.02)
    with pytest.raises(RuntimeError, match=r"kernel block_gemm is wrong .* fprop of the block recipe"):
        check(BlockScaling(), torch.bfloat16, torch.device(device), False)
    assert block_gemm.block_gemm is right


def test_a_model_is_not_touched_when_it_fails(monkeypatch, device):
    def fails(self, recipe, dtype, where, *, fused, experts):
        assert (recipe.name, dtype, fused, experts) == ("current", torch.bfloat16, False, False)
        raise RuntimeError("wrong here")

    monkeypatch.setattr(NativeBackend, "self_check", fails)
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(RuntimeError, match="wrong here"):
        foundry_fp8.apply_fp8(model, recipe="current", backend="native", device=device)
    assert type(model[0]) is nn.Linear
