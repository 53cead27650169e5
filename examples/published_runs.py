"""The runs of published FP8 studies: how each is started, how fast it is on paper, or trained small on a CPU.

python examples/published_runs.py aws                  # the commands of every node; then foundry-fp8 compare runs
python examples/published_runs.py aws --plan           # predicted beside published
python examples/published_runs.py fog-models --small out
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import foundry_fp8
from foundry_fp8.cli.predicted import planned
from foundry_fp8.cli.quiet import quiet

YAMLS = Path(foundry_fp8.__file__).parent / "yamls" / "pretrain"
PER_NODE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One run of a study."""

    name: str
    yaml: str
    nodes: int
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Dotted keys of the YAML."""
    over: str = ""
    """The run that it was compared with."""
    published: float | None = None
    """How many times as fast as that one."""
    gpu: str = "h100"

    def dotlist(self) -> list[str]:
        """The command line's ``key=value``."""
        given = {"run_name": self.name, **self.changes}
        return [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in given.items()
        ]


def twins(yaml: str, nodes: int, published: Mapping[str, Any], changes: Mapping[str, Any], name: str = "") -> Iterator[PublishedRun]:  # fmt: skip
    """A run in BF16 and one for each recipe, ``{recipe: published}``, mxfp8 on a B200; all with the same ``changes``."""
    name = name or yaml
    for gpu in dict.fromkeys("b200" if recipe == "mxfp8" else "h100" for recipe in published):
        base, of_gpu = (
            f"{name}-bf16{'-b200' * (gpu == 'b200')}",
            [r for r in published if (r == "mxfp8") == (gpu == "b200")],
        )
        off = {**changes, "algorithms.fp8.enabled": False}
        yield PublishedRun(name=base, yaml=yaml, nodes=nodes, changes=off, gpu=gpu)
        for recipe in of_gpu:
            more = {**changes, "algorithms.fp8.recipe": recipe}
            yield PublishedRun(name=f"{name}-{recipe}", yaml=yaml, nodes=nodes, changes=more, over=base, published=published[recipe], gpu=gpu)  # fmt: skip


def databricks() -> Iterator[PublishedRun]:
    """ "Turbocharged Training", figure 3: the losses of MPT-13B over 1,000 steps; figure 1: 1.4 to 1.5 times as fast on 64 H100."""
    yield from twins("mpt-13b", 8, {"delayed": 1.45}, {"max_duration": "1000ba"})


AWS = {
    "mpt-1b": (1.015, 1.081, 1.063, 1.094, 1.113, 1.134),
    "mpt-7b": (1.176, 1.144, 1.140, 1.124, 1.161, 1.228),
}
"""FP8's tokens a second over BF16's on 1, 2, 4, 8, 16 and 32 nodes (both tables of the page)."""


def aws() -> Iterator[PublishedRun]:
    """ "How FP8 boosts LLM training by 18% on Amazon SageMaker P5 instances": 24 billion tokens on 1 to 32 nodes."""
    for model, rates in AWS.items():
        for i, rate in enumerate(rates):
            changes = {"max_duration": "24_000_000_000tok"}
            if i == 5:  # a step's sequences over 256 GPUs
                changes["device_train_microbatch_size"] = 2 if model == "mpt-1b" else 4
            yield from twins(model, 2**i, {"delayed": rate}, changes, f"{model}-{2**i}-nodes")


def nemo() -> Iterator[PublishedRun]:
    """NVIDIA, "Faster Training Throughput in FP8 Precision with NeMo": recipes by size; MXFP8 1.28 to 1.37 on B200, by its middle."""
    sizes = {"llama-3-8b": (1, None), "llama-3-70b": (8, 1.43), "llama-3.1-405b": (64, 1.53)}
    for yaml, (nodes, current) in sizes.items():
        yield from twins(
            yaml, nodes, {"delayed": None, "current": current, "block": None, "mxfp8": 1.325}, {}
        )


FOG_MODELS = {
    "fog-8b": {"llama3-smooth-swiglu": 1.343, "fog-max": 1.355, "fog-opt": 1.363, "fog-flash": 1.402},
    "fog-390m": {"llama3-smooth-swiglu": 1.181, "fog-max": 1.152, "fog-opt": 1.159, "fog-flash": 1.180},
}


