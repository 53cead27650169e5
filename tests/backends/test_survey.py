import json
import types

import pytest
import torch

from foundry_fp8.backends import BACKENDS, load_backend
from foundry_fp8.backends import survey as doctor
from foundry_fp8.backends.attention_requirements import AttentionMachine
from foundry_fp8.backends.native import attention as native_attention
from foundry_fp8.backends.transformer_engine import attention as te_attention
from foundry_fp8.backends.transformer_engine.library import ImportProblem
from foundry_fp8.layers.backend import Availability
from foundry_fp8.numerics.recipes import RECIPES


def test_every_recipe_and_backend_has_an_answer_that_agrees_with_the_backend():
    found = doctor.collect()
    for device in {entry["device"] for entry in found["devices"]}:
        entries = {(e["recipe"], e["backend"]): e for e in found["support"] if e["device"] == device}
        assert set(entries) == {(recipe, backend) for recipe in RECIPES for backend in (*BACKENDS, "auto")}
        for (recipe, backend), entry in entries.items():
            if backend != "auto":
                said = load_backend(backend).availability(RECIPES[recipe](), torch.device(device))
                assert (entry["ok"], entry["reason"], entry["remedy"]) == (said.ok, said.reason, said.remedy)
            assert entry["ok"] or entry["reason"]


def test_what_it_finds_is_plain_data():
    found = doctor.collect()
    assert json.loads(json.dumps(found)) == found
    assert found["platform"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("2.6.1+cu124", "not tested: this foundry_fp8 was with 2.7 to 2.15"),
        ("2.7.0+cu126", None),
        ("2.15.3", None),
        ("2.16.0a0+git", "not tested: this foundry_fp8 was with 2.7 to 2.15"),
        ("3.0.0", "not tested: this foundry_fp8 was with 2.7 to 2.15"),
    ],
)
def test_a_torch_past_the_tested_ones_is_named(version, said, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert doctor.collect()["untested"].get("torch") == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_auto_on_a_cpu_is_the_emulation():
    chosen = {e["recipe"]: e["chosen"] for e in doctor.collect()["support"] if e["backend"] == "auto"}
    assert chosen == dict.fromkeys(RECIPES, "emulated")


def test_gpus_of_one_kind_are_one_entry(monkeypatch):
    gpus = [
        types.SimpleNamespace(name=n, major=m, minor=0, total_memory=80 * 2**30)
        for n, m in (("H", 9), ("B", 10), ("H", 9))
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
    found = [
        (d["device"], d["name"], d["count"], d["capability"], d["memory_gib"]) for d in doctor._devices()
    ]
    assert found == [("cuda:0", "H", 2, "9.0", 80.0), ("cuda:1", "B", 1, "10.0", 80.0)]


def test_a_broken_transformer_engine_is_explained(monkeypatch):
    monkeypatch.setattr(
        doctor, "load_library", lambda: ImportProblem("it fails (StopIteration)", "Reinstall it.")
    )
    monkeypatch.setattr(doctor, "installed_version", lambda: "2.8.0")
    assert doctor.collect()["transformer_engine"] == {
        "version": "2.8.0",
        "ok": False,
        "reason": "it fails (StopIteration)",
        "remedy": "Reinstall it.",
    }


def on_a_gpu(monkeypatch, capability, cudnn, te="2.8.0", **availability):
    """What the doctor says of FP8 attention through Transformer Engine on such a machine, by recipe and case."""
    backend = load_backend("transformer_engine")
    found = Availability(True) if not availability else Availability(False, **availability)
    monkeypatch.setattr(type(backend), "availability", lambda self, recipe, device: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(te_attention, "library", lambda: types.SimpleNamespace(version=te))
    entries = doctor._attention(torch.device("cuda:0"))
    return {(e["recipe"], e["case"]): e for e in entries if e["backend"] == "transformer_engine"}


def native_cases(monkeypatch, machine):
    monkeypatch.setattr(
        type(load_backend("native")), "availability", lambda self, recipe, device: Availability(True)
    )
    monkeypatch.setattr(native_attention, "machine_here", lambda: machine)
    entries = doctor._attention(torch.device("cpu"))
    return {(e["recipe"], e["case"]): e for e in entries if e["backend"] == "native"}


def test_native_attention_is_cudnn_s(monkeypatch):
    found = native_cases(monkeypatch, AttentionMachine(capability=(9, 0), cudnn=(9, 19, 0)))
    assert {case for (recipe, case), e in found.items() if e["ok"]} == {
        "head_dim 128, causal",
        "a sequence that is no multiple of 128",
    }
    assert "delayed recipe alone, not current" in found["current", "head_dim 128, causal"]["reason"]
    found = native_cases(monkeypatch, Availability(False, "not installed", "pip install it."))
    assert {(e["ok"], e["reason"]) for e in found.values()} == {(False, "not installed")}


def test_attention_on_hopper_with_the_pinned_torch(monkeypatch):
    found = on_a_gpu(monkeypatch, (9, 0), 90501)
    assert [case for (recipe, case), e in found.items() if e["ok"]] == ["head_dim 128, causal"]
    reasons = {key: entry["reason"] for key, entry in found.items() if not entry["ok"]}
    assert "on Hopper it has to be 128" in reasons["delayed", "head_dim 64, causal"]
    assert "multiples of 128 (here 4000)" in reasons["delayed", "a sequence that is no multiple of 128"]
    assert "needs 10.0 and cuDNN 9.21" in reasons["delayed", "sliding window"]
    assert "document masks" in reasons["delayed", "packed documents"]
    assert "padded" in reasons["delayed", "padded batch"]
    assert "something added to the logits" in reasons["delayed", "bias (ALiBi, dense mask)"]
    assert all(
        "delayed recipe alone" in reasons[name, "head_dim 128, causal"]
        for name in RECIPES
        if name != "delayed"
    )
    assert all(entry["remedy"] for entry in found.values() if not entry["ok"])


def test_attention_on_blackwell_and_older_gpus(monkeypatch):
    found = on_a_gpu(monkeypatch, (10, 0), 92100)
    no = {case for (recipe, case), e in found.items() if recipe == "delayed" and not e["ok"]}
    assert no == {"packed documents", "padded batch", "bias (ALiBi, dense mask)"}
    ada = on_a_gpu(monkeypatch, (8, 9), 92100)
    assert "FP8 attention runs on 9.0 to 11.x" in ada["delayed", "head_dim 128, causal"]["reason"]


@pytest.mark.parametrize("how", ["torch", "environment"])
def test_attention_in_a_deterministic_process(monkeypatch, how):
    if how == "torch":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    usual = ("delayed", "head_dim 128, causal")
    assert "deterministic algorithms are asked for" in on_a_gpu(monkeypatch, (9, 0), 90501)[usual]["reason"]
    assert on_a_gpu(monkeypatch, (9, 0), 91900, te="2.13.0")[usual]["ok"]


def test_attention_without_transformer_engine_says_what_the_backend_says(monkeypatch):
    found = on_a_gpu(monkeypatch, (9, 0), 90501, reason="it is not installed", remedy="Install it.")
    assert {(e["ok"], e["reason"], e["remedy"]) for e in found.values()} == {
        (False, "it is not installed", "Install it.")
    }
