"""Two ranks: FSDP2 sends what one rank would, DDP and FSDP2 train beside published weights."""

from pathlib import Path

import pytest

pytest.importorskip("compressed_tensors")

from tests.multiprocess import launch
from tests.multiprocess.served_weights import adapted, sharded

pytestmark = pytest.mark.multiprocess
IMPORTS = f"{launch.FSDP},transformers.models.llama.modeling_llama,tests.multiprocess.served_weights"


def test_a_sharded_model_sends_what_a_whole_one_does():
    assert launch.call(sharded, 2, imports=IMPORTS) == [True, True]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "ignored"])
def test_adapters_train_beside_published_weights(wrapper, tmp_path):
    assert max(launch.call(adapted, 2, Path(tmp_path), wrapper, imports=IMPORTS)) < 1e-5
