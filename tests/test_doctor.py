import json
import types

import pytest
import torch

from foundry_fp8 import doctor
from foundry_fp8.backends import BACKENDS, load_backend
from foundry_fp8.backends.transformer_engine.library import ImportProblem
from foundry_fp8.recipes import RECIPES


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
