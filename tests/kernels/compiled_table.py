"""Write compiled.json, what each kernel compiles to, and the tables of docs/kernels.md and docs/attention.md from it.

Entries of other versions of Triton stay: run it once with each stack.

    python -m tests.kernels.compiled_table
"""

import itertools
import json
import pathlib
import re

from tests.kernels.gpu import ISSUED, issue_cap
from tests.kernels.test_compile import TABLE, compile_for

DOCS = pathlib.Path(__file__).parents[2] / "docs"
KEPT = (
    "registers",
    "spill_bytes",
    "resident_blocks",
    "instructions_an_element",
    "instructions_masked",
    "exponentials_an_element",
)
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"


def measured(arch):
    """(key of the table, its entries)."""
    lines = compile_for(arch)
    minor = ".".join(lines[0]["triton"].split(".")[:2])
    entries = {
        f"{line['kernel']}, {line['case']}": {name: line[name] for name in KEPT if name in line}
        for line in lines
    }
    return f"triton {minor} sm_{arch}", entries


def rendered(table):
    """The quantise kernels: share of a copy's bandwidth and thread blocks, the least of all Tritons; one line of the block GEMM."""
    keys = sorted({key for column in table.values() for key in column})
    lines = ["| kernel | sm_90 | sm_100 |", "|---|---|---|"]
    for key in keys:
        if key.startswith(("_amax", "_quantize_")):
            lines.append(
                f"| {label(key).removeprefix('quantize').lstrip(', ')} | "
                + " | ".join(least(table, key, arch) for arch in (90, 100))
                + " |"
            )
    gemms = [e for column in table.values() for key, e in column.items() if key.startswith("_block_gemm")]
    registers, blocks, spilled = (
        [entry[name] for entry in gemms] for name in ("registers", "resident_blocks", "spill_bytes")
    )
    return "\n".join(lines) + (
        f"\n\nThe block GEMM, all tilings: {min(registers)} to {max(registers)} registers a thread, {min(blocks)} to "
        f"{max(blocks)} thread blocks, {max(spilled)} bytes spilled."
    )


def label(key):
    return key.strip("_").replace("_kernel", "").replace("_", " ")


def least(table, key, arch):
    entries = [table[column][key] for column in table if column.endswith(f"_{arch}") and key in table[column]]
    share = min(issue_cap(key, arch, entry["instructions_an_element"]) for entry in entries)
    return f"{share:.2f}x, {min(entry['resident_blocks'] for entry in entries)}"


MULTIPLICATIONS = {90: 4096, 100: 8192}
"""FP8 products that a multiprocessor's tensor cores add up in a cycle; bfloat16 ones: half. H100: 1979 TFLOP/s, 132 multiprocessors, 1.83
GHz; B200: 4500, 148, 1.86 (NVIDIA's data sheets, dense)."""
EXPONENTIALS = 16
"""Results of a multiprocessor's special function unit in a cycle (CUDA C++ Programming Guide, table of arithmetic throughput)."""
PRODUCTS = {"_forward_kernel": (2, 0), "_dq_kernel": (2, 1), "_dkdv_kernel": (3, 1)}
"""FP8 products of a pair of query and key, and those of the logits' gradient."""


def rendered_attention(table):
    """Attention's kernels, and the backward of them: the share of FP8's peak that instructions and exponentials leave at most."""
    columns = sorted(table)
    lines = ["| kernel, head size | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for kernel, head in itertools.product(("forward", "dq", "dkdv", "backward"), (64, 128)):
        cases = [f"head_dim {head}"]
        if kernel != "forward":
            cases.append(f"head_dim {head}, logits' gradients in bfloat16")
        cells = ["/".join(f"{share(table[c], kernel, case, c):.0%}" for case in cases) for c in columns]
        lines.append(f"| {kernel}, {head} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def share(entries, kernel, case, column):
    """Of one kernel; of the backward, both kernels' time for the five products that it needs."""
    arch = int(column.rpartition("_")[2])
    if kernel != "backward":
        key = f"_{kernel}_kernel, {case}"
        return min(limits(key, arch, entries[key]))
    return 5 / sum(
        products_of(f"_{k}_kernel, {case}") / share(entries, k, case, column) for k in ("dq", "dkdv")
    )


def products_of(key):
    """Products of a pair of query and key, in FP8's time: one in bfloat16 counts twice."""
    in_fp8, of_gradient = PRODUCTS[key.partition(",")[0]]
    return in_fp8 + of_gradient * (2 if "bfloat16" in key else 1)


def limits(key, arch, entry):
    """What part of the tensor cores' time the issue of instructions, and the exponentials, leave them at most."""
    cycles = products_of(key) * int(re.search(r"head_dim (\d+)", key)[1]) / MULTIPLICATIONS[arch]
    return (
        min(1.0, cycles / (entry["instructions_an_element"] / ISSUED)),
        min(1.0, cycles / (entry["exponentials_an_element"] / EXPONENTIALS)),
    )


TABLES = {DOCS / "kernels.md": rendered, DOCS / "attention.md": rendered_attention}


def in_document(document, table):
    """The text of ``document`` with its table made anew."""
    before, rest = document.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{TABLES[document](table)}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for arch in (90, 100):
        key, entries = measured(arch)
        table[key] = entries
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    for document in TABLES:
        document.write_text(in_document(document, table))
