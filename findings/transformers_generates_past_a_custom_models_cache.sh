#!/usr/bin/env bash
# transformers 5.24: a model of one's own whose forward takes past_key_values and **kwargs generates nonsense, without a word.
#
# One would guess: generate() hands keys and values of earlier tokens to forward(..., past_key_values=...), as it has for years, and a
# renamed argument raises or warns. transformers' own models do take the old name.
# What happens: generate() passes cache=... . A forward that takes past_key_values and swallows the rest with **kwargs, as transformers'
# own did, gets the last token alone and no cache. No exception and no warning: the second token is already wrong. With use_cache=False
# the same model is right; without **kwargs there is a TypeError.
# Why it matters: remote code and converted training code look fine in loss and in their first token; evaluation by generation is wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch==2.14.1" "transformers==5.24.0" numpy
cat > "$folder/model.py" <<'END'
import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class Config(PretrainedConfig):
    model_type = "summing"

    def __init__(self, vocab_size=50, **kwargs):
        self.vocab_size, self.num_hidden_layers, self.hidden_size, self.num_attention_heads = vocab_size, 1, 8, 1
        super().__init__(**kwargs)


class Summing(PreTrainedModel, GenerationMixin):
    """The next token is the sum of all so far; keys hold the tokens."""

    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.unused = nn.Linear(1, 1)
        self.post_init()

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, **kwargs):
        seen = input_ids[:, None, :, None].float()
        if past_key_values is not None:
            seen, _ = past_key_values.update(seen, seen, 0)
        total = seen.sum((1, 2, 3)).long() % self.config.vocab_size
        logits = nn.functional.one_hot(total, self.config.vocab_size).float()[:, None]
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)


model = Summing(Config()).eval()
ids = torch.tensor([[3, 4, 5]])
runs = {c: model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=c, pad_token_id=0)[0].tolist() for c in (False, True)}
print("transformers", transformers.__version__, "without cache", runs[False], "with cache", runs[True])
assert runs[False] == [3, 4, 5, 12, 24, 48, 46]
assert runs[True] == [3, 4, 5, 12, 12, 12, 12], runs[True]
END
"$folder/venv/bin/python" "$folder/model.py"
echo "as found: the cached run repeats the last token, since forward saw nothing else"
