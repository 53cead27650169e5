"""What GPUs are: dense FLOP/s by precision, memory and its bandwidth, with the source of each number.

Vendors print the sparse figure beside or instead of the dense one; everything here is dense. A device that is not in
the table has no peak: nothing is assumed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

from foundry_fp8.config import check_choice

__all__ = ["GPUS", "PRECISIONS", "TABLE", "Device", "Gpu", "Peaks", "gpu_named", "gpu_of", "peaks_of"]

PRECISIONS = ("fp4", "fp8", "bf16", "fp16", "tf32", "fp32")
"""What a GEMM can have run in. ``tf32`` is fp32 with reduced-precision multiplication allowed."""


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Peaks of one device.

    Attributes:
        flops_per_sec: Dense FLOP/s by precision.
        source: ``table``, ``user`` or ``measured``.
        detail: The device and where the numbers come from, for the log.
    """

    flops_per_sec: Mapping[str, float]
    source: Literal["table", "user", "measured"]
    detail: str

    def of(self, precision: str) -> float:
        """The peak for ``precision``; for tf32 and fp16 where they are not given, that of fp32 and bf16.

        Raises:
            KeyError: No peak for this precision.
        """
        if precision in self.flops_per_sec:
            return self.flops_per_sec[precision]
        other = {"tf32": "fp32", "fp16": "bf16"}.get(precision, precision)
        if other in self.flops_per_sec:
            return self.flops_per_sec[other]
        raise KeyError(
            f"{precision} has no peak ({self.detail}: {', '.join(self.flops_per_sec)}). "
            f"Give it in mfu_monitor.peak_flops, for example {{{precision}: 1.0e14}}."
        )


@dataclasses.dataclass(frozen=True)
class Device:
    """A row of the table: TFLOP/s, dense; ``None`` where the device has no such units."""

    name: str
    pattern: str
    """Regular expression for the whole name that the driver reports, case ignored."""
    fp4: float | None
    fp8: float | None
    bf16: float | None
    tf32: float | None
    fp32: float
    source: str
    read: str | None
    """Where the figures were read in November 2026, a page that reprints the source; ``None``: nowhere, they are not verified."""
    fp16: float | None = None
    """Where it is not that of bf16."""


def _nvidia(product: str) -> str:
    return rf"(nvidia )?{product}"


_H100 = "NVIDIA H100 datasheet (sparse figures halved)"
_B = "NVIDIA Blackwell architecture brief (sparse figures halved)"
_BU = "NVIDIA HGX B300 and GB300 NVL72 datasheets (sparse figures halved, FP4 as given dense)"
_ADA = "NVIDIA Ada GPU architecture whitepaper, FP32 accumulation, dense"
_V100 = "NVIDIA V100 datasheet: FP16 alone"
# Pages that reprint vendors' tables.
_HOPPER_READ = "github.com/astroC86/gpu-datasheet; hmc-tech.com/gpu/nvidia-gb200-vs-nvidia-h100-sxm"
_CARDS_READ = "github.com/winston-zhang-orz/gpu-specs"
_H20_READ = "zangshuxian.com/new/674733024499207168; FP8 is its INT8"
_4090_READ = "waredb.com/processor/nvidia-geforce-rtx-4090; hmc-tech.com/gpus/nvidia-geforce-rtx-4090-vs-nvidia-rtx-pro-5000-blackwell"
_L40_READ = "mullet.se/product.html?product_id=355414"
_RTX_PRO_READ = "hmc-tech.com/gpu/nvidia-rtx-pro-6000-blackwell-vs-amd-radeon-pro-duo-polaris"
_B_READ = "zdszero.github.io/Computer/Artificial_Intelligence/Hardware.html"
_BU_READ = "fibermall.com/blog/?p=17161; FP4: glennklockwood.com/garden/processors/B300 says 13.1, datacrunch.io 14 PFLOP/s"
_CDNA4_READ = "FP8: 8192 FLOP a clock and CU, 256 CUs, 2.2 and 2.4 GHz: world-today-news.com/?p=7253162, wccftech.com; others by its ratio"

