import torch

from foundry_fp8.observe.flops.gemms import gemms_of


def test_an_mpt_with_hugging_face_rope_is_counted():
    """Its rotary embedding has a config that raises KeyError for every key it does not hold."""
    from llmfoundry.models.mpt import MPTConfig, MPTForCausalLM

    attention = {"attn_impl": "torch", "rope": True, "rope_impl": "hf"}
    config = MPTConfig(
        d_model=32,
        n_heads=2,
        n_layers=1,
        vocab_size=64,
        max_seq_len=16,
        attn_config=attention,
        init_device="meta",
    )
    with torch.device("meta"):
        model = MPTForCausalLM(config)
    # Four linears of the block, and the output head that is the tied embedding.
    assert len(gemms_of(model)) == 5
