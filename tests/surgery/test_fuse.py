import pytest
from torch import nn

from foundry_fp8.config import ConfigError
from foundry_fp8.surgery.apply import apply_fp8


def test_fuse_true_is_for_native():
    with pytest.raises(
        ConfigError, match=r"fuse: not with the emulated backend: it fuses nothing; native does"
    ):
        apply_fp8(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)), backend="emulated", fuse=True)


def test_fuse_is_true_or_false():
    with pytest.raises(ConfigError, match=r"fuse: 'yes' is not true or false"):
        apply_fp8(nn.Linear(32, 32), fuse="yes")
