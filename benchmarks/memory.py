"""Peak memory and step time of checkpointing, compression and plans, on the demo model and a 12-layer Llama-style model.

    python benchmarks/memory.py [--models demo llama] [--repeats 5] [--save memory_cpu_DATE]
    python benchmarks/memory.py --train          # 300-step losses over 3 seeds, with and without compression
    python benchmarks/memory.py --coat           # end-to-end reduction against bfloat16, counted as COAT does
    python benchmarks/memory.py --head           # a head of 128k words, counted on fake tensors

Peak is parameters, gradients and activations of one step (no optimizer state): the CUDA allocator on a GPU, every live
storage (``foundry_fp8.planning.memory.live_bytes.LiveBytes``) on a CPU. Cases are timed in turn; the figure is the median of
the ratios to ``none`` within one round. A plan's column "predicted" is what the planner said before the case ran.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, environment, interleaved, keep_freed_memory, median_ratio, save
from torch import Tensor, nn
from torch_ilp import TorchPlanner, missing
from transformers import LlamaConfig, LlamaForCausalLM

from foundry_fp8.activations.checkpointing.apply import apply_activation_checkpointing
from foundry_fp8.activations.compression.apply import apply_activation_compression
from foundry_fp8.activations.fused_head.apply import apply_fused_head
from foundry_fp8.compat.fake_tensor import FakeTensorMode
from foundry_fp8.planning.memory.live_bytes import meter_for
from foundry_fp8.planning.memory.planner import apply_plan, choose, measure
from foundry_fp8.surgery.apply import apply_fp8

ROUNDS = 30
"""Timed runs of each of the planner's options: more than its default, as CPUs are noisy."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def llama(layers: int = 12, width: int = 256, vocab: int = 2048) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        vocab_size=vocab,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def demo() -> nn.Module:
    """The model of yamls/demo/mpt-gqa.yaml."""
    from llmfoundry.models import ComposerMPTCausalLM

    torch.manual_seed(0)
    model = ComposerMPTCausalLM(
        d_model=256,
        n_heads=4,
        n_layers=4,
        expansion_ratio=4,
        max_seq_len=256,
        vocab_size=2048,
        no_bias=True,
        norm_type="layernorm",
        learned_pos_emb=False,
        attn_config={
            "attn_type": "grouped_query_attention",
            "attn_impl": "torch",
            "kv_n_heads": 2,
            "rope": True,
            "rope_impl": "hf",
        },
        loss_fn="torch_crossentropy",
        use_train_metrics=False,
    )
    return model.to(DEVICE)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "demo": (demo, (8, 256)),
    "llama": (llama, (4, 256)),
}


def loss_of(model: Any, tokens: Tensor, autocast: bool = False) -> Callable[[], Tensor]:
    """A step's forward; the output, and with it the logits, lives until backward is over, as in Composer's trainer."""
    held: list[Any] = [None]

    def run() -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=autocast):
            held[0] = None
            if isinstance(model, LlamaForCausalLM):
                held[0] = model(input_ids=tokens, labels=tokens)
                return held[0].loss
            batch = {"input_ids": tokens, "labels": tokens}
            held[0] = model(batch)
            return model.loss(held[0], batch)

    return run


