"""Settings that do not go together: the one table that training raises from, ``doctor`` prints and the site's page of limits shows."""

from __future__ import annotations

import dataclasses

from foundry_fp8.activations.checkpointing.apply import BUDGET_ALONE
from foundry_fp8.activations.fused_head.apply import FLASH_LOSS
from foundry_fp8.config import Clash
from foundry_fp8.config import refuse as refuse_by
from foundry_fp8.distributed.compression.legs import LEG_CLASHES, Legs
from foundry_fp8.distributed.compression.sequence_shards import NO_SEQUENCE_SHARDS
from foundry_fp8.distributed.sharding import is_fsdp2, sharding_of
from foundry_fp8.run.settings import Run
from foundry_fp8.surgery.fp8_config import KEY, TE_LAYERS

__all__ = ["CALLBACK", "CLASHES", "KEYS", "clashes_of", "refuse"]

CALLBACK = "FP8Callback"
KEYS = {"composer": KEY, "transformers": CALLBACK, "torchtitan": "model.converters", "loop": "FP8Run"}
"""Trainer -> where its user writes FP8's options."""


def clashes_of(run: Run) -> list[Clash]:
    """The clashes that ``run`` has."""
    return [clash for clash in CLASHES if run.trainer in clash.trainers and clash.when(run)]


def refuse(run: Run) -> None:
    """Raise the first error that ``run`` has as a :class:`ConfigError`."""
    refuse_by(clashes_of(run), run)


def _unit_under_fp16(run: Run) -> bool:
    return run.precision == "amp_fp16" and run.converts is not None and run.converts.runs_unit


def _frozen_under_fsdp(run: Run) -> bool:
    return run.fsdp is not None and run.converts is not None and run.converts.frozen_weights == "fp8"


def _asks(run: Run, option: str) -> bool:
    return bool(getattr(run.fsdp, option, None))


def _hybrid(run: Run) -> bool:
    return run.hybrid_sharding is not None and run.ranks > 1


def _strategy(run: Run) -> str:
    """FSDP1's; empty where there is another wrapper."""
    return "" if run.fsdp is None or is_fsdp2(run.fsdp) else run.fsdp.sharding_strategy.upper()


def _legs(run: Run) -> Legs:
    """What ``compressed_communication`` is attached to, on several ranks."""
    assert run.compressed_communication is not None
    hybrid, fewer = run.hybrid_sharding is not None, getattr(run.fsdp, "reshard_after_forward", True)
    return Legs(
        config=run.compressed_communication,
        shards=is_fsdp2(run.fsdp) or run.shard > 1,
        replicates=run.replicate > 1 or hybrid or _asks(run, "data_parallel_replicate_degree"),
        ddp=run.fsdp is None,
        reshards_to_fewer=not isinstance(fewer, bool) and 1 < fewer < run.shard,
        drops_replication=bool(_strategy(run)) and sharding_of(run.fsdp) != "NO_SHARD" and run.shard == 1 and not hybrid,
    )  # fmt: skip


def _on_legs(clash: Clash) -> Clash:
    text = clash.text.replace("{run.config.", "{run.compressed_communication.")
    sends = lambda run: run.compressed_communication is not None and run.ranks > 1  # noqa: E731
    return dataclasses.replace(clash, text=text, when=lambda run: sends(run) and clash.when(_legs(run)))


