"""The tensors that the kurtosis monitor watches, by role in a transformer block.

The roles are those of the FOG paper:

============== ==========================================================================
residual       the residual stream after the block
qkv_input      input of the QKV projection
qkv_output     its output, before any QK norm
q, k           queries and keys after QK norm, before rotary embedding
fc1_output     output of the first feed-forward projection (gate and up together)
fc2_input      input of the second, after the activation function
fc2_output     output of the second, before a post-norm
============== ==========================================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor, nn

from foundry_fp8.config import ConfigError
from foundry_fp8.model_structure.blocks import block_index_of, transformer_blocks
from foundry_fp8.model_structure.names import clean_name, named_modules_clean
from foundry_fp8.model_structure.selection import check_patterns_match, matches

__all__ = ["PRESETS", "ROLES", "Part", "Tap", "find_taps"]

ROLES = ("residual", "qkv_input", "qkv_output", "q", "k", "fc1_output", "fc2_input", "fc2_output")

Side = Literal["input", "output"]
Part = Literal["q", "k"]
Place = tuple[str, Side] | tuple[str, Side, Part]
"""A glob on module names inside the block (``""``: the block), input or output, and optionally only the columns of q or k."""

_Preset = Mapping[str, Sequence[Sequence[Place]]]
"""Role -> alternatives, each a list of places; the first alternative whose globs all match is used."""

PRESETS: dict[str, _Preset] = {
    "mpt": {
        "residual": [[("", "output")]],
        "qkv_input": [[("*attn.Wqkv", "input")], [("*attn.Wq", "input")]],
        "qkv_output": [[("*attn.Wqkv", "output")], [("*attn.W[qkv]", "output")]],
        "q": [[("*attn.q_norm", "output")], [("*attn.q_ln", "output")], [("*attn.Wq", "output")], [("*attn.Wqkv", "output", "q")]],
        "k": [[("*attn.k_norm", "output")], [("*attn.k_ln", "output")], [("*attn.Wk", "output")], [("*attn.Wqkv", "output", "k")]],
        "fc1_output": [[("*ffn.gate_proj", "output"), ("*ffn.up_proj", "output")], [("*ffn.up_proj", "output")]],
        "fc2_input": [[("*ffn.down_proj", "input")]],
        "fc2_output": [[("*ffn.down_proj", "output")]],
    },
    "llama": {
        "residual": [[("", "output")]],
        "qkv_input": [[("*attn.q_proj", "input")]],
        "qkv_output": [[("*attn.[qkv]_proj", "output")]],
        "q": [[("*attn.q_norm", "output")], [("*attn.q_proj", "output")]],
        "k": [[("*attn.k_norm", "output")], [("*attn.k_proj", "output")]],
        "fc1_output": [
            [("*.experts.*.w1", "output"), ("*.experts.*.w3", "output")],
            [("*.experts.*.gate_proj", "output"), ("*.experts.*.up_proj", "output")],
            [("*mlp.gate_proj", "output"), ("*mlp.up_proj", "output")],
            [("*mlp.up_proj", "output")],
        ],
        "fc2_input": [[("*.experts.*.w2", "input")], [("*.experts.*.down_proj", "input")], [("*mlp.down_proj", "input")]],
        "fc2_output": [[("*.experts.*.w2", "output")], [("*.experts.*.down_proj", "output")], [("*mlp.down_proj", "output")]],
    },
    "fog": {
        "residual": [[("", "output")]],
        "qkv_input": [[("*attn.qkv_proj", "input")]],
        "qkv_output": [[("*attn.qkv_proj", "output")]],
        "q": [[("*attn.q_norm", "output")]],
        "k": [[("*attn.k_norm", "output")]],
        "fc1_output": [[("*mlp.gate_up_proj", "output")], [("*mlp.up_proj", "output")]],
        "fc2_input": [[("*mlp.down_proj", "input")]],
        "fc2_output": [[("*mlp.down_proj", "output")]],
    },
}  # fmt: skip
"""By family: MPT (FOG's MPT form too), Llama-style (Llama, Mistral, Qwen, Mixtral, Gemma, OLMo), and FOG."""


@dataclasses.dataclass(frozen=True)
class Tap:
    """One tensor to watch.

    Attributes:
        role: Its part in the block, or the name that the user gave it.
        layer: Index of the block; ``None`` outside of the blocks.
        name: The module's name.
        module: The module.
        side: Its input or its output.
        columns: The features to take; ``None`` for all.
        grouped: Whether the tensor is the outputs of several modules side by side (separate q, k and v projections).
    """

    role: str
    layer: int | None
    name: str
    module: nn.Module
    side: Side
    columns: slice | None = None
    grouped: bool = False

    def take(self, value: object) -> Tensor | None:
        """The tensor in a module's input or output (the first of a tuple), or ``None`` if it is not floating point."""
        first = value[0] if isinstance(value, tuple | list) and value else value
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return None
        return first if self.columns is None else first[..., self.columns]


def find_taps(
    model: nn.Module, *, tensors: Mapping[str, Sequence[str]] | None = None, key: str = "kurtosis"
) -> list[Tap]:
    """The tensors of ``model`` to watch: those of the preset whose QKV projection it has; of any other model what its blocks give and its
    linears are given.

    Args:
        model: Wrapped (DDP, FSDP) or not.
        tensors: Additional ones by the user's own role names: globs on whole module names, which mean the module's
            output, or with ``@input`` at the end its input.
        key: The YAML key, for messages.

    Raises:
        ConfigError: There is nothing to watch, a pattern matches no module, or it ends in another ``@``.
    """
    blocks = [(clean_name(name), block) for name, block in transformer_blocks(model)]
    taps = _custom(model, tensors or {}, blocks, key)
    # Any block: in a hybrid model some have no attention.
    fits = (p for p in PRESETS.values() if any(_places(p["qkv_input"], block) for _, block in blocks))
    preset = next(fits, None)
    if preset is None:
        taps += [Tap("residual", layer, name, block, "output") for layer, (name, block) in enumerate(blocks)]
        for where, module in named_modules_clean(model):
            if isinstance(module, nn.Linear) or hasattr(module, "nx"):  # transformers' Conv1D
                layer = block_index_of(where, blocks)
                inner = where if layer is None else where[len(blocks[layer][0]) + 1 :]
                taps.append(Tap(f"{inner.replace('.', '_')}_input", layer, where, module, "input"))
        if not taps:
            raise ConfigError(f"{key}.tensors: the model has neither blocks nor linears. Name some.")
        return taps
    for role, alternatives in preset.items():
        for layer, (block_name, block) in enumerate(blocks):
            found = _places(alternatives, block)
            experts = any(".experts." in inner for inner, *_ in found)
            for inner, module, side, part in found:
                columns = None if part is None else _columns(part, inner, block)
                where = f"{block_name}.{inner}" if inner else block_name
                taps.append(Tap(role, layer, where, module, side, columns, len(found) > 1 and not experts))
    return taps


def _places(
    alternatives: Sequence[Sequence[Place]], block: nn.Module
) -> list[tuple[str, nn.Module, Side, Part | None]]:
    names = dict(named_modules_clean(block))
    for alternative in alternatives:
        found = []
        for pattern, side, *part in alternative:
            # With a leading dot "*.experts.*" also matches a name that starts with "experts".
            inside = ((n, m) for n, m in names.items() if n and matches(f".{n}", [pattern]))
            hits = list(inside) if pattern else [("", block)]
            if not hits:
                break
            found += [(name, module, side, part[0] if part else None) for name, module in hits]
        else:
            return found  # type: ignore[return-value]
    return []


def _columns(part: Part, inner: str, block: nn.Module) -> slice:
    """The columns of a fused QKV projection that are the queries or the keys (MPT's order: q, k, v)."""
    attention = block.get_submodule(inner.rpartition(".")[0])
    q = attention.n_heads * attention.head_dim  # type: ignore[operator]
    k = attention.kv_n_heads * attention.head_dim  # type: ignore[operator]
    return slice(0, q) if part == "q" else slice(q, q + k)


def _custom(
    model: nn.Module, tensors: Mapping[str, Sequence[str]], blocks: Sequence[tuple[str, nn.Module]], key: str
) -> list[Tap]:
    names = {name: module for name, module in named_modules_clean(model) if name}
    taps = []
    for role, patterns in tensors.items():
        for pattern in patterns:
            glob, _, side = pattern.partition("@")
            if side not in ("", "input", "output"):
                raise ConfigError(
                    f"{key}.tensors.{role}: {pattern!r} ends in @{side}; write @input or @output."
                )
            check_patterns_match([glob], list(names), f"{key}.tensors.{role}", "modules")
            for name in names:
                if matches(name, [glob]):
                    where: Side = "input" if side == "input" else "output"
                    taps.append(Tap(role, block_index_of(name, blocks), name, names[name], where))
    return taps
