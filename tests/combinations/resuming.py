"""Composer runs that are saved, resumed, resumed with other settings, and resumed on other ranks; what each rank saw."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer import Trainer
from composer.core import Callback
from composer.utils.parallelism import FSDP2Config
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import foundry_fp8
from foundry_fp8.distributed.traffic import average_on_gloo
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.linear import FP8Linear
from foundry_fp8.numerics.recipes import parse_recipe
from foundry_fp8.report.runs import read_run
from foundry_fp8.run.training_state import FP8Parts
from tests.combinations.composing import Causal, Tokens
from tests.combinations.parts import PARTS, Part, Settings, numbers_of
from tests.combinations.wrapping import gradients_of, parameters_of, with_amaxes_of_all_ranks

ROWS = 4
"""Sequences of a batch, all ranks together: the same for any number of them."""
SAVED, END = 4, 6
torch.compiler.set_stance(
    "force_eager"
)  # torchao compiles its steps for each shape, and nothing else here is compiled
LEARNING_RATE = 0.02
DAMAGED = "inner.model.model.layers.1.mlp.down_proj"
GROWN = {0: 1.0, 1: 10.0, 2: 100.0}
"""By batch, and 50 from then on: more than the history knows of in two batches in turn."""


class Growing(Causal):
    """A quarter of what the last down projection reads grows as :data:`GROWN` says."""

    def __init__(self, name: str = "llama", seed: int = 0) -> None:
        super().__init__(name)
        self.batches_seen = 0
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(seed * 0.01 * torch.randn(parameter.shape, generator=generator))
        if name == "llama":
            self.get_submodule(DAMAGED).register_forward_pre_hook(self._grow)

    def _grow(self, module: nn.Module, args: Any) -> Any:
        factor = torch.ones(args[0].shape[-1])
        factor[:24] = GROWN.get(self.batches_seen, 50.0)
        return (args[0] * factor,)


class Watcher(Callback):
    """What a run began with, its gradients by batch, and copies of all state where it saves and where it ends."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.began: dict[str, Any] = {}
        self.gradients: dict[int, dict[str, Tensor]] = {}
        self.saved: dict[str, Any] = {}
        self.end: dict[str, Any] = {}

    def after_load(self, state, logger):
        if isinstance(state.fsdp_config, FSDP2Config):
            average_on_gloo(state.model)

    def fit_start(self, state, logger):
        self.start = parameters_of(state.model)
        self.began = snapshot(state)
        self.batch_end(state, logger)

    def batch_end(self, state, logger):
        causal_of(state.model).batches_seen = int(state.timestamp.batch)

    def after_train_batch(self, state, logger):
        self.gradients[int(state.timestamp.batch)] = gradients_of(state.model)

    def batch_checkpoint(self, state, logger):
        if int(state.timestamp.batch) == SAVED:
            self.saved = snapshot(state)

    def fit_end(self, state, logger):
        self.end = snapshot(state)


def causal_of(model: nn.Module) -> Growing:
    return next(m for m in model.modules() if isinstance(m, Growing))


def snapshot(state: Any) -> dict[str, Any]:
    """Algorithms' states by class, the parameters, the optimizer's state, and what layers run."""
    optimizer = [
        whole_of(x)
        for per_parameter in state.optimizers[0].state.values()
        for x in per_parameter.values()
        if isinstance(x, Tensor)
    ]
    return copy.deepcopy(
        {
            "algorithms": {
                type(a).__name__: {key: x for key, x in a.state_dict().items() if key != "repr"}
                for a in state.algorithms
            },
            "parameters": parameters_of(state.model),
            "optimizer": optimizer,
            "running": running(state.model),
        }
    )


def whole_of(value: Tensor) -> Tensor:
    """A copy of all of an optimizer's moment, as numbers."""
    if isinstance(value, DTensor):
        local = value.to_local()
        parts = DTensor.from_local(
            numbers_of(local), value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
        )
        return parts.full_tensor().clone()
    return numbers_of(value).clone()


def running(model: nn.Module) -> dict[str, str]:
    """The recipe of each converted layer."""
    return {
        m.fqn: "high_precision" if m.recipe is None else m.recipe.name
        for m in model.modules()
        if isinstance(m, FP8Linear | FP8DotProductAttention)
    }


