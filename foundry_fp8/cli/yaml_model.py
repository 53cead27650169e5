"""A training YAML and its model, for commands that plan with it."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from foundry_fp8.cli.hf_folder import FOLDER_MODEL, PUBLISHED_MODEL, read_folder
from foundry_fp8.config import Config, ConfigError, Positive, Text, accept, first_line, from_mapping
from foundry_fp8.planning.model_shapes import MODEL_SHAPES

__all__ = [
    "RunFile", "Trust", "build_yaml_model", "build_yaml_optimizer", "optimizer_bytes_of", "read_yaml", "resolve_yaml",
]  # fmt: skip

Trust = Annotated[
    bool,
    typer.Option(
        "--trust", help="Run code of others: what the YAML, its model's folder or a checkpoint holds."
    ),
]
"""The option of every command that could run it."""
RunFile = Annotated[
    Path,
    typer.Argument(help="An LLM Foundry training YAML, or the folder of a Hugging Face model.", exists=True),
]
"""The argument of what plans a run."""
SIZES = ("d_model", "n_heads", "n_layers", "vocab_size")
"""Keys of MPT and of this package's models that have to be positive: the models themselves take 0 and fail somewhere else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read(Config):
    """The keys of a training YAML that planning reads."""

    model: Mapping[Text, Any]
    max_seq_len: Positive
    device_train_microbatch_size: Positive | Literal["auto"] = "auto"
    algorithms: Mapping[Text, Mapping[Text, Any] | None] | None = None
    fsdp_config: Mapping[Text, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tokenizer(Config):
    """What a Hugging Face model is built with."""

    name: Text
    kwargs: Mapping[Text, Any] | None = None


def read_yaml(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """The YAML in ``path``, resolved; of a folder, what :func:`~foundry_fp8.cli.hf_folder.read_folder` makes of it.

    Args:
        path: A training YAML, or the folder of a model.
        trust: Of its author: what it names may run code of its own once the model is built.

    Raises:
        ConfigError: What planning reads is missing or of the wrong type; code of others without ``trust``.
    """
    config = read_folder(path) if path.is_dir() else _read_file(path)
    if not trust:
        model, tokenizer = config["model"], config.get("tokenizer")
        code = [*(config.get("code_paths") or []), *_code_in([model, tokenizer])]
        if code:
            raise ConfigError(
                f"{path} has code of others run ({', '.join(map(str, code[:3]))}), as training it does. If you trust who wrote it, give --trust."
            )
        # A hub's, which LLM Foundry trusts.
        if model["name"] == FOLDER_MODEL or model["name"].startswith("hf_"):
            config["model"] = {**model, "trust_remote_code": False}
        if isinstance(tokenizer, Mapping):
            kwargs = {**(tokenizer.get("kwargs") or {}), "trust_remote_code": False}
            config["tokenizer"] = {**tokenizer, "kwargs": kwargs}
    return config


def _code_in(value: Any) -> list[str]:
    """The files of models' and tokenizers' folders in a configuration's section that name code of their own."""
    if isinstance(value, Mapping | list):
        parts = value.values() if isinstance(value, Mapping) else value
        return [file for one in parts for file in _code_in(one)]
    folder = isinstance(value, str) and os.path.isdir(value)
    files = sorted(Path(value).glob("*config.json")) if folder else []
    return [str(file) for file in files if "auto_map" in file.read_text(encoding="utf-8", errors="replace")]


def _read_file(path: Path) -> dict[str, Any]:
    try:
        config = resolve_yaml(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read as a YAML: {error}") from error
    names = [field.name for field in dataclasses.fields(_Read)]
    read = from_mapping(_Read, {name: config[name] for name in names if name in config}, "")
    if not isinstance(read.model.get("name"), str):
        raise ConfigError(f"model.name: {read.model.get('name')!r} is not the name of a model.")
    return config


def resolve_yaml(text: str, where: Path | str) -> dict[str, Any]:
    """A YAML's values, with what its variables stand for; ``ConfigError`` names the file ``where`` it stood."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except RecursionError as error:
        raise ConfigError(f"{where} cannot be read as a YAML: it is nested too deeply.") from error
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"{where} cannot be read as a YAML: {error}") from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where} is no training run of LLM Foundry: it is not a mapping.")
    return {str(name): value for name, value in config.items()}


def build_yaml_model(config: dict[str, Any], init_device: str) -> Any:
    """Build ``config["model"]`` as LLM Foundry would, with fresh weights.

    A model whose shape this package knows (:data:`foundry_fp8.planning.model_shapes.MODEL_SHAPES`) is built without its hub. For others from
    Hugging Face the tokenizer is built too, and so perhaps fetched: they ask it for their vocabulary.

    Args:
        config: The YAML, resolved.
        init_device: ``cpu`` or ``meta``.

    Returns:
        The ComposerModel.

    Raises:
        ConfigError: It cannot be built: a hub that is not reached, a key that is wrong.
    """
    if config["model"]["name"] == FOLDER_MODEL:
        from foundry_fp8.cli.folder_model import build_folder_model

        return build_folder_model(config["model"], init_device)
    from llmfoundry.utils.builders import build_composer_model, build_tokenizer
    from llmfoundry.utils.registry_utils import import_file

    for file in config.get("code_paths") or []:
        import_file(file)
    name = config["model"]["name"].replace(PUBLISHED_MODEL, "hf_causal_lm")  # here no weights are read
    options = {k: v for k, v in config["model"].items() if k not in ("name", "init_device")}
    for size in SIZES:
        if isinstance(options.get(size), int | float):
            accept(Positive, options[size], f"model.{size}")
    tokenizer = known = None
    if name == "hf_causal_lm":
        known = MODEL_SHAPES.get(str(options.get("pretrained_model_name_or_path")))
        options["pretrained"] = False  # its default is true, and a folder may hold a config.json alone
        if init_device == "meta":  # it does not run; its shapes are the same
            options["use_flash_attention_2"] = False
    elif name == "mpt_causal_lm":
        options["loss_fn"] = "torch_crossentropy"  # the default is a kernel that only a GPU has
    try:
        with tempfile.TemporaryDirectory() as folder:
            if known is not None:
                (Path(folder) / "config.json").write_text(json.dumps(known))
                options["pretrained_model_name_or_path"] = folder
            elif name == "hf_causal_lm":
                wanted = from_mapping(_Tokenizer, config.get("tokenizer") or {}, "tokenizer")
                tokenizer = build_tokenizer(wanted.name, dict(wanted.kwargs or {}))
            return build_composer_model(
                name=name, cfg={**options, "init_device": init_device}, tokenizer=tokenizer
            )
    except ConfigError:
        raise
    except Exception as error:  # Foundry, transformers and PEFT raise what they like
        raise ConfigError(
            f"model: it cannot be built: {first_line(error)}. From a hub that this machine does not reach, give a local folder with config.json and "
            "the tokenizer. If it has code of its own, give --trust."
        ) from error


def optimizer_bytes_of(model: Any, config: Mapping[str, Any]) -> int:
    """Bytes of the states that the YAML's optimizer keeps for the whole model; of two float32 moments where it names none.

    Raises:
        ConfigError: It cannot be built.
    """
    from foundry_fp8.planning.memory.optimizer_state import optimizer_bytes

    optimizer = build_yaml_optimizer(model, config)
    if optimizer is None:
        return 8 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    return optimizer_bytes([optimizer])


def build_yaml_optimizer(model: Any, config: Mapping[str, Any]) -> Any:
    """The YAML's optimizer of ``model``; ``None`` where it names none.

    Raises:
        ConfigError: It cannot be built.
    """
    named = config.get("optimizer")
    if not isinstance(named, dict) or "name" not in named:
        return None
    from llmfoundry.utils.builders import build_optimizer

    settings = {key: value for key, value in named.items() if key != "name"}
    try:
        return build_optimizer(model, named["name"], settings)
    except ConfigError:
        raise
    except Exception as error:  # Foundry's registry and the optimizers raise what they like
        raise ConfigError(f"optimizer: it cannot be built: {first_line(error)}.") from error
