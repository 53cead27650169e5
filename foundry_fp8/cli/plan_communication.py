"""``foundry-fp8 plan communication``: what communication costs from 64 to 16384 GPUs, and the HSDP degree to choose."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foundry_fp8.cli.cluster import shard_of, wire_bytes
from foundry_fp8.cli.yaml_model import Trust, build_yaml_model, optimizer_bytes_of, read_yaml
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.config import ConfigError, Positive, accept, at_least, check_choice
from foundry_fp8.distributed.sharding import sharding_of
from foundry_fp8.gpus import GPUS, gpu_named
from foundry_fp8.planning.communication.machines import NETWORKS, Network
from foundry_fp8.planning.communication.step import Workload, plan_communication

__all__ = ["communication", "counts_of", "workload_of"]


def communication(
    yaml: Annotated[
        Path | None,
        typer.Argument(
            help="An LLM Foundry training YAML, or the folder of a Hugging Face model.", exists=True
        ),
    ] = None,
    gpus: Annotated[str, typer.Option(help="64..16384 (doubling), or a list: 64,512.")] = "64..16384",
    gpu: Annotated[str, typer.Option(help=", ".join(GPUS))] = "h100",
    network: Annotated[str, typer.Option(help=", ".join(NETWORKS))] = "h100-3200g",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a network constant, as by the bus bandwidth of nccl-tests: across_bus=1.2e11.",
        ),
    ] = None,
    parameters: Annotated[
        float | None, typer.Option(help="Instead of a YAML, such as 7e9; in 32 blocks, 4096 wide.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens a GPU and step; by default the YAML's.")] = None,
    microbatches: Annotated[int, typer.Option(help="FSDP communicates for each of a step.")] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(help="GPUs of a node that share every matrix; by default the YAML's.")
    ] = 1,
    mfu: Annotated[float, typer.Option(help="Of the BF16 peak, of a GPU that computes alone.")] = 0.4,
    host_ms: Annotated[
        float, typer.Option(help="What the host needs to launch a step; a step is never shorter.")
    ] = 0.0,
    trust: Trust = False,
) -> None:
    """Print communication, exposed time and memory a GPU for FSDP and the best HSDP, with and without compression."""
    counts, left_out = [], ""
    gpu = gpu_named(gpu)
    check_choice("--network", network, tuple(NETWORKS))
    constants = _override(NETWORKS[network], set_ or [])
    if parameters is not None:
        counts = counts_of(gpus)
        tokens = 8192 if tokens is None else tokens
        work = Workload(parameters=parameters, units=32, tokens=tokens, width=4096)
    elif yaml is not None:
        config = read_yaml(yaml, trust=trust)
        model = build_yaml_model(config, "meta")
        counts, left_out = _divided(config, model, GPUS[gpu].memory_bytes, counts_of(gpus))
        if degree := run_of(config).tensor_parallel:
            tensor_parallel = degree
            left_out += f"tp_config: as if {degree} GPUs shared every matrix; LLM Foundry's strategies shard feed-forwards alone\n"
        work = workload_of(config, model, tokens)
    else:
        raise ConfigError("Give a training YAML, or --parameters.")
    accept(Positive, tensor_parallel, "--tensor-parallel")
    work = dataclasses.replace(
        work,
        mfu=mfu,
        microbatches=microbatches,
        tensor_parallel=tensor_parallel,
        host_seconds=accept(Annotated[float, at_least(0)], host_ms, "--host-ms") / 1e3,
    )
    rows = plan_communication(work, counts, GPUS[gpu], constants)
    typer.echo(
        f"{work.parameters / 1e9:.2f} B parameters in {work.units} units, {work.tokens} tokens a GPU and step, "
        f"MFU {work.mfu:g} of {gpu} ({GPUS[gpu].source})\nnetwork {network}: {json.dumps(dataclasses.asdict(constants))}\n"
    )
    typer.echo(left_out, nl=bool(left_out))
    header = f"{'GPUs':>6} {'layout':16} {'wire':10} {'comm ms':>9} {'exposed ms':>11} {'efficiency':>10} {'GB a GPU':>9}"
    typer.echo(header)
    best_last = sorted(rows, key=lambda row: (row["fits"], -float(row["step_ms"])))
    shortest = {row["gpus"]: row for row in best_last}
    for row in rows:
        typer.echo(
            f"{row['gpus']:>6} {row['layout']:16} {row['wire']:10} {row['communication_ms']:9.1f} "
            f"{row['exposed_ms']:11.1f} {row['efficiency']:10.1%} {row['memory_gb']:9.1f}"
            + ("" if row["fits"] else "  does not fit")
            + ("  shortest step" if row is shortest[row["gpus"]] else "")
        )
    typer.echo(
        f"\nGB a GPU: parameters, gradients, {work.optimizer_bytes:.2f} bytes a parameter of optimizer states, and two gathered units; no "
        "activations."
        "\nefficiency: of a GPU that computes alone. Ranks layouts; leaves out tree all-reduce, PAT, congestion. Off by 2.4 % rms from 52 published points."
    )


def _divided(
    config: Mapping[str, Any], model: Any, device_bytes: float, counts: list[int]
) -> tuple[list[int], str]:
    """Those of ``counts`` that the YAML's shards divide, of which there must be one, and a line on the others."""
    fitting, refused = [], {}
    for count in counts:
        try:
            shard_of(run_of(config, count), model, device_bytes)
            fitting.append(count)
        except ConfigError as error:
            refused[count] = error
    if not fitting:
        raise next(iter(refused.values()))
    return fitting, f"left out: {next(iter(refused.values()))}" if refused else ""


