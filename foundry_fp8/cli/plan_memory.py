"""``foundry-fp8 plan memory run.yaml``: what a run needs, and the YAML that makes it fit, without training.

The model of the YAML is built here and one microbatch of random tokens is measured. For a model that does not fit on this
machine there is ``--device fake``: nothing is allocated, bytes are counted, seconds come from a cost model, FP8 layers are
those of the native backend unless the YAML names another. ``--world-size`` answers so for a rank of a cluster, sharding by
arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import torch
import typer
from torch import Tensor
from torch.nn import functional as F

from foundry_fp8.cli.cluster import cluster_of, limit_of
from foundry_fp8.cli.hardware import PER_NODE
from foundry_fp8.cli.quiet import quiet
from foundry_fp8.cli.yaml_model import RunFile, Trust, build_yaml_model, optimizer_bytes_of, read_yaml
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.compat.fake_tensor import NEEDS_VALUES, FakeTensor, FakeTensorMode
from foundry_fp8.config import ConfigError, Positive, accept, check_choice, format_bytes
from foundry_fp8.gpus import GPUS, gpu_named
from foundry_fp8.layers.autocast import autocast_type
from foundry_fp8.model_structure.experts import router_modules

if TYPE_CHECKING:
    from foundry_fp8.run.settings import Run

__all__ = ["convert", "fake", "memory", "plan_yaml", "step_of", "without_flash"]


def memory(
    yaml: RunFile,
    budget: Annotated[
        str | None, typer.Option(help="20GiB, 0.4 or fit; by default what the YAML's algorithm says.")
    ] = None,
    accumulate: Annotated[
        bool, typer.Option(help="Several microbatches a step: gradients are there from the second on.")
    ] = True,
    microbatch: Annotated[
        int | None, typer.Option(help="Sequences; by default device_train_microbatch_size.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or fake (nothing allocated; seconds from a cost model).")
    ] = "",
    compression: Annotated[
        str | None,
        typer.Option(
            help="none, exact, int8, e4m3 or int4; by default what the YAML's algorithm says, else exact."
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="Plan for a rank of so many, on the YAML's sharding, from this machine (device fake)."
        ),
    ] = None,
    sharding: Annotated[
        str | None,
        typer.Option(
            help="With --world-size: FULL_SHARD, SHARD_GRAD_OP or NO_SHARD; by default the YAML's fsdp_config."
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="With --world-size: the GPU whose memory is the budget where none is given.")
    ] = "h100",
    trust: Trust = False,
) -> None:
    """Print a table of what each block could do, the plan, and the YAML that pins it."""
    options = locals()
    with quiet():
        said = plan_yaml(**options)
    typer.echo(said)


def plan_yaml(
    yaml: Path,
    *,
    budget: str | None,
    microbatch: int | None,
    device: str,
    compression: str | None = None,
    accumulate: bool = True,
    world_size: int | None = None,
    sharding: str | None = None,
    gpu: str = "h100",
    trust: bool = False,
) -> str:
    """The plan for a run, as text; the options are those of :func:`memory`."""
    from foundry_fp8.cli.memory_options import cached_weights, frozen_weights, other_optimizers
    from foundry_fp8.planning.memory.cluster import SHARDINGS, on_cluster
    from foundry_fp8.planning.memory.cost_model import CostModel
    from foundry_fp8.planning.memory.flash_bytes import hold_flash_bytes
    from foundry_fp8.planning.memory.planner import choose, measure, plan_memory

    config = read_yaml(yaml, trust=trust)
    if world_size is not None:
        accept(Positive, world_size, "--world-size")
        gpu = gpu_named(gpu)
    elif sharding is not None:
        raise ConfigError("--sharding: a strategy for ranks; give --world-size too.")
    if sharding is not None:
        check_choice("--sharding", sharding, SHARDINGS)
    run = run_of(config, world_size or PER_NODE, sharding)
    limit, kinds, offload = _wanted(run, budget, compression, gpu if world_size is not None else None)
    if microbatch is None:
        microbatch = config.get("device_train_microbatch_size")
        if not isinstance(microbatch, int):
            raise ConfigError(
                f"device_train_microbatch_size: {microbatch!r} is not a number; give --microbatch."
            )
    microbatch = accept(Positive, microbatch, "--microbatch")
    if world_size is not None and device not in ("", "fake"):
        raise ConfigError(f"--device: {device!r} with --world-size. A cluster is planned with fake alone.")
    own = "cuda" if torch.cuda.is_available() else "cpu"
    device = "fake" if world_size is not None else device or own
    check_choice("--device", device, ("cpu", "cuda", "fake"))
    dry = device == "fake"
    where = torch.device("cpu" if dry else device)
    stand_in = device != "cuda" and without_flash(config)
    # Built before the fake mode begins: metrics copy their tensors in ways that it does not allow.
    model = build_yaml_model(config, "meta" if dry else "cpu")
    cluster = None if world_size is None else cluster_of(run, model, GPUS[gpu].memory_bytes)
    if stand_in:
        hold_flash_bytes(model)
    state_bytes = optimizer_bytes_of(model, config)
    others = other_optimizers(model, state_bytes, 1 if cluster is None else cluster.shard, dry)
    if cluster is not None and cluster.gathered == 2:
        model.to(torch.bfloat16)  # what FSDP gathers under mixed precision
    with fake(model) if dry else contextlib.nullcontext(model.to(where)):
        convert(model, run, microbatch * config["max_seq_len"], where)
        loss_fn = step_of(model, config, microbatch, where)
        others += frozen_weights(model, cluster, dry) + cached_weights(model)
        if cluster is None:
            plan = plan_memory(
                model,
                loss_fn,
                budget=limit,
                offload=offload,
                compression=kinds,
                optimizer_bytes=state_bytes,
                accumulates=accumulate,
                cost_model=CostModel(gpu=gpu) if dry else None,
            )
        else:
            alone = measure(model, loss_fn, compression=kinds, cost_model=CostModel(gpu=gpu))
            sharded = on_cluster(alone, model, cluster, optimizer_bytes=state_bytes, accumulates=accumulate)
            plan = choose(sharded, limit, offload=offload)
    note = "attention holds flash attention's bytes, at other seconds\n" if stand_in else ""
    return (
        f"{yaml.name}: {microbatch} x {config['max_seq_len']} tokens, parameters and optimizer state "
        f"{format_bytes(plan.measurements.frame.static)}\n{note}{_notes(run, model, dry)}{others}{plan.text(config.get('algorithms'))}"
    )


def _wanted(run: Run, budget: str | None, compression: str | None, gpu: str | None) -> tuple[Any, Any, bool]:
    """The budget, the compression and whether to offload: of the options, else the YAML's own, else the memory of ``gpu``."""
    from foundry_fp8.activations.checkpointing.apply import ActivationCheckpointingConfig, PlannedCompression

    own = run.activation_checkpointing or ActivationCheckpointingConfig()
    limit: float | str | None = own.budget if budget is None else budget
    with contextlib.suppress(ValueError, TypeError):
        limit = float(limit)  # type: ignore[arg-type]
    if limit is None and gpu is not None:
        limit = limit_of(gpu)
    if limit is None:
        raise ConfigError(
            "--budget: the YAML's activation_checkpointing has no budget either; give one, such as 0.5."
        )
    if limit == "fit" and gpu is not None:
        raise ConfigError(
            "--budget: fit asks a GPU of this machine. With --world-size give a size, such as 76GiB."
        )
    kinds: Any = own.compression if compression is None else compression
    check_choice("--compression", kinds, get_args(PlannedCompression))
    return limit, kinds, own.offload


