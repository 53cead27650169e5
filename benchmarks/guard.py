"""The divergence guard on ten small labelled runs: it acts where FP8 alone diverges, and leaves the others in FP8.

    python benchmarks/guard.py [--only NAME ...] [--jobs 2]      ends with 1 if a run is not as its label says

Each run is trained in high precision, in FP8, and in FP8 under the guard (four minutes on two cores). A cause meets weights that are zero
and stay so: in high precision its product is zero at any size. ``results/guard.md`` and ``guard_suite.md`` hold 291 and 53 such runs,
made by the suite at commit aa3c8f7.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import multiprocessing
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from fnmatch import fnmatch
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, LENGTH, HIDDEN, LAYERS, TAIL = 64, 32, 64, 2, 20
GUARD: dict[str, Any] = {"interval": 5, "rows": 64, "quiet_batches": 60}
"""Shorter times than the guard's defaults, because the runs are short."""

Size = Callable[[int], float]
"""How large a cause is at a step."""
Cause = Callable[[nn.Module], Callable[[int], None]]
"""Installs itself in a model before surgery, and returns what is called before every batch with its step."""


def grows(start: int, rate: float, first: float = 1.0, most: float = float("inf")) -> Size:
    """0 before ``start``, then ``first``, times ``rate`` every step, up to ``most``."""
    return lambda step: 0.0 if step < start else min(most, first * rate ** min(step - start, 2000))


def matching(model: nn.Module, pattern: str) -> list[Any]:
    """The modules whose names match; at least one."""
    found = [module for name, module in model.named_modules() if fnmatch(name, pattern)]
    if not found:
        raise ValueError(f"{pattern} matches no module")
    return found


def keep(parameter: nn.Parameter, index: Any, value: float | None = None) -> None:
    """A part of a parameter gets no gradient; with ``value``, it is set to that first."""
    if value is not None:
        with torch.no_grad():
            parameter[index] = value
    cut = torch.zeros_like(parameter, dtype=torch.bool)
    cut[index] = True
    parameter.register_hook(lambda grad: grad.masked_fill(cut, 0.0))


