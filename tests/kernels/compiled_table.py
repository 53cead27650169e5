"""Write compiled.json, what each kernel compiles to, and the table of docs/kernels.md from it.

Entries of other versions of Triton stay: run it once with each stack.

    python -m tests.kernels.compiled_table
"""

import json
import pathlib
import re

from tests.kernels.test_compile import TABLE, compile_for

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "kernels.md"
KEPT = ("registers", "spill_bytes", "resident_blocks", "instructions_an_element")
BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"


def measured(arch):
    """(key of the table, its entries)."""
    lines = compile_for(arch)
    minor = ".".join(lines[0]["triton"].split(".")[:2])
    entries = {f"{line['kernel']}, {line['case']}": {name: line[name] for name in KEPT} for line in lines}
    return f"triton {minor} sm_{arch}", entries


def rendered(table):
    """The quantise kernels' rows and the GEMM's, one column a compiler and architecture: registers / blocks / instructions."""
    columns = sorted(table)
    rows = sorted({key for column in columns for key in table[column]})
    rows = [key for key in rows if key.startswith(("_amax", "_quantize_", "_block_gemm"))]
    lines = ["| kernel, case | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [
        f"| {label(key)} | " + " | ".join(cell(table[c].get(key)) for c in columns) + " |" for key in rows
    ]
    return "\n".join(lines)


def label(key):
    found = re.sub(
        r"GemmConfig\(block_m=(\d+), block_n=(\d+), num_warps=(\d+), num_stages=(\d+)\)",
        r"\1 x \2, \3 warps, \4 stages",
        key,
    )
    return found.strip("_").replace("_kernel", "").replace("_", " ")


def cell(entry):
    if entry is None:
        return ""
    found = f"{entry['registers']}, {entry['resident_blocks']}"
    found += "" if entry["instructions_an_element"] is None else f", {entry['instructions_an_element']}"
    return found + (f", spills {entry['spill_bytes']} B" if entry["spill_bytes"] else "")


def in_document(table, text):
    """``text`` with its table made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{rendered(table)}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for arch in (90, 100):
        key, entries = measured(arch)
        table[key] = entries
    TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    DOCUMENT.write_text(in_document(table, DOCUMENT.read_text()))
