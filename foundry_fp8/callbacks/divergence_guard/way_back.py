"""Which checkpoint to go on from after a stop."""

from __future__ import annotations

import os.path

from composer.callbacks import CheckpointSaver
from composer.core import State, Timestamp
from composer.utils import format_name_with_dist_and_time, parse_uri

__all__ = ["way_back"]

SHARD = ".distcp"
"""How a rank's file of a sharded checkpoint ends; what is loaded is the folder around."""


def way_back(state: State) -> str:
    """From where to go on: Composer has no way back inside of a run, and what it saves after this batch holds the cause.

    A trainer saves after BATCH_END, so all that is there now is of before the alarm. Asked is what a saver carries over a resume;
    what only weights were saved of is no way back.
    """
    savers = [one for one in state.callbacks if isinstance(one, CheckpointSaver)]
    if not savers:
        return "nothing was saved before: the trainer has no save_folder"
    saved = [
        (int(when.batch.value), _place(one, state, name, when))
        for one in savers
        if not one.weights_only
        for name, when in one.all_saved_checkpoints_to_timestamp.items()
    ]
    if not saved:
        return "nothing was saved before that a run could go on from"
    batch, (path, loads) = max(saved)
    how = (
        f"with load_path: {path} a run goes on from it"
        if loads
        else f"it was saved as {path}, which is not kept there: a run goes on from where it was uploaded to"
    )
    return (
        f"the last checkpoint before is of batch {batch}; {how}, and alarms again unless something is changed"
    )


def _place(saver: CheckpointSaver, state: State, name: str, when: Timestamp) -> tuple[str, bool]:
    """Where a checkpoint is that a rank, or an earlier run's, knows by ``name``; whether it can be loaded from there."""
    local = os.path.dirname(name) if name.endswith(SHARD) else name

    def named(template: str, rank: str) -> str:
        if name.endswith(SHARD):
            template = os.path.join(os.path.dirname(template), os.path.basename(local))
        return os.path.normpath(
            format_name_with_dist_and_time(template.replace("{rank}", rank), state.run_name, when)
        )

    template = os.path.join(saver.filename.folder or "", saver.filename.filename)
    ours = named(template, "{rank}") == os.path.normpath(local)
    if saver.remote_uploader is None or saver.remote_file_name is None:
        # Rank 0 alone writes a whole checkpoint, and every rank notes a name of its own.
        return named(template, "0") if ours else local, saver.num_checkpoints_to_keep != 0
    remote = named(saver.remote_file_name.filename.lstrip("/"), "0")
    if not ours and not os.path.normpath(local).endswith(os.sep + remote):
        return local, False  # of a run with another name or folder
    backend, bucket, _ = parse_uri(saver.remote_uploader.remote_folder)
    return f"{backend}:/{'/' + bucket if bucket else ''}/{remote}", True
