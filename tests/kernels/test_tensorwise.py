"""The tensorwise quantise kernels against ``foundry_fp8.numerics.quantize``, bit for bit."""

import pytest
import torch

from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.tensorwise import (
    Cast,
    Casts,
    Measure,
    quantize_tensorwise,
    quantize_tensorwise_reference,
)
from foundry_fp8.kernels.zeros import statistics
from foundry_fp8.numerics.formats import E4M3, E5M2
from foundry_fp8.numerics.quantize import amax_of
from tests.kernels.cases import DTYPES, MOST_DTYPES, SHAPES, assert_same_bits, poisoned, spread

INF, NAN = float("inf"), float("nan")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


def assert_matches_reference(x, fmt, *, scale=None, slot=None, **options):
    slots = [None, None] if slot is None else [slot.clone(), slot.clone()]
    source = Producer.identity(x)
    ours = quantize_tensorwise(source, fmt, scale=scale, amax_slot=slots[0], **options)
    reference = quantize_tensorwise_reference(source, fmt, scale=scale, amax_slot=slots[1], **options)
    for name in ("data", "data_t", "stats"):
        assert_same_bits(getattr(ours, name), getattr(reference, name), name)
    if slot is not None:
        assert_same_bits(slots[0], slots[1], "amax_slot")
    return ours


@pytest.mark.parametrize("dtype", MOST_DTYPES, ids=str)
@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_current_and_delayed_match_the_reference(shape, fmt, dtype, device):
    x = spread(*shape, dtype, device)
    scale, slot = torch.tensor(13.7, device=device), torch.tensor(0.5, device=device)
    assert_matches_reference(x, fmt)
    assert_matches_reference(x, fmt, scale=scale, slot=slot)


@every_format
@pytest.mark.parametrize("power_2", [False, True])
def test_power_2_scales_and_every_subset_of_outputs(fmt, power_2, device):
    x = spread(70, 96, torch.bfloat16, device)
    for rows, columns in ((True, False), (False, True)):
        assert_matches_reference(x, fmt, power_2=power_2, rows=rows, columns=columns)


@every_dtype
@pytest.mark.parametrize("values", [(NAN,), (INF,), (-INF, NAN)], ids=str)
def test_non_finite_values_match_the_reference_and_stay_visible(values, dtype, device):
    x = poisoned(spread(130, 140, dtype, device), *values)
    for scale in (None, torch.tensor(2.0, device=device)):
        ours = assert_matches_reference(x, E4M3, scale=scale, slot=torch.zeros((), device=device))
        dequantized = ours.data.float() * ours.stats[1]
        assert not torch.isfinite(dequantized).all()


@pytest.mark.parametrize("value", [1e-38, 1e-42, 3e38, 448.0, 464.0, 57344.0, 61440.0])
@every_format
def test_extreme_amaxes(value, fmt, device):
    x = spread(20, 40, torch.float32, device).clamp(-1, 1) * value
    x[3, 3] = value
    assert_matches_reference(x, fmt)


def test_saturates_under_a_stale_delayed_scale(device):
    x = spread(64, 64, torch.bfloat16, device)
    ours = assert_matches_reference(x, E4M3, scale=torch.tensor(1e6, device=device))
    assert ours.data.float().abs().max() == 448


def test_known_amax_gives_the_same_bytes_without_measuring(device):
    x = spread(48, 80, torch.bfloat16, device)
    measured = quantize_tensorwise(Producer.identity(x), E4M3)
    again = quantize_tensorwise(Producer.identity(x), E4M3, known_amax=measured.stats[:1], rows=False)
    assert_same_bits(again.data_t, measured.data_t, "data_t")
    assert_same_bits(again.stats, measured.stats, "stats")


def test_every_scale_has_16_bytes_of_its_own(device):
    """What some of cuBLAS's FP8 paths ask of the pointers (pytorch pull request 159957)."""
    x = spread(48, 80, torch.bfloat16, device)
    for known in (None, torch.full((1,), 3.0, device=device)):
        stats = quantize_tensorwise(Producer.identity(x), E4M3, known_amax=known).stats
        assert [stats[i].data_ptr() % 16 for i in range(3)] == [0, 0, 0]


def test_slot_keeps_a_larger_amax_and_recording_twice_changes_nothing(device):
    x = spread(40, 40, torch.float32, device)
    slot = torch.tensor(1e9, device=device)
    quantize_tensorwise(Producer.identity(x), E4M3, scale=slot.new_ones(()), amax_slot=slot)
    assert slot == 1e9
    slot.zero_()
    for _ in range(2):
        quantize_tensorwise(Producer.identity(x), E4M3, scale=slot.new_ones(()), amax_slot=slot)
        assert slot == amax_of(x)


