"""What Composer's own suites ask of any algorithm, callback and logger: asked of everything registered here.

After tests/algorithms/test_algorithm_resumption.py and test_algorithms_train.py, tests/callbacks/test_callbacks.py and
tests/trainer/test_checkpoint.py of mosaicml/composer 0.32.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from tests.combinations.parts import PARTS, Settings, numbers_of

pytestmark = pytest.mark.integration
SAMPLE = ("everything",)
"""The others have no code of their own in what these tests ask; they run under ``full``."""
BATCHES = 4
NAMES = [
    pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.full])
    for name, part in PARTS.items()
    if not part.missing
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps for each shape
        yield


def trainer_of(settings, **options):
    from composer import Trainer

    from tests.combinations.composing import Causal, Tokens

    torch.manual_seed(0)
    model = Causal(settings.model)
    optimizer = settings.optimizer_of(model, 1e-2)
    return Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(Tokens(2 * BATCHES), batch_size=2),
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        algorithms=settings.build("algorithms"),
        callbacks=settings.build("callbacks"),
        loggers=settings.build("loggers"),
        device="cpu",
        progress_bar=False,
        **{"max_duration": f"{BATCHES}ba", "run_name": "upstream", **options},
    )


def trained(settings, **options):
    trainer = trainer_of(settings, **options)
    trainer.fit()
    trainer.close()
    return trainer


def ours(trainer):
    return [c for c in trainer.state.callbacks if type(c).__module__.startswith("foundry_fp8.")]


def tree_differs(a, b, place=""):
    if isinstance(a, dict):
        assert a.keys() == b.keys(), (place, a.keys() ^ b.keys())
        return [x for key in a for x in tree_differs(a[key], b[key], f"{place}/{key}")]
    if isinstance(a, list | tuple):
        return [
            x for i, (v, w) in enumerate(zip(a, b, strict=True)) for x in tree_differs(v, w, f"{place}/{i}")
        ]
    if isinstance(a, torch.Tensor):
        same = torch.equal(numbers_of(a), numbers_of(b))
    else:
        same = bool(np.array_equal(a, b)) or (a != a and b != b)
    return [] if same else [place]


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_and_callback_says_what_it_is(name):
    """Composer saves an algorithm's ``repr`` and compares it on load, so it is the same for the same options."""
    settings = PARTS[name].settings
    for kind in ("algorithms", "callbacks"):
        for made, again in zip(settings.build(kind), settings.build(kind), strict=True):
            if type(made).__module__.startswith("foundry_fp8."):
                assert repr(made) == repr(again) and re.fullmatch(r"\w+\(.*\)", repr(made))
                if kind == "algorithms":
                    assert made.state_dict()["repr"] == repr(made)
                    assert repr(eval(repr(made), {type(made).__name__: type(made)})) == repr(made)


@pytest.mark.parametrize("name", NAMES)
def test_resuming_ends_in_the_checkpoint_of_the_run_that_went_through(name, tmp_path):
    """Whole files compared: weights, optimizer, scheduler, generators, time, and the states of all algorithms and callbacks."""
    settings, saving = PARTS[name].settings, {"save_interval": "1ba", "save_filename": "ba{batch}.pt"}
    trained(settings, save_folder=str(tmp_path / "first"), **saving)
    trained(
        settings, save_folder=str(tmp_path / "second"), load_path=str(tmp_path / "first" / "ba2.pt"), **saving
    )
    for batch in (3, 4):
        first, second = (
            torch.load(tmp_path / folder / f"ba{batch}.pt", weights_only=False)
            for folder in ("first", "second")
        )
        assert not tree_differs(first["rng"], second["rng"])
        first, second = first["state"], second["state"]
        for state in (first, second):  # of the clock, and of the folder
            state["timestamp"] = {
                k: str(v) for k, v in state["timestamp"]["Timestamp"].items() if "wct" not in k
            }
            for key in ("metadata", "run_name"):
                del state[key]
            del state["callbacks"]["CheckpointSaver"]
        of_composer = {"GradientClipping"}  # whose repr is an address
        places = tree_differs(first, second)
        names = [name for name, _ in first["algorithms"]]
        for index in (i for i, name in enumerate(names) if name in of_composer):
            places = [place for place in places if place != f"/algorithms/{index}/1/repr"]
        assert not places, places[:5]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_lies_where_checkpoints_do_and_others_read_them(name, tmp_path):
    """As many files as without; and the model alone, in a run without any of it, is the one that was trained."""
    with_it, without = tmp_path / "with", tmp_path / "without"
    trainer = trained(PARTS[name].settings, save_folder=str(with_it), save_interval="2ba")
    none = Settings(model=PARTS[name].settings.model)
    trained(none, save_folder=str(without), save_interval="2ba")
    assert sorted(p.name for p in with_it.rglob("*")) == sorted(p.name for p in without.rglob("*"))
    plain = trainer_of(
        none,
        load_path=str(with_it / "latest-rank0.pt"),
        load_strict_model_weights=True,
        max_duration="9ba",
    )
    there, here = trainer.state.model.state_dict(), plain.state.model.state_dict()
    assert there.keys() == here.keys()
    assert all(torch.equal(there[key], here[key]) for key in there)
    plain.close()


@pytest.mark.parametrize("name", NAMES)
def test_fit_may_be_called_again_and_close_too(name):
    """After ``close`` nothing of ours is left in the model's hooks, whether or not anything was trained."""
    trainer = trainer_of(PARTS[name].settings)
    trainer.fit(duration="2ba")
    trainer.fit(duration="2ba")
    assert int(trainer.state.timestamp.batch) == 4
    assert [c.failed for c in ours(trainer) if getattr(c, "failed", None)] == []
    for _ in range(2):
        trainer.close()
        for callback in ours(trainer):
            callback.close(trainer.state, trainer.logger)
            callback.post_close()
    unused = trainer_of(PARTS[name].settings)
    unused.close()
    unused.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_microbatches_beside_evaluation(name, size):
    """With an evaluation after each batch, whose loss is the same where nothing is trained between."""
    from composer import Evaluator

    from tests.combinations.composing import Tokens

    held_out = Evaluator(label="held out", dataloader=torch.utils.data.DataLoader(Tokens(2), batch_size=1))
    trainer = trainer_of(
        PARTS[name].settings, device_train_microbatch_size=size, eval_dataloader=held_out, eval_interval="1ba"
    )
    trainer.fit()
    assert int(trainer.state.timestamp.batch) == BATCHES and int(trainer.state.eval_timestamp.batch) == 2
    before = {key: value.clone() for key, value in trainer.state.model.state_dict().items()}
    trainer.eval()
    assert all(torch.equal(before[key], value) for key, value in trainer.state.model.state_dict().items())
    trainer.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("error:.*foundry_fp8")
def test_events_that_come_twice(name):
    """Composer's engine runs every event of each callback, in any state, as its own suite does; INIT and FIT_START twice."""
    from composer.core import Event

    trainer = trainer_of(PARTS[name].settings)
    for event in (Event.INIT, Event.FIT_START, Event.FIT_START, Event.FIT_END, Event.FIT_END):
        for callback in ours(trainer):
            callback.run_event(event, trainer.state, trainer.logger)
    trainer.fit()
    assert int(trainer.state.timestamp.batch) == BATCHES
    trainer.close()
