"""What the block recipe's operands look like to torch's own block-scaled GEMM, on fake CUDA tensors through torch's checks."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry_fp8.backends.native import products
from foundry_fp8.compat import block_scaled_mm as compat
from foundry_fp8.kernels.blockwise import quantize_blockwise_reference
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.numerics.formats import E4M3

needs_torchs = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "scaled_mm"), reason="torch.nn.functional.scaled_mm is of torch 2.10"
)


def operands(m, n, k, square, monkeypatch):
    """Fake CUDA tensors with the shapes and strides of quantised ones."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # lets CPU tensors in; the definition runs
    a, b = (
        quantize_blockwise_reference(
            Producer.identity(torch.ones(rows, k)), E4M3, columns=False, square=squares
        )
        for rows, squares in ((m, False), (n, square))
    )
    real = a.data, a.gemm_scale, b.data, b.gemm_scale
    with FakeTensorMode():
        torch.empty(1, device="cuda")  # the first one installs a device guard that needs no driver
        return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in real]


CASES = {
    "fprop": (48, 256, 1024, True),
    "one row of squares": (16, 128, 512, True),
    "wgrad": (272, 144, 384, False),
    "one block": (16, 16, 128, False),
}


@needs_torchs
@pytest.mark.parametrize(("m", "n", "k", "square"), CASES.values(), ids=CASES)
def test_torch_takes_the_scales_as_they_lie(m, n, k, square, monkeypatch):
    assert compat.fits_block_mode(n, k, torch.bfloat16, square_b=square)
    a, a_scale, b, b_scale = operands(m, n, k, square, monkeypatch)
    out = compat.block_scaled_mm(a, a_scale, b, b_scale, torch.bfloat16, square_b=square)
    assert out.shape == (m, n) and out.dtype == torch.bfloat16 and out.device.type == "cuda"


@needs_torchs
@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) > (2, 11),
    reason="on fake tensors torch 2.15 checks no layouts of scales any more, its GPU code alone does",
)
def test_torch_refuses_other_layouts(monkeypatch):
    """So that the test above says something: squares that are not whole words of four, and transposed scales."""
    for n, k in ((256, 640), (200, 512)):
        assert not compat.fits_block_mode(n, k, torch.bfloat16, square_b=True)
    a, a_scale, b, b_scale = operands(48, 256, 640, True, monkeypatch)
    with pytest.raises(RuntimeError, match="128x128"):
        compat.block_scaled_mm(a, a_scale, b, b_scale, torch.bfloat16, square_b=True)
    a, a_scale, b, b_scale = operands(48, 256, 512, False, monkeypatch)
    transposed = a_scale.t().contiguous().t()
    with pytest.raises(RuntimeError, match="1x128"):
        compat.block_scaled_mm(a, transposed, b, b_scale, torch.bfloat16, square_b=False)


@pytest.mark.parametrize(
    ("missing", "k", "bias", "taken"),
    [(None, 512, False, True), ("old", 512, False, False), (None, 384, False, False), (None, 512, True, False)],
)  # fmt: skip
def test_torchs_is_taken_where_it_is_there_and_fits(missing, k, bias, taken, monkeypatch):
    asked = []

    def multiply(a, *_, **__):
        asked.append(a)
        return a.new_empty((48, 256), dtype=torch.bfloat16)

    monkeypatch.setattr(products, "block_mode_missing", lambda index: missing)

    def multiply_in_triton(a, a_scale, b, b_scale, *, m, n, out_dtype, **_):
        return a.new_empty((m, n), dtype=out_dtype)

    monkeypatch.setattr(products, "block_scaled_mm", multiply)
    monkeypatch.setattr(products, "block_gemm", multiply_in_triton)
    args = operands(48, 256, k, True, monkeypatch)
    added = args[0].new_empty(256, dtype=torch.bfloat16) if bias else None
    with args[0].fake_mode:
        y = products.blockwise_gemm(*args, added, 37, 256, torch.bfloat16, True)
    assert y.shape == (37, 256) and bool(asked) == taken


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(compat, "_MISSING", None)
    monkeypatch.setattr(compat, "_missing_on", compat._missing_on.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in compat.block_mode_missing(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    assert compat.block_mode_missing(0) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (10, 0))
    assert "this GPU has 10.0" in compat.block_mode_missing(0)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    said = "12.6" if hasattr(torch.nn.functional, "scaled_mm") else "no torch.nn.functional.scaled_mm"
    assert said in compat._missing()
