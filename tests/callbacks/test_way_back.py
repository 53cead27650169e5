"""The checkpoint that a stopped run goes on from is one that is there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.callbacks.conftest import build_llama

pytestmark = pytest.mark.integration


def way_back(state):
    from foundry_fp8.callbacks.divergence_guard.way_back import way_back

    return way_back(state)


def test_after_a_resume_it_is_the_checkpoint_that_was_resumed_from(train, tmp_path):
    from composer.core import Callback

    class Asks(Callback):
        said = ""

        def batch_end(self, state, logger):
            self.said = way_back(state)

    saving = {"save_folder": str(tmp_path), "run_name": "r"}
    path = str(tmp_path / "ep0-ba2-rank0.pt")
    train(build_llama(), [], steps=2, save_interval="2ba", **saving)
    train(build_llama(), [asks := Asks()], steps=3, load_path=path, save_interval="9ba", **saving)
    assert f"batch 2; with load_path: {path} a run goes on from it" in asks.said


@pytest.fixture
def saver():
    """Composer's savers, whose folders for links are taken away again."""
    from composer.callbacks import CheckpointSaver

    made = []

    def make(**options):
        made.append(CheckpointSaver(**options))
        return made[-1]

    yield make
    for one in made:
        one.tmp_dir_for_symlink.cleanup()


def run(*savers, batch=4, sharded=False, name="r", saves=True):
    """A run whose savers have noted a checkpoint of ``batch``, by Composer's own naming."""
    from composer.core import Timestamp
    from composer.utils.checkpoint import get_save_filename

    state = SimpleNamespace(
        callbacks=list(savers), run_name=name, timestamp=Timestamp(batch=batch), fsdp_sharded_state_dict_enabled=sharded,
        fsdp_config=SimpleNamespace(sharded_ckpt_prefix_dir="ep{epoch}-ba{batch}"),
    )  # fmt: skip
    for one in savers if saves else ():
        path = get_save_filename(state, one.filename.format(state, keep_placeholders=True))
        one.all_saved_checkpoints_to_timestamp[path] = state.timestamp
    return state


def resumed(before, after):
    """``after`` with what ``before`` left in its checkpoint."""
    after.load_state_dict(before.state_dict())
    return after


@pytest.mark.parametrize(("sharded", "end"), [(False, "ep0-ba4-rank0.pt"), (True, "ep0-ba4")])
def test_what_is_named_is_what_is_loaded(saver, tmp_path, monkeypatch, sharded, end):
    folder = str(tmp_path / "{run_name}")
    first = saver(folder=folder)
    said = way_back(run(first, sharded=sharded))
    path = str(tmp_path / "r" / end)
    assert f"batch 4; with load_path: {path} a run goes on from it" in said
    # The next run's own entries are still empty, and it may have other settings.
    for settings in ({"folder": folder}, {"folder": str(tmp_path / "elsewhere")}):
        assert way_back(run(resumed(first, saver(**settings)), saves=False)) == said
    later = run(resumed(first, saver(folder=folder)), batch=6, sharded=sharded)
    assert "batch 6; with load_path: " + path.replace("ba4", "ba6") + " " in way_back(later)
    # Every rank notes a name of its own, and rank 0 alone writes a whole checkpoint.
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    assert way_back(run(saver(folder=folder), sharded=sharded)) == said


def test_what_has_been_removed_is_not_offered(saver, tmp_path):
    said = way_back(run(saver(folder=str(tmp_path), num_checkpoints_to_keep=0)))
    assert "batch 4" in said and "uploaded" in said and "load_path" not in said


def test_weights_alone_are_no_way_back(saver, tmp_path):
    weights = saver(folder=str(tmp_path / "weights"), weights_only=True)
    whole = saver(folder=str(tmp_path / "whole"))
    assert "nothing was saved" in way_back(run(weights))
    run(whole, batch=3)
    run(weights, batch=5)
    assert "batch 3;" in way_back(run(weights, whole, saves=False))
    assert "no save_folder" in way_back(run())
    assert "nothing was saved" in way_back(run(saver(folder=str(tmp_path)), saves=False))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("path", ["", "deep/{run_name}"])
def test_a_remote_save_folder_is_named_as_such(saver, tmp_path, sharded, path):
    def remote(copy):  # as the trainer makes it, without the uploader's processes
        name = "ep{epoch}-ba{batch}-rank{rank}.pt"
        one = saver(folder=str(tmp_path / copy / path), filename=name, remote_file_name=str(Path(path) / name), num_checkpoints_to_keep=0)  # fmt: skip
        one.remote_uploader = SimpleNamespace(remote_folder=f"s3://bucket/{path}")
        return one

    first = remote("tmp1")
    said = way_back(run(first, sharded=sharded))
    end = "/".join(
        ["s3://bucket", *(["deep/r"] if path else []), "ep0-ba4" + ("" if sharded else "-rank0.pt")]
    )
    assert f"load_path: {end} a run" in said
    assert way_back(run(resumed(first, remote("tmp2")), saves=False)) == said
    if path:
        other = way_back(run(resumed(first, remote("tmp3")), saves=False, name="other"))
        assert "load_path" not in other and "/deep/r/ep0-ba4" in other
