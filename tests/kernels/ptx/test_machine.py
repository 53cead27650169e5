"""The executor itself: control flow, and the faults that it must notice, on PTX written for it."""

import numpy as np
import pytest
import torch

from tests.kernels.ptx.machine import Block
from tests.kernels.ptx.memory import Global, PTXError
from tests.kernels.ptx.numbers import fma
from tests.kernels.ptx.program import parse

PTX = """
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 64, 1, 1
{{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.u64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    {body}
    ret;
}}
"""


def run(body, words=64):
    out = torch.zeros(words, dtype=torch.int32)
    program = parse(PTX.format(body="\n    ".join(line + ";" if line[-1] != ":" else line for line in body)))
    Block(program, [out.data_ptr()], Global([out]), 1024, (0, 0, 0), (1, 1, 1)).run()
    return out


def test_threads_that_part_join_again():
    """Each thread counts to its own number, odd ones start at 100, and all meet at a barrier."""
    out = run(
        [
            "and.b32 %r2, %r1, 1",
            "setp.eq.s32 %p1, %r2, 0",
            "mov.b32 %r3, 0",
            "@%p1 bra $even",
            "mov.b32 %r3, 100",
            "$even:",
            "mov.b32 %r4, 0",
            "$loop:",
            "setp.ge.s32 %p2, %r4, %r1",
            "@%p2 bra $done",
            "add.s32 %r3, %r3, 1",
            "add.s32 %r4, %r4, 1",
            "bra.uni $loop",
            "$done:",
            "bar.sync 0",
            "st.global.b32 [%rd3], %r3",
        ]
    )
    thread = torch.arange(64)
    assert torch.equal(out.long(), thread + 100 * (thread % 2))


SHARED = ["shl.b32 %r2, %r1, 2", "add.s32 %r3, %r2, 1024", "xor.b32 %r4, %r3, 128"]


def test_a_barrier_orders_shared_memory():
    read = ["ld.shared.b32 %r5, [%r4]", "st.global.b32 [%rd3], %r5"]
    out = run([*SHARED, "st.shared.b32 [%r3], %r1", "bar.sync 0", *read])
    assert torch.equal(out.long(), torch.arange(64) ^ 32)
    with pytest.raises(PTXError, match="without a barrier"):
        run([*SHARED, "st.shared.b32 [%r3], %r1", *read])


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (["st.global.b32 [%rd3+4], %r1"], "outside every tensor"),
        (["st.global.b32 [%rd3+2], %r1"], "misaligned"),
        (["setp.eq.s32 %p1, %r1, 3", "@%p1 bra $past", "bar.sync 0", "$past:"], "some threads do not reach"),
        (["frobnicate.b32 %r2, %r1"], "not known"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_faults_are_noticed(body, fault):
    with pytest.raises(PTXError, match=fault):
        run(body)


def test_fma_rounds_once():
    """Against integers: a * b + c of 24-bit numbers over many magnitudes, where two roundings differ."""
    generator = np.random.default_rng(0)
    a, b, c = (generator.integers(2**23, 2**24, 4000) for _ in range(3))
    shift = generator.integers(0, 48, 4000)
    scaled = (c.astype(np.float64) * 2.0**shift).astype(np.float32)
    ours = fma(a.astype(np.float32), b.astype(np.float32), scaled)
    exact = [int(x) * int(y) + (int(z) << int(s)) for x, y, z, s in zip(a, b, c, shift, strict=True)]

    def nearest(value):
        bits = value.bit_length() - 24
        low, rest = value >> bits, value & ((1 << bits) - 1)
        up = rest > 1 << (bits - 1) or (rest == 1 << (bits - 1) and low & 1)
        return (low + up) << bits

    assert [int(value) for value in ours] == [nearest(value) for value in exact]


def test_a_shuffle_stays_in_its_segment():
    """Within four lanes (mask 0x1c above a limit of 31): lane 3 of each; and a step down that would leave them stays where it is."""
    shuffle = "shfl.sync.{}.b32 %r5, %r1, {}, 7199, -1"
    thread = torch.arange(64)
    out = run([shuffle.format("idx", 3), "st.global.b32 [%rd3], %r5"])
    assert torch.equal(out.long(), thread | 3)
    out = run([shuffle.format("down", 1), "st.global.b32 [%rd3], %r5"])
    assert torch.equal(out.long(), torch.where(thread % 4 == 3, thread, thread + 1))
