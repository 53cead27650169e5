"""Kills a run at random moments, again and again in one folder, and says what was lost. Arguments: a folder, how often, the seed.

What is killed trains with a run log and Composer's checkpoints, saves a training state with torch, exports over an older export, and lets
``init`` rewrite a YAML. It notes in a journal what is whole; after each kill everything in the journal is read again.
"""

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from composer import Callback, Trainer
from typer.testing import CliRunner

import foundry_fp8
from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.callbacks.run_log import RunLog
from foundry_fp8.cli.main import app
from foundry_fp8.config.files import TEMPORARY
from foundry_fp8.report.sources.run_log import read
from tests.callbacks.conftest import batches, build_llama, train
from tests.export.served import stored

YAML = "model:\n  name: mpt_causal_lm\n  d_model: {}\nmax_duration: 1ba\n" + "# a line of the user\n" * 200
LONGEST = 6.0  # seconds of a life


class Notes(Callback):
    """The journal, and what is written beside training."""

    def __init__(self, folder, life):
        self.folder, self.life = folder, life
        self.exported = build_llama().train()
        foundry_fp8.apply_fp8(self.exported, recipe="current", backend="emulated")

    def note(self, **said):
        with (self.folder / "journal.jsonl").open("a") as journal:
            journal.write(json.dumps({"life": self.life, **said}) + "\n")

    def batch_start(self, state, logger):
        if state.timestamp.batch.value:
            self.note(step=state.timestamp.batch.value)  # its line was written when the last batch ended

    def batch_checkpoint(self, state, logger):
        """Composer's checkpoint of this batch, those before it, and ours."""
        n, model = state.timestamp.batch.value % 200 + 1, state.model
        written = state.timestamp.batch.value - 1
        if (path := self.folder / f"checkpoints{self.life}" / f"ba{written}.pt").exists():
            self.note(file=str(path), digest=digest(path))
        state_file = self.folder / f"state{self.life}-{n}.pt"
        torch.save(foundry_fp8.training_state(model).state_dict(), state_file)
        self.note(file=str(state_file), digest=digest(state_file))
        served = self.folder / "served"
        self.exported.config.bos_token_id = n
        with torch.no_grad():
            self.exported.lm_head.weight.fill_(float(n))
        foundry_fp8.export_fp8(self.exported, served, overwrite=True)
        self.note(served=n)
        run = self.folder / "run.yaml"
        beside = self.folder / "fresh.yaml"
        beside.write_text(YAML.format(n))
        beside.replace(run)
        assert CliRunner().invoke(app, ["init", str(run)]).exit_code == 0
        self.note(yaml=n)


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def live(folder, life):
    os.chdir(folder)
    model = train.__wrapped__().wrap(build_llama())
    Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(batches(500), batch_size=4),
        max_duration="500ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        callbacks=[Notes(folder, life)],
        algorithms=[FP8(recipe="delayed", backend="emulated")],
        loggers=[RunLog(str(folder / f"log{life}.jsonl"))],
        device="cpu",
        progress_bar=False,
        save_folder=str(folder / f"checkpoints{life}"),
        save_interval="1ba",
        save_filename="ba{batch}.pt",
    ).fit()


def lost(folder):
    """What is in the journal and cannot be read whole, and what happened to be there."""
    entries = []
    for line in (
        (folder / "journal.jsonl").read_text().splitlines() if (folder / "journal.jsonl").exists() else []
    ):
        entries.append(json.loads(line))
    found, problems = Counter(), []
    for life in {entry["life"] for entry in entries}:
        steps = {entry["step"] for entry in entries if entry["life"] == life and "step" in entry}
        if steps:
            logged = {int(step) for step in read(folder / f"log{life}.jsonl").step}
            found["steps"] += len(steps)
            problems += [f"life {life}: steps {sorted(steps - logged)} are not in the log"] * bool(
                steps - logged
            )
    for entry in entries:
        if "file" in entry:
            found["checkpoints"] += 1
            if not Path(entry["file"]).exists() or digest(entry["file"]) != entry["digest"]:
                problems.append(f"{entry['file']} is not what it was")
    exports = [entry["served"] for entry in entries if "served" in entry]
    if exports and not (folder / "served" / "config.json").exists():
        found["exports under way"] += 1  # which every reader refuses
    elif exports:
        found["exports"] += 1
        config, tensors = stored(folder / "served")
        values = {config["bos_token_id"], *tensors["lm_head.weight"].float().unique().tolist()}
        problems += [f"the export is of {values}"] * (len(values) != 1)
    if (run := folder / "run.yaml").exists():
        text = run.read_text()
        n = int(text.split("d_model: ")[1].split()[0])
        found["YAMLs"] += 1
        whole = text == YAML.format(n) or ("fp8:" in text and text.count("# a line of the user") == 200)
        problems += ["run.yaml is neither before nor after"] * (not whole)
    left = [path for path in folder.rglob(f"{TEMPORARY}*")]
    found["temporary files"] = len(left)
    return found, problems


def main():
    folder, times, seed = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3])
    chance, kept, problems, total = random.Random(seed), Counter(), [], 0.0
    for life in range(times):
        child = os.fork()
        if child == 0:
            sys.stdout = sys.stderr = (folder / f"said{life}").open("w")
            live(folder, life)
            os._exit(0)
        after = chance.uniform(0.0, LONGEST)
        time.sleep(after)
        total += after
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found, new = lost(folder)
        kept += found
        problems += [f"after kill {life} at {after:.2f} s: {one}" for one in new]
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    written = Counter(key for entry in entries for key in ("step", "file", "served", "yaml") if key in entry)
    print(json.dumps({"kills": times, "seconds": total, "written": written, "read": kept, "lost": problems}))


if __name__ == "__main__":
    main()
