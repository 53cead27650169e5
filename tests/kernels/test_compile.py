"""Every kernel compiles for GPUs that are not there, and the machine code is of the kind it was written for.

Not a run on hardware: what is checked is that Triton and ptxas accept the kernels, and that the instructions are there.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.kernels.gpu import issue_cap

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["representatives", pytest.param("all", marks=pytest.mark.full)])
def compiled(request):
    """The worker's lines for sm_90, one process for all tests: of a case or two of each kernel, or of every case."""
    return compile_for(90, request.param == "all")


def compile_for(arch, every=True):
    """The worker's lines."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    environment |= {} if every else {"REPRESENTATIVES": "1"}
    command = [sys.executable, "-m", "tests.kernels.run_compile", str(arch)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


TABLE = pathlib.Path(__file__).with_name("compiled.json")
"""What each kernel compiled to when it was last looked at: by Triton's version and architecture, then kernel and case.
`python -m tests.kernels.compiled_table` writes it, and the table of docs/kernels.md, after a change for the better."""


def committed(lines):
    """The entries of the Triton and architecture of ``lines``; none of them for another Triton."""
    table = json.loads(TABLE.read_text())
    minor = ".".join(lines[0]["triton"].split(".")[:2])
    return table.get(f"triton {minor} sm_{lines[0]['arch']}", {})


def worse(lines):
    """Everything that got worse than the committed table, in words."""
    before, found = committed(lines), []
    for line in lines:
        entry = before.get(f"{line['kernel']}, {line['case']}")
        if entry is None:
            found.append(f"{line['kernel']}, {line['case']} is not in the table")
            continue
        for what, limit in entry.items():
            if limit is None:
                continue
            got = line[what]
            if (got < limit) if what == "resident_blocks" else (got > limit):
                found.append(f"{line['kernel']}, {line['case']}: {what} {got}, was {limit}")
    return found


def test_machine_code_is_no_worse_than_it_was(compiled):
    """Registers, spills, blocks a multiprocessor, instructions an element: sm_90, the Triton of this stack."""
    if not committed(compiled):
        pytest.skip(f"the table has no Triton {compiled[0]['triton']}")
    assert worse(compiled) == []


@pytest.mark.full
def test_machine_code_for_blackwell_is_no_worse_than_it_was():
    lines = compile_for(100)
    if not committed(lines):
        pytest.skip(f"the table has no Triton {lines[0]['triton']}")
    assert worse(lines) == []


def test_machine_code_depends_neither_on_lines_nor_on_what_was_compiled_before(compiled):
    """Once from a file moved by a line, as the first kernel of its process (which took 73 registers for 66, see ``settle_compiler``)."""
    first, later = (
        line["code"] for line in named(compiled, "_quantize_blockwise_kernel") if line["case"] == "rows"
    )
    assert first == later


CASTS = "_quantize_kernel", "_quantize_together_kernel", "_quantize_blockwise_kernel"
EXACT = (
    *CASTS,
    "_amax_kernel",
    "_amax_together_kernel",
    "_group_amax_kernel",
    "_group_cast_kernel",
    "_quantize",
    "_pack_norm_input",
)


def test_what_is_defined_to_the_bit_is_not_contracted(compiled):
    """ptxas contracts too, past what the executor of PTX can see."""
    for line in named(compiled, *EXACT):
        assert not line["contracts"], (line["kernel"], line["case"])


def test_two_blocks_share_a_multiprocessor(compiled):
    """So that one loads while the other computes."""
    for line in named(compiled, *CASTS):
        assert line["resident_blocks"] >= 2, line["case"]


MEANT = 1.3
"""Of a copy's bandwidth, so that nine tenths of it can be reached."""


def test_arithmetic_leaves_room_for_the_bandwidth(compiled):
    """On an H100, by issued instructions."""
    for line in named(compiled, "_amax_kernel", *CASTS):
        cap = issue_cap(f"{line['kernel']}, {line['case']}", 90, line["instructions_an_element"])
        assert cap >= MEANT, (line["kernel"], line["case"], cap)


def named(compiled, *kernels):
    found = [line for line in compiled if line["kernel"] in kernels]
    assert found, f"no launch of {kernels}"
    return found


def test_every_kernel_is_among_them(compiled):
    kernels = {line["kernel"] for line in compiled}
    assert kernels == {
        *CASTS,
        "_amax_kernel",
        "_amax_together_kernel",
        "_update_kernel",
        "_statistics_kernel",
        "_sum_kernel",
        "_backward_kernel",
        "_xielu_kernel",
        "_block_gemm_kernel",
        "_quantize",
        "_dequantize",
        "_gated_backward",
        "_group_amax_kernel",
        "_group_cast_kernel",
        "_pack_norm_input",
        "_dequantize_kernel",
    }


def test_nothing_spills(compiled):
    assert [(line["kernel"], line["case"]) for line in compiled if line["spill_bytes"]] == []


FORMATS_OF = {"delayed e5m2 bias": ("e5m2",), "e5m2 and a weight": ("e4m3", "e5m2")}
"""Of a case that is not of E4M3 alone."""


def test_casts_are_the_saturating_instruction(compiled):
    for line in named(compiled, *CASTS):
        wanted = FORMATS_OF.get(line["case"], ("e4m3",))
        assert line["cvt"] == [f"cvt.rn.satfinite.{name}x2.f32" for name in wanted], line["case"]


def test_memory_is_accessed_in_whole_words(compiled):
    """16 bytes at a time for the tensors; what is smaller is a scale. A mask the compiler cannot see through shows here."""
    for line in named(compiled, *CASTS):
        assert line["stores"].get(".v4.b32", 0) >= 4, line["case"]
        # Two scales of a thread's columns, MX's with Triton 3.3.
        assert line["stores"].get(".b8", 0) <= (2 if line["case"] == "mx" else 0), line["case"]
        assert line["loads"][".v4.b32"] >= 4, line["case"]


def test_leaving_fp8_reads_and_writes_whole_words(compiled):
    (line,) = named(compiled, "_dequantize_kernel")
    assert line["loads"][".v4.b32"] >= 3 and line["stores"][".v4.b32"] >= 6, line
    assert ".b8" not in line["stores"] and ".b16" not in line["stores"], line
    assert all(op.startswith("div.rn") for op in line["div"]), line


def test_the_gemm_uses_hoppers_fp8_tensor_cores(compiled):
    for line in named(compiled, "_block_gemm_kernel"):
        kinds = "e5m2.e4m3" if "e5m2" in line["case"] else "e4m3.e4m3"
        assert line["wgmma"] and all(op.endswith(f"k32.f32.{kinds}") for op in line["wgmma"]), line["case"]
        assert line["async_copy"] and line["shared_bytes"] <= 227 * 1024, line["case"]


def test_scales_divide_exactly(compiled):
    for line in named(compiled, *CASTS):
        if line["case"] not in ("mx", "swiglu", "rows and columns, swiglu"):
            assert all(op.startswith("div.rn") for op in line["div"]), line["case"]


def test_the_documents_tables_are_the_committed_ones():
    from tests.kernels.compiled_table import TABLES, in_document

    for document in TABLES:
        assert document.read_text() == in_document(document, json.loads(TABLE.read_text())), document.name
