#!/usr/bin/env bash
# torch's own memory tracker ends the first forward of any model with a frozen parameter, so it can plan no LoRA run.
#
# One would guess: torch.distributed._tools' MemTracker, on which torchtitan's memory estimate is built, tracks a fine-tuning run as it tracks a
# pretraining run; frozen weights would be weights without gradients, the easier case.
# What happens: at the first call of each module it puts gradient hooks on every parameter, and asks none whether it takes a gradient. A hook
# on one that does not is a RuntimeError ("cannot register a hook on a tensor that doesn't require gradient"), out of a global hook, in the
# middle of the user's forward. One frozen bias is enough. Under torch.no_grad() with parameters that take gradients all is well, so an
# evaluation of the same architecture hides it.
# Why it matters: the runs that are planned most closely to the memory there is (LoRA, adapters, a frozen tower) are those that cannot be
# tracked; freezing for real has to be left out, and then the tracker counts gradients and optimizer states that the run will not have.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "torch==2.14.1" numpy
cat > track.py <<'END'
import sys
import warnings

import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

warnings.filterwarnings("ignore", message="global module forward hook")


def tracked(frozen, grad=True):
    """Peak bytes of a step of two linears, of whose parameters ``frozen`` takes no gradient; or what was raised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    tracker = MemTracker()
    tracker.track_external(model)
    try:
        with tracker, torch.set_grad_enabled(grad):
            loss = model(torch.randn(8, 64)).sum()
            if grad:
                loss.backward()
    except RuntimeError as error:
        return str(error)
    return sum(one["Total"] for one in tracker.get_tracker_snapshot("peak").values())


print("torch", torch.__version__)
whole, evaluation = tracked([]), tracked([], grad=False)
print("all parameters train:", whole, "bytes at the peak")
print("the same, evaluated under no_grad:", evaluation, "bytes at the peak")
found = {name: tracked([name]) for name in ("0.weight", "1.bias")}
for name, said in found.items():
    print(f"{name} frozen: {said}")
counted = isinstance(whole, int) and isinstance(evaluation, int) and whole > evaluation > 0
refused = all("cannot register a hook" in str(said) for said in found.values())
sys.exit(not (counted and refused))
END
venv/bin/python track.py
