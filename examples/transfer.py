"""The YAML of a wide µnit-scaled run from the narrow one that was swept.

python examples/transfer.py proxy.yaml --width 4096
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer

from foundry_fp8.cli.yaml_model import read_yaml
from foundry_fp8.cli.yaml_run import run_of
from foundry_fp8.config import ConfigError, Positive, accept

NAMES = {
    "mpt_causal_lm": ("d_model", "n_layers", "n_heads", "ffn_config.ffn_hidden_size", "attn_config.kv_n_heads"),
    "mus_causal_lm": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "num_key_value_heads"),
}  # fmt: skip
"""By model: where the YAML has width, layers, heads, the MLP's width and the key-value heads."""


def transfer(
    yaml: Annotated[Path, typer.Argument(help="The proxy's training YAML.", exists=True, dir_okay=False)],
    width: Annotated[int, typer.Option(help="d_model of the run to write.")],
    layers: Annotated[int | None, typer.Option(help="Its layers; by default the proxy's.")] = None,
) -> None:
    """Print the YAML of a µnit-scaled run of another width (and depth), with what changes and why at its head."""
    try:
        typer.echo(transfer_yaml(yaml, width=width, layers=layers))
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def transfer_yaml(path: Path, *, width: int, layers: int | None = None) -> str:
    """The YAML for ``width``, its first lines comments on what changed.

    Heads keep their size, so that their number grows with the width; the MLP and grouped queries keep their ratios. What a
    variable of the YAML stands for is written out where it changes.

    Args:
        path: The proxy's YAML, with ``algorithms.unit_scaling``.
        width: Of the residual stream.
        layers: Transformer blocks; tau follows :func:`~foundry_fp8.models.mus.default_tau`'s curve.

    Raises:
        ConfigError: Not a µnit-scaled run, or a width that the heads do not divide.
    """
    from omegaconf import OmegaConf

    from foundry_fp8.models.mus.config import SIZES
    from foundry_fp8.models.mus.residual import default_tau

    accept(Positive, width, "--width")
    accept(Positive | None, layers, "--layers")
    values, config = read_yaml(path, trust=True), OmegaConf.load(path)
    model, name = values["model"], values["model"]["name"]
    base_width = getattr(run_of(values, 1).unit_scaling, "base_width", None)
    if name not in NAMES or base_width is None:
        raise ConfigError(
            f"algorithms.unit_scaling.base_width: {path} does not have it, so its learning rate is not known to transfer. Sweep "
            "a µnit-scaled proxy (model.name: mus_causal_lm) whose base_width is its own width."
        )
    keys = dict(zip(("width", "layers", "heads", "mlp", "kv_heads"), NAMES[name], strict=True))
    preset = SIZES.get(model.get("size", ""), (None,) * 3)

    def given(what: str, default: Any = None) -> Any:
        value = OmegaConf.select(OmegaConf.create(model), keys[what])
        return default if value is None else value

    old_width, old_layers, old_heads = (
        given(what, preset[i]) for i, what in enumerate(("width", "layers", "heads"))
    )
    if None in (old_width, old_layers, old_heads):
        raise ConfigError(f"model: give {', '.join(NAMES[name][:3])}, or a size.")
    ratio, new_layers = Fraction(width, old_width), layers or old_layers
    new = {"width": width, "layers": new_layers, "heads": old_heads * ratio}
    new |= {what: given(what) * ratio for what in ("mlp", "kv_heads") if given(what) is not None}
    changes = []
    for what, value in new.items():
        if Fraction(value).denominator != 1:
            raise ConfigError(
                f"--width: {width} would make {keys[what]} {float(value):g}, since heads and ratios stay as they are. Take "
                f"a multiple of {old_width // old_heads}."
            )
        if int(value) != given(what):
            changes.append(f"model.{keys[what]}: {given(what)} -> {int(value)}")
        OmegaConf.update(config, f"model.{keys[what]}", int(value))
    config.model.pop("size", None)
    if name == "mpt_causal_lm":
        config.model.logit_scale = 1 / width
        changes.append(f"model.logit_scale: 1/{old_width} -> 1/{width}: the head's output multiplier")
    if new_layers != old_layers:
        places = ("tau",) if name == "mus_causal_lm" else ("attn_config.tau", "ffn_config.tau")
        for place in places:
            tau = OmegaConf.select(OmegaConf.create(model), place)
            if tau is not None:
                moved = round(tau * default_tau(new_layers) / default_tau(old_layers), 4)
                OmegaConf.update(config, f"model.{place}", moved)
                changes.append(f"model.{place}: {tau} -> {moved}: falls with depth, by default_tau's curve")
    lr, decay = values["optimizer"]["lr"], values["optimizer"].get("weight_decay", 0.0)
    factor, share = math.sqrt(base_width / width), base_width / width
    said = [
        f"From {path.name}, width {old_width} x {old_layers} layers, for width {width} x {new_layers} layers.",
        *changes,
        f"optimizer.lr stays {lr:g}: table, head and norms train at it, hidden weights at lr x sqrt({base_width} / "
        f"{width}) = {lr * factor:g}, which algorithms.unit_scaling does.",
        f"optimizer.weight_decay stays {decay:g}: fully decoupled, it does not depend on width.",
        f"For comparison, the usual rule of a standard parametrisation: lr {lr * share:g}, weight decay {decay / 2:g}, found "
        "by other sweeps than these.",
        "Unchanged, and yours to choose: batch size, duration, microbatch, sharding.",
    ]
    return "".join(f"# {line}\n" for line in said) + OmegaConf.to_yaml(config).rstrip("\n")


app = typer.Typer(add_completion=False, rich_markup_mode=None)
app.command()(transfer)

if __name__ == "__main__":
    app()
