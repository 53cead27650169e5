"""The divergence guard's demonstration: outliers are grown in a small Llama until delayed FP8 diverges.

Every run trains the same model on the same data. In two of its four blocks one channel of the second feed-forward
projection's input carries a value A that grows by 8 % a step from step 100 on, as massive activations do, and acts as a
bias, which is taken off again behind the GEMM: ``y = (x + A e_c) W^T - A W[:, c]``. In float32 that changes nothing, at any
A. Delayed scaling clips what has grown since the last step, so its error is a share of A, and grows with it. That
column of W is not trained (in all runs alike), so that no optimizer has to cope with A.

    python benchmarks/divergence.py [--part outliers|healthy] [--steps 300] [--healthy 10] [--seed 0] [--out results.json]

Prints: the losses of the high-precision run, of FP8 without the guard and of FP8 with it; for every signal, how many
steps before the loss its first alarm came; and the false alarms of healthy runs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import composer
import torch
import torch.nn.functional as F
import transformers
from composer import Trainer
from composer.core import Callback
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel

from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.callbacks.divergence_guard import DivergenceGuard

VOCAB, LENGTH, ROWS = 256, 64, 8
OUTLIER_BLOCKS, CHANNEL, GROWTH, START = (1, 2), 7, 1.08, 100
GUARD = {"interval": 5}
TAIL = 20
"""Steps at the end whose mean is the final loss."""


class Decoder(ComposerModel):
    """A Llama of four blocks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=VOCAB, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, batch):
        return self.model(input_ids=batch).logits

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs[:, :-1].reshape(-1, VOCAB), batch[:, 1:].reshape(-1))


class GrowOutliers(Callback):
    """Adds A to one channel before the GEMM and takes its contribution off behind it; A grows."""

    def __init__(self, model: Decoder) -> None:
        self.value = 0.0
        for index in OUTLIER_BLOCKS:
            linear = model.model.model.layers[index].mlp.down_proj
            linear.register_forward_pre_hook(self._add)
            linear.register_forward_hook(self._take_off)
            linear.weight.register_hook(self._freeze_column)

    def _add(self, module, args):
        bump = torch.zeros(args[0].shape[-1])
        bump[CHANNEL] = self.value
        return (args[0] + bump,)

    def _take_off(self, module, args, output):
        return output - self.value * module.weight[:, CHANNEL].detach()

    def _freeze_column(self, grad):
        grad = grad.clone()
        grad[:, CHANNEL] = 0.0
        return grad

    def batch_start(self, state, logger):
        step = state.timestamp.batch.value
        self.value = 0.0 if step < START else 0.1 * GROWTH ** (step - START)


def make_data(steps: int, seed: int) -> torch.Tensor:
    """Sequences whose next token is a function of the last two nine times out of ten: ``[steps * ROWS, LENGTH]``."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, VOCAB, (VOCAB, 4), generator=torch.Generator().manual_seed(1234))
    tokens = torch.randint(0, VOCAB, (steps * ROWS, LENGTH), generator=generator)
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    for t in range(2, LENGTH):
        follows = table[tokens[:, t - 1], tokens[:, t - 2] % 4]
        tokens[:, t] = torch.where(noise[:, t], tokens[:, t], follows)
    return tokens


def run(
    steps: int, seed: int, *, fp8: bool, outliers: bool, actions: list[str] | None
) -> tuple[list[float], list[dict]]:
    """Train; return the loss of every step and the guard's events."""
    model = Decoder(seed)
    callbacks: list[Callback] = [GrowOutliers(model)] if outliers else []
    guard = None if actions is None else DivergenceGuard(actions=actions, **GUARD)
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(make_data(steps, seed), batch_size=ROWS),
        max_duration=f"{steps}ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95)),
        algorithms=[FP8(recipe={"name": "delayed", "amax_history_len": 16})] if fp8 else [],
        callbacks=callbacks if guard is None else [*callbacks, guard],
        loggers=[logger],
        device="cpu",
        progress_bar=False,
        seed=seed,
    )
    trainer.fit()
    if guard is not None and guard.failed is not None:
        raise RuntimeError(f"the guard failed: {guard.failed}")
    losses = [float(value) for _, value in logger.data["loss/train/total"]]
    trainer.close()
    return losses, [] if guard is None else guard.events


def tail(losses: list[float]) -> float:
    return sum(losses[-TAIL:]) / TAIL


def departure(losses: list[float], reference: list[float], share: float = 0.1, width: int = 5) -> int | None:
    """The first step from which the mean of ``width`` losses is ``share`` above the reference's, or ``None``."""
    for step in range(width, len(losses)):
        ours, theirs = (sum(x[step - width : step]) / width for x in (losses, reference))
        if not ours <= theirs * (1 + share):
            return step
    return None


