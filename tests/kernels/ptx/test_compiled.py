"""The kernels as they ship, compiled for sm_90, against their definitions: the same bits.

What the interpreter cannot see, because it runs the source: contraction, what a conversion does with NaN and with what is too large,
the exchange of words through shared memory, barriers, vector accesses past an edge. Open bugs of this kind in Triton (issue 11111: a
clamp that keeps NaN, then a transposed FP8 store; mlc-ai/pith-train 74) are near to the quantise kernels, which transpose what they
convert, though they have no clamp: so both layouts are run on ragged shapes and on what is not finite. Each stack runs this with the
Triton that it brings.
"""

import pytest
import torch

from foundry_fp8.distributed.wire import decode, decode_mean, encode
from foundry_fp8.kernels.tensorwise import quantize_tensorwise
from foundry_fp8.kernels.wire import decode_mean_rows, decode_rows, encode_rows
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.packed import PackFormat
from foundry_fp8.numerics.wire_format import WireFormat
from tests.kernels import (
    test_block_gemm,
    test_blockwise,
    test_delayed_update,
    test_dequantize,
    test_packed_norms,
    test_packing,
    test_tensorwise,
)
from tests.kernels import test_producers as producers
from tests.kernels.cases import DTYPES, assert_same_bits, poisoned, spread
from tests.kernels.test_blockwise import GRANULARITIES
from tests.kernels.test_tensorwise import assert_matches_reference

INF, NAN = float("inf"), float("nan")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
RAGGED = pytest.mark.parametrize("shape", [(200, 144), (37, 130)], ids=str)


def test_delayed_with_every_output_keeps_what_is_not_finite(device):
    x = poisoned(spread(37, 130, torch.bfloat16, device), -INF, NAN)
    assert_matches_reference(
        x, E5M2, scale=torch.tensor(13.7), slot=torch.tensor(0.5), power_2=False, column_sum=True
    )


def test_several_at_once(device):
    for scaling in ("measured", "delayed"):
        test_tensorwise.test_several_at_once_are_each_of_them_alone(
            [(33, 130), (1, 130), (40, 16)], scaling, device
        )


def test_blocks_in_both_layouts_keep_what_is_not_finite(device):
    x = poisoned(spread(150, 144, torch.bfloat16, device), -INF, NAN)
    test_blockwise.assert_matches_reference(x, E4M3)


def test_leaving_fp8(device):
    test_dequantize.test_values_amaxes_and_reciprocals_equal_the_reference(3, E5M2, torch.bfloat16, device)


def test_packing_rounds_as_the_reference_does(device):
    """Contracted to one rounding, `x * scale + 1.5 * 2**23` gave other codes for 16-bit inputs."""
    test_packing.test_bytes_equal_the_reference(False, "int4", 1024, torch.bfloat16, device)
    # With Triton 3.9 a bfloat16 scale went through float16 on its way to a float16 value.
    test_packing.test_bytes_equal_the_reference(False, "int4", 1024, torch.float16, device)


