"""Norms, siblings and MLPs of whole models: fused, read in between, and left as they are."""

import copy
import pickle

import pytest
import torch
from torch import nn

import foundry_fp8
from foundry_fp8.activations.offload.store import host_store
from foundry_fp8.layers.gemm_layer import FP8GemmLayer
from foundry_fp8.layers.produced import Produced
from foundry_fp8.layers.state import FP8State

transformers = pytest.importorskip("transformers")

SIZES = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, max_position_embeddings=64,
)  # fmt: skip
NEOX = dict(SIZES)
del NEOX["num_key_value_heads"]
GPT2 = dict(n_embd=64, n_inner=96, n_head=4, vocab_size=64, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
FALCON = dict(hidden_size=64, ffn_hidden_size=96, num_attention_heads=4, vocab_size=64, alibi=False)

FAMILIES = {
    # name: config, norms and MLPs a block
    "Llama": (SIZES, 2, 1),
    "Mistral": (SIZES, 2, 1),
    "Qwen2": (SIZES, 2, 1),
    "Qwen3": (SIZES | {"head_dim": 16}, 2, 1),
    "Gemma": (SIZES | {"head_dim": 16}, 2, 1),
    "Gemma2": (SIZES | {"head_dim": 16}, 4, 1),
    "Olmo2": (SIZES, 3, 1),  # of queries too
    "Phi3": (SIZES | {"pad_token_id": 0}, 2, 0),
    "Cohere": (SIZES, 1, 1),
    "GPTNeoX": (NEOX, 2, 1),
    "Falcon": (FALCON, 1, 1),
    "GPT2": (GPT2, 2, 1),
}


def model_of(name, dtype=torch.bfloat16, blocks=2):
    options, *_ = FAMILIES[name]
    config = getattr(transformers, f"{name}Config")(**options, num_hidden_layers=blocks)
    torch.manual_seed(0)
    model = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).train()
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model


TOKENS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))


def step(model, steps=2):
    """Loss and gradients of the last of some equal steps: siblings are known from the second on."""
    for _ in range(steps):
        model.zero_grad()
        loss = model(TOKENS, labels=TOKENS, use_cache=False).loss
        loss.backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def apart(a, b):
    return max(
        float((a[n].double() - b[n].double()).norm() / b[n].double().norm().clamp(min=1e-12)) for n in b
    )