def grown_outliers(steps: int, seed: int) -> dict:
    """High precision, FP8 alone, FP8 watched, FP8 guarded: the same outliers in all."""
    high, _ = run(steps, seed, fp8=False, outliers=True, actions=None)
    clean, _ = run(steps, seed, fp8=False, outliers=False, actions=None)
    # A guard that only warns leaves the run as it is (tests/callbacks/test_base.py), so this one is "without".
    alone, seen = run(steps, seed, fp8=True, outliers=True, actions=["warn"])
    guarded, acted = run(steps, seed, fp8=True, outliers=True, actions=["demote"])
    departed = departure(alone, high)
    first: dict[str, dict] = {}
    for event in seen:
        if event["action"] == "alarm" and event["batch"] >= START:
            first.setdefault(event["signal"], event)
    return {
        "final_loss": {
            "high_precision": tail(high),
            "high_precision_without_outliers": tail(clean),
            "fp8_without_guard": tail(alone),
            "fp8_with_guard": tail(guarded),
        },
        "with_guard_over_high_precision": tail(guarded) / tail(high) - 1,
        "without_guard_over_high_precision": tail(alone) / tail(high) - 1,
        "outliers_from_step": START,
        "loss_departed_at_step": departed,
        "first_alarm": {
            signal: {
                "step": event["batch"],
                "unit": event["unit"],
                "value": event["value"],
                "lead_steps": None if departed is None else departed - event["batch"],
            }
            for signal, event in first.items()
        },
        "alarms_before_the_outliers": [e for e in seen if e["action"] == "alarm" and e["batch"] < START],
        "actions": [e for e in acted if e["action"] in ("demote", "promote")],
        "alarms_outside_the_outlier_blocks": sorted(
            {e["unit"] for e in acted if e["action"] == "alarm"} - {f"layer_{i:03d}" for i in OUTLIER_BLOCKS}
        ),
    }


def healthy_runs(steps: int, count: int) -> dict:
    """Runs without outliers, one a seed: every alarm is a false one."""
    alarms = []
    for seed in range(count):
        losses, events = run(steps, seed, fp8=True, outliers=False, actions=["demote"])
        alarms.append([e for e in events if e["action"] == "alarm"])
        print(f"healthy run {seed}: final loss {tail(losses):.4f}, {len(alarms[-1])} alarms", flush=True)
    return {
        "healthy_runs": count,
        "healthy_runs_with_alarms": sum(bool(found) for found in alarms),
        "false_alarms": [alarm for found in alarms for alarm in found],
    }


def show_outliers(result: dict) -> None:
    print(f"\nfinal loss, mean of the last {TAIL} of {result['steps']} steps")
    for name, value in result["final_loss"].items():
        print(f"  {name:34s} {value:8.4f}")
    without, guarded = (result[f"{x}_guard_over_high_precision"] for x in ("without", "with"))
    print(f"  against high precision: {without:+.1%} without the guard, {guarded:+.2%} with it")
    print(
        f"\noutliers grow from step {result['outliers_from_step']}; the loss of FP8 without guard leaves that of high "
        f"precision by 10 % at step {result['loss_departed_at_step']}"
    )
    print(f"  {'signal':16s}{'first alarm':>12s}{'lead, steps':>13s}  where")
    for signal, alarm in sorted(result["first_alarm"].items(), key=lambda item: item[1]["step"]):
        print(f"  {signal:16s}{alarm['step']:12d}{alarm['lead_steps'] or '-':>13}  {alarm['unit']}")
    print("\nactions")
    for event in result["actions"]:
        print(f"  step {event['batch']:4d}  {event['unit']}  {event['action']}  {event['signal']}")


def show_healthy(result: dict) -> None:
    print(f"\nhealthy runs with an alarm: {result['healthy_runs_with_alarms']} of {result['healthy_runs']}")
    for alarm in result["false_alarms"]:
        print(
            f"  step {alarm['batch']}  {alarm['unit']}  {alarm['signal']}  {alarm['value']:.4g} > {alarm['threshold']:.4g}"
        )


def finite(value):
    """The same without NaN and Inf, which are not JSON."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["all", "outliers", "healthy"], default="all")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--healthy", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    logging.getLogger("composer").setLevel(logging.ERROR)
    began = time.perf_counter()
    result: dict = {"steps": args.steps, "seed": args.seed}
    if args.part in ("all", "outliers"):
        result |= grown_outliers(args.steps, args.seed)
        show_outliers(result)
    if args.part in ("all", "healthy"):
        result |= healthy_runs(args.steps, args.healthy)
        show_healthy(result)
    result |= {
        "guard": GUARD,
        "seconds": time.perf_counter() - began,
        "load_average": os.getloadavg(),
        "device": platform.processor() or platform.machine(),
        "versions": {
            "torch": torch.__version__,
            "composer": composer.__version__,
            "transformers": transformers.__version__,
        },
    }
    text = json.dumps(finite(result))
    if args.out:
        with open(args.out, "w") as file:
            file.write(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
