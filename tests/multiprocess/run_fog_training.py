"""Worker of test_fog_training.py, two ranks.

Trains FOG-max with FP8 attention under FSDP2 and writes what it found to ``OUT/rank{r}.json``. From the CPU only: Composer
materialises meta tensors on CUDA.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from foundry_fp8.surgery.attention import FP8AttentionState
from tests.integration.foundry_runs import config, train

FOG = {
    "name": "fog_causal_lm",
    "variant": "fog-max",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def case(root):
    os.environ["FSDP_VERSION"] = "2"
    trainer = train(
        config(
            root,
            model=FOG,
            algorithms={"fp8": {"recipe": {"name": "delayed", "amax_history_len": 8}, "attention": True}},
            fsdp_config={
                "sharding_strategy": "FULL_SHARD",
                "mixed_precision": "PURE",
                "activation_checkpointing": True,
                "state_dict_type": "sharded",
            },
            global_train_batch_size=16,
            max_duration="4ba",
        )
    )
    model = trainer.state.model
    state = FP8AttentionState.of(model)
    mine = torch.cat([state.delayed.scale, state.delayed.amax_history.flatten()])
    both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mine)
    vectors = {name: p.full_tensor().mean().item() for name, p in model.named_parameters() if p.dim() == 1}
    blocks = [m for n, m in model.named_modules() if type(m).__name__.endswith("FogBlock")]
    return {
        "loss": float(trainer.state.total_loss_dict["loss/train/total"]),
        "scales_agree": bool(torch.equal(both[0], both[1]) and (mine != 0).any()),
        "all_finite": all(bool(torch.isfinite(p.full_tensor()).all()) for p in model.parameters()),
        "sharded_by_block": len(blocks) == 2 and all("FSDP" in type(b).__name__ for b in blocks),
        "gain": next(v for n, v in vectors.items() if "attention_post_norm" in n),
        "slope": next(v for n, v in vectors.items() if n.endswith("act.p")),
        "embedding_std": float(model.model.model.embed_tokens.weight.full_tensor().std()),
    }


def main():
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        found = case(root)
    except Exception:
        found = {"error": traceback.format_exc()}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
