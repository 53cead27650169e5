"""Models that no feature was written for: what is exact gives the same FP8 gradients on them, what is lossy near ones."""

import pytest
import torch

from tests.combinations.hosts import FEATURES, HOSTS, errors, gradients, made

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning", "ignore:::transformers[.]")
QUICK = {"T5, tied": "current", "CLIP": "delayed"}
"""In the default tier: here something was wrong once."""
REFUSES = {
    "Jamba": "which layer gets which mask it decides by the layers' class, and a checkpoint has another"
}
"""Hosts that cannot be checkpointed, and why; they say so by an error."""
SUMS = (1e-6, 1e-6)
"""Checkpoints: bit for bit, but for the order in which shared weights add their gradients up."""
INT8 = 0.2
"""Of all gradients together: what int8 in two blocks and FP8 behind it move (tests/combinations/bounds.py) stays well below."""
EXACT = {torch.float32: (0.05, 5e-3), torch.bfloat16: (0.3, 0.15)}
"""Of the worst gradient, and of all together: sums in another order, which flip the FP8 rounding of a few elements behind them. Where
that moves an amax by the last bit of bfloat16, its scale moves, and with it every rounding of that tensor."""


NO_AUTOCAST = {"SwitchTransformers"}
"""transformers puts bfloat16 into a float32 tensor there."""
CASES = [
    pytest.param(host, recipe, dtype, marks=[] if QUICK.get(host) == recipe else [pytest.mark.full])
    for host in HOSTS
    for recipe, dtype in (("current", torch.float32), ("delayed", torch.bfloat16))
    if dtype == torch.float32 or host not in NO_AUTOCAST
]


@pytest.mark.parametrize(("host", "recipe", "dtype"), CASES)
def test_features_hold_on_any_host(host, recipe, dtype):
    wanted = gradients(*made(host, recipe, "none"), dtype)
    for feature in FEATURES:
        if host in REFUSES and feature in ("full", "selective"):
            with pytest.raises(RuntimeError, match="must match the size"):
                gradients(*made(host, recipe, feature), dtype)
            continue
        total, worst = errors(gradients(*made(host, recipe, feature), dtype), wanted)
        assert_within(feature, total, worst, dtype)


def assert_within(feature, total, worst, dtype):
    most = {"exact": EXACT[dtype], "int8": (float("inf"), INT8)}.get(feature, SUMS)
    assert worst <= most[0] and total <= most[1], (
        f"{feature}: {worst:.1e} and {total:.1e} off, allowed {most}"
    )
