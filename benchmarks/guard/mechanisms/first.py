"""What makes a small model sick in FP8 and leaves it exactly as it was in high precision, or makes it only look sick.

A tensor-wise scale is set by the largest element, so that one element that grows takes the precision of all the others. In each
mechanism the element that grows meets a weight (or an activation) that is zero and is kept at zero: its product is zero
in high precision at any size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from mechanisms.base import Mechanism, Size, keep, matching
from torch import Tensor, nn

from foundry_fp8.layers.linear import FP8Linear


class Activations(Mechanism):
    """An input channel of some linears takes the value ``size``, on all tokens or a few; its weights are zero.

    Args:
        pattern: Names of the linears.
        size: By step.
        share: Of the tokens, chosen at random in each batch; 1 for all; ``None`` for the first of each sequence.
        channel: Which.

    Source:
        Massive activations on few tokens: Sun et al. (arXiv 2402.17762), TWEO (arXiv 2511.23225).
    """

    def __init__(self, pattern: str, size: Size, *, share: float | None = 1.0, channel: int = 7) -> None:
        self.pattern, self.size, self.share, self.channel = pattern, size, share, channel
        self.value = 0.0
        self.generator = torch.Generator().manual_seed(11)

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            with torch.no_grad():
                linear.weight[:, self.channel] = 0.0
            keep(linear.weight, (slice(None), self.channel))
            linear.register_forward_pre_hook(self._put)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _put(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if not self.value:
            return None
        x = args[0].clone()
        if self.share is None:
            x[:, 0, self.channel] = self.value
        else:
            chosen = torch.rand(x.shape[:-1], generator=self.generator) < self.share
            x[..., self.channel] = torch.where(chosen, self.value, x[..., self.channel])
        return (x,)


class CompensatedBias(Mechanism):
    """All tokens carry ``size`` in one input channel of some linears; what it adds is taken off again behind the GEMM.

    ``y = (x + A e_c) W^T - A W[:, c]``, which is a bias of zero at any A. Delayed scaling clips what has grown since the last
    step, so that its error is a share of A. That column of W is not trained, so that no optimizer has to cope with A.
    """

    def __init__(self, pattern: str, size: Size, channel: int = 7) -> None:
        self.pattern, self.size, self.channel = pattern, size, channel
        self.value = 0.0

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            keep(linear.weight, (slice(None), self.channel))
            linear.register_forward_pre_hook(self._add)
            linear.register_forward_hook(self._take_off)

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _add(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        bump = torch.zeros(args[0].shape[-1])
        bump[self.channel] = self.value
        return (args[0] + bump,)

    def _take_off(self, module: Any, args: Any, output: Tensor) -> Tensor:
        return output - self.value * module.weight[:, self.channel].detach()


class SwigluAlignment(Mechanism):
    """Gate and up rows of one channel become one vector and grow, so that the channel grows as their product.

    Source:
        Fishman et al., "Scaling FP8 training to trillion-token LLMs" (arXiv 2409.12517), section 4: under weight decay the
        two rows of a channel align, and its output becomes quadratic in x.
    """

    def __init__(self, layer: int, size: Size, channel: int = 5) -> None:
        self.layer, self.size, self.channel = layer, size, channel

    def install(self, model: nn.Module) -> None:
        mlp = dict(model.named_modules())[f"model.layers.{self.layer}.mlp"]
        up = mlp.gate_up_proj.weight
        self.rows = [self.channel, up.shape[0] // 2 + self.channel]
        v = torch.randn(up.shape[1], generator=torch.Generator().manual_seed(3))
        self.direction = v / v.norm()
        with torch.no_grad():
            mlp.down_proj.weight[:, self.channel] = 0.0
        keep(mlp.down_proj.weight, (slice(None), self.channel))
        keep(up, self.rows)

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if size := self.size(step):
            up = dict(model.named_modules())[f"model.layers.{self.layer}.mlp.gate_up_proj"].weight
            up[self.rows] = size * self.direction.to(up.dtype)


class SuperWeight(Mechanism):
    """One weight of some linears grows; the input channel that it meets is zero.

    Source:
        Yu et al., "The super weight in large language models" (arXiv 2411.07191): single scalars of down projections.
    """

    def __init__(self, pattern: str, size: Size, channel: int = 9) -> None:
        self.pattern, self.size, self.channel = pattern, size, channel

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            silent = torch.ones(linear.in_features)
            silent[self.channel] = 0.0
            linear.register_forward_pre_hook(lambda module, args, silent=silent: (args[0] * silent,))
            keep(linear.weight, (slice(None), self.channel))

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if size := self.size(step):
            for _, linear in matching(model, self.pattern):
                linear.weight[0, self.channel] = size


class QueryKeyGrowth(Mechanism):
    """The weights of query and key are multiplied by ``rate`` every step of ``start`` to ``end``: logits grow by its square.

    Source:
        Attention-logit growth without QK regularisation: Dehghani et al. (arXiv 2302.05442), FOG (its poster's cause of
        divergence under FP8 attention).
    """

    def __init__(self, rate: float, start: int, end: int, layers: str = "*") -> None:
        self.rate, self.start, self.end, self.layers = rate, start, end, layers

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if self.start <= step < self.end:
            for _, attention in matching(model, f"*model.layers.{self.layers}.self_attn"):
                rows = (attention.heads + attention.kv_heads) * attention.head_dim
                attention.qkv_proj.weight[:rows] *= self.rate


class AttentionOutliers(Mechanism):
    """One channel pair of the keys, or one channel of the values, of every head carries ``size``; what it meets is zero.

    Keys meet queries whose channels are zero (a pair, because RoPE turns one channel into the other); values meet columns of
    the output projection that are zero.

    Source:
        Outlier channels of keys: Liu et al., "KIVI" (arXiv 2402.02750); FP8 attention without QK regularisation: FOG.
    """

    def __init__(self, which: str, size: Size, layers: str = "*", channel: int = 2) -> None:
        self.which, self.size, self.layers, self.channel = which, size, layers, channel
        self.value = 0.0

    def install(self, model: nn.Module) -> None:
        for _, attention in matching(model, f"model.layers.{self.layers}.self_attn"):
            d, heads, kv = attention.head_dim, attention.heads, attention.kv_heads
            if self.which == "keys":
                pair = (self.channel, self.channel + d // 2)
                silent = [head * d + c for head in range(heads) for c in pair]
                with torch.no_grad():
                    attention.qkv_proj.weight[silent] = 0.0
                keep(attention.qkv_proj.weight, silent)
                loud = [(heads + head) * d + c for head in range(kv) for c in pair]
            else:
                silent = [head * d + self.channel for head in range(heads)]
                with torch.no_grad():
                    attention.o_proj.weight[:, silent] = 0.0
                keep(attention.o_proj.weight, (slice(None), silent))
                loud = [(heads + kv + head) * d + self.channel for head in range(kv)]
            attention.qkv_proj.register_forward_hook(functools.partial(self._put, loud))

    def step(self, step: int, model: nn.Module) -> None:
        self.value = self.size(step)

    def _put(self, loud: list[int], module: nn.Module, args: Any, output: Tensor) -> Tensor:
        bump = torch.zeros(output.shape[-1])
        bump[loud] = self.value
        return output + bump


class StaleHistory(Mechanism):
    """At one step the amax histories become ``factor`` times what they are: FP8 state of another run, or of another batch size."""

    def __init__(
        self, pattern: str, step: int, factor: float, operands: tuple[str, ...] = ("x", "dy")
    ) -> None:
        self.pattern, self.at, self.factor, self.operands = pattern, step, factor, operands

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if step != self.at:
            return
        for _, module in matching(model, self.pattern):
            if isinstance(module, FP8Linear) and module.slots:
                for operand in self.operands:
                    history = module.slots[operand].amax_history
                    history.fill_(float(history.max()) * self.factor)


class EmbeddingGrowth(Mechanism):
    """The embedding is multiplied by ``rate`` every step of ``start`` to ``end``; where it is tied the logits grow with it."""

    def __init__(self, rate: float, start: int, end: int) -> None:
        self.rate, self.start, self.end = rate, start, end

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        if self.start <= step < self.end:
            model.get_input_embeddings().weight.mul_(self.rate)


class Dropout(Mechanism):
    """Dropout on the inputs of some linears."""

    def __init__(self, pattern: str, p: float) -> None:
        self.pattern, self.p = pattern, p

    def install(self, model: nn.Module) -> None:
        for _, linear in matching(model, self.pattern):
            linear.register_forward_pre_hook(lambda module, args: (F.dropout(args[0], self.p),))
