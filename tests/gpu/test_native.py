"""The native backend on a CUDA device: what the interpreter cannot show.

The kernels' own cases, ``tests/kernels`` and ``tests/backends/native``, run on the device too where there is one
(``pytest tests/gpu tests/kernels tests/backends/native``).
"""

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends.native.scaling.tensor import tensorwise_mm
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.tensorwise import quantize_tensorwise
from foundry_fp8.layers.delayed_scaling import DelayedScalingState
from foundry_fp8.layers.state import FP8State
from foundry_fp8.numerics.formats import E4M3, E5M2, cast
from foundry_fp8.numerics.recipes import DelayedScaling

pytestmark = pytest.mark.gpu
RECIPES = ("delayed", "current", "block")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(autouse=True)
def _needs_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no FP8 tensor cores")


def make(recipe, backend="native", k=1024, n=2048, dtype=torch.bfloat16, layers=1, **options):
    torch.manual_seed(0)
    parts = []
    for i in range(layers):
        parts += [nn.Linear(k if i % 2 == 0 else n, n if i % 2 == 0 else k), nn.GELU()]
    model = nn.Sequential(*parts[:-1]).to("cuda", dtype)
    if recipe is not None:
        foundry_fp8.apply_fp8(model, recipe=recipe, backend=backend, **options)
    return model