@pytest.mark.full
class TestEveryVariant:
    @RAGGED
    @every_format
    @every_dtype
    def test_tensorwise(self, shape, fmt, dtype, device):
        x = spread(*shape, dtype, device)
        assert_matches_reference(x, fmt)
        assert_matches_reference(x, fmt, scale=torch.tensor(13.7), slot=torch.tensor(0.5))

    @pytest.mark.parametrize("values", [(NAN,), (-INF, NAN)], ids=str)
    @every_format
    def test_tensorwise_what_is_not_finite(self, values, fmt, device):
        x = poisoned(spread(130, 140, torch.bfloat16, device), *values)
        for scale in (None, torch.tensor(2.0)):
            for rows, columns in ((True, True), (True, False), (False, True)):
                slot = torch.zeros(())
                assert_matches_reference(x, fmt, scale=scale, slot=slot, rows=rows, columns=columns)

    def test_a_known_amax_and_powers_of_two(self, device):
        x = spread(48, 80, torch.bfloat16, device)
        measured = quantize_tensorwise(producers.Producer.identity(x), E4M3)
        assert_matches_reference(x, E4M3, known_amax=measured.stats[:1], power_2=True, rows=False)

    @RAGGED
    @every_dtype
    @pytest.mark.parametrize("options", GRANULARITIES.values(), ids=GRANULARITIES)
    def test_blockwise(self, shape, dtype, options, device):
        test_blockwise.assert_matches_reference(spread(*shape, dtype, device), E4M3, **options)

    def test_scales_of_every_exponent(self, device):
        for group in (128, 32):
            test_blockwise.test_scales_of_every_exponent(group, torch.float32, E4M3, device)

    @pytest.mark.parametrize("values", [(NAN,), (-INF, NAN)], ids=str)
    @pytest.mark.parametrize("options", GRANULARITIES.values(), ids=GRANULARITIES)
    def test_blockwise_what_is_not_finite(self, values, options, device):
        x = poisoned(spread(200, 144, torch.bfloat16, device), *values)
        for rows, columns in ((True, True), (True, False), (False, True)):
            test_blockwise.assert_matches_reference(x, E5M2, rows=rows, columns=columns, **options)

    @pytest.mark.parametrize("centered", [False, True], ids=["rmsnorm", "layernorm"])
    @every_dtype
    def test_a_norm_is_rounded_as_its_definition_is(self, centered, dtype, device):
        """To the bit: every operation of it is IEEE, and none is contracted."""
        x = spread(37, 130, dtype, device)
        weight, bias = torch.rand(130) + 0.5, torch.randn(130) if centered else None
        source = producers.norm(x, centered, weight, bias)
        producers.assert_quantized_alike(source, share=0)

    @pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
    @pytest.mark.parametrize("name", producers.ACTIVATIONS)
    def test_activations(self, name, gated, device):
        producers.test_fused_activation_quantises_the_unfused_value(name, gated, torch.bfloat16, device)
        producers.test_activation_backward(name, gated, torch.bfloat16, device)

    @pytest.mark.parametrize("centered", [False, True], ids=["rmsnorm", "layernorm"])
    def test_norm_backward(self, centered, device):
        producers.test_norm_backward_is_autograds(centered, True, device)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", ["int8", "e4m3", "int4"])
    def test_packing(self, name, dtype, device):
        for nonzero in (False, True):
            test_packing.test_bytes_equal_the_reference(nonzero, name, 2500, dtype, device)

    @pytest.mark.parametrize("name", ["int8", "e4m3"])
    def test_packed_norms_and_activations(self, name, device):
        test_packed_norms.test_every_dtype_and_what_is_not_finite(torch.bfloat16, name, device)
        test_packed_norms.test_backward_reads_the_codes((6, 384), torch.bfloat16, True, name, device)
        test_packed_norms.assert_packed_alike(
            spread(7, 50, torch.float16, device), PackFormat(name=name).within(50), True
        )
        test_packing.test_gated_backward_is_autograd_of_the_unpacked_inputs(name, "silu", device)

    @pytest.mark.parametrize("algorithm", ["max", "most_recent"])
    def test_delayed_update(self, algorithm, device):
        test_delayed_update.test_matches_the_state(66, algorithm, device)

    @pytest.mark.parametrize("name", ["int8", "e4m3"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_wire(self, name, dtype, device):
        x = torch.randn(3, 333) * torch.logspace(-4, 3, 333)
        x[1, 17], x[2, 0] = NAN, INF
        x, wire = x.to(dtype), WireFormat(name=name, block_size=32)
        wanted = encode(x, wire)
        coded = torch.zeros_like(wanted)
        encode_rows(x, wire, coded)
        assert torch.equal(coded, wanted) or same_message(coded, wanted, wire)
        values = torch.empty(3, 333, dtype=dtype)
        decode_rows(wanted, wire, 333, values)
        assert_same_bits(values, decode(wanted, wire, 333, out=torch.empty_like(values)), "values")
        mean = decode_mean_rows(wanted, wire, 333, 3, torch.empty(333))
        assert_same_bits(mean, decode_mean(wanted, wire, 333, 3), "mean")

    @pytest.mark.parametrize("square", [True, False], ids=["128x128", "1x128"])
    @pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
    def test_block_gemm(self, fmt, square, device):
        test_block_gemm.test_matches_float64((150, 90, 200), square, fmt, device)

    def test_every_tiling_of_the_block_gemm(self, monkeypatch, device):
        for square in (True, False):
            test_block_gemm.test_every_config_gives_the_same_bits(square, monkeypatch, device)


def same_message(ours, wanted, wire):
    """Equal codes, and scales that are equal or both NaN."""
    payload = wire.payload_bytes(333)
    scales = [message[:, payload:].contiguous().view(torch.float32) for message in (ours, wanted)]
    assert_same_bits(*scales, "scales")
    return torch.equal(ours[:, :payload], wanted[:, :payload])
