"""``foundry-fp8 export CHECKPOINT FOLDER``: a trained checkpoint as a folder that servers of FP8 models read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foundry_fp8.cli.yaml_model import Trust
from foundry_fp8.config import ConfigError

__all__ = ["export"]


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A whole checkpoint of Composer's trainer.", exists=True)
    ],
    folder: Annotated[Path, typer.Argument(help="Where to write; made if it is not there.", file_okay=False)],
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; by default what training computed in.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="compressed-tensors, or fp8 (FineGrainedFP8's) for block and mxfp8.")
    ] = "compressed-tensors",
    tokenizer: Annotated[
        Path | None, typer.Option(help="A tokenizer's folder, to copy beside it.", exists=True)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the model that the folder holds; its other files stay.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Write the FP8 weights that training multiplied with, and their scales, in a layout that vLLM reads (never run here)."""
    from foundry_fp8.cli.composer_checkpoint import read_checkpoint
    from foundry_fp8.export.apply import check_target, export_fp8

    check_target(folder, overwrite=force)
    found = read_checkpoint(checkpoint, trust=trust)
    tokens = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        tokens = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=trust)
    try:
        report = export_fp8(
            found.model,
            folder,
            dtype=dtype or found.dtype,  # type: ignore[arg-type]
            layout=layout,  # type: ignore[arg-type]
            tokenizer=tokens,
            overwrite=force,
        )
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    typer.echo(f"{folder}: {report.summary()}")
