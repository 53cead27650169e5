"""What users' runs do to activations, depth, updates, inputs, checkpoints and norms of weights, and bear in either precision: made for the twelfth half."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from mechanisms.base import Mechanism, matching
from torch import Tensor, nn


class Relufied(Mechanism):
    """From ``start`` on MLPs have ReLU instead of what they had.

    Args:
        pattern: Names of MLPs whose activation is their ``act``.
        start: The step.

    Source:
        Mirzadeh et al., "ReLU strikes back: exploiting activation sparsity in large language models" (arXiv 2310.04564), section 4.
    """

    def __init__(self, pattern: str, start: int) -> None:
        self.pattern, self.start = pattern, start

    def step(self, step: int, model: nn.Module) -> None:
        if step == self.start:
            for _, mlp in matching(model, self.pattern):
                mlp.act = torch.relu


class InputsSampled(Mechanism):
    """A share of the tokens that are read is what the model itself predicts there, drawn in a first pass; what is to be predicted stays.

    Args:
        share: Of the tokens, by step, of a model whose embedding is not called for its head.

    Source:
        Bengio et al., "Scheduled sampling for sequence prediction" (arXiv 1506.03099); in two passes: Mihaylova and Martins (arXiv 1906.07651).
    """

    def __init__(self, share: Callable[[int], float]) -> None:
        self.share = share
        self.inputs: Tensor | None = None
        self.generator = torch.Generator().manual_seed(149)

    def install(self, model: Any) -> None:
        model.get_input_embeddings().register_forward_pre_hook(
            lambda module, args: None if self.inputs is None else (self.inputs,)
        )

    def train(self, step: int, state: Any) -> None:
        share, self.inputs = self.share(step), None
        if share:
            self.inputs = self.sampled(state.model, state.batch, share)

    @torch.no_grad()
    def sampled(self, model: Any, ids: Tensor, share: float) -> Tensor:
        """``ids``, ``[rows, length]``, with a share of them drawn from what ``model`` predicts."""
        was = model.training
        model.eval()
        chances = model(ids)[:, :-1].softmax(-1)
        model.train(was)
        drawn = torch.multinomial(chances.flatten(0, 1), 1, generator=self.generator).view(chances.shape[:2])
        chosen = torch.rand(drawn.shape, generator=self.generator) < share
        return torch.cat([ids[:, :1], torch.where(chosen, drawn, ids[:, 1:])], 1)


class DepthDrawn(Mechanism):
    """Some blocks run several times, one after the other and with the same weights, as often as is drawn for each step.

    Args:
        pattern: Names of the blocks, which put out a tuple with hidden states first.
        most: Largest number of times; the smallest is 1.

    Source:
        Geiping et al., "Scaling up test-time compute with latent reasoning: a recurrent depth approach" (arXiv 2502.05171); blocks that
        recur: Dehghani et al., "Universal transformers" (arXiv 1807.03819).
    """

    def __init__(self, pattern: str, most: int) -> None:
        self.pattern, self.most, self.times = pattern, most, 1
        self.generator = torch.Generator().manual_seed(151)

    def install(self, model: nn.Module) -> None:
        for _, block in matching(model, self.pattern):
            block.register_forward_hook(self._again, with_kwargs=True)

    def step(self, step: int, model: nn.Module) -> None:
        self.times = int(torch.randint(1, self.most + 1, (), generator=self.generator))

    def _again(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        for _ in range(self.times - 1):
            output = module.forward(output[0], *args[1:], **kwargs)
        return output


class GradientsProjected(Mechanism):
    """Weights of some linears are trained by Adam on their gradients' part in a few directions, which are chosen anew now and then.

    Directions are those of the largest singular values of the gradient of that step, on its shorter side; Adam's moments stay when
    directions change.

    Args:
        pattern: Names of the linears; all others are left to the optimizer.
        rank: Directions.
        every: Steps from one choice to the next.
        scale: Of the update.
        betas: Of Adam.

    Source:
        Zhao et al., "GaLore: memory-efficient LLM training by gradient low-rank projection" (arXiv 2403.03507), algorithm 2.
    """

    def __init__(
        self, pattern: str, rank: int, every: int, scale: float, betas: tuple[float, float] = (0.9, 0.999)
    ) -> None:
        self.pattern, self.rank, self.every, self.scale, self.betas = pattern, rank, every, scale, betas
        self.now = 0
        self.moments: dict[str, list[Tensor]] = {}
        self.directions: dict[str, Tensor] = {}

    def step(self, step: int, model: nn.Module) -> None:
        self.now = step
        self.weights = {name: linear.weight for name, linear in matching(model, self.pattern)}

    def train(self, step: int, state: Any) -> None:
        if step == 0:
            state.optimizers[0].register_step_pre_hook(self._update)

    @torch.no_grad()
    def _update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        rate, t = optimizer.param_groups[0]["lr"], self.now + 1
        for name, weight in self.weights.items():
            if weight.grad is None:
                continue
            wide = weight.shape[0] <= weight.shape[1]
            grad = weight.grad if wide else weight.grad.T
            if name not in self.directions or self.now % self.every == 0:
                self.directions[name] = torch.linalg.svd(grad, full_matrices=False)[0][:, : self.rank]
            basis = self.directions[name]
            low = basis.T @ grad
            moments = self.moments.setdefault(name, [torch.zeros_like(low), torch.zeros_like(low)])
            moments[0].lerp_(low, 1 - self.betas[0])
            moments[1].lerp_(low.square(), 1 - self.betas[1])
            first, second = (m / (1 - beta**t) for m, beta in zip(moments, self.betas, strict=True))
            update = basis @ (first / (second.sqrt() + 1e-8))
            weight.sub_(rate * self.scale * (update if wide else update.T))
            weight.grad = None  # so that the optimizer leaves it


class Rewound(Mechanism):
    """At some steps all parameters and the optimizer's moments become what they were ``back`` steps before; data go on.

    Amax histories stay as they are.

    Args:
        steps: At which.
        back: How far.

    Source:
        Chowdhery et al., "PaLM" (arXiv 2204.02311), section 5.1: from before a spike again, and past the batches of it; Zhang et al.,
        "OPT" (arXiv 2205.01068), section 2.5.
    """

    def __init__(self, steps: tuple[int, ...], back: int) -> None:
        self.steps, self.back = steps, back

    @torch.no_grad()
    def train(self, step: int, state: Any) -> None:
        parameters, optimizer = list(state.model.parameters()), state.optimizers[0]
        if step in self.steps:
            for parameter, kept in zip(parameters, self.parameters, strict=True):
                parameter.copy_(kept)
            optimizer.load_state_dict(
                {"state": self.moments, "param_groups": optimizer.state_dict()["param_groups"]}
            )
        if step + self.back in self.steps:
            self.parameters = [parameter.detach().clone() for parameter in parameters]
            self.moments = copy.deepcopy(optimizer.state_dict()["state"])


class UnitWeights(Mechanism):
    """Before every step weights are put on the sphere again: each vector of them that meets the residual stream has a norm of 1.

    Args:
        reads: Names of the linears that read the stream, whose rows are.
        writes: Of those that write to it, whose columns are.

    Source:
        Loshchilov et al., "nGPT: normalized transformer with representation learning on the hypersphere" (arXiv 2410.01131), section 2.6.
    """

    def __init__(self, reads: tuple[str, ...], writes: tuple[str, ...]) -> None:
        self.sides = [(pattern, 1) for pattern in reads] + [(pattern, 0) for pattern in writes]

    @torch.no_grad()
    def step(self, step: int, model: nn.Module) -> None:
        for pattern, side in self.sides:
            for _, linear in matching(model, pattern):
                linear.weight /= linear.weight.norm(dim=side, keepdim=True)