def run(model, tokens=4096, seed=0, steps=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        first = next(m for m in model.modules() if isinstance(m, nn.Linear))
        x = torch.randn(tokens, first.in_features, device="cuda", generator=generator).to(first.weight.dtype)
        x.requires_grad_()
        y = model(x)
        y.backward(torch.randn(y.shape, device="cuda", generator=generator).to(y.dtype) * 1e-3)
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@every_recipe
@pytest.mark.parametrize("tokens", [4096, 1000, 1])
@pytest.mark.parametrize("shape", [(1024, 2048), (1008, 528)], ids=str)
def test_agrees_with_the_emulated_backend(recipe, tokens, shape):
    """Same FP8 operands; the products differ by the tensor core's accumulation and one bf16 rounding."""
    ours = run(make(recipe, k=shape[0], n=shape[1]), tokens, steps=2)
    if tokens % 16:
        # The emulated backend refuses what it would have to pad; high precision bounds the error instead.
        theirs, bound = run(make(None, k=shape[0], n=shape[1]), tokens, steps=2), 0.08
    else:
        theirs, bound = run(make(recipe, "emulated", k=shape[0], n=shape[1]), tokens, steps=2), 0.01
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < bound


@every_recipe
def test_float64_error_is_that_of_fp8(recipe):
    """Output and gradients within the quantisation noise of E4M3 and E5M2: SQNR above 20 dB and 18 dB."""
    fp8, exact = run(make(recipe)), run(make(None, dtype=torch.float64))
    assert relative(fp8[0], exact[0]) < 0.1
    for ours, reference in zip(fp8[1:], exact[1:], strict=True):
        assert relative(ours, reference) < 0.126


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_device_cast_is_exact_on_every_midpoint(fmt):
    """The conversion instruction rounds ties to even, saturates and keeps NaN: every value and every midpoint."""
    grid = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    grid = grid[torch.isfinite(grid)].sort().values
    middle = (grid[1:] + grid[:-1]) / 2
    values = torch.cat([grid, middle, torch.tensor([1e9, -1e9, float("inf"), float("nan")])])
    if torch.cuda.get_device_capability() >= (9, 0):  # sm_89 converts through float16, which rounds twice
        values = torch.cat([values, middle.nextafter(grid[1:]), middle.nextafter(grid[:-1])])
    x = values.repeat(16, 1).cuda()
    q = quantize_tensorwise(Producer.identity(x), fmt, scale=torch.ones((), device="cuda"))
    expected = cast(values, fmt).float()
    ours = q.data[0, : len(values)].cpu().float()
    assert torch.equal(ours.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert torch.equal(ours.isnan(), expected.isnan())


@every_recipe
def test_is_deterministic(recipe):
    first, second = run(make(recipe, layers=2), steps=3), run(make(recipe, layers=2), steps=3)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@every_recipe
def test_nothing_waits_for_the_device(recipe):
    model = make(recipe, layers=2)
    run(model, steps=2)  # tunes the block GEMM, which does wait
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_recipe
def test_compiled_by_inductor_agrees(recipe):
    model = make(recipe, layers=2)
    eager = run(nn.Sequential(*model))
    compiled = run(torch.compile(nn.Sequential(*model), fullgraph=True))
    for a, b in zip(compiled, eager, strict=True):
        assert relative(a, b) < 0.02  # inductor fuses GELU in float32, so a few operands round the other way


@every_recipe
def test_replays_in_a_cuda_graph(recipe):
    """A captured forward and backward gives new results for new inputs, and records their amaxes."""
    model = make(recipe)[0]
    x = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(512, 2048, device="cuda", dtype=torch.bfloat16)

    def step():
        y = model(x)
        return (y, *torch.autograd.grad(y, (x, model.weight), dy))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn_like(x) * seed * 10)
        if model.slots is not None:
            model.slots["x"].state.amax_history.zero_()
        graph.replay()
        replayed = [t.clone() for t in captured]
        if model.slots is not None:
            assert model.slots["x"].amax_history[0] == x.abs().max().float()
            model.slots[
                "x"
            ].state.amax_history.zero_()  # so that the update of the eager step changes no scale
        for a, b in zip(replayed, step(), strict=True):
            assert torch.equal(a, b)


@every_recipe
@pytest.mark.parametrize("cache_weights", [False, True])
def test_a_captured_training_step_equals_eager_ones(recipe, cache_weights):
    """Forward through the root, so that delayed scaling's update is captured too, backward and optimizer step."""
    models = [make(recipe, layers=2, cache_weights=cache_weights) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 1e-2) for model in models]
    x, dy = (torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step(i):
        models[i](x).backward(dy)
        optimizers[i].step()
        optimizers[i].zero_grad()  # sets to None: the captured backward writes new gradients

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(0)
            step(1)
    torch.cuda.current_stream().wait_stream(stream)
    for model in models:
        FP8State.of(model).update()  # what is captured must not depend on it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(0)
    for seed in range(4):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x) * 3.0**seed)
        graph.replay()
        step(1)
        if seed == 2:
            for model in models:
                FP8State.of(model).update()
        states = [FP8State.of(model).delayed for model in models]
        kept = [[] if s is None else [s.scale, s.amax_history] for s in states]
        for a, b in zip(
            [*kept[0], *models[0].parameters()], [*kept[1], *models[1].parameters()], strict=True
        ):
            assert torch.equal(a, b), f"replay {seed}"


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_update_in_a_cuda_graph_equals_the_reference(algorithm):
    recipe = DelayedScaling(amax_history_len=66, amax_compute_algo=algorithm)
    captured, reference = (DelayedScalingState(recipe, [448.0] * 40) for _ in range(2))
    captured.to(torch.device("cuda"))
    captured.update()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.update()
    for step in range(70):
        amax = torch.rand(40) * 2.0 ** (step % 9)
        captured.amax_history[0], reference.amax_history[0] = amax.cuda(), amax
        graph.replay()
        reference.update()  # on the CPU: the torch expression
        assert torch.equal(captured.scale.cpu(), reference.scale)
        assert torch.equal(captured.amax_history.cpu(), reference.amax_history)


@every_recipe
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_inputs_stay_visible(recipe, value):
    model = make(recipe)
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    x[17, 5] = value
    assert not torch.isfinite(model(x)).all()


@every_recipe
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_non_finite_gradients_stay_visible(recipe, value):
    model = make(recipe)
    x = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = model(x)
    dy = torch.randn_like(y)
    dy[17, 5] = value
    y.backward(dy)
    assert not torch.isfinite(x.grad).all() and not torch.isfinite(model[0].weight.grad).all()


@every_recipe
def test_peak_memory_is_below_bf16(recipe):
    def peak(model):
        run(model, 16384)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(model, 16384)
        return torch.cuda.max_memory_allocated() - before

    assert peak(make(recipe, layers=8)) < peak(make(None, layers=8))


