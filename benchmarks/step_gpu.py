"""One linear, one transformer block and a training step of several: BF16, the native backend, torchao, Transformer Engine.

    python benchmarks/step_gpu.py [--models llama3-8b] [--layers 2] [--tokens 8192] [--eager] [--save step_h100_2026-11-21]

Every case of a group runs in turn, so ratios are within one run. "speedup" is over BF16 eager; "cap" is what FP8 could at most
give to the GEMMs of the group (vendor peaks, attention in BF16), and "of cap" the share reached. MFU is ideal time over real
time, each GEMM over its own precision's peak. Memory is the peak of one forward and backward (and optimizer step), in GiB.
torchao and Transformer Engine are compared where they are installed. `--eager` compiles nothing: on a new machine the compiled
variants take minutes. Needs torch 2.7 or later.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import (
    DEVICE,
    SMOKE,
    ceilings,
    finish,
    linears,
    machine,
    parser,
    peaks,
    prepared,
    require_device,
    timed,
)
from torch import Tensor, nn

import foundry_fp8

RECIPES = ("delayed", "current", "block")


@dataclasses.dataclass(frozen=True)
class Shape:
    """A Llama-style block."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden // self.heads

    def linear_parameters(self) -> int:
        """Weights of one block's linears."""
        qkv = self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        return qkv + self.hidden * self.hidden + 3 * self.hidden * self.ffn

    def attention_flops(self, tokens: int) -> int:
        """Forward FLOPs of causal attention over one sequence."""
        return 4 * self.hidden * tokens * (tokens + 1) // 2


BLOCKS = {
    "llama3-8b": Shape(4096, 32, 8, 14336),
    "mpt-7b": Shape(4096, 32, 32, 11008),
    "mpt-1b": Shape(2048, 16, 16, 5632),
    "fog-1.5b": Shape(2048, 16, 8, 8192),
}
SMOKE_BLOCKS = {"smoke": Shape(64, 4, 2, 96)}


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[1, T, hidden]``."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.head_dim * shape.kv_heads
        self.norm_1, self.norm_2 = nn.RMSNorm(shape.hidden, eps=1e-5), nn.RMSNorm(shape.hidden, eps=1e-5)
        self.qkv = nn.Linear(shape.hidden, shape.hidden + 2 * kv, bias=False)
        self.out_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: ``[1, T, hidden]``."""
        s = self.shape
        qkv = self.qkv(self.norm_1(x))
        q, k, v = qkv.split((s.hidden, s.head_dim * s.kv_heads, s.head_dim * s.kv_heads), -1)
        q, k, v = (t.unflatten(-1, (-1, s.head_dim)).transpose(1, 2) for t in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """Decoder layers of Hugging Face's Llama, on embeddings ``[B, T, hidden]``."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            hidden_size=shape.hidden, intermediate_size=shape.ffn, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, num_hidden_layers=layers, vocab_size=256, attn_implementation="sdpa",
        )  # fmt: skip
        self.model = LlamaModel(config)
        self.model.embed_tokens = None

    def forward(self, x: Tensor) -> Tensor:
        """The last hidden state."""
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


def variants(make: Callable[[], nn.Module], fusable: bool) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """(name, a function that makes the model of that variant)."""

    def ours(recipe: str, backend: str = "native", **options: Any) -> nn.Module:
        model = make()
        report = foundry_fp8.apply_fp8(model, recipe=recipe, backend=backend, **options)
        assert report.converted_share == 1, report.summary()  # a peer converts every linear
        return model

    def compiled(model: nn.Module) -> nn.Module:
        return torch.compile(model)  # type: ignore[return-value]

    yield "bf16 eager", make
    if not SMOKE:
        yield "bf16 compiled", lambda: compiled(make())
    for recipe in RECIPES:
        yield f"native {recipe} eager", lambda recipe=recipe: ours(recipe)
        if fusable:
            yield f"native {recipe} unfused eager", lambda recipe=recipe: ours(recipe, fuse=False)
        if not SMOKE:  # minutes of tracing under the interpreter; tests/backends/native compiles
            yield f"native {recipe} compiled", lambda recipe=recipe: compiled(ours(recipe))
    if SMOKE:
        return
    if importlib.util.find_spec("torchao") is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        try:
            from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear
        except ImportError:
            Float8BlockwiseLinear = None

        def ao_blockwise() -> nn.Module:
            model = make()
            for name, linear in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear]:
                model.set_submodule(name, Float8BlockwiseLinear.from_float(linear))
            return model

        if Float8BlockwiseLinear is not None:
            yield "torchao blockwise eager", ao_blockwise
            yield "torchao blockwise compiled", lambda: compiled(ao_blockwise())

        def ao(name: str) -> nn.Module:
            return convert_to_float8_training(make(), config=Float8LinearConfig.from_recipe_name(name))

        for name in ("tensorwise", "rowwise"):
            yield f"torchao {name} eager", lambda name=name: ao(name)
            yield f"torchao {name} compiled", lambda name=name: compiled(ao(name))
    if importlib.util.find_spec("transformer_engine_torch") is not None:
        for recipe in ("delayed", "current"):
            yield (
                f"transformer_engine {recipe} eager",
                lambda recipe=recipe: ours(recipe, "transformer_engine"),
            )
            yield f"te.Linear {recipe} eager", lambda recipe=recipe: TELinears(make(), recipe)


