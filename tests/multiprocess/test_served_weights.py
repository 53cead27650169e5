"""Two ranks: FSDP2 sends what one rank would, and DDP trains beside published weights."""

from pathlib import Path

import pytest

pytest.importorskip("compressed_tensors")

from tests.multiprocess import launch
from tests.multiprocess.served_weights import adapted, sharded

pytestmark = pytest.mark.multiprocess
IMPORTS = f"{launch.FSDP},transformers.models.llama.modeling_llama"


def test_a_sharded_model_sends_what_a_whole_one_does():
    assert launch.call(sharded, 2, imports=IMPORTS) == [True, True]


def test_ddp_trains_beside_published_weights(tmp_path):
    assert max(launch.call(adapted, 2, Path(tmp_path), imports=IMPORTS)) < 1e-5
