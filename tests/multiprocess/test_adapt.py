"""``compressed_communication`` takes the way that makes steps shortest."""

import pytest

from tests.multiprocess import launch

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def results():
    return launch.run("run_adapt.py", 2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp1-FULL_SHARD", "fsdp1-NO_SHARD", "fsdp2"])
def test_each_way_gives_the_mean_gradient_within_its_rounding(results, kind):
    """bfloat16 has 8 bits: 2^-9 a rounding, of the input and of the sum. int8's bound: test_wrappers.py."""
    ways = results[kind]
    assert all(got["same"] for got in ways.values())
    assert 1e-4 < ways["coded"]["direction"] < 1.5e-2
    assert 1e-5 < ways["bf16"]["direction"] < 2 * 2**-9
    assert ways["plain"]["direction"] < 1e-6
    assert ways["coded"]["sent"] < ways["bf16"]["sent"] < ways["plain"]["sent"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_slow_link_keeps_the_format_and_a_slow_codec_ends_it(results, kind):
    slow, fast = results["slow link"][kind], results["slow codec"][kind]
    assert slow["way"] == "coded", slow
    assert "gradients travel in int8. A step takes " in slow["verdict"] and "Gbit/s a rank" in slow["verdict"]
    assert fast["way"] in ("bf16", "plain"), fast
    assert fast["lost"] == 0
