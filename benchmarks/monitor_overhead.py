"""What each monitor costs, as a share of a training step.

Two measurements of the same runs. *Attributed*: the CPU time of the training thread inside the monitor's events and hooks,
over that of the rest of the steps; it holds on a busy machine, and on a CPU it is all there is (on a GPU it is host time
only). *A/B*: the median wall time of a step with the monitor against without, runs interleaved; it needs a quiet machine.

    python benchmarks/monitor_overhead.py [--width 256] [--layers 4] [--length 256] [--rows 8] [--interval 10]
                                          [--steps 43] [--repeats 3] [--device cpu] [--out results.json]

Prints a table; the last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import platform
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import composer
import torch
import torch.nn.functional as F
import transformers
from composer import Trainer
from composer.core import Callback
from composer.models import ComposerModel

from foundry_fp8.algorithms.fp8 import FP8
from foundry_fp8.callbacks.divergence_guard import DivergenceGuard
from foundry_fp8.callbacks.fp8_monitor import FP8Monitor
from foundry_fp8.callbacks.kurtosis_monitor import KurtosisMonitor
from foundry_fp8.callbacks.mfu_monitor import MFUMonitor

VOCAB = 1024
WARMUP = 3
PEAKS = {"fp32": 1e12, "bf16": 1e12, "fp8": 2e12}


class Decoder(ComposerModel):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=args.width, intermediate_size=args.width * 8 // 3 // 16 * 16, num_hidden_layers=args.layers,
            num_attention_heads=max(args.width // 64, 1), vocab_size=VOCAB, use_cache=False,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, batch):
        return self.model(**batch).logits

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs[:, :-1].reshape(-1, VOCAB), batch["input_ids"][:, 1:].reshape(-1))


class Clock(Callback):
    """Wall and CPU seconds of every step, from data to BATCH_END."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.spent = 0.0
        """CPU seconds inside the monitor since the warm-up."""

    def before_dataloader(self, state, logger):
        if state.timestamp.batch.value == WARMUP:
            self.spent = 0.0
        self._began = time.perf_counter(), time.thread_time()

    def before_train_batch(self, state, logger):
        if state.device._device.type == "cuda":
            torch.cuda.synchronize()

    def batch_checkpoint(self, state, logger):
        if state.device._device.type == "cuda":
            torch.cuda.synchronize()
        self.wall.append(time.perf_counter() - self._began[0])
        self.cpu.append(time.thread_time() - self._began[1])

    def attribute(self, monitor) -> None:
        """Count the time inside ``monitor``: its events, and the hooks that it hangs into the model."""
        inside = False

        def timed(function):
            @functools.wraps(function)
            def run(*args, **kwargs):
                nonlocal inside
                if inside:
                    return function(*args, **kwargs)
                inside, began = True, time.thread_time()
                try:
                    return function(*args, **kwargs)
                finally:
                    self.spent += time.thread_time() - began
                    inside = False

            return run

        guarded = monitor.guarded
        monitor.guarded = lambda function: timed(guarded(function))
        monitor.run_event = timed(monitor.run_event)


def run(args: argparse.Namespace, build) -> Clock:
    model, clock = Decoder(args), Clock()
    monitor = build()
    if monitor is not None:
        clock.attribute(monitor)
    data = [{"input_ids": row} for row in torch.randint(0, VOCAB, (args.steps * args.rows, args.length))]
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=args.rows),
        max_duration=f"{args.steps}ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        algorithms=[FP8(recipe="delayed")],
        callbacks=[clock] if monitor is None else [monitor, clock],
        device="gpu" if args.device == "cuda" else "cpu",
        precision="amp_bf16" if args.device == "cuda" else "fp32",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    if monitor is not None and monitor.failed is not None:
        raise RuntimeError(f"{monitor.key} failed: {monitor.failed}")
    return clock


def measure(args: argparse.Namespace) -> dict:
    builds = {
        "none": lambda: None,
        "mfu_monitor": lambda: MFUMonitor(interval=args.interval, peak_flops=PEAKS),
        "kurtosis_monitor": lambda: KurtosisMonitor(interval=args.interval),
        "fp8_monitor": lambda: FP8Monitor(interval=args.interval),
        "divergence_guard": lambda: DivergenceGuard(interval=args.interval),
    }
    clocks: dict[str, list[Clock]] = {name: [] for name in builds}
    for _ in range(args.repeats):
        for name, build in builds.items():
            clocks[name].append(run(args, build))
    rows = {}
    plain = statistics.median(t for clock in clocks["none"] for t in clock.wall[WARMUP:])
    for name in list(builds)[1:]:
        shares = [clock.spent / (sum(clock.cpu[WARMUP:]) - clock.spent) for clock in clocks[name]]
        # The mean, because a due batch costs more than the others; of medians, because the machine has its own ideas.
        wall = [statistics.mean(clock.wall[WARMUP:]) for clock in clocks[name]]
        without = [statistics.mean(clock.wall[WARMUP:]) for clock in clocks["none"]]
        rows[name] = {
            "attributed_share": statistics.median(shares),
            "attributed_range": [min(shares), max(shares)],
            "ab_wall_share": statistics.median(wall) / statistics.median(without) - 1,
        }
    return {
        "rows": rows,
        "step_seconds_without": plain,
        "step_seconds_spread": [min(clocks["none"][0].wall[WARMUP:]), max(clocks["none"][0].wall[WARMUP:])],
        "settings": vars(args),
        "load_average": os.getloadavg(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "composer": composer.__version__, "transformers": transformers.__version__},
    }  # fmt: skip


def show(result: dict) -> None:
    settings = result["settings"]
    print(f"\nevery {settings['interval']} batches; a step without monitors takes {result['step_seconds_without'] * 1e3:.1f} ms "
          f"(width {settings['width']}, {settings['layers']} layers, {settings['rows']} x {settings['length']} tokens); "
          f"load {result['load_average'][0]:.1f}")  # fmt: skip
    print(f"  {'monitor':20s}{'attributed':>12s}{'range':>20s}{'A/B wall':>12s}")
    for name, row in result["rows"].items():
        low, high = row["attributed_range"]
        print(
            f"  {name:20s}{row['attributed_share']:12.2%}{f'{low:.2%} .. {high:.2%}':>20s}{row['ab_wall_share']:12.1%}"
        )
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (
        ("width", 256),
        ("layers", 4),
        ("length", 256),
        ("rows", 8),
        ("interval", 10),
        ("steps", 43),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out")
    args = parser.parse_args()
    logging.getLogger("composer").setLevel(logging.ERROR)
    result = measure(args)
    show(result)
    if args.out:
        with open(args.out, "w") as file:
            file.write(json.dumps(result) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