@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3 e4m3", "e5m2 e4m3"])
@pytest.mark.parametrize("fast", [True, False])
def test_scaled_mm_is_exact_on_small_integers(pair, fast):
    """cuBLASLt takes the layouts and scales as this package passes them, a NaN scale included."""
    a = torch.randint(-2, 3, (48, 256), device="cuda").float().to(pair[0].dtype)
    b = torch.randint(-2, 3, (32, 256), device="cuda").float().to(pair[1].dtype)
    stats = torch.empty_strided((3,), (4,), device="cuda")  # cuBLASLt takes a scale at a multiple of 16 bytes
    stats.copy_(torch.tensor([1.0, 0.5, 2.0]))
    bias = torch.arange(32, device="cuda").bfloat16()
    options = {"m": 48, "n": 32, "out_dtype": torch.bfloat16, "fast_accumulation": fast}
    ours = tensorwise_mm(a, stats[1], b, stats[2], bias=bias, **options)
    assert torch.equal(ours.float(), (a.float() @ b.float().t() + bias.float()).bfloat16().float())
    stats[1] = torch.nan
    assert bool(tensorwise_mm(a, stats[1], b, stats[2], **options).isnan().all())


@every_recipe
def test_cached_weights_change_nothing(recipe):
    results = []
    for cached in (False, True):
        model = make(recipe, layers=2, cache_weights=cached)
        results.append(run(model, steps=3))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@every_recipe
