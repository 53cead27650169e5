"""What else changes a step, on a CUDA device: offload, packed activations, the fused head, beside the same FP8 model without them."""

import pytest
import torch

import foundry_fp8

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_fp8():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip(f"{torch.cuda.get_device_name()} has no FP8 tensor cores")


def llama(apply=lambda model: None):
    torch.manual_seed(0)
    sizes = {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, use_cache=False)
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).train()
    foundry_fp8.apply_fp8(model, recipe="current", backend="native")
    apply(model)
    return model


def gradients(model):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 2048, (4, 512), generator=generator).cuda()
    model(input_ids=ids, labels=ids).loss.backward()
    return torch.cat([p.grad.flatten().double() for _, p in sorted(model.named_parameters())])


def relative(x, exact):
    return float((x - exact).norm() / exact.norm())


def test_offload_changes_no_gradient():
    offloaded = llama(lambda m: foundry_fp8.apply_activation_checkpointing(m, policy="offload"))
    assert torch.equal(gradients(offloaded), gradients(llama()))


@pytest.mark.parametrize("apply", [foundry_fp8.apply_activation_compression, foundry_fp8.apply_fused_head])
def test_packed_activations_and_the_fused_head_stay_near(apply):
    assert relative(gradients(llama(apply)), gradients(llama())) < 0.1
