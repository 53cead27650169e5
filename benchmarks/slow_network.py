"""Step time of data-parallel training over a slow network, uncompressed and compressed.

Each host is a network namespace of this machine. They are joined by veth links (two hosts) or a bridge (more), shaped
with tc's token bucket filter, and a small GPT is trained over them with gloo, one rank a host. Bytes are read from the
kernel's own counters of each link, besides those that the process group counted. Needs root and iproute2.

    sudo python benchmarks/slow_network.py --gbit 1 --hosts 2 --steps 12
    sudo python benchmarks/slow_network.py --gbit 10 --steps 298 --width 128 --layers 2 --vocabulary 512 --batch 8   # losses

The last line printed is JSON; --out writes it to a file too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

MODES = {
    "default": {"adapt": True},
    "fp32": None,
    "bf16 (torch bf16_compress_hook)": "torch",
    "bf16": {"gradients": "bf16", "second_leg": "bf16"},
    "int8": {"gradients": "int8", "second_leg": "int8", "error_feedback": False},
    "int8 + error feedback": {"gradients": "int8", "second_leg": "int8"},
    "int8, second leg bf16": {"gradients": "int8", "second_leg": "bf16"},
    "e4m3 + error feedback": {"gradients": "e4m3", "second_leg": "e4m3"},
    "int4 + error feedback": {"gradients": "int4", "second_leg": "int4"},
    "int4 two hops": {"gradients": "int4", "second_leg": "int8", "scope": "inter_node"},
}
PREFIX = "fp8slow"


def shell(command: str, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=not check)


def make_network(hosts: int, gbit: float) -> None:
    """Namespaces fp8slow0.. with 10.77.0.1.. on a bridge; every host's egress is shaped to ``gbit``."""
    remove_network(hosts)
    for host in range(hosts):
        shell(f"ip link del {PREFIX}o{host}", check=False)  # what a killed run left
    shell(f"ip link add {PREFIX}br type bridge")
    shell(f"ip link set {PREFIX}br up")
    for host in range(hosts):
        name, inside, outside = f"{PREFIX}{host}", f"{PREFIX}i{host}", f"{PREFIX}o{host}"
        shell(f"ip netns add {name}")
        shell(f"ip link add {outside} type veth peer name {inside}")
        shell(f"ip link set {inside} netns {name}")
        shell(f"ip link set {outside} master {PREFIX}br")
        shell(f"ip link set {outside} up")
        shell(f"ip -n {name} addr add 10.77.0.{host + 1}/24 dev {inside}")
        shell(f"ip -n {name} link set {inside} up")
        shell(f"ip -n {name} link set lo up")
        rate = f"{int(gbit * 1000)}mbit"
        shell(f"tc -n {name} qdisc add dev {inside} root tbf rate {rate} burst 256kb latency 50ms")


def remove_network(hosts: int) -> None:
    for host in range(hosts):
        shell(f"ip netns del {PREFIX}{host}", check=False)
    shell(f"ip link del {PREFIX}br", check=False)


