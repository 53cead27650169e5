#!/usr/bin/env bash
# A custom autograd function cannot find out in its forward that no backward will come: under no_grad every answer is that of a training step.
#
# One would guess: ctx.needs_input_grad, of which torch's documentation says that it tells which gradients have to be computed, is false for
# everything under torch.no_grad() and inference_mode(), since there is no graph; or torch.is_grad_enabled() tells the two apart.
# What happens: needs_input_grad repeats requires_grad of the inputs, whatever the mode; a weight that trains says True in an evaluation too.
# And is_grad_enabled() inside of a forward is False in every mode, training included, because torch switches gradients off around it. So the
# two calls that could tell agree in both cases, and save_for_backward is accepted in both.
# Why it matters: functions that prepare their backward in forward (an FP8 linear writes its input in a second, transposed layout for the weight's
# gradient; others keep dropout's random numbers or compressed copies) do that work in every evaluation, and in the first forward of
# each reentrant checkpoint, which runs without gradients by design. Only who calls apply() can know, and has to pass it in.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "torch==2.14.1" numpy
cat > ask.py <<'END'
import contextlib
import sys
import warnings

import torch
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")


class Ask(torch.autograd.Function):
    answers = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        Ask.answers.append((ctx.needs_input_grad, torch.is_grad_enabled()))
        return x @ weight

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy, x.t() @ dy


weight = torch.eye(4, requires_grad=True)
print("torch", torch.__version__)
modes = {"training": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
found = {}
for name, mode in modes.items():
    with mode():
        y = Ask.apply(torch.ones(2, 4), weight)
    found[name] = (*Ask.answers[-1], y.grad_fn is not None)
    print(f"{name}: needs_input_grad {found[name][0]}, is_grad_enabled {found[name][1]}, the output has a graph: {found[name][2]}")
Ask.answers.clear()
checkpoint(Ask.apply, torch.ones(2, 4, requires_grad=True), weight, use_reentrant=True).sum().backward()
first, again = Ask.answers
print(f"a reentrant checkpoint's first forward: {first}, its recompute: {again}")
alike = len({answer[:2] for answer in found.values()}) == 1 and first == again
graphs = [found[name][2] for name in modes]
sys.exit(not (alike and found["no_grad"][0] == (False, True) and graphs == [True, False, False]))
END
venv/bin/python ask.py
