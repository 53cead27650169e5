"""The table of peaks, and peaks from a user or a clock."""

from __future__ import annotations

import pytest
import torch

from foundry_fp8.config import ConfigError
from foundry_fp8.gpus import TABLE, peaks_of
from foundry_fp8.observe.flops.mfu import MFUConfig
from foundry_fp8.observe.flops.peaks import measured_peaks, peaks_from_user

# What torch.cuda.get_device_name returns, and the row it must (or must not) find.
NAMES = {
    "NVIDIA H100 80GB HBM3": "H100 SXM", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200 SXM", "NVIDIA H200 NVL": "H200 NVL", "NVIDIA H20": "H20", "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 120GB": "GH200", "NVIDIA A100-SXM4-40GB": "A100", "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100", "NVIDIA A100 80GB PCIe": "A100", "NVIDIA A10": "A10", "NVIDIA A10G": "A10G",
    "NVIDIA L40S": "L40S", "NVIDIA L4": "L4", "NVIDIA B200": "B200", "NVIDIA GB200": "GB200",
    "AMD Instinct MI300X": "MI300X", "NVIDIA H800": "H800 SXM", "NVIDIA L40": "L40", "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000 Blackwell", "NVIDIA GB10": "GB10",
    "NVIDIA B100": "B100", "AMD Instinct MI350X": "MI350X", "AMD Instinct MI355X": "MI355X",
    "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA GeForce RTX 5090": "RTX 5090",
    "Tesla V100-SXM2-32GB": "V100 SXM", "Tesla V100-PCIE-16GB": "V100 PCIe",
    # Substrings of known names, and parts of a GPU: unknown rather than wrong.
    "NVIDIA RTX A1000": None, "NVIDIA T400": None, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None, "Tesla T4": None,
    "NVIDIA GeForce RTX 4080": None, "NVIDIA RTX 6000": None, "NVIDIA B1000": None, "Quadro A100000": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "row"), NAMES.items())
def test_whole_names_find_their_row(name, row):
    peaks = peaks_of(name)
    assert (peaks.detail.split(":")[0] if peaks else None) == row


def test_the_table_holds_dense_figures():
    for device in TABLE:
        assert device.source
        if (
            device.fp8 is not None
        ):  # FP8 runs at twice the rate of bf16 on all of these; 4 times would be sparse
            assert device.fp8 == pytest.approx(2 * device.bf16, rel=0.02), device.name
        if (
            device.fp4 is not None
        ):  # and FP4 at twice that, at three times on Blackwell Ultra; GeForce has half the rate of FP8 alone
            most = 4.1 if device.name == "RTX 5090" else 3.1
            assert 1.9 < device.fp4 / device.fp8 < most, device.name
        if device.tf32 is not None:
            assert device.tf32 == pytest.approx(device.bf16 / 2, rel=0.03), device.name
    assert peaks_of("NVIDIA H100 80GB HBM3").of("bf16") == pytest.approx(989.4e12)
    assert peaks_of("NVIDIA B200").of("fp4") == 2 * peaks_of("NVIDIA B200").of("fp8")
    assert peaks_of("Tesla V100-SXM2-16GB").of("fp16") == 125e12
    with pytest.raises(KeyError, match=r"bf16 has no peak \(V100 SXM: NVIDIA"):
        peaks_of("Tesla V100-SXM2-16GB").of("bf16")


def test_a_figure_that_nobody_could_look_up_is_logged_as_not_verified():
    assert peaks_of("NVIDIA H100 80GB HBM3").detail.endswith("(sparse figures halved)")
    assert peaks_of("NVIDIA GB10").detail.endswith(", not verified")
    unread = {device.name for device in TABLE if device.read is None}
    assert "H100 SXM" not in unread and len(unread) < len(TABLE) / 2


def test_a_missing_precision_says_how_to_give_it():
    with pytest.raises(
        KeyError,
        match=r"fp8 has no peak \(A100: NVIDIA A100 datasheet.*: bf16, .*\)\. Give it in mfu_monitor.peak_flops",
    ):
        peaks_of("NVIDIA A100-SXM4-80GB").of("fp8")


def test_peaks_from_a_user():
    assert peaks_from_user(2.5e14).of("bf16") == 2.5e14
    assert peaks_from_user({"bf16": 1e14, "fp8": 2e14}).of("fp8") == 2e14
    assert peaks_from_user({"fp32": 1e13}).of("tf32") == 1e13
    with pytest.raises(KeyError, match=r"fp32 has no peak \(given by the user: bf16, fp8\)\. Give it in"):
        peaks_from_user({"bf16": 1e14, "fp8": 2e14}).of("fp32")
    with pytest.raises(ConfigError, match=r"peak_flops.bf61: 'bf61' is not one of .*Did you mean 'bf16'"):
        MFUConfig(peak_flops={"bf61": 1e14})
    for bad in (-1, 0, "fast", True, {"fp8": float("nan")}, {}):
        with pytest.raises(ConfigError, match="peak_flops"):
            MFUConfig(peak_flops=bad)


def test_measured_peaks_on_this_cpu():
    peaks = measured_peaks(torch.device("cpu"), size=128, seconds=0.01)
    assert peaks.source == "measured"
    assert 1e7 < peaks.of("fp32") < 1e14
    assert peaks.of("fp8") == peaks.of("fp32")