def counts_of(text: str) -> list[int]:
    """The numbers of GPUs that ``64..16384`` or ``8,64`` names; a :class:`ConfigError` for another text."""
    if re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        return [int(part) for part in text.split(",")]
    ends = re.fullmatch(r"([0-9]{1,9})\.\.([0-9]{1,9})", text)
    if not ends:
        raise ConfigError(f"--gpus: {text!r} is not like 64..16384 or 64,512.")
    low, high = int(ends[1]), int(ends[2])
    if low > high:
        raise ConfigError(f"--gpus: {text!r} runs backwards. Write {high}..{low}.")
    return [low * 2**n for n in range(max(1, high.bit_length())) if low * 2**n <= high]


def _override(network: Network, pairs: list[str]) -> Network:
    names = [field.name for field in dataclasses.fields(Network) if field.name != "source"]
    changes: dict[str, Any] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        check_choice("--set", name, names)
        try:
            number = float(value)
        except ValueError as error:
            raise ConfigError(f"--set {name}: {value!r} is not a number.") from error
        changes[name] = int(number) if number.is_integer() else number
    if changes:
        changes["source"] = f"{network.source}; given: {', '.join(pairs)}"
    return dataclasses.replace(network, **changes)


def workload_of(config: Mapping[str, Any], model: Any, tokens: int | None = None) -> Workload:
    """What a YAML says of its step on a GPU.

    ``tokens`` are a GPU's in a step, by default those of ``device_train_microbatch_size`` sequences.

    Raises:
        ConfigError: That is no number.
    """
    from torch.nn import Embedding

    from foundry_fp8.model_structure.blocks import transformer_blocks
    from foundry_fp8.observe.flops.attention import attended_pairs, attention_shapes
    from foundry_fp8.observe.flops.gemms import gemms_of

    microbatch, length = config.get("device_train_microbatch_size"), config["max_seq_len"]
    if tokens is None and not isinstance(microbatch, int):
        raise ConfigError(f"device_train_microbatch_size: {microbatch!r} is not a number; give --tokens.")
    run = run_of(config)
    shapes = attention_shapes(model)
    attention = sum(s.forward_flops(attended_pairs(length, s.window, s.causal)) for s in shapes)
    parameters = sum(p.numel() for p in model.parameters())
    gathered, reduced = wire_bytes(run)
    return Workload(
        parameters=float(parameters),
        units=max(1, len(transformer_blocks(model))),
        tokens=microbatch * length if tokens is None else tokens,
        idle=sum((1 - gemm.share) * gemm.in_features * gemm.out_features for gemm in gemms_of(model)),
        attention_flops=3 * attention / length,
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad) / parameters,
        sharding="SHARD_GRAD_OP" if sharding_of(run.fsdp) == "SHARD_GRAD_OP" else "FULL_SHARD",
        parameter_bytes=gathered,
        gradient_bytes=reduced,
        optimizer_bytes=optimizer_bytes_of(model, config) / parameters,
        width=float(next((m.embedding_dim for m in model.modules() if isinstance(m, Embedding)), 0)),
        compression=run.compressed_communication,
    )
