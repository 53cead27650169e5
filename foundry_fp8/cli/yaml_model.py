"""The model of a training YAML, for commands that plan with it."""

from __future__ import annotations

from typing import Any

__all__ = ["build_yaml_model"]


def build_yaml_model(config: dict[str, Any], init_device: str) -> Any:
    """Build ``config["model"]`` as LLM Foundry would, with fresh weights.

    A tokenizer is built (and so perhaps fetched) only for models that ask one for their vocabulary.

    Args:
        config: The YAML, resolved.
        init_device: ``cpu`` or ``meta``.

    Returns:
        The ComposerModel.
    """
    from llmfoundry.utils.builders import build_composer_model, build_tokenizer
    from llmfoundry.utils.registry_utils import import_file

    for file in config.get("code_paths") or []:
        import_file(file)
    name = config["model"]["name"]
    options = {k: v for k, v in config["model"].items() if k not in ("name", "pretrained", "init_device")}
    tokenizer = None
    if name == "hf_causal_lm":
        wanted = config["tokenizer"]
        tokenizer = build_tokenizer(wanted["name"], wanted.get("kwargs") or {})
    elif name == "mpt_causal_lm":
        options["loss_fn"] = "torch_crossentropy"  # the default is a kernel that only a GPU has
    return build_composer_model(name=name, cfg={**options, "init_device": init_device}, tokenizer=tokenizer)