def train(
    settings: Settings,
    kind: str,
    name: str,
    folder: str | None = None,
    load: str | None = None,
    **options: Any,
):
    """A run to batch :data:`END`, and what was warned about. ``folder``: where it saves at batch :data:`SAVED`."""
    torch.manual_seed(3)
    model = Growing(settings.model, seed=0 if load is None else 1)
    data, watcher = Tokens(END * ROWS), Watcher()
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    with warned() as said:
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(
                data,
                batch_size=ROWS // world,
                sampler=torch.utils.data.DistributedSampler(data, world, dist.get_rank(), shuffle=False),
            ),
            optimizers=settings.optimizer_of(model, LEARNING_RATE),
            algorithms=settings.build("algorithms"),
            callbacks=[*settings.build("callbacks"), watcher],
            loggers=settings.build("loggers"),
            max_duration=f"{END}ba",
            device="cpu",
            precision="fp32",
            parallelism_config={"fsdp": FSDP2Config(state_dict_type="sharded")}
            if kind == "sharded"
            else None,
            device_train_microbatch_size=1,
            run_name=name,
            save_folder=folder,
            save_interval=f"{SAVED}ba",
            save_filename="ba{batch}" if kind == "sharded" else "ba{batch}.pt",
            save_overwrite=True,
            load_path=load,
            progress_bar=False,
            **options,
        )
        trainer.fit()
        trainer.close()
    return watcher, trainer, said


@contextlib.contextmanager
def warned():
    """The messages of our own warnings and errors."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    listener, ours = Listener(logging.WARNING), logging.getLogger("foundry_fp8")
    ours.addHandler(listener)
    try:
        yield said
    finally:
        ours.removeHandler(listener)


def checkpoint(folder: str, kind: str) -> str:
    return f"{folder}/ep0-ba{SAVED}" if kind == "sharded" else f"{folder}/ba{SAVED}.pt"


def functional(
    settings: Settings, parameters: dict[str, Tensor], algorithms: dict[str, Any], runs: dict[str, str]
):
    """The gradients of the batch after the checkpoint, by the functional forms on a plain model: no trainer, no wrapper.

    Args:
        settings: Whose FP8 is applied; what is exact or rounds what is sent is not.
        parameters: Of the checkpoint.
        algorithms: The FP8 state to go on with; empty is a fresh one.
        runs: What the resumed run's guard has its layers run.
    """
    model = Growing(settings.model)
    model.batches_seen = SAVED
    if settings.fp8 is not None:
        foundry_fp8.apply_fp8(model, **settings.fp8)
        with_amaxes_of_all_ranks(model)
        if "FP8" in algorithms:
            FP8Parts(model).load_state_dict(algorithms["FP8"])
        for module in model.modules():
            if (
                isinstance(module, FP8Linear | FP8DotProductAttention)
                and runs.get(module.fqn, module.recipe.name) != module.recipe.name
            ):
                name = runs[module.fqn]
                module.set_recipe(None if name == "high_precision" else parse_recipe(name))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    world, rank, data = dist.get_world_size(), dist.get_rank(), Tokens(END * ROWS)
    for index in range(SAVED * ROWS + rank, (SAVED + 1) * ROWS, world):
        batch = {"input_ids": data.rows[index][None]}
        loss = model.loss(model(batch), batch)
        (loss / (ROWS // world)).backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad.double()
        dist.all_reduce(gradient)
        found[name] = gradient / world
    clip = settings.algorithms.get("gradient_clipping", {}).get("clipping_threshold", float("inf"))
    norm = sum(float(gradient.norm()) ** 2 for gradient in found.values()) ** 0.5
    return {name: gradient * min(1.0, clip / (norm + 1e-6)) for name, gradient in found.items()}


def off_by(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest relative error of a parameter's gradient, small ones measured against all of them."""
    total = sum(float(w.norm()) ** 2 for w in wanted.values()) ** 0.5
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    return max(float((got[n] - w).norm()) / max(float(w.norm()), 1e-2 * total) for n, w in wanted.items())


def identical(a: Any, b: Any) -> list[str]:
    """The places in which two trees differ."""
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"keys {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [f"{key}/{place}" for key in a for place in identical(a[key], b[key])]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"lengths {len(a)}, {len(b)}"]
        return [
            f"{i}/{place}" for i, (x, y) in enumerate(zip(a, b, strict=True)) for place in identical(x, y)
        ]
    if isinstance(a, Tensor):
        return [] if torch.equal(a, b) or (a.isnan().all() and b.isnan().all()) else ["differs"]
    return [] if a == b or (a != a and b != b) else [f"{a!r} is not {b!r}"]


def nonzero(state: list[Tensor]) -> list[str]:
    """The moments that are not fresh. For a sharded checkpoint torch makes them beforehand, by a step without gradients."""
    return [f"{index} is not zero" for index, x in enumerate(state) if x.dim() and x.any()]