TABLE: tuple[Device, ...] = (
    Device("H100 SXM", _nvidia(r"h100( 80gb| 96gb| 64gb)? hbm3|h100 sxm\S*.*"), None, 1978.9, 989.4, 494.7, 66.9, _H100, _HOPPER_READ),
    Device("H100 PCIe", _nvidia(r"h100 (pcie|80gb hbm2e)"), None, 1513.0, 756.5, 378.0, 51.2, _H100, _CARDS_READ),
    Device("H100 NVL", _nvidia(r"h100 nvl"), None, 1671.0, 835.5, 417.5, 60.0, _H100, None),
    Device("H200 SXM", _nvidia(r"h200( sxm.*)?"), None, 1978.9, 989.4, 494.7, 66.9, "NVIDIA H200 datasheet (halved)", _HOPPER_READ),
    Device("H200 NVL", _nvidia(r"h200 nvl"), None, 1671.0, 835.5, 417.5, 60.0, "NVIDIA H200 datasheet (halved)", None),
    Device("H800 SXM", _nvidia(r"h800"), None, 1978.9, 989.4, 494.7, 66.9, "H100 SXM silicon; NVIDIA H800 datasheet", _HOPPER_READ),
    Device("H20", _nvidia(r"h20"), None, 296.0, 148.0, 74.0, 44.0, "NVIDIA H20 product brief", _H20_READ),
    Device("GH200", _nvidia(r"gh200( \d+gb?( hbm3e?)?)?"), None, 1978.9, 989.4, 494.7, 66.9, "NVIDIA GH200 datasheet (halved)", None),
    Device("A100", _nvidia(r"a100([- ](sxm4|pcie|pg\d+))?([- ]\d+gb)?( pcie)?"), None, None, 312.0, 156.0, 19.5, "NVIDIA A100 datasheet", _CARDS_READ),
    Device("A800", _nvidia(r"a800([- ](sxm4|pcie))?([- ]\d+gb)?( pcie)?"), None, None, 312.0, 156.0, 19.5, "A100 silicon; NVIDIA A800 datasheet", None),
    Device("A10", _nvidia(r"a10"), None, None, 125.0, 62.5, 31.2, "NVIDIA A10 datasheet", _CARDS_READ),
    Device("A10G", _nvidia(r"a10g"), None, None, 70.0, 35.0, 31.5, "NVIDIA A10G datasheet: 70 TF dense FP16", None),
    Device("L40S", _nvidia(r"l40s"), None, 733.0, 362.05, 183.0, 91.6, "NVIDIA L40S datasheet", _L40_READ),
    Device("L40", _nvidia(r"l40"), None, 362.1, 181.05, 90.5, 90.5, "NVIDIA L40 datasheet", _L40_READ),
    Device("RTX 6000 Ada", _nvidia(r"rtx 6000 ada generation"), None, 728.5, 364.2, 182.1, 91.1, _ADA, None),
    Device("RTX 4090", _nvidia(r"(geforce )?rtx 4090"), None, 330.3, 165.2, 82.6, 82.6, _ADA, _4090_READ),
    Device("RTX 5090", _nvidia(r"(geforce )?rtx 5090"), 1676.0, 419.0, 209.5, 104.8, 104.8,
           "NVIDIA RTX Blackwell GPU architecture, FP32 accumulation, dense", None),
    Device("L4", _nvidia(r"l4"), None, 242.5, 121.0, 60.0, 30.3, "NVIDIA L4 datasheet (sparse figures halved)", _CARDS_READ),
    Device("RTX PRO 6000 Blackwell", _nvidia(r"rtx pro 6000 blackwell workstation edition"), 2015.2, 1007.6, 503.8, 251.9, 126.0,
           "NVIDIA RTX Blackwell PRO GPU architecture, FP32 accumulation, dense", _RTX_PRO_READ),
    Device("GB10", _nvidia(r"gb10"), 500.0, 250.0, 125.0, 62.5, 31.0,
           "NVIDIA DGX Spark datasheet: FP4 with sparsity, halved; FP8, BF16 and TF32 by halving again", None),
    Device("B100", _nvidia(r"b100"), 7000.0, 3500.0, 1750.0, 875.0, 60.0, _B, None),
    Device("B200", _nvidia(r"b200"), 9000.0, 4500.0, 2250.0, 1100.0, 75.0, _B, _B_READ),
    Device("B300", _nvidia(r"b300( sxm\d?)?( ac)?"), 13500.0, 4500.0, 2250.0, 1100.0, 75.0, _BU, _BU_READ),
    Device("GB200", _nvidia(r"gb200"), 10000.0, 5000.0, 2500.0, 1250.0, 80.0, _B, _B_READ),
    Device("GB300", _nvidia(r"gb300"), 15000.0, 5000.0, 2500.0, 1250.0, 80.0, _BU, None),
    Device("MI300X", r"(amd )?(instinct )?mi300x.*", None, 2614.9, 1307.4, 653.7, 163.4, "AMD Instinct MI300X datasheet", None),
    Device("MI325X", r"(amd )?(instinct )?mi325x.*", None, 2614.9, 1307.4, 653.7, 163.4, "AMD Instinct MI325X datasheet", None),
    Device("MI350X", r"(amd )?(instinct )?mi350x.*", 9227.5, 4613.7, 2306.9, None, 144.2, "AMD Instinct MI350X datasheet", _CDNA4_READ),
    Device("MI355X", r"(amd )?(instinct )?mi355x.*", 10066.3, 5033.2, 2516.6, None, 157.3, "AMD Instinct MI355X datasheet", _CDNA4_READ),
    Device("MI250X", r"(amd )?(instinct )?mi250x.*", None, None, 191.5, None, 23.9, "AMD Instinct MI250X datasheet, one of its two dies", None),
    Device("V100 SXM", r"(nvidia )?(tesla )?v100-sxm[23]-\d+gb.*", None, None, None, None, 15.7, _V100, _CARDS_READ, fp16=125.0),
    Device("V100 PCIe", r"(nvidia )?(tesla )?v100-pcie-\d+gb", None, None, None, None, 14.0, _V100, _CARDS_READ, fp16=112.0),
)  # fmt: skip


