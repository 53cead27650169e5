"""The graphs that go to cuDNN, made and validated without a GPU: as cuDNN's own library writes them down."""

import functools
import json
import types

import pytest
import torch

from foundry_fp8.backends.native import cudnn_graphs
from foundry_fp8.backends.native.cudnn_graphs import (
    AttentionSizes,
    Role,
    backward_graph,
    cudnn_version,
    forward_graph,
    frontend_missing,
)
from foundry_fp8.numerics.formats import E4M3, E5M2

with_frontend = pytest.mark.skipif(
    frontend_missing() is not None, reason="cuDNN's Python frontend (foundry-fp8[cudnn]) is not installed"
)

B, H, HK, S, D = 2, 8, 2, 1000, 128
QUERIES = [B, H, S, D], [S * H * D, D, H * D, 1]  # [b, tokens, heads, d] in memory
KEYS = [B, HK, S, D], [S * HK * D, D, HK * D, 1]
STATISTICS = [B, H, S, 1], [H * S, S, 1, 1]
# By the names of the frontend's documentation, "SDPA FP8" forward and backward: (sizes, strides), type.
FORWARD = {
    "Q": (QUERIES, "FP8_E4M3"), "K": (KEYS, "FP8_E4M3"), "V": (KEYS, "FP8_E4M3"),
    "O": (QUERIES, "FP8_E4M3"), "Stats": (STATISTICS, "FLOAT"),
}  # fmt: skip
BACKWARD = {
    **FORWARD, "dO": (QUERIES, "FP8_E5M2"),
    "dQ": (QUERIES, "FP8_E5M2"), "dK": (KEYS, "FP8_E5M2"), "dV": (KEYS, "FP8_E5M2"),
}  # fmt: skip
NUMBERS = {
    "forward": {"Descale_Q", "Descale_K", "Descale_V", "Descale_S", "Scale_S", "Scale_O", "Amax_S", "Amax_O"},
    "backward": {
        "Descale_Q", "Descale_K", "Descale_V", "Descale_O", "Descale_dO", "Descale_S", "Descale_dP",
        "Scale_S", "Scale_dQ", "Scale_dK", "Scale_dV", "Scale_dP", "Amax_dQ", "Amax_dK", "Amax_dV", "Amax_dP",
    },
}  # fmt: skip
KINDS = pytest.mark.parametrize(
    ("make", "kind", "tensors"), [(forward_graph, "forward", FORWARD), (backward_graph, "backward", BACKWARD)]
)


def sizes(**changes):
    usual = {"batch": B, "heads": H, "kv_heads": HK, "tokens": S, "head_dim": D, "softmax_scale": 0.125}
    repeats = frontend_missing() is None and cudnn_version() >= (9, 19)
    return AttentionSizes(**{**usual, "causal": True, "do_format": E5M2, "deterministic": repeats, **changes})


def written(graph):
    """(the one node, uid -> tensor) of a graph that its library finds valid."""
    graph.validate()
    found = json.loads(str(graph))
    (node,) = found["nodes"]
    return node, {int(uid): tensor for uid, tensor in found["tensors"].items()}


@with_frontend
@KINDS
def test_every_tensor_has_the_place_size_strides_and_type_of_the_documentation(make, kind, tensors):
    node, found = written(make(sizes()))
    places = {**node["inputs"], **node["outputs"]}
    if "Amax_d" in places:  # how the frontend's JSON names Amax_dP
        places["Amax_dP"] = places.pop("Amax_d")
    assert set(places) == {*tensors, *NUMBERS[kind]}
    for name, uid in places.items():
        assert Role(uid).name == name.lower()
        layout, dtype = tensors.get(name, (([1] * 4, [1] * 4), "FLOAT"))
        assert (found[uid]["dim"], found[uid]["stride"]) == layout, name
        assert found[uid]["data_type"] == dtype, name
        assert not found[uid]["is_virtual"], name


@with_frontend
@KINDS
@pytest.mark.parametrize("causal", [True, False])
def test_the_mask_and_the_scale_are_the_call_s(make, kind, tensors, causal):
    node, _ = written(make(sizes(causal=causal)))
    assert node["attn_scale_value"] == "3E000000"  # 0.125 in the bits of a float32
    assert (node["diagonal_alignment"], node["right_bound"]) == ("TOP_LEFT", 0 if causal else None)
    assert node["left_bound"] is None and node["dropout_probability"] is None and not node["padding_mask"]


@with_frontend
def test_what_else_the_two_say():
    node, _ = written(forward_graph(sizes()))
    assert node["generate_stats"] is True
    for deterministic in {False, cudnn_version() >= (9, 19)}:
        node, _ = written(backward_graph(sizes(deterministic=deterministic)))
        assert node["is_deterministic_algorithm"] is deterministic
    node, found = written(backward_graph(sizes(do_format=E4M3)))
    assert {found[uid]["data_type"] for name, uid in node["outputs"].items() if name[0] == "d"} == {
        "FP8_E4M3"
    }


@with_frontend
def test_the_library_itself_refuses_other_head_sizes_on_hopper():
    import cudnn

    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="equal to 128"):
        backward_graph(sizes(head_dim=64)).validate()


class Frontend:
    """What :func:`cudnn_graphs.run` asks of the library, written down; a graph fails to build where ``refuses``."""

    cudnnGraphNotSupportedError = type("cudnnGraphNotSupportedError", (Exception,), {})
    heur_mode = types.SimpleNamespace(A="A")

    def __init__(self, refuses=False):
        self.log, self.refuses = [], refuses

    def create_handle(self):
        self.log.append("handle")
        return "handle"

    def backend_version(self):
        return 91900

    def set_stream(self, handle, stream):
        self.log.append(("stream", stream))

    def build(self, modes):
        self.log.append("build")
        if self.refuses:
            raise self.cudnnGraphNotSupportedError("no engine")

    def get_workspace_size(self):
        return 0

    def execute(self, pointers, workspace, handle):
        self.log.append(pointers)


@pytest.fixture
def frontend(monkeypatch):
    found = Frontend()
    monkeypatch.setattr(cudnn_graphs, "_frontend", lambda: found)
    monkeypatch.setattr(cudnn_graphs, "_GRAPHS", {"forward": lambda sizes, handle: found})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    for cached in (cudnn_graphs._handle, cudnn_graphs._plan):
        monkeypatch.setattr(cudnn_graphs, cached.__name__, functools.cache(cached.__wrapped__))
    return found


def test_a_plan_is_built_once_a_kind_of_call_and_runs_on_the_current_stream(frontend):
    tensors = {Role.q: torch.zeros(3), Role.amax_s: torch.zeros(1)}
    for tokens in (S, S, 2 * S):
        cudnn_graphs.run("forward", sizes(tokens=tokens), tensors)
    pointers = {int(role): tensor.data_ptr() for role, tensor in tensors.items()}
    again = [("stream", 7), pointers]
    assert frontend.log == [
        "handle",
        ("stream", 7),
        "build",
        pointers,
        *again,
        ("stream", 7),
        "build",
        pointers,
    ]


def test_what_cudnn_does_not_support_is_named(frontend):
    frontend.refuses = True
    with pytest.raises(
        RuntimeError, match=r"cuDNN 9.19.0 has no FP8 attention, forward, for .*1000.*: no engine. Set"
    ):
        cudnn_graphs.run("forward", sizes(), {Role.q: torch.zeros(3)})
