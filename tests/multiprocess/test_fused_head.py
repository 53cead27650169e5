"""Sharded heads without logits: one gather each way, whether the head is a unit of its own or in the root."""

import pytest

from tests.multiprocess import launch
from tests.multiprocess.fused_head import run

IMPORTS = f"{launch.FSDP},transformers.models.llama.modeling_llama,tests.multiprocess.fused_head"


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_gradients_are_those_of_one_device(kind):
    for found in launch.call(run, 2, kind, imports=IMPORTS):
        assert "FSDP units of their own" in found.pop("lora")
        assert len(found) == 4
        for case, (with_logits, without) in found.items():
            assert without < (1e-5 if "bf16 False" in case else 1.2 * with_logits + 2**-8), (
                case,
                with_logits,
                without,
            )