@two_gpus
def test_runs_on_a_device_that_is_not_the_current_one(recipe):
    """Triton launches on the current device, so the operators make theirs current."""
    results = []
    for device in ("cuda:0", "cuda:1"):
        model = make(None).to(device)
        foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
        torch.manual_seed(1)
        x = torch.randn(256, 1024).to(device, torch.bfloat16).requires_grad_()
        for _ in range(2):
            y = model(x)
            model.zero_grad()
            y.backward(torch.full_like(y, 1e-3))
        assert torch.cuda.current_device() == 0
        results.append([t.cpu() for t in (y.detach(), x.grad, *(p.grad for p in model.parameters()))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_weight_on_another_device_is_named():
    model = make("current")
    with pytest.raises(RuntimeError, match=r"0: the input is on cpu, the weight on cuda:0"):
        model(torch.zeros(16, 1024, dtype=torch.bfloat16))


def attention_of(backend, kv_heads=2, tokens=1024, batch=1, history=2):
    """FP8 attention of 8 heads of 128, its state, and what it is given: q, k, v and dO."""
    from foundry_fp8.backends import load_backend
    from foundry_fp8.layers.attention import FP8DotProductAttention, attention_format, attention_slots

    if backend == "native":
        pytest.importorskip("cudnn", reason="cuDNN's Python frontend (foundry-fp8[cudnn]) is not installed")
        if torch.cuda.get_device_capability() < (9, 0):
            pytest.skip("cuDNN's FP8 attention needs compute capability 9.0")
    recipe = DelayedScaling(amax_history_len=history)
    attention = FP8DotProductAttention(fqn="a", recipe=recipe, backend=load_backend(backend).attention())
    names = attention_slots(recipe)
    state = DelayedScalingState(recipe, [attention_format(recipe, name).max for name in names])
    state.to(torch.device("cuda", torch.cuda.current_device()))
    attention.slots = {name: state.slot(i) for i, name in enumerate(names)}
    generator = torch.Generator("cuda").manual_seed(0)
    given = [
        torch.randn(batch, tokens, heads, 128, device="cuda", generator=generator).bfloat16().transpose(1, 2)
        for heads in (8, kv_heads, kv_heads, 8)
    ]
    return attention, state, [*given[:3], given[3] * 1e-3]


def attended(attention, given, causal=True, call=None):
    from foundry_fp8.layers.attention_mask import AttentionMask

    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out = (call or attention)(*leaves, mask=AttentionMask(causal=causal), softmax_scale=128**-0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def warmed_attention(backend, causal=True, **shape):
    """Results of the third pass, as delayed scales follow, and its amaxes by slot."""
    attention, state, given = attention_of(backend, **shape)
    for _ in range(3):
        state.update()
        found = attended(attention, given, causal)
    state.update()
    return found, dict(zip(attention.slots, state.amax_history[-1].tolist(), strict=True)), given


@pytest.mark.parametrize(
    ("causal", "shape"),
    [
        (True, {}),
        (True, {"kv_heads": 8, "batch": 2}),
        (True, {"tokens": 1000}),
    ],
    ids=str,
)
def test_attention_is_as_near_to_exact_attention_as_the_emulation_is(causal, shape):
    ours, amaxes, given = warmed_attention("native", causal, **shape)
    emulated, expected, _ = warmed_attention("emulated", causal, **shape)
    leaves = [x.double().requires_grad_() for x in given[:3]]
    keys = [x.repeat_interleave(8 // x.shape[1], 1) for x in leaves[1:]]
    out = nn.functional.scaled_dot_product_attention(leaves[0], *keys, is_causal=causal)
    exact = [out.detach(), *torch.autograd.grad(out, leaves, given[3].double())]
    errors = {
        name: (relative(a, c), relative(b, c), relative(a, b))
        for name, a, b, c in zip(("o", "dq", "dk", "dv"), ours, emulated, exact, strict=True)
    }
    print("errors native, emulated, between:", errors)
    print("amaxes native, emulated:", {slot: (amaxes[slot], expected[slot]) for slot in amaxes})
    assert all(a < 1.5 * b and a < 0.2 for a, b, _ in errors.values()), errors
    for slot in ("qkv", "do"):
        assert amaxes[slot] == expected[slot]
    for slot in ("o", "dqkv"):
        assert 0.67 < amaxes[slot] / expected[slot] < 1.5, slot
    for slot in ("s", "dp"):  # of cuDNN's own S and dP, which may hold another factor
        assert 0 < amaxes[slot] < float("inf"), slot


def test_attention_repeats_its_bits_and_a_recompute_has_them():
    from torch.utils.checkpoint import checkpoint

    results = []
    for recompute in (False, False, True):
        attention, state, given = attention_of("native")

        def again(*args, attention=attention, **kwargs):
            return checkpoint(attention, *args, use_reentrant=False, **kwargs)

        for _ in range(3):
            state.update()
            found = attended(attention, given, call=again if recompute else None)
        results.append([*found, state.amax_history])
    repeats = torch.backends.cudnn.version() >= 91900
    for a, b, c in zip(*results, strict=True):
        assert not repeats or (torch.equal(a, b) and torch.equal(a, c))
    assert torch.equal(results[0][0], results[2][0]) and torch.equal(results[0][4], results[2][4])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "do"])
def test_attention_keeps_what_is_not_finite_visible(which, value):
    attention, state, given = attention_of("native")
    for _ in range(2):
        state.update()
        attended(attention, given)
    given = [x.clone() for x in given]
    given[which][0, 0, 5, 3] = value
    out, *gradients = attended(attention, given)
    assert which == 3 or not torch.isfinite(out).all()
    assert all(not torch.isfinite(g).all() for g in gradients[: 3 if which != 2 else 2])


def test_attention_waits_for_nothing_and_is_not_captured():
    attention, state, given = attention_of("native")
    given = [x.clone() for x in given]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            state.update()
            attended(attention, given)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attended(attention, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captured CUDA graph"), torch.cuda.graph(graph):
        attended(attention, given)


def test_attention_passes_its_check_and_refuses_by_name():
    from foundry_fp8.backends.native.attention import NativeAttention
    from foundry_fp8.layers.attention import AttentionInputs
    from foundry_fp8.layers.attention_mask import AttentionMask

    attention, _, given = attention_of("native")
    NativeAttention().self_check(DelayedScaling(), 128, torch.bfloat16, given[0].device)
    assert attention.backend.module_reason(DelayedScaling(), 128) is None
    if torch.cuda.get_device_capability() < (10, 0):
        assert "on Hopper it has to be 128" in attention.backend.module_reason(DelayedScaling(), 64)
    assert (
        "no dropout"
        in attention.backend.call_reason(
            attention, AttentionInputs(*given[:3], AttentionMask(), 1.0, 0.1)
        ).reason
    )
