"""A run that is saved on some ranks goes on on others, under another wrapper: state to the bit, gradients as the run before."""

import pytest
import torch

from tests.multiprocess import elastic, launch
from tests.multiprocess.tensor_parallel import TOKENS, WIDTH, Stack, error

FULL = pytest.mark.full


def exact_gradients(weights):
    """Of the batch after the checkpoint, in float64."""
    model = Stack().double()
    model.load_state_dict({name.removeprefix("module."): w.double() for name, w in weights.items()})
    random = torch.Generator().manual_seed(elastic.SAVED)
    x, y = (torch.randn(elastic.ROWS, TOKENS // 2, WIDTH, generator=random).double() for _ in range(2))
    (model(x) - y).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def without_wrapper(found):
    return {name.removeprefix("module."): value for name, value in found.items()}


@pytest.mark.parametrize(
    ("recipe", "guard", "before", "after"),
    [
        ("delayed", 0.002, ("ddp", 1), ("fsdp2", 2)),
        ("delayed", None, ("tp", 2), ("ddp", 1)),
        pytest.param("delayed", 0.002, ("ddp", 2), ("fsdp2", 4), marks=FULL),
        pytest.param("delayed", None, ("ddp", 1), ("tp", 4), marks=FULL),
        pytest.param("delayed", None, ("tp", 4), ("ddp", 1), marks=FULL),
        pytest.param("delayed", None, ("fsdp2", 2), ("fsdp2", 4), marks=FULL),
        pytest.param("delayed", None, ("fsdp2", 4), ("tp", 4), marks=FULL),
        pytest.param("delayed", None, ("tp", 4), ("fsdp2", 4), marks=FULL),
        pytest.param("block", None, ("tp", 4), ("fsdp2", 2), marks=FULL),
        pytest.param("mxfp8", None, ("ddp", 1), ("fsdp2", 4), marks=FULL),
        pytest.param("current", None, ("fsdp2", 2), ("tp", 4), marks=FULL),
    ],
    ids=str,
)
def test_a_run_goes_on_on_other_ranks(tmp_path, recipe, guard, before, after):
    folder = str(tmp_path / "checkpoint")
    (how, ranks), (to, others) = before, after
    went_on, weights, moments, _, recipes, events = launch.call(
        elastic.run, ranks, how, recipe, None, folder, guard
    )[0]
    resumed = launch.call(elastic.run, others, to, recipe, folder, None, guard)
    assert bool(events) == bool(guard)
    for _, loaded, loaded_moments, _, runs, _ in resumed:
        for mine, theirs in ((weights, loaded), (moments, loaded_moments)):
            mine, theirs = without_wrapper(mine), without_wrapper(theirs)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert runs == recipes  # what the guard had demoted stays so
    grads = resumed[0][0]
    exact = exact_gradients(weights)
    was, now = error(went_on, exact), error(grads, exact)
    assert all(now[name] <= 1.1 * was[name] for name in exact), (was, now)
    fewer = before == ("tp", 4) and after == (
        "ddp",
        1,
    )  # a smaller dy, whose largest values a history would cut less
    if recipe != "current" and not fewer:  # a rank's own scales, of its share of the batch
        assert all(torch.allclose(grads[name], went_on[name], rtol=1e-3, atol=1e-9) for name in exact)
