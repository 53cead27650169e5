"""The operators and ``torch._scaled_mm`` as torch sees them: fake tensors, CUDA without a GPU, ``torch.compile``."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import foundry_fp8
from foundry_fp8.backends.native import ops
from foundry_fp8.backends.native.inputs import LinearCall
from foundry_fp8.backends.native.linear import dgrad_and_wgrad, fprop
from foundry_fp8.backends.native.plan import plan_of
from foundry_fp8.backends.native.scaling.tensor import tensorwise_mm
from foundry_fp8.backends.native.source import Source
from foundry_fp8.layers.state import FP8State
from foundry_fp8.layers.unit_linear import UnitLinear
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.mx_layout import swizzle_mx_scales, unswizzle_mx_scales
from foundry_fp8.numerics.recipes import BlockScaling, CurrentScaling, DelayedScaling, UnitScaling
from tests.kernels.cases import spread

NOTHING = (None,) * 5


def operator_samples(device):
    x = spread(33, 50, torch.bfloat16, device)
    vector = torch.rand(33, device=device)
    slot, scale = torch.zeros((), device=device), torch.ones((), device=device)
    square = ops.quantize_blockwise(x, *NOTHING, 0, "e4m3", 128, True, True, True, True, False)
    block = ops.quantize_blockwise(x, *NOTHING, 0, "e4m3", 128, False, True, True, True, False)
    data, _, stats, _ = ops.quantize_tensorwise(
        x, *NOTHING, 0, None, None, None, "e4m3", True, True, False, False
    )
    return {
        "current": (
            ops.quantize_tensorwise,
            (x, *NOTHING, 0, None, None, None, "e4m3", True, True, True, True),
        ),
        "delayed": (
            ops.quantize_tensorwise,
            (x, *NOTHING, 0, scale, None, slot, "e5m2", False, True, False, False),
        ),
        "constant": (
            ops.quantize_tensorwise,
            (x, *NOTHING, 0, None, None, None, "e5m2", False, True, True, True, 1024.0, 0.125),
        ),
        "block": (ops.quantize_blockwise, (x, *NOTHING, 0, "e4m3", 128, False, True, True, True, True)),
        "square": (ops.quantize_blockwise, (x, *NOTHING, 0, "e4m3", 128, True, True, True, True, False)),
        "mx": (ops.quantize_blockwise, (x, *NOTHING, 0, "e4m3", 32, False, True, False, True, False)),
        "tensorwise_gemm": (
            ops.tensorwise_gemm,
            (data, stats[1], data, stats[1], None, torch.bfloat16, True),
        ),
        "gemm": (
            ops.blockwise_gemm,
            (block[0], block[1], square[0], square[1], None, 33, 33, torch.bfloat16, True),
        ),
        "statistics": (ops.norm_statistics, (x, 1e-5, True)),
        "norm_backward": (ops.norm_backward, (x, x, vector, None, vector, torch.bfloat16)),
        "activation_backward": (ops.activation_backward, (x, x, x, 2)),
    }


@pytest.mark.parametrize(
    "name",
    ["current", "delayed", "constant", "block", "square", "mx", "gemm", "tensorwise_gemm", "statistics", "norm_backward", "activation_backward"],
)  # fmt: skip
def test_operators_say_what_they_return(name, device):
    """torch's own check: the schema is right about mutation and aliases, fake outputs match real ones."""
    op, args = operator_samples(device)[name]
    # The schema check compares inputs before and after, which torch cannot do with FP8 ones.
    checks = ("test_faketensor",) if name.endswith("gemm") else ("test_schema", "test_faketensor")
    torch.library.opcheck(op.definition, args, test_utils=checks)


BY_ROW = {"name": "current", "granularity": "row"}


