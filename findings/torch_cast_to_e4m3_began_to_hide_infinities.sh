#!/usr/bin/env bash
# From some release before 2.15 on, torch's cast to float8_e4m3fn saturates on a CPU, and Inf is an overflow too: it becomes 448.
#
# One would guess: what overflows in x.to(torch.float8_e4m3fn) stays visible. It did: torch 2.7.0 and 2.11.0 give NaN from 465 on, for 600, and
# for Inf, as E4M3FN has no Inf. float8_e5m2 has one, and gets it from Inf and from what overflows. Code that casts, and looks for NaN
# afterwards, has worked for years.
# What happens: torch 2.15.0 gives 448 for 465, for 600 and for Inf, from float32 and from bfloat16; -Inf becomes -448. NaN stays NaN. In the same
# release float8_e5m2 still overflows to Inf, so the two formats of one recipe (E4M3 forward, E5M2 gradients) disagree about an Inf.
# Why it matters: a training step whose activations became Inf goes on with finite products, a check of the quantised tensor for NaN finds
# nothing, and a run that ended at once with the older release trains on with the newer. Scales that are too small (an MX scale rounded to the
# nearest power of two, for example) no longer show. Whoever needs to see an Inf has to look before the cast.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check "torch==2.15.0" numpy
cat > cast.py <<'END'
import math

import torch

print("torch", torch.__version__)
given = (448.0, 463.0, 465.0, 600.0, math.inf, -math.inf, math.nan)
found = {}
for source in (torch.float32, torch.bfloat16):
    for target in (torch.float8_e4m3fn, torch.float8_e5m2):
        cast = torch.tensor(given, dtype=source).to(target).float().tolist()
        found[source, target] = cast
        print(f"{source} {list(given)} to {target}: {cast}")
for source in (torch.float32, torch.bfloat16):
    e4m3, e5m2 = found[source, torch.float8_e4m3fn], found[source, torch.float8_e5m2]
    assert e4m3[:6] == [448.0, 448.0 if source == torch.float32 else e4m3[1], 448.0, 448.0, 448.0, -448.0], e4m3
    assert math.isnan(e4m3[6]) and math.isnan(e5m2[6])
    assert e5m2[4:6] == [math.inf, -math.inf], e5m2
overflows = torch.tensor(70000.0).to(torch.float8_e5m2).float().item()
print("70000 to float8_e5m2:", overflows)
assert overflows == math.inf
print("as found")
END
venv/bin/python cast.py