def peaks_of(device_name: str) -> Peaks | None:
    """The datasheet peaks of the device that reports ``device_name``, or ``None``. The whole name must match."""
    wanted = " ".join(device_name.lower().split())
    for device in TABLE:
        if re.fullmatch(device.pattern, wanted):
            values = {name: getattr(device, name) for name in PRECISIONS}
            values["fp16"] = device.fp16 or device.bf16
            peaks = {name: value * 1e12 for name, value in values.items() if value is not None}
            unread = "" if device.read else ", not verified"
            return Peaks(peaks, "table", f"{device.name}: {device.source}{unread}")
    return None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A kind of GPU that plans know."""

    peaks: Peaks
    memory_bytes: float
    bandwidth: float
    """Of its memory, bytes/s, as the data sheet has it."""
    recipe: str | None = "current"
    """What ``recipe: auto`` chooses on it; ``None`` for a GPU without FP8 GEMMs."""
    reached: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What was measured of its :class:`~foundry_fp8.backends.size_rule.Rates`."""
    measured: str = ""
    """In words: which of them, by what, and when."""

    @property
    def bf16_flops(self) -> float:
        """Dense peak, FLOP/s."""
        return self.peaks.of("bf16")

    @property
    def hbm_bytes_per_second(self) -> float:
        """Bandwidth of a fused quantiser, reads plus writes: three quarters of the data sheet's peak (assumed)."""
        return 0.75 * self.bandwidth

    @property
    def source(self) -> str:
        """Of the peaks."""
        return f"{self.peaks.detail}, dense"


def _gpu(device: str, memory_bytes: float, bandwidth: float, recipe: str | None = "current") -> Gpu:
    peaks = peaks_of(device)
    assert peaks is not None
    return Gpu(peaks, memory_bytes, bandwidth, recipe)


GPUS = {
    "a100": _gpu("A100", 80e9, 2.039e12, None),
    "a100-40g": _gpu("A100", 40e9, 1.555e12, None),
    "l40s": _gpu("L40S", 48e9, 0.864e12),
    "rtx4090": _gpu("RTX 4090", 24e9, 1.008e12),
    "rtx5090": _gpu("RTX 5090", 32e9, 1.792e12),
    "h100": _gpu("H100 SXM", 80e9, 3.35e12),
    "h800": _gpu("H800", 80e9, 3.35e12),
    "h20": _gpu("H20", 96e9, 4.0e12),
    "h200": _gpu("H200", 141e9, 4.8e12),
    "b200": _gpu("B200", 180e9, 7.7e12, "mxfp8"),
    "gb200": _gpu("GB200", 186e9, 8e12, "mxfp8"),
    "b300": _gpu("B300", 270e9, 8e12, "mxfp8"),
}
"""By the name that ``--gpu`` and ``--hardware`` take."""


def gpu_of(device_name: str) -> Gpu | None:
    """The one of :data:`GPUS` that reports ``device_name``, or ``None``."""
    peaks = peaks_of(device_name)
    return None if peaks is None else next((gpu for gpu in GPUS.values() if gpu.peaks == peaks), None)


def gpu_named(text: str) -> str:
    """The one of :data:`GPUS` that ``--gpu`` means: ``h100`` and ``h100-sxm`` are the same.

    Raises:
        ConfigError: None of them.
    """
    name = text.lower()
    found = name if name in GPUS else name.partition("-")[0]
    check_choice("--gpu", found if found in GPUS else text, tuple(GPUS))
    return found
