"""Where the native backend says it runs, why not elsewhere, and which layers are worth it."""

import math
import re

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.backends import BackendOptions, choose_backend
from foundry_fp8.backends.emulated import EmulatedBackend
from foundry_fp8.backends.native import NativeBackend
from foundry_fp8.backends.size_rule import break_even, saved_seconds, size_reason
from foundry_fp8.compat import block_scaled_mm
from foundry_fp8.config import ConfigError
from foundry_fp8.kernels import launch
from foundry_fp8.numerics.recipes import RECIPES, BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling
from foundry_fp8.surgery.apply import resolve_recipe

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """A function that makes torch report an NVIDIA GPU of a compute capability."""

    def pretend(capability, cuda="12.6", version="2.7.0"):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Pretend")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", version)
        return NativeBackend()

    return pretend


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling(), BlockScaling()], ids=lambda r: r.name)
def test_runs_from_compute_capability_8_9_on(capability, recipe, gpu):
    assert gpu(capability).availability(recipe, CUDA).ok


def test_block_scaling_says_whose_gemm_runs(gpu):
    said = gpu((9, 0)).availability(BlockScaling(), CUDA).reason
    assert "its GEMMs are" in said


def test_older_gpus_are_refused_by_name(gpu):
    found = gpu((8, 0)).availability(CurrentScaling(), CUDA)
    assert not found.ok
    assert "NVIDIA Pretend has compute capability 8.0" in found.reason and "8.9" in found.reason


@pytest.mark.parametrize(
    ("missing", "said"),
    [("compiler", "neither gcc nor clang"), ("headers", r"no Python\.h")],
)
def test_what_triton_builds_with_is_asked_for_by_name(missing, said, gpu, monkeypatch):
    """Triton's own error comes at the first launch and names a temporary file."""
    monkeypatch.delenv("CC", raising=False)
    compiler = None if missing == "compiler" else "/usr/bin/gcc"
    monkeypatch.setattr(launch.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(launch.sysconfig, "get_path", lambda name: "/nowhere")
    found = gpu((9, 0)).availability(CurrentScaling(), CUDA)
    assert not found.ok and re.search(said, found.reason) and "python3-dev" in found.remedy


def test_mxfp8_is_for_the_blackwells_it_was_written_for(gpu):
    pretend = gpu((12, 0), version="2.11.0", cuda="13.0")
    refused = pretend.availability(MXFP8Scaling(), CUDA)
    assert not refused.ok and "10.x, this GPU has 12.0" in refused.reason
    assert pretend.availability(CurrentScaling(), CUDA).ok


@pytest.mark.parametrize("backend", ["native", "auto"])
def test_a_model_is_not_converted_for_an_older_gpu(backend, gpu):
    gpu((8, 0))
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0.*Train in BF16 on this GPU"):
        foundry_fp8.apply_fp8(model, recipe="current", backend=backend, device="cuda")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("capability", "version", "cuda", "said"),
    [
        ((9, 0), "2.11.0", "13.0", "needs compute capability 10.0, this GPU has 9.0"),
        ((10, 0), "2.7.0+cu126", "12.6", "needs torch 2.8 built with CUDA 12.8, this is torch 2.7.0"),
        ((10, 0), "2.8.0", "12.6", "built with CUDA 12.8"),
    ],
)
def test_mxfp8_says_what_it_needs(capability, version, cuda, said, gpu):
    found = gpu(capability, cuda, version).availability(MXFP8Scaling(), CUDA)
    assert not found.ok and said in found.reason and found.remedy


def test_mxfp8_runs_on_blackwell(gpu):
    assert gpu((10, 0), "12.10", "2.10.0a0+git").availability(MXFP8Scaling(), CUDA).ok


def test_cpus_are_refused_outside_of_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = NativeBackend().availability(CurrentScaling(), torch.device("cpu"))
    assert not found.ok and "not on cpu" in found.reason and "emulated" in found.remedy
    with pytest.raises(RuntimeError, match="native cannot run the current recipe on cpu"):
        choose_backend("native", CurrentScaling(), torch.device("cpu"))