QUICK_FAMILIES, QUICK_RECIPES = ("Gemma2", "Phi3", "GPT2"), ("delayed",)
"""What runs by default; the others in the full tier."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK_FAMILIES else pytest.mark.full) for name in FAMILIES],
)
def test_what_is_fused_in_each_family(name, device):
    _, norms, mlps = FAMILIES[name]
    plain = model_of(name, torch.float32, blocks=1)
    fused = copy.deepcopy(plain)
    report = foundry_fp8.apply_fp8(fused, recipe="current", backend="native")
    assert len(report.fused) == norms + mlps, report.fused
    foundry_fp8.apply_fp8(plain, recipe="current", backend="native", fuse=False)
    ours, theirs = step(fused), step(plain)
    assert ours.keys() == theirs.keys()
    assert apart(ours, theirs) < 0.03, name  # a rounding of float32 that turns a code of FP8
    for a, b in zip(fused.modules(), plain.modules(), strict=True):
        if isinstance(a, FP8GemmLayer):
            assert a.ledger.flops == b.ledger.flops


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=() if recipe in QUICK_RECIPES else pytest.mark.full)
        for recipe in ("delayed", "current", "block", "mxfp8", {"name": "current", "granularity": "row"})
    ],
)
def test_who_looks_in_between_changes_no_bit(recipe, device):
    fused, seen = (model_of("Llama", blocks=1) for _ in range(2))
    for model in (fused, seen):
        foundry_fp8.apply_fp8(model, recipe=recipe, backend="native")
    found = []
    for name, module in seen.named_modules():
        if name.endswith(("layernorm", "act_fn", "down_proj", "k_proj")):
            module.register_forward_hook(lambda module, args, output: found.append(output.float().sum()))
    ours, theirs = step(fused), step(seen)
    assert found and all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_who_looks_without_gradients_takes_none_from_others(mode, device):
    """A monitor is the first that reads a norm, a linear in high precision the second."""
    fused, seen = (model_of("Llama", blocks=1) for _ in range(2))
    for model in (fused, seen):
        foundry_fp8.apply_fp8(model, recipe="current", backend="native", exclude=["*.v_proj", "*.up_proj"])

    def look(module, args, output):
        with mode():
            found.append(output.abs().max())

    found = []
    for name, module in seen.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_hook(look)
    ours, theirs = step(seen), step(fused)
    assert found
    for n in theirs:
        torch.testing.assert_close(ours[n], theirs[n], rtol=0, atol=0, msg=n)


def test_hooks_of_all_modules_see_the_linears_of_an_mlp(device):
    fused, seen = (model_of("Llama", blocks=1) for _ in range(2))
    for model in (fused, seen):
        foundry_fp8.apply_fp8(model, recipe="delayed", backend="native")
    ours, found = step(fused), []
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: found.append(module))
    try:
        theirs = step(seen)
    finally:
        hook.remove()
    assert {model for model in seen.modules() if isinstance(model, FP8GemmLayer)} <= set(found)
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.full)])
def test_checkpointed_blocks_give_the_same_bits_in_the_first_step_too(reentrant, device):
    plain, checkpointed = (model_of("Llama", blocks=1) for _ in range(2))
    for model in (plain, checkpointed):
        foundry_fp8.apply_fp8(model, recipe="delayed", backend="native")
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        checkpointed.enable_input_require_grads()
    for _ in range(2):
        ours, theirs = step(checkpointed, 1), step(plain, 1)
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


@pytest.mark.parametrize("keeps", ["offload", "int8"])
def test_the_input_of_a_checkpoint_is_kept_as_that_of_an_unfused_model(keeps, device):
    """A norm's output that nobody has read yet."""
    found = []
    for fuse in ("auto", False):
        model = model_of("Llama", blocks=2)
        foundry_fp8.apply_fp8(model, recipe="block", backend="native", fuse=fuse)
        foundry_fp8.apply_activation_checkpointing(model, targets=["*.mlp"], offload=keeps == "offload")
        store = host_store(torch.device(device))
        before = store.moved
        if keeps == "int8":
            kept = dict.fromkeys(("norm", "activation"), "none")
            report = foundry_fp8.apply_activation_compression(
                model, targets=["*.mlp"], overrides=kept, min_numel=256
            )
        gradients = step(model)
        bytes_kept = store.moved - before if keeps == "offload" else report.saved.original
        found.append((bytes_kept, gradients))
    (ours, gradients), (theirs, wanted) = found
    assert ours == theirs > 0
    assert apart(gradients, wanted) < 0.05


def test_two_forwards_before_their_backwards(device):
    """Siblings learned between a forward and its recompute must not change what the recompute saves."""
    model, plain = (model_of("Llama", blocks=1) for _ in range(2))
    for one in (model, plain):
        foundry_fp8.apply_fp8(one, recipe="current", backend="native")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for one in (model, plain):
        losses = [one(TOKENS, labels=TOKENS, use_cache=False).loss for _ in range(2)]
        for loss in losses:
            loss.backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_gate_and_up_have_one_scale_and_their_own_saved_state(device):
    model = model_of("Llama", blocks=1)
    foundry_fp8.apply_fp8(model, recipe="delayed", backend="native", include=["*.mlp.*"])
    mlp = model.model.layers[0].mlp
    own = mlp.up_proj.slots["x"].index
    step(model)
    assert mlp.up_proj.slots["x"].index == mlp.gate_proj.slots["x"].index != own
    saved = FP8State.of(model).state_dict()["modules"]
    of = {n: saved[f"model.layers.0.mlp.{n}"]["amax_history"][:, 0] for n in ("gate_proj", "up_proj")}
    assert float(of["gate_proj"].max()) > 0 and torch.equal(of["up_proj"], of["gate_proj"])
    # A past of its own is kept: from then on each has its scale.
    other = copy.deepcopy(FP8State.of(model).state_dict())
    entry = other["modules"]["model.layers.0.mlp.up_proj"]
    entry["amax_history"][:, 0] *= 2
    entry["scale"][0] /= 2
    del entry["checksum"]  # as older versions saved it
    FP8State.of(model).load_state_dict(other)
    assert mlp.up_proj.slots["x"].index == own
    model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert mlp.up_proj.slots["x"].index == own