def fog_models() -> Iterator[PublishedRun]:
    """FOG's poster (NeurIPS 2025), table 2: over BF16 Llama3. Its linears alone run FP8 in the SwiGLU baseline."""
    for yaml, variants in FOG_MODELS.items():
        yield from _fog(yaml, "", {v: (rate, {}) for v, rate in variants.items()}, {})


def fog_contexts() -> Iterator[PublishedRun]:
    """Table 3, its rows without tensor parallelism: longer contexts, as many tokens a step. yamls/pretrain/fog-8b-16k.yaml is of the others."""
    for length, rates in {4096: (1.426, 1.385), 8192: (1.435, None)}.items():
        changes = {"variables.max_seq_len": length, "global_train_batch_size": 512 * 4096 // length}
        variants = {
            v: (rate, {}) for v, rate in zip(("fog-flash", "llama3-smooth-swiglu"), rates, strict=True)
        }
        yield from _fog("fog-8b", f"-{length}", variants, changes)


def fog_recipes() -> Iterator[PublishedRun]:
    """Table 4: recipes on 8B models."""
    block = {"algorithms.fp8.recipe": "block", "algorithms.fp8.attention": False}
    linears = {"algorithms.fp8.attention": False}
    variants = {
        "llama3": (1.179, block),
        "op1": (1.281, linears),
        "llama3-smooth-swiglu": (1.382, linears),
        "fog-flash": (1.426, {}),
    }
    yield from _fog("fog-8b", "-recipes", variants, {})


def fog_tasks() -> Iterator[PublishedRun]:
    """Table 1: BF16 and FP8DPA of every variant, for a table of tasks (add ``icl_tasks``, as the YAML says)."""
    for yaml in ("fog-390m", "fog-1.5b"):
        yield from _fog(yaml, "-tasks", {v: (None, {}) for v in ("fog-max", "fog-opt", "fog-flash")}, {})
        for variant in ("fog-max", "fog-opt", "fog-flash"):
            changes = {"variables.variant": variant, "algorithms.fp8.enabled": False}
            yield PublishedRun(name=f"{yaml}-tasks-{variant}-bf16", yaml=yaml, nodes=4, changes=changes)


def fog_long() -> Iterator[PublishedRun]:
    """450 billion tokens, fifteen times what is optimal."""
    yield PublishedRun(
        name="fog-1.5b-450b", yaml="fog-1.5b", nodes=8, changes={"max_duration": "450_000_000_000tok"}
    )


def _fog(
    yaml: str, name: str, variants: Mapping[str, Any], changes: Mapping[str, Any]
) -> Iterator[PublishedRun]:
    nodes, base = 8 if yaml == "fog-8b" else 4, f"{yaml}{name}-llama3-bf16"
    off = {**changes, "variables.variant": "llama3", "algorithms.fp8.enabled": False}
    yield PublishedRun(name=base, yaml=yaml, nodes=nodes, changes=off)
    for variant, (published, more) in variants.items():
        attention = {} if variant.startswith("fog") else {"algorithms.fp8.attention": False}
        own = {**changes, "variables.variant": variant, **attention, **more}
        yield PublishedRun(
            name=f"{yaml}{name}-{variant}-fp8",
            yaml=yaml,
            nodes=nodes,
            changes=own,
            over=base,
            published=published,
        )


STUDIES = {
    "databricks": databricks,
    "aws": aws,
    "nemo": nemo,
    "fog-models": fog_models,
    "fog-contexts": fog_contexts,
    "fog-recipes": fog_recipes,
    "fog-tasks": fog_tasks,
    "fog-450b": fog_long,
}


def command(run: PublishedRun) -> str:
    """What starts ``run`` on each of its nodes."""
    ranks = f"composer -n {PER_NODE}"
    if run.nodes > 1:
        ranks += f" --world_size {PER_NODE * run.nodes} --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port 7501"
    return f"{ranks} -m llmfoundry.cli.cli train yamls/pretrain/{run.yaml}.yaml {' '.join(run.dotlist())}"


def configured(run: PublishedRun) -> Any:
    """Its YAML, as OmegaConf has it."""
    from omegaconf import OmegaConf

    config = OmegaConf.load(YAMLS / f"{run.yaml}.yaml")
    return OmegaConf.merge(config, OmegaConf.from_dotlist(run.dotlist()))


def tokens_per_second(run: PublishedRun) -> float:
    """Of a GPU, as ``foundry-fp8 plan speed`` predicts it."""
    from omegaconf import OmegaConf

    from foundry_fp8.cli.plan_communication import workload_of

    config: Any = OmegaConf.to_container(configured(run), resolve=True)
    there = planned(config, run.gpu)
    recipe = there.report.recipe if there.fp8.enabled else None
    return there.speed(workload_of(config, there.model), PER_NODE * run.nodes, recipe)[0]


def plan(runs: list[PublishedRun]) -> Iterator[str]:
    """A line a run."""
    rates: dict[str, float] = {}
    yield f"{'run':40} {'GPUs':>5} {'GPU':>5} {'tokens/s a GPU':>15} {'over':>6} {'published':>10}"
    for run in runs:
        with quiet():
            rates[run.name] = rate = tokens_per_second(run)
        over = f"{rate / rates[run.over]:6.2f}" if run.over else ""
        yield f"{run.name:40} {PER_NODE * run.nodes:5d} {run.gpu:>5} {rate:15.0f} {over:>6} {run.published or '':>10}"


SMALL = {
    "mpt_causal_lm": {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 512, "attn_config.attn_impl": "torch", "loss_fn": "torch_crossentropy",
    },
    "fog_causal_lm": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
    "hf_causal_lm": {"use_flash_attention_2": False},
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


def small(run: PublishedRun, folder: Path, data: Path, steps: int) -> Any:
    """The YAML of ``run`` with its model, batches and length small enough for a CPU; one process, so nothing is sharded."""
    from omegaconf import OmegaConf

    config = configured(run)
    config.model.pop("size", None)
    for key, value in {**SMALL[config.model.name], "init_device": "cpu"}.items():
        OmegaConf.update(config, f"model.{key}", value)
    if config.model.name == "hf_causal_lm":
        (data / "tokenizer" / "config.json").write_text(json.dumps(LLAMA))
        config.variables.model_name = str(data / "tokenizer")
    else:
        config.variables.tokenizer_name = str(data / "tokenizer")
    config.variables.update(data_local=str(data), max_seq_len=64)
    loader = {"num_workers": 0, "persistent_workers": False, "prefetch_factor": None, "pin_memory": False}
    config.train_loader.update(loader)
    for key in (
        "eval_loader",
        "fsdp_config",
        "save_interval",
        "save_folder",
        "save_num_checkpoints_to_keep",
        "device_eval_batch_size",
    ):
        config.pop(key, None)
    for name in ("activation_checkpointing", "hybrid_sharding", "compressed_communication"):
        config.algorithms.pop(name, None)
    config.callbacks = {}
    config.loggers = {"run_log": {"path": str(folder / run.name / "run_log.jsonl")}}
    config.update(
        max_duration=f"{steps}ba", eval_interval=0, global_train_batch_size=4, device_train_microbatch_size=4, precision="fp32",
    )  # fmt: skip
    config.scheduler.t_warmup = "0ba"
    return config


def train_small(runs: list[PublishedRun], folder: Path, steps: int) -> None:
    """Train ``runs`` one after the other in emulated FP8, and print their table."""
    from omegaconf import OmegaConf

    from foundry_fp8.cli.training import train_command
    from foundry_fp8.data import prepare_data

    data = prepare_data(folder / "data", vocab_size=512, sequence_length=64, say=print).folder
    for run in runs:
        path = folder / f"{run.name}.yaml"
        OmegaConf.save(small(run, folder / "runs", data, steps), path)
        subprocess.run(train_command(path, {}), check=True)
    table = ("compare", folder / "runs", "--output", folder / "report")
    subprocess.run([sys.executable, "-m", "foundry_fp8.cli.main", *map(str, table)], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument(
        "--plan",
        action="store_true",
        help="Tokens a second of each run, predicted, beside what was published.",
    )
    parser.add_argument("--small", type=Path, metavar="FOLDER", help="Train each run small on this CPU.")
    parser.add_argument("--steps", type=int, default=8, help="Of the small runs.")
    given = parser.parse_args()
    chosen = list(STUDIES[given.study]())
    if given.small is not None:
        train_small(chosen, given.small, given.steps)
    else:
        for line in plan(chosen) if given.plan else map(command, chosen):
            print(line, flush=True)