@contextlib.contextmanager
def fake(model: Any) -> Iterator[None]:
    """Fake tensors in place of a model's on ``meta``: nothing is allocated."""
    from foundry_fp8.planning.memory.dry_runs import EqualShares

    with FakeTensorMode(allow_non_fake_inputs=True), EqualShares(model):
        try:
            model.to_empty(device="cpu")
            for module in model.modules():
                if hasattr(module, "tie_weights"):
                    module.tie_weights()
            yield
        except NEEDS_VALUES as error:
            raise ConfigError(
                f"model: its forward depends on values ({error}), which a plan that allocates nothing does not have. Give --device cpu, "
                "without --world-size."
            ) from error


def _notes(run: Run, model: Any, dry: bool) -> str:
    """What a plan assumes."""
    from foundry_fp8.layers.state import FP8State

    note = ""
    if dry and next(router_modules(model), None) is not None:
        note += "each expert has an equal share of the tokens\n"
    state = FP8State.of(model)
    if dry and state is not None:
        note += f"FP8 layers are those of the {state.backend.name} backend\n"
    if run.converts is not None and run.converts.attention and run.converts.backend == "auto":
        note += "FP8 attention is planned; on a GPU without Transformer Engine or cuDNN's frontend auto leaves it in BF16\n"
    return note


