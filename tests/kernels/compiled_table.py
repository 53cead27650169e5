"""Write compiled.json, what each kernel compiles to, and the table of docs/kernels.md from it.

Entries of other versions of Triton stay: run it once with each stack.

    python -m tests.kernels.compiled_table
"""

import json
import pathlib

from tests.kernels.gpu import issue_cap
from tests.kernels.test_compile import TABLE, compile_for

DOCS = pathlib.Path(__file__).parents[2] / "docs"
KEPT = (
    "registers",
    "spill_bytes",
    "resident_blocks",
    "instructions_an_element",
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


TABLES = {DOCS / "kernels.md": rendered}


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
