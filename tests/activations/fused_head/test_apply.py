"""Whole models without logits: the loss and gradients that they had, whatever they do to their logits; what is refused, by its name."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foundry_fp8
from foundry_fp8 import ConfigError, apply_activation_compression, apply_fp8, apply_fused_head
from foundry_fp8.activations.fused_head.logits import DeferredLogits
from tests import model_zoo as zoo

pytestmark = pytest.mark.filterwarnings("ignore:::transformers[.]", "ignore::FutureWarning")
MODELS = {
    "Llama": lambda: zoo.hugging_face("Llama"),
    "Llama, tied": lambda: zoo.hugging_face("Llama", tie_word_embeddings=True),
    "Gemma2, soft cap": lambda: zoo.hugging_face("Gemma2", head_dim=16, attn_implementation="eager", final_logit_softcapping=2.0),
    "Cohere, scaled": lambda: zoo.hugging_face("Cohere", logit_scale=0.5),
    "GraniteMoe, divided": lambda: zoo.hugging_face("GraniteMoe", num_local_experts=4, logits_scaling=3.0),
    "GPT2": lambda: zoo.MODELS["GPT2"]()[0],
    "GPTNeoX": lambda: zoo.MODELS["GPTNeoX"]()[0],
    "Phi, bias": lambda: zoo.MODELS["Phi"]()[0],
    "Mixtral, balanced": lambda: zoo.hugging_face("Mixtral", num_local_experts=4, output_router_logits=True),
    "FOG": zoo.fog,
    "MPT, tied": lambda: zoo.mpt(logit_scale=0.3, final_logit_softcapping=2.0),
    "MPT": lambda: zoo.mpt(tie_word_embeddings=False),
}  # fmt: skip
if not zoo.TRANSFORMERS_4:  # torch's grouped products are not for float64
    for _name in ("GraniteMoe, divided", "Mixtral, balanced"):
        MODELS[_name] = lambda make=MODELS[_name]: _one_by_one(make())


def _one_by_one(model):
    model.set_experts_implementation("eager")
    return model


OTHERS = ("Mistral", "Qwen2", "Olmo2", "Phi3", "Gemma", "Falcon", "Bloom", "OPT", "Olmoe", "Qwen2Moe")


def batch(shape=(3, 14)):
    labels = torch.randint(1, zoo.VOCABULARY, shape)
    tokens = labels.clone()
    labels[0, 2:5] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model, inputs, dtype=None):
    model.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        output = model(**inputs)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def off_by(got, wanted):
    assert got.keys() == wanted.keys()
    total = sum(float(w.double().norm()) ** 2 for w in wanted.values()) ** 0.5
    return max(
        float((got[n].double() - w.double()).norm()) / (float(w.double().norm()) + 1e-3 * total)
        for n, w in wanted.items()
    )


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)])
def test_loss_and_gradients_are_those_of_whole_logits(name):
    model = (MODELS.get(name) or (lambda: zoo.MODELS[name]()[0]))().train()
    inputs = batch()
    before, state = {}, {k: v.clone() for k, v in model.state_dict().items()}
    for dtype in (None, torch.bfloat16):
        before[dtype] = step(model, inputs, dtype)
    exact = step(copy.deepcopy(model).double(), inputs)[1]
    fused = apply_fused_head(model, chunk_tokens=5)
    for dtype, (output, wanted) in before.items():
        got_output, got = step(model, inputs, dtype)
        assert isinstance(got_output.logits, DeferredLogits) and isinstance(output.logits, torch.Tensor)
        torch.testing.assert_close(got_output.loss, output.loss, rtol=1e-6, atol=0)
        if dtype is None:
            assert off_by(got, wanted) < 1e-5
        else:
            assert off_by(got, exact) < 1.1 * off_by(wanted, exact)
    assert state.keys() == model.state_dict().keys()
    fused.undo()
    output, again = step(model, inputs)
    assert isinstance(output.logits, torch.Tensor)
    assert all(torch.equal(again[n], g) for n, g in before[None][1].items())


def test_without_labels_and_in_evaluation_logits_are_whole(caplog):
    model, inputs = zoo.hugging_face("Llama").train(), batch()
    wanted = model(**inputs).logits
    apply_fused_head(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=inputs["input_ids"]).logits, wanted)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "foundry_fp8"):
        for _ in range(2):
            assert torch.equal(model(input_ids=inputs["input_ids"]).logits, wanted)
    assert [r.message for r in caplog.records] == [
        "algorithms.fused_head: a training forward was given no labels, so its logits are whole."
    ]
    model.eval()
    evaluated = model(**inputs)
    assert torch.equal(evaluated.logits, wanted) and evaluated.loss.isfinite()


def test_a_conversion_that_tries_the_head_says_nothing(caplog):
    model = zoo.hugging_face("Llama").train()
    apply_fused_head(model)
    foundry_fp8.apply_fp8(model, recipe="current", backend="emulated")
    assert not caplog.records


def test_positional_labels_are_found():
    model, inputs = zoo.fog().train(), batch()
    apply_fused_head(model)
    labels = inputs["labels"]
    with_keywords = model(**inputs).loss
    positional = model(inputs["input_ids"], None, None, None, None, None, labels)
    assert isinstance(positional.logits, DeferredLogits) and torch.equal(positional.loss, with_keywords)


def test_a_factor_on_the_loss_and_several_forwards_before_a_backward():
    model, inputs, others = (
        zoo.hugging_face("Llama", tie_word_embeddings=True).train(),
        batch(),
        batch((2, 9)),
    )

    def gradient():
        model.zero_grad()
        (1024 * model(**inputs).loss + model(**others, num_items_in_batch=7).loss).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    wanted = gradient()
    apply_fused_head(model, chunk_tokens=4)
    assert off_by(gradient(), wanted) < 1e-5


def test_the_lean_loss_of_activation_compression_takes_it_too():
    for model in (zoo.hugging_face("Llama"), zoo.mpt()):
        inputs = batch()
        wanted = step(model.train(), inputs)[1]
        apply_activation_compression(model, format="exact", min_numel=256)
        apply_fused_head(model, chunk_tokens=5)
        output, got = step(model, inputs)
        assert isinstance(output.logits, DeferredLogits) and off_by(got, wanted) < 1e-5


def test_lora_on_the_head():
    from peft import LoraConfig, inject_adapter_in_model

    model, inputs = zoo.hugging_face("Llama").train(), batch()
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False), model)
    wanted = step(model, inputs)[1]
    apply_fused_head(model, chunk_tokens=5)
    output, got = step(model, inputs)
    assert isinstance(output.logits, DeferredLogits) and any("lm_head.lora_A" in name for name in got)
    assert off_by(got, wanted) < 1e-5


def test_a_loss_outside_of_the_model_with_targets_of_its_own():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.out = nn.Linear(8, 8), nn.Linear(8, 32)

        def forward(self, x):
            return self.out(self.body(x))

    model, x, targets = Plain(), torch.randn(4, 6, 8), torch.randint(32, (4, 6))
    F.cross_entropy(model(x).transpose(1, 2), targets, reduction="sum").backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    fused = apply_fused_head(model, head="out", chunk_tokens=5)
    fused.expect(targets)
    logits = model(x)
    assert logits.shape == (4, 6, 32) and logits.dtype == torch.float32 and logits.size(-1) == 32
    F.cross_entropy(logits.float().view(-1, 32), targets.view(-1), reduction="sum").backward()
    assert off_by({n: p.grad for n, p in model.named_parameters()}, wanted) < 1e-5


def used(action, model=None, **options):
    model = (model or zoo.hugging_face("Llama")).train()
    apply_fused_head(model, **options)
    return action(model(**batch()).logits)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda x: x[..., :-1, :], "takes a part of its logits"),
        (lambda x: torch.softmax(x, -1), "calls softmax on its logits"),
        (lambda x: x.argmax(-1), "asks its logits for argmax"),
        (lambda x: x * 2.0, "does mul by 2.0 to its logits"),
        (lambda x: x.view(-1, 2, 32), "views its logits"),
        (lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(42).long(), label_smoothing=0.1), "label smoothing"),
        (lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(42).long(), ignore_index=0), "ignore_index 0"),
        (lambda x: F.cross_entropy(x.flatten(0, 1), torch.zeros(7).long()), "asks for the loss of"),
    ],
)  # fmt: skip
def test_whoever_wants_logits_gets_an_error_by_name(action, message):
    with pytest.raises((RuntimeError, AttributeError), match=message):
        used(action)


def test_steps_that_the_configuration_has_and_the_model_leaves_out():
    model = zoo.hugging_face("Llama")
    model.config.final_logit_softcapping = 30.0  # of no meaning to a Llama
    with pytest.raises(RuntimeError, match="leaves out"):
        used(lambda x: x, model)


@pytest.mark.parametrize("name", ["T5", "Bert"])
def test_other_targets_than_the_next_token_are_an_error(name):
    model = (
        zoo.MODELS["T5"]()[0]
        if name == "T5"
        else zoo.hugging_face("Bert", cls="ForMaskedLM", style=zoo.BERT_STYLE)
    )
    head = {} if name == "T5" else {"head": "cls.predictions.decoder"}
    with pytest.raises(RuntimeError, match="not the batch's labels shifted by one"):
        used(lambda x: x, model, **head)


def test_what_a_head_must_be():
    with pytest.raises(ConfigError, match=r"algorithms\.fused_head\.head: Linear has no output embeddings"):
        apply_fused_head(nn.Linear(2, 2))
    llama = zoo.hugging_face("Llama")
    with pytest.raises(ConfigError, match=r"has no lm_haed\. Did you mean 'lm_head'"):
        apply_fused_head(llama, head="lm_haed")
    with pytest.raises(ConfigError, match=r"model\.norm is a LlamaRMSNorm"):
        apply_fused_head(llama, head="model.norm")
    fused = apply_fused_head(llama)
    assert apply_fused_head(llama) is fused
    with pytest.raises(
        ConfigError, match=r"fused already, with other settings \(chunk_tokens: None, here 64\)"
    ):
        apply_fused_head(llama, chunk_tokens=64)
    fused.undo()
    assert apply_fused_head(llama, chunk_tokens=64) is not fused
    llama = zoo.hugging_face("Llama")
    apply_fp8(llama, recipe="current", backend="emulated", include=["lm_head"])
    with pytest.raises(ConfigError, match=r"lm_head runs in FP8"):
        apply_fused_head(llama)
    llama = zoo.hugging_face("Llama")
    llama.loss = type("CrossEntropyLoss", (nn.Module,), {"__module__": "flash_attn.losses.cross_entropy"})()
    with pytest.raises(ConfigError, match=r"model\.loss_fn: torch_crossentropy"):
        apply_fused_head(llama)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_compiled_the_head_runs_behind_the_graph():
    model, inputs = zoo.hugging_face("Llama").train(), batch()
    wanted = step(model, inputs)[1]
    apply_fused_head(model, chunk_tokens=5)
    compiled = torch.compile(model, backend="aot_eager")
    output = compiled(**inputs)
    output.loss.backward()
    assert isinstance(output.logits, DeferredLogits)
    model.zero_grad()
    compiled(**inputs).loss.backward()
    assert off_by({n: p.grad for n, p in model.named_parameters()}, wanted) < 1e-5


def test_a_copy_has_a_head_of_its_own():
    model, inputs = zoo.hugging_face("Llama").train(), batch()
    apply_fused_head(model, chunk_tokens=5)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    wanted = step(model, inputs)[1]
    output, got = step(twin, inputs)
    assert isinstance(output.logits, DeferredLogits)
    assert output.loss.item() == pytest.approx(torch.log(torch.tensor(64.0)).item())
    assert not torch.equal(got["lm_head.weight"], wanted["lm_head.weight"])
