"""The table of fusible norms, held against LLM Foundry's real blocks: moving a norm into its linear must change nothing."""

import pytest
import torch

from foundry_fp8.layers.deferred_norm import _NORMS, qualified_name
from foundry_fp8.surgery.norm_fusion import _sites

pytest.importorskip("llmfoundry")

from llmfoundry.models.layers.blocks import MPTBlock
from llmfoundry.models.mpt.configuration_mpt import attn_config_defaults

ATTENTION = {**attn_config_defaults, "attn_impl": "torch"}


def block(norm, ffn, fused_norm_attn_norm):
    torch.manual_seed(0)
    made = MPTBlock(
        d_model=32,
        n_heads=4,
        expansion_ratio=2,
        norm_type=norm,
        attn_config=dict(ATTENTION),
        ffn_config={"ffn_type": ffn},
        fuse_norm_attn_norm=fused_norm_attn_norm,
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("fused_norm_attn_norm", [False, True])
@pytest.mark.parametrize(("ffn", "count"), [("mptmlp", 2), ("mptglu", 1)])
@pytest.mark.parametrize("norm", ["low_precision_layernorm", "layernorm", "rmsnorm", "low_precision_rmsnorm"])
def test_norm_feeds_that_linear_alone(norm, ffn, count, fused_norm_attn_norm):
    model = block(norm, ffn, fused_norm_attn_norm)
    x = torch.randn(2, 8, 32)
    expected = model(x)[0]
    sites = list(_sites(model))
    assert len(sites) == count
    for norm_name, linear_name in sites:
        module = model.get_submodule(norm_name)
        assert qualified_name(type(module)) in _NORMS
        # The norm passes its input on; the linear normalises what it is given.
        forward = type(module).forward
        module.register_forward_hook(lambda module, args, output: args[0])
        model.get_submodule(linear_name).register_forward_pre_hook(
            lambda linear, args, norm=module, forward=forward: (forward(norm, args[0]),)
        )
    assert torch.equal(model(x)[0], expected)
