"""Composer's amp_bf16 and automatic microbatches, which need a GPU, by a shim of its checks: gradients against the functional model."""

import pytest

from tests.multiprocess import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.integration]
IMPORTS = f"{launch.COMPOSER},transformers.models.llama.modeling_llama,tests.combinations.mixed"


@pytest.mark.full
def test_the_trainer_s_mixed_precision_is_autocast_s():
    """The quick twin: autocast's rows of test_pairs.py."""
    from tests.combinations.mixed import mixed_precision

    recipes = [None, "delayed", "current", "block", "mxfp8", "nvfp4"]
    wrappers = ["ddp", "fsdp1", "fsdp1-flat", "fsdp2"]
    ranks = launch.call(mixed_precision, 2, recipes, wrappers, imports=IMPORTS)
    for cells in ranks:
        assert len(cells) == len(recipes) * len(wrappers)
        for (wrapper, recipe), (errors, ran, batches_apart) in cells.items():
            # FSDP's gradients are bf16 until they are reduced, as the functional model's are; its flat ones are read from a step.
            assert max(errors) < 1e-3 < batches_apart, (wrapper, recipe, errors)
            assert ran == {None: [], "nvfp4": ["fp4"]}.get(recipe, ["fp8"]), (wrapper, recipe, ran)


@pytest.mark.full
def test_a_batch_that_ran_out_of_memory_on_one_rank_is_run_again_in_smaller_parts():
    """Microbatches of 4, then of 2, as if they had always been 2; replicas stay alike."""
    from composer.trainer import _patch_pytorch

    from tests.combinations.mixed import out_of_memory

    if not hasattr(_patch_pytorch, "unshard_with_sync"):
        pytest.skip("Composer's automatic microbatches name a patch that it has not for this torch")
    int8 = {
        "warmup": 0,
        "min_bytes": 0,
        "scope": "all",
        "block_size": 32,
        "gradients": "int8",
        "parameters": "int8",
    }
    cases = {
        "current": {"fp8": {"recipe": "current"}},
        "delayed": {"fp8": {"recipe": "delayed"}},
        "compressed": {"fp8": {"recipe": "current"}, "compressed_communication": int8},
    }
    for found in launch.call(out_of_memory, 2, cases, imports=IMPORTS, timeout=120):
        for name in cases:
            assert found[name]["microbatches"] == [2, 2] and found[name]["replicas"], found
            # Delayed scaling has seen the batch before: its scales are other ones, and no worse.
            if name != "delayed":
                assert max(found[name]["errors"]) < 1e-6, found
            for again, at_once in zip(*found[name]["from_exact"], strict=True):
                assert again <= 1.5 * at_once, found
