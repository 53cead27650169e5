"""nvfp4 against Transformer Engine's own recipe and its reference in Python. Run by test_real_te.py."""

import importlib
import itertools

import pytest
import torch

from foundry_fp8.backends.transformer_engine.backend import library, te_recipe_of
from foundry_fp8.numerics.nvfp4 import unpack_codes
from foundry_fp8.numerics.operands import quantize
from foundry_fp8.numerics.recipes import NVFP4Scaling


@pytest.fixture
def reference(te):
    """Its quantiser in Python, which releases from 2.18 on have."""
    place = "transformer_engine.pytorch.custom_recipes"
    try:
        found = importlib.import_module(f"{place}.reference_nvfp4")
        formats = importlib.import_module(f"{place}.reference_utils").Fp4Formats
    except ModuleNotFoundError:
        pytest.skip("this release has no reference of nvfp4 under this name")
    return lambda **options: found.NVFP4QuantizerRef(dtype=formats.E2M1, **options)


@pytest.mark.parametrize("options", list(itertools.product([True, False], repeat=3)), ids=str)
def test_every_option_reaches_te(te, options):
    if not hasattr(library().recipe, "NVFP4BlockScaling"):
        pytest.skip("this release has no nvfp4")
    hadamard, stochastic, square = options
    made = te_recipe_of(
        NVFP4Scaling(hadamard=hadamard, stochastic_rounding=stochastic, square_weights=square)
    )
    x, w, dy = made.fp4_quant_fwd_inp, made.fp4_quant_fwd_weight, made.fp4_quant_bwd_grad
    assert [q.random_hadamard_transform for q in (x, w, dy)] == [hadamard, False, hadamard]
    assert [q.stochastic_rounding for q in (x, w, dy)] == [False, False, stochastic]
    assert [q.fp4_2d_quantization for q in (x, w, dy)] == [False, square, False]
    assert (
        getattr(made, "nvfp4_4over6", "none") == "none" and getattr(made, "backward_override", None) is None
    )
    assert made.nvfp4() and not made.fp8_dpa and not made.fp8_mha


def cases():
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 96)
        yield "gaussian", x.to(dtype)
        yield "outlier", x.index_put((torch.tensor(5), torch.tensor(7)), torch.tensor(3e4)).to(dtype)
        yield "zero blocks", x.masked_fill(torch.arange(64)[:, None] // 16 % 2 == 0, 0.0).to(dtype)
        yield "small", (x * torch.logspace(0, -6, 64)[:, None]).to(dtype)
        yield "zeros", torch.zeros_like(x).to(dtype)


@pytest.mark.parametrize("square", [False, True])
def test_codes_scales_and_products_are_those_of_tes_reference(reference, square):
    """Both copies of an operand; the columnwise one transformed where TE transforms it: bfloat16, not in squares."""
    for name, x in cases():
        mixes = x.dtype == torch.bfloat16 and not square
        recipe = NVFP4Scaling(hadamard=mixes, stochastic_rounding=False)
        theirs = reference(quant_tile_shape=(16, 16) if square else (1, 16), with_rht=mixes)
        found = theirs.quantize(x)
        operand = "w" if square else "x"
        for along, codes, scale, amax in (
            (1, found.data, found.scale, found.global_amax_row),
            (0, found.data_t, found.scale_t, found.global_amax_col),
        ):
            ours = quantize(x, operand, recipe, along=along)
            ours = ours if along else ours.t()
            values = unpack_codes(codes).float()
            assert torch.equal(ours.data.float(), values), (name, x.dtype, along)
            rows = scale.view(torch.float8_e4m3fn).float()
            rows = rows[:: ours.block[0]] if len(rows) != len(ours.scale_inv) else rows
            encode = 1.0 if float(amax) == 0 else torch.tensor(2688.0) / amax.view(())
            assert torch.equal(ours.scale_inv, rows / 1.0 * torch.as_tensor(1.0 / encode)), (
                name,
                x.dtype,
                along,
            )


def test_the_product_is_that_of_tes_reference_up_to_the_order_of_its_sums(reference):
    from foundry_fp8.backends.emulated.gemm import scaled_mm

    x, w = torch.randn(64, 96), torch.randn(32, 96)
    theirs = reference()
    qx, qw = theirs.quantize(x), theirs.quantize(w)
    y = theirs.qgemm(qx.data, qw.data, None, torch.float32, qx.scale, qw.scale, qresult_x=qx, qresult_w=qw)
    recipe = NVFP4Scaling(square_weights=False)
    ours = scaled_mm(
        quantize(x, "x", recipe), quantize(w, "w", recipe), out_dtype=torch.float32, power_2=False
    )
    torch.testing.assert_close(ours, y, rtol=0, atol=float(y.abs().max()) * 1e-6)