def peak_of(model: nn.Module, run: Callable[[], Tensor]) -> int:
    """Peak bytes of a step, parameters and buffers included."""
    for _ in range(2):  # the first step may build tables that later ones share
        model.zero_grad(set_to_none=True)
        with meter_for(DEVICE) as meter:
            run().backward()
            peak = meter.peak
    model.zero_grad(set_to_none=True)
    return peak + sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def table(name: str, repeats: int) -> list[dict[str, Any]]:
    build, shape = MODELS[name]
    tokens = torch.randint(0, 2048, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    layers = 4 if name == "demo" else 12
    first = -(-layers // 8)  # 5 of the reference run's 40
    block, attention = (
        ("mptblock", "grouped_query_attention") if name == "demo" else ("LlamaDecoderLayer", "LlamaAttention")
    )
    planned_on = build()
    measured = measure(planned_on, loss_of(planned_on, tokens), compression="int8", rounds=ROUNDS)
    smallest = measured.peak("block")
    none = measured.peak("none")
    budgets = {
        "at full's peak": smallest,
        "1/4 above": smallest + (none - smallest) // 4,
        "1/2 above": smallest + (none - smallest) // 2,
    }
    cases: dict[str, Callable[[nn.Module], int | None]] = {
        "none": lambda m: None,
        "full": lambda m: apply_activation_checkpointing(m) and None,
        "every second block": lambda m: (
            apply_activation_checkpointing(m, targets={block: "every-2"}) and None
        ),
        f"foundry: {block} first-{first}, {attention} last-{layers - first}": lambda m: (
            apply_activation_checkpointing(
                m, targets={block: f"first-{first}", attention: f"last-{layers - first}"}
            )
            and None
        ),
        "selective": lambda m: apply_activation_checkpointing(m, policy="selective") and None,
        "compression exact": lambda m: apply_activation_compression(m, format="exact") and None,
        "compression int8": lambda m: apply_activation_compression(m) and None,
        "compression int8, fp8 linears": lambda m: (
            apply_fp8(m, recipe="current", backend="emulated") and apply_activation_compression(m) and None
        ),
    }
    without = measure(planned_on, loss_of(planned_on, tokens), compression="none", rounds=ROUNDS)
    for label, budget in budgets.items():
        for kind, m in (("checkpointing", without), ("checkpointing and compression", measured)):
            plan = choose(m, f"{budget}B")
            print(f"\n{name}: planner, {kind}, {label}\n{plan}")
            cases[f"planner {kind}, {label}"] = lambda model, plan=plan: (
                apply_plan(model, plan) and plan.predicted_peak
            )
    theirs = None
    if name == "llama":  # MPT's loss asks for values
        if absent := missing():
            print(
                f"\n{name}: torch's integer programme is left out: {', '.join(absent)} not installed (extra benchmarks)"
            )
        else:
            theirs = TorchPlanner(build, loss_of, shape)
    for label, budget in budgets.items() if theirs else ():
        if plan := theirs.plan(budget):
            cases[f"torch's integer programme, {label}"] = lambda model, plan=plan: (
                plan.apply(model) or plan.predicted_peak
            )
        else:
            print(f"\n{name}: torch's integer programme finds no plan {label}")
    del planned_on
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], object]] = {}
    for label, apply in cases.items():
        model = build()
        predicted = apply(model)
        run = loss_of(model, tokens)
        print(f"{name}: {label}", flush=True)
        rows[label] = {"case": label, "peak_bytes": peak_of(model, run), "predicted_bytes": predicted}

        def step(model: nn.Module = model, run: Callable[[], Tensor] = run) -> None:
            model.zero_grad(set_to_none=True)
            run().backward()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()

        steps[label] = step
    seconds = interleaved(steps, repeats)
    for label, row in rows.items():
        row["seconds"] = statistics.median(seconds[label])
        row["time_ratio"] = median_ratio(seconds[label], seconds["none"])
        row["peak_ratio"] = row["peak_bytes"] / rows["none"]["peak_bytes"]
    full_cost = rows["full"]["time_ratio"] - 1
    for row in rows.values():
        row["recompute_of_full"] = (row["time_ratio"] - 1) / full_cost
    return list(rows.values())


def show(name: str, rows: list[dict[str, Any]]) -> str:
    shape = MODELS[name][1]
    lines = [
        f"### {name}, {shape[0]} x {shape[1]} tokens, float32",
        "",
        "| case | peak MiB | of none | predicted | step time of none | added time of full's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        off = (
            "" if not r["predicted_bytes"] else f"{100 * (r['predicted_bytes'] / r['peak_bytes'] - 1):+.2f} %"
        )
        lines.append(
            f"| {r['case']} | {r['peak_bytes'] / 2**20:.1f} | {r['peak_ratio']:.3f} | {off} | "
            f"{r['time_ratio']:.3f} | {r['recompute_of_full']:.2f} |"
        )
    return "\n".join(lines)


def plot(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(tables), figsize=(6 * len(tables), 7), squeeze=False)
    for axis, (name, rows) in zip(axes[0], tables.items(), strict=True):
        for number, r in enumerate(rows, 1):
            kind = (
                "planner"
                if r["case"].startswith("planner")
                else "compression"
                if "compr" in r["case"]
                else "rest"
            )
            colour = {"planner": "tab:blue", "compression": "tab:green", "rest": "tab:gray"}[kind]
            at = (r["time_ratio"], r["peak_bytes"] / 2**20)
            axis.scatter(*at, color=colour, label=f"{number}  {r['case']}")
            axis.annotate(str(number), at, xytext=(4, 4 if number % 2 else -10), textcoords="offset points")
        axis.set_xlabel("step time, of none")
        axis.set_ylabel("peak MiB")
        axis.set_title(name)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    figure.tight_layout()
    figure.savefig(path)


NOISE = 6.5e-3
"""Relative error of an int8 activation (Gaussian input), put on every gradient as unbiased noise in a control."""