@every_dtype
def test_column_sum_is_the_bias_gradient(dtype, device):
    x = spread(300, 150, dtype, device)
    for scale in (None, torch.tensor(1.0, device=device)):
        summed = quantize_tensorwise(Producer.identity(x), E5M2, scale=scale, column_sum=True).column_sum
        # 300 float32 additions, in any order: 300 roundings of at most half an ulp of the sum of magnitudes.
        bound = x.double().abs().sum(0) * 300 * 2.0**-24
        assert bool(((summed.double() - x.double().sum(0)).abs() <= bound + 1e-30).all())


def test_strided_rows_are_read_in_place_and_transposes_copied(device):
    wide = spread(70, 200, torch.bfloat16, device)
    for x in (wide[:, 40:136], wide.t(), wide[::2]):
        assert_matches_reference(x, E4M3)


@every_dtype
def test_amax_ignores_nan_and_sees_inf(dtype, device):
    x = spread(150, 260, dtype, device)
    for values in ((), (NAN,), (NAN, -INF)):
        y = poisoned(x, *values)
        found = [piece.stats for piece in statistics(y.device, 2)]
        Measure(Producer.identity(y), Producer.identity(y))(
            *((Producer.identity(y).pointers, one) for one in found)
        )
        assert found[0][0].item() == found[1][0].item() == amax_of(y).item()


TOGETHER = {
    "one weight": [(33, 260)],
    "two": [(16, 260), (200, 260)],
    "three": [(33, 260), (1, 260), (160, 40)],
}


@pytest.mark.parametrize("shapes", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("scaling", ["measured", "delayed", "constant"])
def test_several_at_once_are_each_of_them_alone(shapes, scaling, device):
    """A produced input in E5M2 with its column sum, and weights in E4M3, one layout or both; NaN and Inf in one of them."""
    x, up = (spread(70, 260, torch.bfloat16, device, seed) for seed in (0, 1))
    weights = [spread(*shape, torch.bfloat16, device) * 3.0**i for i, shape in enumerate(shapes)]
    weights[0] = poisoned(weights[0], NAN, INF) if len(weights) == 2 else weights[0]
    sources = [Producer.activation("silu", x, up=up), *map(Producer.identity, weights)]
    constant = 4.0 if scaling == "constant" else None
    kinds = [
        {"fmt": E4M3 if i else E5M2, "power_2": False, "rows": i != 1, "columns": i != 2, "column_sum": i == 0, "constant": constant}
        for i in range(len(sources))
    ]  # fmt: skip
    scales = [
        torch.tensor(3.0 + i, device=device) if scaling == "delayed" else None for i in range(len(sources))
    ]
    slots = [None if constant else torch.zeros((), device=device) for _ in sources]
    stats = [piece.stats for piece in statistics(x.device, len(sources))]
    if scaling == "measured":
        Measure(*sources)(*((source.pointers, one) for source, one in zip(sources, stats, strict=True)))
    casts = Casts([Cast(source, **kind) for source, kind in zip(sources, kinds, strict=True)])
    known = stats if scaling == "measured" else [None] * len(sources)
    given = zip((source.pointers for source in sources), stats, scales, known, slots, strict=True)
    for i, (data, data_t, summed) in enumerate(casts(list(given))):
        slot = None if constant else torch.zeros((), device=device)
        kind = {name: value for name, value in kinds[i].items() if name != "fmt"}
        alone = quantize_tensorwise(sources[i], kinds[i]["fmt"], scale=scales[i], amax_slot=slot, **kind)
        ours = data, data_t, stats[i], summed, slots[i]
        for name, one, its in zip(
            ("data", "data_t", "stats", "column_sum", "slot"), ours, (*alone, slot), strict=True
        ):
            assert_same_bits(one, its, f"{name} of {i}")


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.float64), TypeError, "float64; the FP8 kernels take float32"),
        (torch.zeros(4, 4, 4), ValueError, "2 dimensions"),
    ],
)
def test_bad_input_is_named(x, error, message, device):
    with pytest.raises(error, match=message):
        Producer.identity(x.to(device))


def test_a_cpu_tensor_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="backend: emulated"):
        Producer.identity(torch.zeros(4, 4))


def test_mixed_devices_are_refused(device):
    with pytest.raises(ValueError, match="must share a device"):
        Producer.activation("silu", torch.zeros(4, 4, device=device), up=torch.zeros(4, 4, device="meta"))