def judged(
    resumed: Any, original: Watcher, settings: Settings, *, keeps: bool, fresh: bool = False
) -> dict[str, Any]:
    """How a resumed run relates to the run whose checkpoint it read; ``fresh``: but for the optimizer's state."""
    watcher, trainer, said = resumed
    kept = original.saved["algorithms"] if keeps else {}
    began, runs = watcher.began["optimizer"], watcher.began["running"]
    first = min(watcher.gradients)
    return {
        "first": first,
        "loaded": identical(watcher.start, original.saved["parameters"]),
        "optimizer": nonzero(began) if fresh else identical(began, original.saved["optimizer"]),
        "gradient": off_by(
            watcher.gradients[first], functional(settings, original.saved["parameters"], kept, runs)
        ),
        "guard": watcher.began["algorithms"].get("DivergenceGuardState"),
        "running": runs,
        "constant": watcher.began["algorithms"].keys() == watcher.end["algorithms"].keys(),
        "said": said,
        "failed": [c.failed for c in trainer.state.callbacks if getattr(c, "failed", None)],
    }


def run_log_of(name: str) -> list[int] | None:
    """The batches that the run's log holds, as the report reads them."""
    path = Path("runs") / name
    return [int(step) for step in read_run(path).step] if path.exists() else None


def resumptions(
    names: list[str], kinds: list[str], folder: str, ways: tuple[str, ...]
) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Each part, monolithic and sharded: resumed unchanged, with changed settings, and added to an older checkpoint.

    ``ways``: which of these, ``unchanged`` always.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    originals: dict[str, Watcher] = {}

    def original(settings: Settings, kind: str, name: str) -> tuple[str, Watcher]:
        place = f"{folder}/{name}-{kind}"
        if place not in originals:
            originals[place] = train(settings, kind, f"{name}-{kind}", folder=place)[0]
            if dist.get_rank() == 0:
                torch.save(originals[place].saved, f"{place}.saved")
        return place, originals[place]

    for name in names:
        part = PARTS[name]
        for kind in (k for k in kinds if k in part.kinds):
            place, whole = original(part.settings, kind, name)
            load = checkpoint(place, kind)
            resumed = train(part.settings, kind, f"{name}-{kind}", load=load)
            found[name, kind, "unchanged"] = {
                **judged(resumed, whole, part.settings, keeps=True),
                "differs": identical(whole.end, resumed[0].end)
                + identical({b: whole.gradients[b] for b in resumed[0].gradients}, resumed[0].gradients),
                "steps": run_log_of(f"{name}-{kind}"),
            }
            if "changed" in ways:
                found[name, kind, "changed"] = changed(part, kind, load, whole)
            if "added" not in ways:
                continue
            older, base = original(part.base, kind, f"base of {name}")
            load = checkpoint(older, kind)
            keeps = part.base.fp8 is not None
            found[name, kind, "added"] = judged_or_refused(part, "added", kind, load, base, keeps=keeps)[0]
    return found


def changed(part: Part, kind: str, load: str, whole: Watcher) -> dict[str, Any]:
    facts, resumed = judged_or_refused(part, "changed", kind, load, whole, keeps=True)
    if not part.moves:
        facts["differs"] = [
            place
            for key in ("parameters", "optimizer")
            for place in identical(whole.end[key], resumed[0].end[key])
        ]
    return facts


def judged_or_refused(
    part: Part, how: str, kind: str, load: str, whole: Watcher, *, keeps: bool
) -> tuple[dict[str, Any], Any]:
    """A resume, or how it is refused and the one that begins afresh as the refusal says."""
    older, settings = {"changed": (part.settings, part.changed), "added": (part.base, part.settings)}[how]
    refusal = part.refused.get((how, kind))
    if refusal is None:
        resumed = train(settings, kind, how, load=load)
        fresh = settings.optimizer["name"] != older.optimizer["name"]  # Composer keeps states by the class
        return judged(resumed, whole, settings, keeps=keeps, fresh=fresh), resumed
    try:
        train(settings, kind, how, load=load)
        said = "nothing was refused"
    except (Exception, CheckpointException) as error:  # which is no Exception
        said = f"{type(error).__name__}: {error}"
    resumed = train(settings, kind, how, load=load, load_ignore_keys=[*refusal.ignore])
    facts = judged(
        resumed,
        whole,
        settings,
        keeps=keeps and "state/algorithms" not in refusal.ignore,
        fresh="state/optimizers" in refusal.ignore,
    )
    return {**facts, "refusal": said}, resumed


def elsewhere(names: list[str], kinds: list[str], folder: str) -> dict[tuple[str, str, str], dict[str, Any]]:
    """The checkpoints that :func:`resumptions` left, on as many ranks as there are now."""
    found = {}
    for name in names:
        part = PARTS[name]
        for kind in (k for k in kinds if k in part.kinds):
            place, whole = f"{folder}/{name}-{kind}", Watcher()
            whole.saved = torch.load(f"{place}.saved")
            resumed = train(part.settings, kind, "elsewhere", load=checkpoint(place, kind))
            found[name, kind, "other world"] = judged(resumed, whole, part.settings, keeps=True)
    return found
