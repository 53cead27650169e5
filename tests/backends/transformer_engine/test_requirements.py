"""The machine rules, against the table of Transformer Engine's own checks and the limits it does not check."""

import dataclasses

import pytest
import torch

from foundry_fp8.backends import BackendOptions
from foundry_fp8.backends.transformer_engine import TransformerEngineBackend
from foundry_fp8.backends.transformer_engine.requirements import Machine, cublas_version, requirement
from foundry_fp8.numerics.recipes import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    MXFP8Scaling,
    NVFP4Scaling,
)

PINNED = {"cuda": (12, 6), "cublas": (12, 6, 4), "te": (2, 8, 0)}
MODERN = {"cuda": (13, 0), "cublas": (13, 1, 0), "te": (2, 20, 2)}
ALL = (DelayedScaling(), CurrentScaling(), BlockScaling(), MXFP8Scaling(), NVFP4Scaling())


@pytest.mark.parametrize(
    ("capability", "stack", "runs"),
    [
        ((8, 0), MODERN, set()),
        ((8, 9), PINNED, {"delayed", "current"}),
        ((9, 0), PINNED, {"delayed", "current"}),
        ((9, 0), MODERN, {"delayed", "current", "block"}),
        ((10, 0), PINNED, {"delayed", "current"}),
        ((10, 0), MODERN, {"delayed", "current", "block", "mxfp8", "nvfp4"}),
        ((10, 3), MODERN, {"delayed", "current", "block", "mxfp8", "nvfp4"}),
        ((12, 0), MODERN, {"delayed", "current"}),
    ],
)
def test_which_recipes_run_where(capability, stack, runs):
    found = {recipe.name: requirement(recipe, Machine(capability=capability, **stack)) for recipe in ALL}
    assert {name for name, answer in found.items() if answer.ok} == runs
    assert all(answer.reason and answer.remedy for answer in found.values() if not answer.ok)


@pytest.mark.parametrize(
    ("recipe", "machine", "said"),
    [
        (
            BlockScaling(),
            {"capability": (9, 0), **PINNED},
            "torch was built with CUDA 12.6, and block scaling needs 12.9",
        ),
        (BlockScaling(), {"capability": (9, 0), **MODERN, "cublas": (12, 8, 4)}, "cuBLAS 12.8.4 is loaded"),
        (
            BlockScaling(),
            {"capability": (10, 0), **MODERN, "te": (2, 8, 0)},
            "2.8.0 runs block scaling on 9.0 alone",
        ),
        (BlockScaling(power_2_scales=False), {"capability": (10, 0), **MODERN}, "power_2_scales: false"),
        (MXFP8Scaling(), {"capability": (9, 0), **MODERN}, "compute capability 9.0"),
        (NVFP4Scaling(), {"capability": (9, 0), **MODERN}, "runs nvfp4 on 10.x and 11.x alone"),
        (NVFP4Scaling(), {"capability": (10, 0), **MODERN, "te": (2, 7, 0)}, "2.7.0 has no nvfp4"),
        (CurrentScaling(), {"capability": (8, 9), **PINNED, "cuda": (12, 0)}, "needs 12.1"),
        (CurrentScaling(granularity="row"), {"capability": (9, 0), **MODERN}, "no scales of rows"),
        (DelayedScaling(), {"capability": (8, 6), **MODERN}, "FP8 needs 8.9"),
    ],
)
def test_the_reason_names_the_obstacle(recipe, machine, said):
    assert said in requirement(recipe, Machine(**machine)).reason


def test_float32_block_scales_run_on_hopper():
    assert requirement(BlockScaling(power_2_scales=False), Machine(capability=(9, 0), **MODERN)).ok


def test_cuda_12_10_is_later_than_12_9():
    machine = Machine(capability=(9, 0), **{**MODERN, "cuda": (12, 10)})
    assert requirement(BlockScaling(), machine).ok


def test_unknown_cublas_is_no_obstacle():
    machine = Machine(capability=(9, 0), **MODERN)
    assert requirement(BlockScaling(), dataclasses.replace(machine, cublas=())).ok


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch was built without CUDA")
def test_cublas_version_is_that_of_the_library_torch_loads():
    assert cublas_version()[:1] == tuple(map(int, torch.version.cuda.split(".")[:1]))


def test_other_devices_are_refused_with_a_way_out():
    found = TransformerEngineBackend().availability(CurrentScaling(), torch.device("cpu"))
    assert not found.ok and "NVIDIA" in found.reason and "emulated" in found.remedy


@pytest.mark.parametrize(
    ("recipe", "sizes", "reason"),
    [
        (CurrentScaling(), (48, 32), None),
        (CurrentScaling(), (50, 32), "in_features=50 is not a multiple of 16"),
        (DelayedScaling(), (32, 40), "out_features=40 is not a multiple of 16"),
        (BlockScaling(), (192, 128), "in_features=192 is not a multiple of 128"),
        (BlockScaling(), (256, 128), None),
        (MXFP8Scaling(), (64, 48), "out_features=48 is not a multiple of 32"),
        (NVFP4Scaling(), (80, 64), "in_features=80 is not a multiple of 32"),
    ],
)
def test_shapes_that_te_cannot_take(recipe, sizes, reason):
    said = TransformerEngineBackend().shape_reason(recipe, *sizes)
    assert said is None if reason is None else reason in said


def test_small_layers_stay_only_where_asked():
    """`recipe: auto` asks, whichever backend it gets."""
    assert TransformerEngineBackend().shape_reason(CurrentScaling(), 256, 256) is None
    backend = TransformerEngineBackend(BackendOptions(only_where_faster=True))
    assert "too small to gain" in backend.shape_reason(CurrentScaling(), 256, 256)
    assert backend.shape_reason(CurrentScaling(), 4096, 4096) is None
    assert "multiple of 16" in backend.shape_reason(CurrentScaling(), 4090, 4096)