def test_missing_triton_is_named(monkeypatch, gpu):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    found = gpu((9, 0)).availability(CurrentScaling(), CUDA)
    assert not found.ok and "Triton is not installed" in found.reason


def test_rocm_is_refused(monkeypatch, gpu):
    backend = gpu((9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.3")
    found = backend.availability(CurrentScaling(), CUDA)
    assert not found.ok and "not on ROCm" in found.reason


def test_auto_takes_native_where_transformer_engine_is_absent(gpu):
    gpu((9, 0))
    backend, chosen = choose_backend("auto", BlockScaling(), CUDA)
    assert backend.name == "native" and "auto chose native" in chosen


@pytest.mark.parametrize("recipe", RECIPES)
def test_auto_never_emulates_on_a_gpu(recipe, gpu):
    gpu((8, 0))
    with pytest.raises(
        RuntimeError, match=r"auto found no backend.*To check numerics without speed, set backend: emulated"
    ):
        choose_backend("auto", RECIPES[recipe](), CUDA)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 9), "current"), ((9, 0), "current"), ((10, 0), "mxfp8"), ((10, 3), "mxfp8"), ((12, 0), "current")],
)
def test_the_recipe_that_auto_takes(capability, name, gpu):
    gpu(capability)
    assert resolve_recipe("auto", CUDA) == RECIPES[name]()
    assert resolve_recipe("auto", torch.device("cpu")) == CurrentScaling()


def test_it_does_not_emulate_hoppers_accumulation(device):
    model = nn.Sequential(nn.Linear(64, 64)).to(device)
    with pytest.raises(
        ConfigError, match=r"accumulation: not with the native backend: it is for backend: emulated"
    ):
        foundry_fp8.apply_fp8(model, accumulation="hopper", recipe="current", backend="native")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(64, 1), (64, 8), (50, 75), (48, 64), (64, 96)], ids=str)
def test_it_takes_the_layers_that_emulation_takes(recipe, shape):
    """A value head, an adapter of rank 8: the kernels would pad them, and gain nothing by it."""
    recipe = RECIPES[recipe]()
    assert NativeBackend().shape_reason(recipe, *shape) == EmulatedBackend().shape_reason(recipe, *shape)


@pytest.mark.parametrize(
    ("k", "n", "gains"), [(4096, 4096, True), (4096, 1024, True), (768, 768, False), (4096, 64, False)]
)
def test_size_rule(k, n, gains):
    reason = size_reason(CurrentScaling(), k, n)
    assert (reason is None) == gains
    if not gains:
        assert f"{k} x {n}" in reason and "Name the recipe instead of auto" in reason


@pytest.mark.parametrize("missing", ["torch has none", None])
def test_block_is_worth_it_where_torch_has_its_gemm(missing, monkeypatch):
    monkeypatch.setattr(block_scaled_mm, "_MISSING", missing)
    reason = size_reason(BlockScaling(), 16384, 53248)
    assert (reason is None) == (missing is None)
    assert reason is None or "slower than BF16's" in reason
    assert (break_even(BlockScaling()) == math.inf) == (missing is not None)


def test_the_prediction_is_near_what_an_h100_took():
    """`benchmarks/step_gpu.py`, 2026-11-26, 8192 tokens, milliseconds in BF16 and in the current recipe."""
    for in_features, out_features, bf16, fp8 in ((4096, 14336, 3.985, 2.693), (14336, 4096, 4.098, 2.742)):
        saved = 1e3 * saved_seconds(CurrentScaling(), 8192, in_features, out_features)
        assert saved == pytest.approx(bf16 - fp8, rel=0.1)


def test_break_even_orders_the_recipes(monkeypatch):
    """Fewer bytes moved, earlier gain; a slower GEMM, later."""
    monkeypatch.setattr(block_scaled_mm, "_MISSING", None)
    assert break_even(DelayedScaling()) < break_even(BlockScaling()) < break_even(CurrentScaling())


def test_small_layers_stay_only_where_asked():
    backend = NativeBackend(BackendOptions(only_where_faster=True))
    assert "too small to gain" in backend.shape_reason(CurrentScaling(), 256, 256)
    assert NativeBackend().shape_reason(CurrentScaling(), 256, 256) is None
