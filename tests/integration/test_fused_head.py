"""`fused_head` through LLM Foundry's own train entry."""

import pytest
import torch

from foundry_fp8.activations.fused_head.logits import DeferredLogits
from foundry_fp8.config import ConfigError
from tests.integration.foundry_runs import MPT, config, hugging_face, train, weights

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("host", ["mpt", pytest.param("llama", marks=pytest.mark.full)])
def test_a_run_ends_where_it_ends_with_logits(root, host):
    model = {**(MPT if host == "mpt" else hugging_face(root, "llama")), "use_train_metrics": False}
    plain = weights(train(config(root, model=model)))
    algorithms = {"fp8": {"recipe": "delayed"}, "fused_head": {"chunk_tokens": 50}}
    run = train(config(root, model=model, algorithms=algorithms))
    outputs = run.state.outputs
    assert isinstance(outputs.logits, DeferredLogits)
    for name, value in weights(run).items():
        assert (value - plain[name]).abs().max() < 1e-3, (
            name
        )  # rounding that FP8 and Adam's first steps make larger
    run.state.model.eval()
    with torch.no_grad():
        assert run.state.model.eval_forward(dict(run.state.batch)).shape[-1] == 512


def test_train_metrics_are_refused_before_the_first_batch(root):
    with pytest.raises(
        ConfigError, match=r"algorithms\.fused_head: train metrics read the logits .*use_train_metrics: false"
    ):
        train(config(root, algorithms={"fused_head": {}}))