def test_q_k_and_v_have_one_scale_while_they_read_one_tensor(device):
    """Each step gives the bits and the saved state of linears that have a scale each, whoever steps between norm and linear."""
    models = model_of("Llama", blocks=1), model_of("Llama", blocks=1)
    for model, fuse in zip(models, ("auto", False), strict=True):
        options = {"fuse": fuse, "evaluate": "fp8", "include": ["*.self_attn.*"]}
        foundry_fp8.apply_fp8(model, recipe="delayed", backend="native", **options)
    linears = [getattr(models[0].model.layers[0].self_attn, f"{n}_proj") for n in "qkv"]

    def places():
        return len({linear.slots["x"].index for linear in linears})

    def evaluate(model):
        with torch.no_grad():
            model.eval()(TOKENS)
        model.train()

    def change_k(model):
        k = model.model.layers[0].self_attn.k_proj
        k.register_forward_pre_hook(lambda module, args: (args[0] * 4,))

    def demote_v(model):
        model.model.layers[0].self_attn.v_proj.set_recipe(None)

    found = [places()]
    for model in models:
        step(model, 1)
    found.append(places())
    for change in (evaluate, change_k, demote_v):
        for model in models:
            change(model)
            step(model, 1)
        ours, theirs = (FP8State.of(model).state_dict()["modules"] for model in models)
        for name in (n for n in ours if "self_attn" in n):
            for key in ("scale", "amax_history"):
                a, b = ours[name][key][..., 0], theirs[name][key][..., 0]  # of x
                assert torch.allclose(a, b, rtol=0.02, atol=0), (change, name, key, a, b)
        found.append(places())
    assert found == [3, 1, 1, 2, 3]


def test_demotion_evaluation_and_lora_read_what_they_need(device):
    peft = pytest.importorskip("peft")
    model, plain = model_of("Llama", blocks=1), model_of("Llama", blocks=1).eval()
    foundry_fp8.apply_fp8(model, recipe="current", backend="native")

    def evaluates_as_plain():
        model.eval()
        with torch.no_grad():
            same = torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
        model.train()
        return same

    step(model)
    assert evaluates_as_plain()
    model.model.layers[0].self_attn.k_proj.set_recipe(None)
    model.model.layers[0].mlp.down_proj.set_recipe(None)
    assert all(bool(g.isfinite().all()) for g in step(model).values())
    assert evaluates_as_plain()
    tuned = model_of("Llama", blocks=1)
    foundry_fp8.apply_fp8(tuned, recipe="current", backend="native")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj", "up_proj"], lora_dropout=0.0)
    tuned = peft.get_peft_model(tuned, config)
    grads = step(tuned)
    assert all(n == "loss" or "lora_" in n for n in grads) and len(grads) == 7
    assert all(bool(g.isfinite().all()) for g in grads.values())


def test_a_fused_model_is_copied_and_pickled(device):
    model = model_of("Llama", blocks=1)
    foundry_fp8.apply_fp8(model, recipe="current", backend="native")
    theirs = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ours = step(other, 1)  # what the model has learned of its siblings is copied too
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


def test_what_has_no_form_is_left_and_named(device):
    class Odd(nn.RMSNorm):
        def forward(self, x):
            return super().forward(x) ** 2

    class Site(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = Odd(64), nn.Linear(64, 96), nn.Linear(96, 64)

        def forward(self, x):
            return self.down(torch.relu(self.up(self.norm(x))))

    model = nn.Sequential(Site()).to(device)
    report = foundry_fp8.apply_fp8(model, recipe="current", backend="native")
    assert report.fused == () and report.not_fused == {
        "0.norm": "Odd computes what no norm in the kernels does"
    }
    assert "1 norms are not: Odd computes" in report.summary()


@pytest.mark.parametrize("written", [lambda h: h, lambda h: h.T, lambda h: h.data, lambda h: h[:4]])
def test_a_write_in_place_is_what_linears_read(written, device):
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.proj = nn.RMSNorm(64, eps=1e-5), nn.Linear(64, 64)

        def forward(self, x):
            h = self.norm(x)
            written(h).mul_(2)
            return self.proj(h)

    torch.manual_seed(0)
    fused = nn.Sequential(Changed()).to(device)
    plain = copy.deepcopy(fused)
    foundry_fp8.apply_fp8(fused, recipe="current", backend="native")
    foundry_fp8.apply_fp8(plain, recipe="current", backend="native", fuse=False)
    assert type(fused[0].norm(torch.ones(2, 64, device=device))) is Produced
    x = torch.randn(32, 64, device=device)
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-5, atol=1e-5)
