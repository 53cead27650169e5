"""For workers: LLM Foundry trains a small FOG from a shipped YAML, under its tensor parallelism or without."""

from pathlib import Path

import torch
from composer.utils import dist
from llmfoundry.registry import tp_strategies
from omegaconf import OmegaConf
from torch.distributed.fsdp import FullyShardedDataParallel

from foundry_fp8.models.fog.tensor_parallel import feed_forward_plan
from tests.integration.foundry_runs import SEQ, VOCAB, config, train
from tests.multiprocess.run_fog_training import FOG
from tests.multiprocess.tensor_parallel import whole

YAML = Path(__file__).parents[2] / "yamls" / "pretrain" / "fog-8b-16k.yaml"


def trained(root, together):
    """The loss, all weights, and a layer's FLOPs after four batches; ``together`` 1: the same run without ``tp_config``."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.initialize_dist("cpu")
    if "fog" not in tp_strategies.get_all():
        tp_strategies.register("fog", func=feed_forward_plan)
    shipped = OmegaConf.load(YAML)
    shipped.tp_config.tensor_parallel_degree = together
    shipped = OmegaConf.to_container(shipped, resolve=True)
    small = config(root)
    small["train_loader"]["dataset"]["replication"] = shipped["train_loader"]["dataset"]["replication"]
    for name in ("algorithms", "fsdp_config", "tp_config", "optimizer"):
        small[name] = shipped[name]
    if together == 1:
        del small["tp_config"]
    small["model"] = {
        **shipped["model"],
        **FOG,
        "size": None,
        "vocab_size": VOCAB,
        "max_position_embeddings": SEQ,
    }
    small["global_train_batch_size"] = 16 * together
    state = train(small).state
    with FullyShardedDataParallel.summon_full_params(state.model, writeback=False):
        weights = {n: whole(p.detach()).clone() for n, p in state.model.named_parameters()}
    (up,) = (m for n, m in state.model.named_modules() if n.endswith("0._fsdp_wrapped_module.mlp.up_proj"))
    flops = sum(up.ledger.flops.values())
    return float(state.total_loss_dict["loss/train/total"]), weights, flops
