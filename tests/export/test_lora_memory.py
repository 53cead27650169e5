"""What a LoRA step on a published FP8 base holds, by torch's own record of allocations, beside the same in bfloat16."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import foundry_fp8
from tests.allocations import most_allocated
from tests.export.published import publish

HIDDEN, INNER, LAYERS, TOKENS = 1024, 3072, 6, 8


def base(dtype, layers=LAYERS):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=256, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def peak(model):
    """Bytes of the parameters, and above them the most that the second step holds at once."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    parts = [getattr(p, n) for p in model.parameters() for n in getattr(p, "parts", ())]
    parts += [p for p in model.parameters() if not hasattr(p, "parts")]
    held = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parts}.values())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(0, 256, (1, TOKENS))

    def step():
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return held + most_allocated(step)


@pytest.fixture(scope="module")
def bfloat16s():
    return peak(base(torch.bfloat16))


@pytest.mark.parametrize("e8m0", [False, pytest.param(True, marks=pytest.mark.full)], ids=["float", "ue8m0"])
def test_a_step_holds_at_most_six_tenths_of_bfloat16s(e8m0, bfloat16s, tmp_path):
    publish(base(torch.float32), tmp_path, e8m0=e8m0)
    model = base(torch.bfloat16).requires_grad_(False)
    foundry_fp8.load_fp8(tmp_path, model)
    assert peak(model) <= 0.60 * bfloat16s
