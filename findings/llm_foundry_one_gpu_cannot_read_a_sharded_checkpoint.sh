#!/usr/bin/env bash
# LLM Foundry 0.22 on one GPU (or one CPU process) cannot go on from a sharded checkpoint, which its own run on two ranks wrote.
#
# One would guess: a checkpoint of state_dict_type "sharded" (torch.distributed.checkpoint) resumes on any number of ranks, one among them,
# since that is what the format is for; Composer's Trainer with the same fsdp configuration does resume it on one rank.
# What happens: with a single rank LLM Foundry takes the parallelism configuration out ("is not applicable for single-GPU training. Reverting
# to DDP"), and Composer then reads load_path as one file: the run ends in IsADirectoryError, which names a temporary folder and neither the
# checkpoint nor the reason. Two ranks and three ranks resume.
# Why it matters: what one does with a cluster's checkpoint at a desk (a debugger, a look at a loss, a small finetune) is what fails, and
# the message looks like a damaged download. There the checkpoint has to be made whole first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check uv
venv/bin/uv pip install --quiet --python venv/bin/python "torch==2.7.0" "mosaicml==0.32.1" "llm-foundry==0.22.0" "mosaicml-streaming==0.12.0"
cat > data.py <<'END'
import numpy as np
from streaming import MDSWriter
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = {word: number for number, word in enumerate(["<end>", *"abcdefgh"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained("tokenizer")
with MDSWriter(out="data/train", columns={"tokens": "ndarray:int32"}) as out:
    for sample in range(48):
        out.write({"tokens": (np.arange(16, dtype=np.int32) + sample) % 9})
END
venv/bin/python data.py 2> /dev/null
cat > run.yaml <<'END'
max_seq_len: 16
seed: 17
model:
  {name: mpt_causal_lm, d_model: 16, n_heads: 2, n_layers: 2, max_seq_len: 16, vocab_size: 16, loss_fn: torch_crossentropy,
   init_device: cpu, attn_config: {attn_impl: torch}}
tokenizer: {name: tokenizer, kwargs: {model_max_length: 16}}
train_loader:
  name: text
  dataset: {local: data, split: train, shuffle: false, max_seq_len: 16}
  drop_last: true
  num_workers: 0
  prefetch_factor: null
  persistent_workers: false
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
scheduler: {name: constant_with_warmup, t_warmup: 1ba}
max_duration: 2ba
eval_interval: 0
global_train_batch_size: 6
device_eval_batch_size: 2
device_train_microbatch_size: 1
precision: fp32
progress_bar: false
log_to_console: false
fsdp_config: {sharding_strategy: FULL_SHARD, mixed_precision: PURE, state_dict_type: sharded, activation_checkpointing: false}
save_folder: saved
save_interval: 2ba
END
export FSDP_VERSION=2 CUDA_VISIBLE_DEVICES="" TOKENIZERS_PARALLELISM=false
train() {  # ranks, and what changes
  ranks=$1; shift
  venv/bin/composer -n "$ranks" -m llmfoundry.cli.cli train run.yaml "$@" > log.txt 2>&1
}
venv/bin/python -c "import composer, llmfoundry, torch; print('torch', torch.__version__, 'mosaicml', composer.__version__, 'llm-foundry', llmfoundry.__version__)" 2> /dev/null
train 2
echo "two ranks wrote: $(ls saved | tr '\n' ' ')"
test -d saved/ep0-ba2
resume="load_path=saved/ep0-ba2 max_duration=4ba save_folder=again save_overwrite=true"
for ranks in 2 3 1; do
  if train "$ranks" $resume; then said=resumes; else said=$(grep -o "IsADirectoryError.*" log.txt | head -1); fi
  echo "$ranks rank(s): $said"
  case "$ranks $said" in "1 IsADirectoryError"* | "2 resumes" | "3 resumes") ;; *) tail -20 log.txt; exit 1 ;; esac
done
grep -o "is not applicable for single-GPU training.*" log.txt | head -1
echo "as found: one rank cannot read what two ranks wrote"