def activations(pattern: str, size: Size, *, first_token: bool = False, channel: int = 7) -> Cause:
    """An input channel of linears is ``size``, on every token or the first; its weights are zero (arXiv:2402.17762, 2511.23225)."""

    def install(model: nn.Module) -> Callable[[int], None]:
        now = [0.0]

        def put(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
            if not now[0]:
                return None
            x = args[0].clone()
            x[:, 0 if first_token else slice(None), channel] = now[0]
            return (x,)

        for linear in matching(model, pattern):
            keep(linear.weight, (slice(None), channel), 0.0)
            linear.register_forward_pre_hook(put)
        return lambda step: now.__setitem__(0, size(step))

    return install


def super_weight(pattern: str, size: Size, channel: int = 9) -> Cause:
    """One weight of linears is ``size``; the input channel that it meets is zero (arXiv:2411.07191)."""

    def install(model: nn.Module) -> Callable[[int], None]:
        linears = matching(model, pattern)
        for linear in linears:
            silent = torch.ones(linear.in_features)
            silent[channel] = 0.0
            linear.register_forward_pre_hook(lambda module, args, silent=silent: (args[0] * silent,))
            keep(linear.weight, (slice(None), channel))
        weights = [linear.weight for linear in linears]

        @torch.no_grad()
        def set_size(step: int) -> None:
            for weight in weights if size(step) else ():
                weight[0, channel] = size(step)

        return set_size

    return install


def swiglu_alignment(pattern: str, size: Size, channel: int = 5) -> Cause:
    """Gate and up rows of a channel become one vector and grow, so that it grows as their product (arXiv:2409.12517)."""

    def install(model: nn.Module) -> Callable[[int], None]:
        ups = []
        for mlp in matching(model, pattern):
            ups.append(mlp.gate_up_proj.weight)
            rows = [channel, len(ups[-1]) // 2 + channel]
            keep(mlp.down_proj.weight, (slice(None), channel), 0.0)
            keep(ups[-1], rows)
        direction = F.normalize(
            torch.randn(ups[0].shape[1], generator=torch.Generator().manual_seed(3)), dim=0
        )

        @torch.no_grad()
        def set_size(step: int) -> None:
            for up in ups if size(step) else ():
                up[[channel, len(up) // 2 + channel]] = size(step) * direction

        return set_size

    return install


def gradient_outliers(pattern: str, size: Size, channel: int = 6) -> Cause:
    """The gradient of one output channel of linears gains ``size``; its weights are zero (arXiv:2006.08173, 2209.05433)."""

    def install(model: nn.Module) -> Callable[[int], None]:
        now = [0.0]

        def put(module: nn.Module, args: Any, output: Tensor) -> None:
            if now[0] and output.requires_grad:
                bump = torch.zeros(output.shape[-1])
                bump[channel] = now[0]
                output.register_hook(lambda grad: grad + bump)

        for linear in matching(model, pattern):
            keep(linear.weight, channel, 0.0)
            linear.register_forward_hook(put)
        return lambda step: now.__setitem__(0, size(step))

    return install


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One labelled run, the same in every variant but for the precision and the guard."""

    label: Literal["diverges", "diverges in both", "healthy"]
    about: str
    recipe: dict[str, Any] | str = dataclasses.field(default_factory=lambda: delayed(16))
    cause: Cause = lambda model: lambda step: None
    onset: int = 0
    """The step at which it begins. Alarms before it are false."""
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of the configuration of ``HOSTS[kind]``."""
    lr: Size = lambda step: 3e-3 * min(1.0, (step + 1) / 20)
    steps: int = 200
    rows: int = 8
    seed: int = 0


def delayed(history: int) -> dict[str, Any]:
    return {"name": "delayed", "amax_history_len": history}


CASES: dict[str, Case] = {
    "swiglu_alignment": Case(
        label="diverges", onset=80, about="gate and up rows of a channel align and grow 12 % a step",
        cause=swiglu_alignment("*.mlp", grows(80, 1.12, 1.0, 1e5)),
    ),
    "massive_first_token": Case(
        label="diverges", onset=80, recipe="current", about="massive activations on the first token",
        cause=activations("*_proj", grows(80, 1.2, 1.0, 1e7), first_token=True),
    ),
    "super_weight": Case(
        label="diverges", onset=80, recipe="current", about="one weight of each linear grows 20 % a step",
        cause=super_weight("*_proj", grows(80, 1.2, 0.1, 1e7)),
    ),
    "gradient_outliers": Case(
        label="diverges", onset=70, recipe="block", seed=6, steps=280, about="gradients of one channel grow 25 % a step",
        cause=gradient_outliers("*_proj", grows(70, 1.25, 1e-4, 1e8)),
    ),
    "bad_batch": Case(
        label="diverges", onset=80, recipe=delayed(64), about="one batch of inputs of 4e5, which 64 steps remember",
        cause=activations("*_proj", lambda step: 4e5 * (step == 80)),
    ),
    "rate_too_large": Case(
        label="diverges in both", onset=80, about="the learning rate grows 4 % a step",
        lr=lambda step: 3e-3 * min(1.0, (step + 1) / 20) * 1.04 ** max(0, step - 80),
    ),
    "warmup_spike": Case(
        label="healthy", about="a learning rate of 1.5e-2 after two steps, then 3e-3", lr=lambda step: 1.5e-2 if 2 <= step < 20 else 3e-3,
    ),
    "stable_then_decay": Case(
        label="healthy", seed=5, model={"kind": "opt"}, steps=300, about="a level learning rate that falls to a twentieth, OPT",
        lr=lambda step: 6e-3 * min(1.0, (step + 1) / 20, max(0.05, (260 - step) / 60)),
    ),
    "eight_experts": Case(
        label="healthy", seed=12, rows=3, recipe="mxfp8", model={"kind": "mixture"}, about="8 experts that see few tokens each",
    ),
    "super_weight_small": Case(
        label="healthy", seed=120, steps=260, rows=20, recipe=delayed(256), model={"kind": "opt"}, about="a super weight that stays at 3, OPT",
        cause=super_weight("*.fc2", grows(80, 1.05, 0.1, 3.0), channel=60),
    ),
}  # fmt: skip


def model_of(case: Case) -> nn.Module:
    """A causal language model of the case's kind: ``llama``, ``opt`` or ``mixture``."""
    import transformers

    from foundry_fp8.models.fog import FogConfig, FogForCausalLM

    torch.manual_seed(case.seed)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    match case.model.get("kind", "llama"):
        case "opt":
            opt = {
                "ffn_dim": 128,
                "word_embed_proj_dim": HIDDEN,
                "dropout": 0.0,
                "tie_word_embeddings": False,
            }
            return transformers.OPTForCausalLM(transformers.OPTConfig(**fields, **opt))
        case "mixture":
            experts = {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 8}
            return transformers.MixtralForCausalLM(transformers.MixtralConfig(**fields, **experts))
    return FogForCausalLM(FogConfig(variant="llama3", num_key_value_heads=2, intermediate_size=128, **fields))


def batches(case: Case) -> Tensor:
    """``[steps, rows, LENGTH]``: each token is a function of the last two, but for one in ten, which is random."""
    generator = torch.Generator().manual_seed(1000 + case.seed)
    table = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(1234))
    ids = torch.randint(0, VOCAB, (case.steps, case.rows, LENGTH), generator=generator)
    random = torch.rand(ids.shape, generator=generator) < 0.1
    for t in range(2, LENGTH):
        ids[..., t] = torch.where(random[..., t], ids[..., t], table[ids[..., t - 1], ids[..., t - 2] % 4])
    return ids


def train(
    case: Case, variant: Literal["high", "fp8", "guarded"], **options: Any
) -> tuple[list[float], list[dict[str, Any]]]:
    """The losses, and the guard's events; ``options`` are the guard's."""
    import foundry_fp8

    model = model_of(case).train()
    at_step = case.cause(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=case.lr(0), betas=(0.9, 0.95), weight_decay=0.0)
    if variant != "high":
        foundry_fp8.apply_fp8(model, recipe=case.recipe, backend="emulated")

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    guard = None
    if variant == "guarded":
        guard = foundry_fp8.DivergenceGuard(model, loss_of, **{**GUARD, **options})
    losses = []
    for step, ids in enumerate(batches(case)):
        at_step(step)
        for group in optimizer.param_groups:
            group["lr"] = case.lr(step)
        if guard is not None:
            guard.before_step(ids)
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if guard is not None:
            guard.after_step(losses[-1])
    return losses, [] if guard is None else guard.events


def wrong(
    case: Case, high: list[float], fp8: list[float], guarded: list[float], events: list[dict[str, Any]]
) -> list[str]:
    """What is not as the case's label says; losses are compared at the end."""
    end = {
        name: statistics.fmean(run[-TAIL:])
        for name, run in (("high", high), ("fp8", fp8), ("guarded", guarded))
    }
    alarms, demotions = ([e["batch"] for e in events if e["action"] == what] for what in ("alarm", "demote"))
    checks = {
        "an alarm before the cause": any(batch < case.onset for batch in alarms),
        "demotions of what FP8 does not harm": case.label == "healthy" and bool(demotions),
    }
    if case.label == "diverges":
        checks |= {
            "FP8 alone ends less than 5 % above high precision": end["fp8"] < 1.05 * end["high"],
            "no alarm": not alarms,
            "with the guard the end is more than 5 % above high precision": not end["guarded"]
            <= 1.05 * end["high"],
        }
    elif case.label == "healthy":
        checks["FP8 alone ends more than 2 % from high precision"] = (
            not abs(end["fp8"] / end["high"] - 1) <= 0.02
        )
    return [what for what, holds in checks.items() if holds]


def row(name: str) -> dict[str, Any]:
    """One case in its three variants, as a line of the table."""
    case = CASES[name]
    high, fp8 = train(case, "high")[0], train(case, "fp8")[0]
    guarded, events = train(case, "guarded")
    above = {
        who: statistics.fmean(run[-TAIL:]) / statistics.fmean(high[-TAIL:]) - 1
        for who, run in (("fp8", fp8), ("guarded", guarded))
    }
    counts = {
        what: sum(event["action"] == what for event in events) for what in ("alarm", "demote", "return")
    }
    return {
        "case": name,
        "label": case.label,
        **above,
        **counts,
        "wrong": wrong(case, high, fp8, guarded, events),
    }


def quiet() -> None:
    """In every process: one thread, and nothing said but what this script prints."""
    torch.set_num_threads(1)
    logging.getLogger("foundry_fp8").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", default=list(CASES))
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    rows = []
    with multiprocessing.get_context("spawn").Pool(args.jobs, quiet) as pool:
        for found in pool.imap(row, args.only):
            rows.append(found)
            print("{case}: {label}; above high precision: FP8 {fp8:+.1%}, guarded {guarded:+.1%}; {demote} demotions".format(**found),
                  *found["wrong"], sep="\n  ", flush=True)  # fmt: skip
    print(json.dumps({"torch": torch.__version__, "rows": rows}))
    sys.exit(any(found["wrong"] for found in rows))


if __name__ == "__main__":
    main()
