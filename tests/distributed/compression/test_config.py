import pytest
import torch

from foundry_fp8.config import ConfigError, from_mapping
from foundry_fp8.distributed.compression.apply import apply_compressed_communication
from foundry_fp8.distributed.compression.config import KEY, CompressionConfig


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gradients": "int16"}, "Did you mean 'int8'"),
        ({"gradient": "int8"}, "Did you mean 'gradients'"),
        ({"gradients": "none"}, "compresses nothing"),
        ({"block_size": 100}, "power of two"),
        ({"warmup": "1ep"}, "100ba"),
        ({"warmup": -1}, "100ba"),
        ({"warmup": "-5ba"}, "100ba"),
        ({"min_bytes": "64 furlongs"}, "64KiB"),
        ({"error_feedback": "sometimes"}, "auto or true or false"),
        ({"gradients": "bf16", "error_feedback": True}, "loses nothing"),
        ({"scope": "node"}, "inter_node"),
        ({"adapt": "yes"}, "true or false"),
        ({"check_replicas": "yes"}, "true or false"),
        ({"rounding": "random"}, "nearest, stochastic"),
        ({"rounding": "stochastic", "gradients": "bf16"}, "not quantised"),
    ],
)
def test_bad_options_are_refused_with_what_to_write(options, said):
    with pytest.raises(ConfigError, match=said) as caught:
        from_mapping(CompressionConfig, options, KEY)
    assert str(caught.value).startswith(KEY)


def test_units_are_understood():
    config = CompressionConfig(warmup="100ba", min_bytes="64KiB", sample_interval=7)
    assert (config.warmup, config.min_bytes, config.sample_interval) == (100, 65536, 7)


@pytest.mark.parametrize(("gradients", "fed"), [("int8", True), ("int4", True), ("bf16", False)])
def test_auto_feeds_back_what_is_quantised(gradients, fed):
    assert CompressionConfig(gradients=gradients).uses_error_feedback is fed


def test_one_process_is_warned_about_and_changes_nothing(caplog):
    model = torch.nn.Linear(2, 2)
    compression = apply_compressed_communication(model)
    assert "one rank" in caplog.text and not compression.rows and not compression.residuals()
    model(torch.randn(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("shape", "exact"),
    [
        ((65536,), True),  # a norm or a bias, of any size
        ((1, 65536), True),
        ((), True),
        ((3, 2), True),  # below 64 KiB
        ((128, 127), True),
        ((128, 128), False),
        ((4, 64, 64), False),
    ],
)
def test_vectors_and_small_parameters_stay_exact(shape, exact):
    assert (CompressionConfig().why_exact(shape, 4) is not None) is exact