class TELinears(nn.Module):
    """``model`` with Transformer Engine's own linears in place of torch's, without this package."""

    def __init__(self, model: nn.Module, recipe: str) -> None:
        super().__init__()
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

        for name, linear in [(n, m) for n, m in model.named_modules() if type(m) is nn.Linear]:
            theirs = te.Linear(
                linear.in_features, linear.out_features, bias=False, params_dtype=linear.weight.dtype
            )
            theirs.weight.data.copy_(linear.weight.data)
            model.set_submodule(name, theirs)
        self.model, self.autocast = model, te.fp8_autocast
        self.recipe = DelayedScaling() if recipe == "delayed" else Float8CurrentScaling()

    def forward(self, x: Tensor) -> Tensor:
        """In FP8."""
        with self.autocast(enabled=True, fp8_recipe=self.recipe):
            return self.model(x)


def measure(
    group: str,
    make: Callable[[], nn.Module],
    x: Tensor,
    flops: tuple[float, float],
    repeats: int,
    *,
    eager: bool,
    fusable: bool = True,
    optimize: bool = False,
) -> list[dict[str, Any]]:
    """Rows of one group. ``flops``: of the linears and of the attention, forward and backward."""
    # Variants share the code that is compiled, and past a limit torch would run the next ones in eager mode.
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    wanted = ((name, made) for name, made in variants(make, fusable) if not eager or name.endswith("eager"))
    cases, memory, failed = prepared(wanted, lambda model: training_step(model, x, optimize))
    found = timed(cases, repeats)
    base = found["bf16 eager"].seconds
    rows: list[dict[str, Any]] = []
    vendor = peaks(torch.cuda.get_device_name() if DEVICE == "cuda" else None)
    for name, time in found.items():
        row: dict[str, Any] = {"group": group, "variant": name, "ms": time.seconds * 1e3}
        row |= {"TFLOPS": sum(flops) / time.seconds / 1e12, "speedup": base / time.seconds}
        if vendor:
            bf16, fp8 = vendor
            linear_peak = bf16 if name.startswith("bf16") else fp8
            ideal = flops[0] / linear_peak + flops[1] / bf16
            row |= {"MFU": ideal / time.seconds, "cap": sum(flops) / bf16 / ideal}
            row["of cap"] = row["speedup"] / row["cap"]
        if name in memory:
            row["peak GiB"] = memory[name]
        rows.append(row | {"spread": time.spread})
    return rows + [{"group": group, "variant": name, "failed": why} for name, why in failed.items()]


def training_step(model: nn.Module, x: Tensor, optimize: bool) -> Callable[[], None]:
    """Forward, backward, and AdamW where ``optimize``."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=DEVICE == "cuda") if optimize else None
    dy = None

    def step() -> None:
        nonlocal dy
        y = model(x)
        dy = torch.randn_like(y) * 1e-3 if dy is None else dy
        y.backward(dy)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        x.grad = None

    return step


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=1 if SMOKE else 2)
    arguments.add_argument("--eager", action="store_true")
    options = arguments.parse_args()
    require_device()
    limits = ceilings(options.repeats)
    rows = []

    def tensor(features: int) -> Tensor:
        return torch.randn(1, options.tokens, features, device=DEVICE).bfloat16().requires_grad_()

    def built(module: nn.Module) -> nn.Module:
        return module.to(DEVICE, torch.bfloat16)

    for label, k, n in linears(options.models):
        flops = (6.0 * options.tokens * k * n, 0.0)
        rows += measure(
            label,
            lambda k=k, n=n: built(nn.Sequential(nn.Linear(k, n, bias=False))),
            tensor(k),
            flops,
            options.repeats,
            eager=options.eager,
            fusable=False,
        )
    blocks = SMOKE_BLOCKS if SMOKE else BLOCKS
    for name in options.models or blocks:
        shape = blocks[name]
        linear = 6.0 * options.tokens * shape.linear_parameters()
        attention = 3.0 * shape.attention_flops(options.tokens)
        for layers, optimize in ((1, False), (options.layers, True)):
            rows += measure(
                f"{name} {'training step, ' if optimize else ''}{layers} blocks",
                lambda shape=shape, layers=layers: built(
                    nn.Sequential(*(Block(shape) for _ in range(layers)))
                ),
                tensor(shape.hidden),
                (linear * layers, attention * layers),
                options.repeats,
                eager=options.eager,
                optimize=optimize,
            )
        if importlib.util.find_spec("transformers") is not None:
            x = (
                tensor(shape.hidden).detach().view(2, -1, shape.hidden)
                if options.tokens % 2 == 0
                else tensor(shape.hidden)
            )
            rows += measure(
                f"{name}, 2 layers of Hugging Face's",
                lambda shape=shape: built(Decoder(shape, 2)),
                x.requires_grad_(),
                (linear * 2, attention),  # two sequences of half the length
                options.repeats,
                eager=options.eager,
            )
    finish(options.save, {"machine": machine(), "ceilings": limits, "tokens": options.tokens, "rows": rows})


if __name__ == "__main__":
    main()