def without_flash(config: dict[str, Any]) -> bool:
    """Let ``config`` build its model without flash attention, which runs on a GPU alone; whether that is a change."""
    model = config["model"]
    attention = model.get("attn_config") or {}
    if model["name"] == "mpt_causal_lm" and attention.get("attn_impl", "flash") == "flash":
        config["model"] = {**model, "attn_config": {**attention, "attn_impl": "torch"}}
        return True
    if model.get("use_flash_attention_2"):
        config["model"] = {**model, "use_flash_attention_2": False}
        return True
    return False


def convert(model: Any, run: Run, tokens: int, device: torch.device) -> None:
    """Apply the YAML's fp8 and fused_head algorithms to ``model``, for microbatches of so many tokens."""
    model.train()
    if run.keeps_codes:
        from foundry_fp8.surgery.published import as_if_published

        as_if_published(model, [] if run.converts is None else run.converts.policy(device).recipes)
    if run.converts is not None:
        from foundry_fp8.layers.unit_linear import choose_gradient_scale
        from foundry_fp8.surgery.apply import apply_fp8

        apply_fp8(model, device=device, **run.converts.given)
        choose_gradient_scale(model.modules(), tokens)
    if run.fused_head is not None:
        from foundry_fp8.activations.fused_head.apply import apply_fused_head

        fused = apply_fused_head(model, **run.fused_head.given)
        fused.expect(None)  # random tokens have no labels of their own


def step_of(
    model: Any, config: dict[str, Any], microbatch: int, device: torch.device, loss: Any = F.cross_entropy
) -> Callable[[], Tensor]:
    """A step of ``model`` on random tokens; fake ones have ``loss`` of their logits."""
    from foundry_fp8.activations.fused_head.apply import fused_head_of

    tokens = torch.randint(0, 100, (microbatch, config["max_seq_len"]), device=device)
    batch = {"input_ids": tokens}
    dry = isinstance(tokens, FakeTensor)  # models look into masks and labels, and fake ones hold no values
    if not dry:
        batch |= {"labels": tokens, "attention_mask": torch.ones_like(tokens, dtype=torch.bool)}
    half = config.get("precision") in ("amp_bf16", "amp_fp16")
    held: list[Any] = [None]  # the trainer holds its outputs through backward

    def loss_fn() -> Tensor:
        held[0] = None
        if dry and (fused := fused_head_of(model)) is not None:
            fused.expect(tokens)
        with torch.autocast(autocast_type(device), dtype=torch.bfloat16, enabled=half):
            held[0] = model(batch)
            if dry:
                return loss(held[0].logits.flatten(0, 1), tokens.flatten())
            return model.loss(held[0], batch)

    return loss_fn