def launch(arguments: argparse.Namespace) -> list[dict]:
    """Run one worker a rank in its namespace; returns rank 0's results."""
    make_network(arguments.hosts, arguments.gbit)
    world = arguments.hosts * arguments.ranks
    out = Path(f"/tmp/{PREFIX}-{os.getpid()}.json")
    try:
        workers = []
        for rank in range(world):
            host = rank // arguments.ranks
            env = dict(
                os.environ,
                RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_RANK=str(rank % arguments.ranks),
                LOCAL_WORLD_SIZE=str(arguments.ranks),
                MASTER_ADDR="10.77.0.1",
                MASTER_PORT="29777",
                GLOO_SOCKET_IFNAME=f"{PREFIX}i{host}",
                OMP_NUM_THREADS="1",
                RESULT_FILE=str(out),
                PYTHONPATH=os.pathsep.join(
                    [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
                ),
            )
            command = ["ip", "netns", "exec", f"{PREFIX}{host}", sys.executable, __file__, "--worker"]
            workers.append(subprocess.Popen([*command, *sys.argv[1:]], env=env))
        codes = [worker.wait(timeout=arguments.timeout) for worker in workers]
        if any(codes):
            raise SystemExit(f"workers ended with {codes}")
        return json.loads(out.read_text())
    finally:
        for worker in workers:
            worker.kill()
        out.unlink(missing_ok=True)
        remove_network(arguments.hosts)


def link_bytes(interface: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def worker(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    from foundry_fp8.distributed.compressed_group import WAYS
    from foundry_fp8.distributed.compression.adapt import BATCHES, START
    from foundry_fp8.distributed.compression.apply import apply_compressed_communication

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    rank, world = dist.get_rank(), dist.get_world_size()
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    # ip netns exec mounts its own /sys, so the counters there are this namespace's.
    results = []
    for name in arguments.modes:
        torch.manual_seed(0)
        model = DistributedDataParallel(GPT(arguments), gradient_as_bucket_view=True)
        compression = None
        if MODES[name] == "torch":
            model.register_comm_hook(None, bf16_compress_hook)
        elif MODES[name] is not None:
            options = {"warmup": 0, "sample_interval": 0, "scope": "all", "adapt": False, **MODES[name]}
            compression = apply_compressed_communication(model, **options)
            compression.start_batch(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
        times, losses, sent, computed = [], [], [], []
        adapting = compression is not None and compression.adaptation is not None
        skip = START + len(WAYS) * BATCHES + 1 if adapting else arguments.skip
        steps = arguments.steps + skip
        for step in range(steps):
            if adapting:
                compression.start_batch(step)
            tokens = batch(step * world + rank, arguments)
            dist.barrier()
            before, begin = link_bytes(interface), time.perf_counter()
            loss = model(tokens)
            loss.backward()
            computed.append(time.perf_counter() - begin)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            if step >= skip:
                times.append(time.perf_counter() - begin)
                sent.append(link_bytes(interface) - before)
            losses.append(loss.detach())
        mean_losses = torch.stack(losses)
        dist.all_reduce(mean_losses)
        tail = (mean_losses / world)[-20:].mean().item()
        slowest = torch.tensor(statistics.median(times))
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        row = {
            "mode": name,
            "step_seconds": float(slowest),
            "step_seconds_spread": [min(times), max(times)],
            "link_bytes_per_step": statistics.median(sent),
            "counted_bytes_per_step": compression.traffic.wire_bytes / steps if compression else None,
            "quantize_seconds_per_step": compression.traffic.seconds["quantize"] / steps
            if compression
            else None,
            "loss_last_20": tail,
            "verdict": compression.adaptation.verdict if adapting else None,
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        results.append(row)
        if rank == 0:
            print(f"{name:34s} {row['step_seconds'] * 1e3:9.1f} ms a step", flush=True)
        del model, optimizer, compression
    if arguments.compute:
        model, times = GPT(arguments), []
        for step in range(5):
            begin = time.perf_counter()
            model(batch(step, arguments)).backward()
            times.append(time.perf_counter() - begin)
        results.append({"mode": "compute alone", "step_seconds": statistics.median(times)})
    if rank == 0:
        Path(os.environ["RESULT_FILE"]).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def GPT(arguments: argparse.Namespace):
    """A pre-norm decoder with tied sizes, large against its batch, so that gradients dominate."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
            self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
            self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, d = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 8, d // 8).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d = arguments.width
            self.embedding = nn.Embedding(arguments.vocabulary, d)
            self.blocks = nn.ModuleList([Block(d) for _ in range(arguments.layers)])
            self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, arguments.vocabulary, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens[:, :-1])
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Decoder()


def batch(number: int, arguments: argparse.Namespace):
    """Text with structure: a noisy walk through a fixed permutation of the vocabulary, so that there is much to learn."""
    import torch

    fixed = torch.Generator().manual_seed(1)
    after = torch.randperm(arguments.vocabulary, generator=fixed)
    generator = torch.Generator().manual_seed(1000 + number)
    tokens = torch.empty(arguments.batch, arguments.length + 1, dtype=torch.long)
    tokens[:, 0] = torch.randint(0, arguments.vocabulary, (arguments.batch,), generator=generator)
    for t in range(arguments.length):
        jump = torch.rand(arguments.batch, generator=generator) < 0.15
        random = torch.randint(0, arguments.vocabulary, (arguments.batch,), generator=generator)
        tokens[:, t + 1] = torch.where(jump, random, after[tokens[:, t]])
    return tokens


def table(results: list[dict]) -> str:
    by_mode = {row["mode"]: row for row in results}
    base = by_mode["fp32"]["step_seconds"] if "fp32" in by_mode else None
    hook = by_mode.get("bf16 (torch bf16_compress_hook)", {}).get("step_seconds")
    lines = [
        "| mode | ms a step | x fp32 | x bf16 hook | MB on the link a step | loss, last 20 steps |",
        "|---|---|---|---|---|---|",
    ]
    for row in results:
        if "loss_last_20" not in row:
            lines.append(f"| {row['mode']} | {row['step_seconds'] * 1e3:.0f} | | | | |")
            continue
        ratios = [f"{b / row['step_seconds']:.2f}" if b else "" for b in (base, hook)]
        lines.append(
            f"| {row['mode']} | {row['step_seconds'] * 1e3:.0f} | {ratios[0]} | {ratios[1]} "
            f"| {row['link_bytes_per_step'] / 1e6:.1f} | {row['loss_last_20']:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="ranks a host")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--skip", type=int, default=2, help="first steps that are not timed")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument(
        "--modes", nargs="*", choices=list(MODES), default=[m for m in MODES if "hops" not in m]
    )
    parser.add_argument(
        "--compute", action="store_true", help="time forward and backward without a network too"
    )
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    load_before = os.getloadavg()
    results = launch(arguments)
    import torch

    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python benchmarks/slow_network.py " + " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "settings": {k: v for k, v in vars(arguments).items() if k not in ("out", "worker")},
        "results": results,
    }
    print(table(results))
    print(json.dumps(record, default=str))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
