#!/usr/bin/env bash
# A block's scale, cast to E8M0, depends on the library: ONNX's default is twice torch's for half of all scales, and 0, -1 and Inf differ everywhere.
#
# One would guess: E8M0 (the scale of an MX block, OCP's specification) is a power of two and nothing else, so a cast from float32 rounds to the
# nearest one, and what has no sign, no zero and no Inf in the format becomes its NaN. It has one format and one specification.
# What happens: torch 2.15.0 and ml_dtypes 0.6.0 round to the nearest (1.25 becomes 1). ONNX's Cast rounds up where round_mode is not given (1.25
# becomes 2), in onnx 1.23.2's reference and in onnxruntime 1.32.0: a scale between 1 and 1.5 is doubled. Of 0, -1 and Inf:
#   torch            2^-127, 1,      NaN       the sign is dropped
#   ml_dtypes        NaN,    NaN,    NaN
#   onnx, reference  2^-127, 1,      NaN       whether or not saturate is set
#   onnxruntime      2^-127, 2^-127, 2^127     saturate (the default); without it NaN, NaN, NaN
# None warns. So the reference and the runtime of one standard disagree about a default cast, and an Inf in a block is a large finite number in
# the runtime that serves what torch would have trained as NaN.
# Why it matters: an MX block's codes were made with one scale; beside another library's scale the block is twice as large, and no shape, dtype or
# name shows it. Casts of powers of two agree: who exchanges MX tensors rounds the scale before the cast, and looks for 0, signs and Inf first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check \
  "torch==2.15.0" "ml_dtypes==0.6.0" "onnx==1.23.2" "onnxruntime==1.32.0" numpy
cat > cast.py <<'END'
import ml_dtypes
import numpy
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

given = numpy.array([1.0, 1.25, 1.75, 4.0, 2.0**-100, 0.0, -1.0, numpy.inf, numpy.nan], numpy.float32)


def model(**options):
    nodes = [
        helper.make_node("Cast", ["x"], ["scale"], to=TensorProto.FLOAT8E8M0, **options),
        helper.make_node("Cast", ["scale"], ["y"], to=TensorProto.FLOAT),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy"]
    graph = helper.make_graph(nodes, "cast", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def reference(**options):
    return ReferenceEvaluator(model(**options)).run(None, {"x": given})[0]


def runtime(**options):
    session = onnxruntime.InferenceSession(model(**options).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": given})[0]


found = {
    "torch": torch.from_numpy(given).to(torch.float8_e8m0fnu).float().numpy(),
    "ml_dtypes": given.astype(ml_dtypes.float8_e8m0fnu).astype(numpy.float32),
    "onnx": reference(),
    "onnx, saturate=0": reference(saturate=0),
    "onnx, nearest": reference(round_mode="nearest"),
    "onnxruntime": runtime(),
    "onnxruntime, saturate=0": runtime(saturate=0),
    "onnxruntime, nearest": runtime(round_mode="nearest"),
}
for one in (torch, ml_dtypes, onnx, onnxruntime):
    print(one.__name__, one.__version__)
print(f"{'':24}", *(f"{x:>9.3g}" for x in given))
for name, values in found.items():
    print(f"{name:24}", *(f"{x:>9.3g}" for x in values))

nan, low, high = numpy.nan, 2.0**-127, 2.0**127
for name, values in found.items():
    numpy.testing.assert_array_equal(values[[0, 3, 4, 8]], numpy.float32([1, 4, 2.0**-100, nan]))  # all agree
    up = name.startswith("onnx") and "nearest" not in name
    numpy.testing.assert_array_equal(values[[1, 2]], [2, 2] if up else [1, 2], name)
odd = {
    "torch": [low, 1, nan],
    "ml_dtypes": [nan, nan, nan],
    "onnx": [low, 1, nan],
    "onnx, saturate=0": [low, 1, nan],
    "onnxruntime": [low, low, high],
    "onnxruntime, saturate=0": [nan, nan, nan],
}
for name, values in odd.items():
    numpy.testing.assert_array_equal(found[name][5:8], numpy.float32(values), name)
print("as found")
END
venv/bin/python cast.py