CLASHES = (
    Clash("no `algorithms.fp8`", "no algorithms.fp8: the run stays in high precision. `foundry-fp8 init` adds it",
          lambda run: run.fp8 is None, error=False),
    Clash("`precision: amp_fp8`, `algorithms.fp8`",
          "precision: amp_fp8 is Composer's own FP8 and cannot be combined with algorithms.fp8. Set precision: amp_bf16.",
          lambda run: run.precision == "amp_fp8" and run.fp8 is not None),
    Clash("`precision: amp_fp16`, `fp8.recipe: unit`",
          "precision: amp_fp16 scales the loss, which would push gradients past the constant scale of algorithms.fp8.recipe: unit. "
          "Set precision: amp_bf16.", _unit_under_fp16),
    Clash("`precision: fp32`, `algorithms.fp8`",
          "precision: fp32, so what stays out of FP8 runs in float32; amp_bf16 is usual",
          lambda run: run.precision == "fp32" and run.converts is not None, error=False),
    Clash("times in `fp8.recipe` that a run never reaches, or does not count", "{run.untimely}.", lambda run: bool(run.untimely),
          trainers=("composer", "transformers", "torchtitan", "loop")),
    Clash("`model.fc_type: te`, `ffn_type: te_ln_mlp`", TE_LAYERS, lambda run: run.te_layers and run.converts is not None),
    Clash("`fsdp_config`, `fp8.frozen_weights: fp8`",
          "algorithms.fp8.frozen_weights: fp8 does not run under FSDP, which shards plain parameters alone. Remove fsdp_config: under "
          "DDP every GPU holds the whole base in one byte an element. Or remove the option.", _frozen_under_fsdp),
    Clash("`fsdp_config`, `hf_fp8_causal_lm` with `peft_config`",
          "model: a trainer's FSDP does not shard the frozen weights' FP8 codes. Use DDP, fully_shard in a loop of your own, or train in full: "
          "load them into parameters that require gradients.",
          lambda run: run.fsdp is not None and run.keeps_codes and run.converts is not None,
          trainers=("composer", "transformers", "torchtitan", "loop")),
    Clash("`compile_config`, `activation_compression`",
          "algorithms.activation_compression does not run under torch.compile: a graph saves copies of weights that cannot be "
          "distinguished from activations. Remove compile_config, or the algorithm.",
          lambda run: run.compiled and run.activation_compression is not None),
    Clash("`fsdp_config.activation_cpu_offload`, `activation_compression`",
          "algorithms.activation_compression: only the innermost saved-tensor hooks run, so fsdp_config.activation_cpu_offload would "
          "switch compression off. Choose one of them.",
          lambda run: _asks(run, "activation_cpu_offload") and run.activation_compression is not None),
    Clash("`activation_checkpointing.budget`, `activation_compression`", BUDGET_ALONE,
          lambda run: run.activation_compression is not None and getattr(run.activation_checkpointing, "budget", None) is not None),
    Clash("`fused_head`, `model.use_train_metrics`",
          "algorithms.fused_head: train metrics read the logits of every training batch, and there are none. Set "
          "model.use_train_metrics: false; metrics of evaluations stay.", lambda run: run.train_metrics and run.fused_head is not None),
    Clash("`fused_head`, `loss_fn: fused_crossentropy`", FLASH_LOSS, lambda run: run.flash_loss and run.fused_head is not None),
    Clash("`fsdp_config.activation_checkpointing`, `algorithms.activation_checkpointing`",
          "fsdp_config.activation_checkpointing and algorithms.activation_checkpointing: the algorithm says what is wrapped",
          lambda run: _asks(run, "activation_checkpointing") and run.activation_checkpointing is not None, error=False),
    Clash("`hybrid_sharding`, no `fsdp_config`",
          "algorithms.hybrid_sharding needs FSDP: this run has no fsdp_config (DDP replicates already). Add one.",
          lambda run: _hybrid(run) and run.fsdp is None),
    Clash("`hybrid_sharding`, `tp_config`",
          "algorithms.hybrid_sharding and tensor parallelism are not supported together. Remove one.",
          lambda run: _hybrid(run) and run.tensor_parallel),
    Clash("`hybrid_sharding`, FSDP2's `load_monolith_rank0_only`",
          "algorithms.hybrid_sharding: load_monolith_rank0_only does not broadcast across replicas. Set it to false.",
          lambda run: _hybrid(run) and is_fsdp2(run.fsdp) and run.fsdp.load_monolith_rank0_only),
    Clash("`hybrid_sharding`, another `fsdp_config.sharding_strategy`",
          "algorithms.hybrid_sharding works with sharding_strategy FULL_SHARD or HYBRID_SHARD, not {run.fsdp.sharding_strategy}.",
          lambda run: _hybrid(run) and _strategy(run) not in ("", "FULL_SHARD", "HYBRID_SHARD")),
    Clash("`HYBRID_SHARD`, no number of replicas",
          "fsdp_config.sharding_strategy: {run.fsdp.sharding_strategy} without data_parallel_replicate_degree: Composer shards over all "
          "ranks. Give it, or algorithms.hybrid_sharding", lambda run: "HYBRID" in _strategy(run) and run.hybrid_sharding is None
          and not _asks(run, "data_parallel_replicate_degree"), error=False),
    *map(_on_legs, LEG_CLASHES),
    Clash("`compressed_communication.activations: fp8`, no `tp_config`", NO_SEQUENCE_SHARDS, lambda run: run.ranks > 1
          and getattr(run.compressed_communication, "activations", "none") != "none" and not run.tensor_parallel),
    Clash("`hybrid_sharding`, `compressed_communication`, one device", "one device: hybrid_sharding and compressed_communication do nothing",
          lambda run: run.ranks == 1 and (run.hybrid_sharding or run.compressed_communication) is not None, error=False),
    Clash("no `run_name`", "run_name is blank: RUN_NAME has to be in the environment, or the name is random",
          lambda run: not run.name, error=False),
    # Of other trainers.
    Clash("a wrapped or compiled model",
          "FP8: the model is wrapped or compiled already, and FP8 layers go in before that. Convert the plain model (give Trainer that "
          "one, as model=: what model_init= makes is in FSDP before a callback sees it); DDP, FSDP and torch.compile come after.", lambda run: run.wrapped, trainers=("transformers", "torchtitan", "loop")),
    Clash("several GPUs of one process",
          f"{CALLBACK}: Trainer would run nn.DataParallel over {{run.copied_to}} GPUs, which copies the model in every step. Launch one "
          "process a GPU (torchrun), or set CUDA_VISIBLE_DEVICES to one.", lambda run: run.copied_to > 1, trainers=("transformers",)),
    Clash("DeepSpeed ZeRO-3",
          f"{CALLBACK}: DeepSpeed ZeRO-3 keeps parameters empty outside of their layer's forward, so FP8 layers find no weight. Use fsdp= "
          "(FSDP1 or FSDP2) or DDP.", lambda run: run.zero_stage == 3, trainers=("transformers",)),
    Clash("DeepSpeed",
          f"{CALLBACK}: DeepSpeed ZeRO-{{run.zero_stage}} was never tested with FP8 layers. Use fsdp= (FSDP1 or FSDP2) or DDP.",
          lambda run: run.zero_stage is not None, trainers=("transformers",)),
    Clash("`mixed_precision: fp8`",
          f"{CALLBACK}: Accelerate's mixed_precision: fp8 is on, and both would quantise. Set it to bf16 (TrainingArguments(bf16=True)).",
          lambda run: run.precision == "amp_fp8", trainers=("transformers",)),
    Clash("`fp16`, `guard`",
          f"{CALLBACK}: fp16 scales the loss by a factor that a callback does not know, which the guard needs. Set bf16=True.",
          lambda run: run.precision == "amp_fp16" and run.guarded, trainers=("transformers",)),
    Clash("`fp16`, `recipe: unit`",
          f"{CALLBACK}: fp16 scales the loss by a factor that a callback does not know, which recipe: unit has no room for. Set bf16=True.",
          _unit_under_fp16, trainers=("transformers",)),
    Clash("`fsdp`, `frozen_weights: fp8`",
          f"{CALLBACK}: frozen_weights: fp8 does not run under FSDP, which shards plain parameters alone. Use DDP.",
          _frozen_under_fsdp, trainers=("transformers",)),
)  # fmt: skip