@pytest.mark.parametrize(
    ("recipe", "bias"),
    [
        ("delayed", True),
        pytest.param(BY_ROW, True, marks=pytest.mark.full),
        ("block", False),
        ("unit", False),
    ],
)
def test_compiles_whole_and_gives_the_same_bits(recipe, bias, device):
    """One graph for every number of tokens, forward and backward, no breaks. 48 tokens need no padding."""
    torch.manual_seed(0)
    unit = recipe == "unit"
    model = nn.Sequential((UnitLinear if unit else nn.Linear)(64, 96, bias=bias)).to(device)
    recipe = {"name": "unit", "gradient_scale": 8} if unit else recipe
    foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
    parts = nn.Sequential(*model)  # the same modules without the state's hooks: scales stand still
    compiled = torch.compile(parts, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.reset()
    for tokens in (33, 48):
        results = []
        for run in (parts, compiled):
            x = torch.linspace(-2, 2, tokens * 64, device=device).view(tokens, 64).requires_grad_()
            parts.zero_grad()
            y = run(x)
            y.backward(torch.ones_like(y) * 0.5)
            results.append([y.detach(), x.grad, *(p.grad for p in parts.parameters())])
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)
    delayed = FP8State.of(model).delayed
    assert delayed is None or bool((delayed.amax_history[0] > 0).all())


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("delayed", marks=pytest.mark.full),
        [{"modules": "0", "recipe": "delayed"}, {"recipe": "block", "gemms": {"wgrad": "high_precision"}}],
    ],
    ids=["delayed", "policy"],
)
def test_layers_compiled_one_by_one_share_delayed_state(device, recipe):
    """Each graph records amaxes between another's forward and backward."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).to(device)
        foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
        state = FP8State.of(model)
        torch._dynamo.reset()
        layers = [torch.compile(nn.Sequential(m), backend="aot_eager", fullgraph=True) for m in model]
        run = nn.Sequential(*(layers if compiled else model))
        inputs = [torch.randn(16, 64, device=device, requires_grad=True) for _ in range(2)]
        for x in inputs:
            state.update()
            run(x).sum().backward()
        results.append([*(x.grad for x in inputs), *(p.grad for p in model.parameters())])
        results[-1] += [state.delayed.scale.clone(), state.delayed.amax_history.clone()]
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(), CurrentScaling(), BlockScaling(), UnitScaling(gradient_scale=1024)],
    ids=lambda r: r.name,
)
@pytest.mark.parametrize("shape", [(64, 128, 256), (33, 100, 75)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_gemms_on_fake_cuda_tensors(recipe, shape, dtype):
    """What CUDA would be asked to do: shapes, dtypes and layouts that ``_scaled_mm`` takes, three GEMMs of the right size, and
    nothing that waits for the device (a fake tensor has no value to wait for: ``item()`` raises)."""
    m, k, n = shape
    with FakeTensorMode():
        x = torch.empty(m, k, dtype=dtype, device="cuda")
        weight, bias = torch.empty(n, k, device="cuda"), torch.empty(n, device="cuda")
        dy = torch.empty(m, n, dtype=dtype, device="cuda")
        delayed = (None, None)
        if isinstance(recipe, DelayedScaling):
            delayed = (torch.empty((), device="cuda"), torch.empty((), device="cuda"))
        with FlopCounterMode(display=False) as flops:
            call = LinearCall(plan=plan_of(recipe), x=delayed, w=delayed, dy=delayed)
            y, saved = fprop(Source(x), weight, bias, call, keep_x=True)
            dx, dw, db = dgrad_and_wgrad(dy, saved, call, dtype, needs=(True, True, True))
    assert (y.shape, y.dtype, y.device.type) == ((m, n), dtype, "cuda")
    assert (dx.shape, dx.dtype) == ((m, k), dtype)
    assert (dw.shape, dw.dtype) == ((n, k), torch.float32)
    assert (db.shape, db.dtype) == ((n,), torch.float32)
    assert y.is_contiguous() and dx.is_contiguous() and dw.is_contiguous()
    if not isinstance(recipe, BlockScaling):
        padded_m, padded_k, padded_n = (size + -size % 16 for size in shape)
        assert flops.get_total_flops() == 3 * 2 * padded_m * padded_k * padded_n


def fake_mm(a_shape, b_shape, *, a_layout="row", b_layout="column", scale_dtype=torch.float32):
    with FakeTensorMode():
        a = torch.empty(a_shape, device="cuda", dtype=E4M3.dtype)
        b = torch.empty(b_shape, device="cuda", dtype=E4M3.dtype)
        a = a if a_layout == "row" else torch.empty(a_shape[::-1], device="cuda", dtype=E4M3.dtype).t()
        b = b.t().contiguous() if b_layout == "row" else b.t()
        one = torch.ones((), device="cuda", dtype=scale_dtype)
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def test_scaled_mm_contract():
    """What torch itself accepts; the comments of this package rely on it."""
    assert fake_mm((17, 64), (32, 64)).shape == (17, 32)  # M is free
    assert fake_mm((1, 16), (16, 16)).shape == (1, 16)


@pytest.mark.parametrize(
    ("kwargs", "shapes"),
    [
        ({}, ((16, 60), (32, 60))),
        ({}, ((16, 64), (24, 64))),
        ({"a_layout": "column"}, ((16, 64), (32, 64))),
        ({"b_layout": "row"}, ((16, 64), (32, 64))),
        ({"scale_dtype": torch.bfloat16}, ((16, 64), (32, 64))),
    ],
    ids=["K not of 16", "N not of 16", "a column-major", "b row-major", "scale not float32"],
)
def test_scaled_mm_refuses(kwargs, shapes):
    with pytest.raises((RuntimeError, torch._dynamo.exc.TorchRuntimeError)):
        fake_mm(*shapes, **kwargs)


@pytest.mark.parametrize("n", [80, 75])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_bias_on_fake_cuda_tensors(n, out_dtype, bias_dtype):
    with FakeTensorMode():
        a = torch.empty(32, 64, device="cuda", dtype=E5M2.dtype)
        b = torch.empty(80, 64, device="cuda", dtype=E4M3.dtype)
        one = torch.ones((), device="cuda")
        bias = None if bias_dtype is None else torch.empty(n, device="cuda", dtype=bias_dtype)
        y = tensorwise_mm(a, one, b, one, m=30, n=n, out_dtype=out_dtype, bias=bias)
    assert (y.shape, y.dtype) == ((30, n), out_dtype) and y.is_contiguous()


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (130, 5), (1, 1)], ids=str)
def test_mx_scales_are_swizzled_as_documented(shape):
    """cuBLAS, "1D block scaling factors layout", element by element."""
    rows, columns = shape
    codes = torch.randint(1, 255, shape, dtype=torch.uint8)
    ours = swizzle_mx_scales(codes)
    tiles_c = -(-columns // 4)
    assert ours.shape == (-(-rows // 128) * tiles_c * 512,)
    expected = torch.zeros_like(ours)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * tiles_c + c // 4
            expected[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = codes[r, c]
    assert torch.equal(ours, expected)
    assert torch.equal(unswizzle_mx_scales(ours, rows, columns), codes)