def train(seeds: int) -> dict[str, Any]:
    """Held-out loss after 300 AdamW steps on Python source, byte by byte.

    Two controls say what of a difference is not compression's doing: ``perturbed`` scales every initial weight by
    ``1 + 1e-6`` (rounding), ``noise`` adds Gaussian noise of int8's size to the gradients (no bias at all).
    """
    source = b"".join(sorted(p.read_bytes() for p in Path(statistics.__file__).parent.glob("[a-f]*.py")))
    data = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    held_out, data = data[-65_536:].view(-1, 8, 128).to(DEVICE), data[:-65_536]
    results: dict[str, list[float]] = {}
    for seed in range(seeds):
        for case in ("none", "perturbed", "noise", "int8", "e4m3"):
            loss = _train_once(case, seed, data, held_out)
            results.setdefault(case, []).append(loss)
            print(seed, case, loss, flush=True)
    change = {
        case: [a / b - 1 for a, b in zip(values, results["none"], strict=True)]
        for case, values in results.items()
    }
    summary = {}
    for case, values in change.items():
        mean, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
        summary[case] = {"mean": mean, "standard_error": error}
        print(f"{case:10} {100 * mean:+.3f} % +- {100 * error:.3f} %")
    return {"loss": results, "relative_change": change, "summary": summary}


def _train_once(
    case: str, seed: int, data: Tensor, held_out: Tensor, steps: int = 300, warmup: int = 30
) -> float:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=2,
        vocab_size=256,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(DEVICE)
    if case == "perturbed":
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 1e-6)
    elif case in ("int8", "e4m3"):
        apply_activation_compression(model, format=case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - 128, (8,), generator=generator)
        tokens = torch.stack([data[s : s + 128] for s in starts]).to(DEVICE)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        if case == "noise":
            for p in model.parameters():
                assert p.grad is not None
                p.grad += torch.randn_like(p.grad) * (NOISE * p.grad.norm() / p.numel() ** 0.5)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return statistics.mean(model(input_ids=tokens, labels=tokens).loss.item() for tokens in held_out)


def coat() -> list[dict[str, Any]]:
    """Peak of a step with gradients and AdamW's state, bfloat16 autocast, microbatch as large as COAT's ratios assume.

    COAT (arXiv:2410.19313) divides the peak of BF16 training by its own on the same batch, weights, gradients,
    optimizer state and activations included; its own optimizer state is FP8, ours stays float32.
    """
    rows = []
    tokens = torch.randint(0, 2048, (4, 256), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for case in ("bf16", "int8", "fp8 linears, int8"):
        model = llama()
        if case.startswith("fp8"):
            apply_fp8(model, recipe="current", backend="emulated")
        if case != "bf16":
            apply_activation_compression(model)
        trained = sum(p.numel() for p in model.parameters())
        peak = peak_of(model, loss_of(model, tokens, autocast=True)) + 8 * trained
        rows.append({"case": case, "peak_bytes": peak, "parameters": trained})
    for row in rows:
        row["reduction"] = rows[0]["peak_bytes"] / row["peak_bytes"]
        print(f"{row['case']:20} {row['peak_bytes'] / 2**20:8.1f} MiB  {row['reduction']:.2f}x")
    return rows


def head() -> list[dict[str, Any]]:
    """Peak of a step of two blocks of Llama-3 8B's width with its vocabulary, 2 x 8192 tokens in bfloat16 autocast; nothing is allocated."""
    rows = []
    for case in ("logits", "fused head"):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = llama(layers=2, width=4096, vocab=128256)
            apply_activation_checkpointing(model)
            if case == "fused head":
                apply_fused_head(model).expect(
                    None
                )  # takes the loss's targets for its own: fake ones hold no values
            tokens = torch.randint(0, 128256, (2, 8192), device=DEVICE)
            held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
            peak = peak_of(model, loss_of(model, tokens, autocast=True)) - held
        rows.append({"case": case, "peak_bytes": peak, "parameter_bytes": held})
        print(f"{case:12} {peak / 2**30:6.2f} GiB beside {held / 2**30:.2f} GiB of parameters")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--tokens", type=int, nargs=2, metavar=("BATCH", "LENGTH"), help="instead of the model's own"
    )
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--seeds", type=int, default=3, help="of --train")
    parser.add_argument("--coat", action="store_true")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--save", default=None, metavar="NAME", help="write results/NAME.json, .md and .png")
    args = parser.parse_args()

    keep_freed_memory()
    if args.tokens:
        MODELS.update({name: (build, tuple(args.tokens)) for name, (build, _) in MODELS.items()})
    result: dict[str, Any] = {"benchmark": "memory", **environment()}
    if args.train:
        result["train"] = train(args.seeds)
    elif args.coat:
        result["coat"] = coat()
    elif args.head:
        result["head"] = head()
    else:
        result["tables"] = {name: table(name, args.repeats) for name in args.models}
        text = "\n\n".join(show(name, rows) for name, rows in result["tables"].items())
        print(text)
        if args.save:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{args.save}.md").write_text(text + "\n")
            plot(result["tables"], RESULTS / f"{args.save}.png")
    if args.save:
        save(args.save, result)


if __name__ == "__main__":
    main()
