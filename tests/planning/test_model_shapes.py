"""The shapes that this package knows are those of the models: their numbers of parameters are the published ones."""

import json

import pytest
import torch

from foundry_fp8.planning.model_shapes import MODEL_SHAPES

PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": 8.03e9,
    "meta-llama/Meta-Llama-3-70B": 70.6e9,
    "meta-llama/Llama-3.1-405B": 405.9e9,
    "./Qwen3-8B-FP8": 8.2e9,
    "mistralai/Mixtral-8x7B-v0.1": 46.7e9,
}
"""As the models' cards state them."""


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name, tmp_path):
    from transformers import AutoConfig, LlamaForCausalLM, MixtralForCausalLM, Qwen3ForCausalLM

    kinds = {"llama": LlamaForCausalLM, "mixtral": MixtralForCausalLM, "qwen3": Qwen3ForCausalLM}
    (tmp_path / "config.json").write_text(json.dumps(MODEL_SHAPES[name]))
    config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = kinds[config.model_type](config)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PUBLISHED[name], rel=0.002)
