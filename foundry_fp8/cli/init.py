"""``foundry-fp8 init RUN.yaml``: the lines that turn somebody's own run into an FP8 run, each with its reason."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any

import typer

from foundry_fp8.cli.hardware import Hardware, parse_hardware
from foundry_fp8.cli.yaml_model import resolve_yaml
from foundry_fp8.cli.yaml_run import has_te_layers, precision_of, run_of
from foundry_fp8.config import ConfigError
from foundry_fp8.config.files import write_file

__all__ = ["add_fp8", "init"]

ADDED = (
    ("callbacks", "mfu_monitor", "MFU with each GEMM over the peak of its own precision"),
    ("callbacks", "divergence_guard",
     "compares FP8 with high precision on the batches of the run, and takes layers out of FP8 that it harms"),
    ("loggers", "run_log", "runs/{run_name}/run_log.jsonl, which foundry-fp8 compare reads"),
)  # fmt: skip
"""To every run, without options: section, name, and why."""
SECTIONS = ("algorithms", "callbacks", "loggers")


def init(
    yaml: Annotated[Path, typer.Argument(help="An LLM Foundry training YAML.", exists=True, dir_okay=False)],
    hardware: Annotated[str, typer.Option(help="What it will run on: h100x8, b200x64, ...")] = "h100x8",
    diff: Annotated[bool, typer.Option("--diff", help="Print what would change, and write nothing.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write here instead of over the file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file that --output names.")] = False,
) -> None:
    """Add FP8, its monitors and its log to a YAML; comments and everything else stay as they are."""
    try:
        before = yaml.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{yaml} cannot be read as a YAML: {error}") from error
    after, said = add_fp8(before, parse_hardware(hardware), str(yaml))
    place = output or yaml
    if diff:
        lines = difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), str(yaml), f"{yaml} with FP8"
        )
        typer.echo("".join(lines), nl=False)
    elif after != before or output is not None:
        if place.exists() and not place.samefile(yaml) and not force:
            raise ConfigError(f"--output: {place} is there. Name another file, or replace it with --force.")
        write_file(place, after, "--output")
    for line in said or ["Nothing to add: everything is there."]:
        typer.echo(line, err=diff)
    if not diff:
        typer.echo(f"Next: foundry-fp8 doctor {place} --hardware {hardware}")


def add_fp8(text: str, hardware: Hardware, where: str = "the YAML") -> tuple[str, list[str]]:
    """The YAML with what it lacks, and a sentence for each line that was added or changed.

    Raises:
        ConfigError: No YAML, no training run, or hardware without FP8.
    """
    if hardware.gpu.recipe is None:
        raise ConfigError(
            f"--hardware: {hardware.name} does not multiply FP8. To see FP8's losses without its speed, write "
            "algorithms: {fp8: {backend: emulated}} yourself."
        )
    from ruamel.yaml import YAML, YAMLError

    run, reader = resolve_yaml(text, where), YAML()
    reader.preserve_quotes, reader.width = True, 4096
    # What is added stands as far in as the file's own lines do.
    step = re.search(r"^\S[^#\n]*:\s*(?:#.*)?\n( +)(?=[^\s#-])", text, re.MULTILINE)
    reader.indent(mapping=len(step[1]) if step else 2)
    try:
        config = reader.load(text)
    except YAMLError as error:
        raise ConfigError(f"{where} cannot be changed line by line: {error}") from error
    if not isinstance(config.get("model"), MutableMapping):
        raise ConfigError(f"{where} is no training run of LLM Foundry: it has no model.")
    said: list[str] = []

    def add(section: str, name: str, why: str, **value: Any) -> None:
        if name not in config[section]:
            config[section][name] = made = type(config)(value)
            made.fa.set_flow_style()  # {recipe: current} on one line
            said.append(f"+ {section}.{name}: {why}.")
            if hasattr(config[section], "yaml_add_eol_comment"):
                config[section].yaml_add_eol_comment(why, name)

    def change(section: Any, path: str, value: Any, why: str) -> None:
        key = path.rpartition(".")[2]
        said.append(f"~ {path}: {section[key]} becomes {value}: {why}.")
        section[key] = value

    _replace_others_fp8(run, config, change)
    for section in SECTIONS:
        if config.get(section) is None:
            config[section] = type(config)()
        if (
            not isinstance(config[section], MutableMapping)
            or sum(config[section] is config.get(s) for s in SECTIONS) > 1
        ):
            raise ConfigError(
                f"{where}: {section} refers to something else (an interpolation, or an anchor that another section shares). Write its "
                "entries there, and run init again."
            )
    # Named: auto leaves out layers that are too small to be faster, in a small model all of them.
    why = f"linear layers in FP8, as {hardware.name} multiplies it; algorithms.fp8.enabled=false is the BF16 twin"
    add("algorithms", "fp8", why, recipe=hardware.gpu.recipe)
    if hardware.nodes > 1 and _takes_hybrid_sharding(run, hardware):
        why = f"shard inside a node, replicate across the {hardware.nodes}; remove it if a node cannot hold the model"
        add("algorithms", "hybrid_sharding", why, shard="node")
    for section, name, why in ADDED:
        add(section, name, why)
    if not said:
        return text, []
    out = io.StringIO()
    reader.dump(config, out)
    changed = _as_written(text if text.endswith("\n") else f"{text}\n", out.getvalue())
    try:
        same = reader.load(changed) == reader.load(out.getvalue())
    except YAMLError:
        same = False
    return changed if same else out.getvalue(), said


def _takes_hybrid_sharding(run: Mapping[str, Any], hardware: Hardware) -> bool:
    if run.get("tp_config"):  # of any degree: the next run may have another
        return False
    from foundry_fp8.run.clashes import clashes_of  # slow to import

    asked = run_of({**run, "algorithms": {"hybrid_sharding": {"shard": "node"}}}, hardware.devices)
    return not any(clash.error and "hybrid_sharding" in clash.settings for clash in clashes_of(asked))


def _replace_others_fp8(run: Mapping[str, Any], config: Any, change: Any) -> None:
    """Composer's and MPT's own ways to FP8 do not go together with this one."""
    model = config["model"]
    if precision_of(run) == "amp_fp8":
        change(config, "precision", "amp_bf16", "Composer's own FP8; what stays out of FP8 runs in this")
    ffn = model.get("ffn_config")
    te_mlp = isinstance(ffn, MutableMapping) and ffn.get("ffn_type") == "te_ln_mlp"
    if has_te_layers(run) and "fc_type" in model:
        change(model, "model.fc_type", "torch", "this package converts plain linears")
    if te_mlp:
        change(ffn, "model.ffn_config.ffn_type", "mptmlp", "this package converts plain linears")


def _as_written(before: str, after: str) -> str:
    """``after`` with the lines of ``before`` where it differs in spelling alone: ``null``, or the space before a comment."""

    def meaning(line: str) -> str:
        null = line if line.startswith(SECTIONS) else re.sub(r":\s+null\b", ":", line)
        return " ".join(null.split())

    old, new = before.splitlines(True), after.splitlines(True)
    lines: list[str] = []
    matcher = difflib.SequenceMatcher(None, list(map(meaning, old)), list(map(meaning, new)), autojunk=False)
    for tag, i, j, k, m in matcher.get_opcodes():
        lines += old[i:j] if tag == "equal" else new[k:m]
    return "".join(lines)
