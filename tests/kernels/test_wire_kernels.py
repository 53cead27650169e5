"""The Triton kernels of the wire format against the torch reference, in Triton's interpreter (or on a GPU)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = """
import json, torch, triton
from foundry_fp8.distributed.wire import WireFormat, decode, decode_mean, encode
from foundry_fp8.kernels.wire import decode_mean_rows, decode_rows, encode_rows

device = "cuda" if torch.cuda.is_available() else "cpu"
results = {}
for name in ("int8", "e4m3", "int4"):
    for block, numel in ((128, 1), (128, 1000), (32, 333)):
        for dtype in (torch.float32, torch.bfloat16)[: 2 if numel == 333 else 1]:
            torch.manual_seed(numel)
            x = (torch.randn(3, numel) * torch.logspace(-4, 3, numel)).to(dtype)
            x[1, numel // 2] = float("nan")
            x[2, 0] = float("inf")
            wire = WireFormat(name=name, block_size=block)
            wanted = encode(x, wire)
            got = torch.empty_like(wanted).to(device)
            encode_rows(x.to(device), wire, got)
            blocks = wire.blocks(numel)
            scales = got.cpu()[:, wire.payload_bytes(numel):].contiguous().view(torch.float32)
            scales_wanted = wanted[:, wire.payload_bytes(numel):].contiguous().view(torch.float32)
            codes = (got.cpu()[:, :wire.payload_bytes(numel)] != wanted[:, :wire.payload_bytes(numel)]).float().mean()
            out = torch.empty(3, numel, dtype=dtype, device=device)
            decode_rows(wanted.to(device), wire, numel, out)
            mean = decode_mean_rows(wanted.to(device), wire, numel, 3, torch.empty(numel, device=device)).cpu()
            reference = decode(wanted, wire, numel, out=torch.empty(3, numel, dtype=dtype))
            mean_reference = decode_mean(wanted, wire, numel, 3)
            results[f"{name}-{block}-{numel}-{dtype}"] = {
                "codes": float(codes),
                "scales": float(((scales - scales_wanted).abs() / scales_wanted.abs()).nan_to_num(0).max()),
                "nan": bool(torch.equal(scales.isnan(), scales_wanted.isnan()) and scales.isnan().any()),
                "decode": float((out.cpu().float() - reference.float()).nan_to_num(0).abs().max() / reference.float().nan_to_num(0).abs().max().clamp(min=1e-30)),
                "decode_nan": bool(torch.equal(out.cpu().isnan(), reference.isnan())),
                "mean": float((mean - mean_reference).nan_to_num(0).abs().max() / mean_reference.nan_to_num(0).abs().max().clamp(min=1e-30)),
            }
random = {}
for name in ("int8", "e4m3", "int4"):
    # 512 rows alike: every row draws for itself.
    x = torch.randn(1, 128) * 0.1
    x[0, 17] = 60.0
    wire = WireFormat(name=name)
    x = x.expand(512, 128).contiguous()
    codes = [torch.empty(512, wire.row_bytes(128), dtype=torch.uint8, device=device) for _ in range(3)]
    for out, seed in zip(codes, (7, 7, 8)):
        encode_rows(x.to(device), wire, out, seed)
    drawn = decode(codes[0].cpu(), wire, 128).double()
    step = 60 / {"int8": 127, "e4m3": 448 * 8, "int4": 7 / 32**0.5}[name] + (x.abs() / 8 if name == "e4m3" else 0)
    random[name] = {
        "again": bool(torch.equal(codes[0], codes[1])),
        "other": not torch.equal(codes[0], codes[2]),
        "rows": len({tuple(row) for row in codes[0].tolist()}) > 400,
        "furthest": float(((drawn - x).abs() / step).max()),
        "bias": float(((drawn - x).mean(0).abs() / step[:1] if name == "e4m3" else (drawn - x).mean(0).abs() / step).max()),
    }
results["random"] = random
print(json.dumps(results))
"""


def test_kernels_match_the_reference():
    pytest.importorskip("triton")
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    if not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"  # read when Triton is imported, hence another process
    run = subprocess.run([sys.executable, "-c", CASES], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    results = json.loads(run.stdout.splitlines()[-1])
    random = results.pop("random")
    assert len(results) == 12
    for case, got in results.items():
        exact = not case.startswith("int4")  # the rotation's sums may be taken in another order
        assert got["codes"] <= (0 if exact else 0.02), (case, got)
        assert got["scales"] <= (0 if exact else 1e-6), (case, got)
        assert got["nan"] and got["decode_nan"], (case, got)
        rounds = "bfloat16" in case or not exact  # the interpreter truncates where a GPU rounds to bfloat16
        assert got["decode"] <= (2.0**-7 if rounds else 0), (case, got)
        assert got["mean"] <= 1e-6, (case, got)
    for name, got in random.items():
        assert got["again"] and got["other"] and got["rows"], (name, got)
        assert got["furthest"] <= 1.001, (name, got)  # to a neighbouring code
        assert got["bias"] <= 5 * 0.5 / 512**0.5, (name, got)  # five standard deviations of the mean of 512
