from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from optimizer.catalog.sources import instance_types
from tests.plans import merged

TODAY = date(2026, 11, 21)
P4D: dict[str, Any] = {
    "InstanceType": "p4d.24xlarge",
    "GpuInfo": {
        "Gpus": [
            {
                "Name": "A100",
                "Manufacturer": "NVIDIA",
                "Count": 8,
                "LogicalGpuCount": 8,
                "GpuPartitionSize": 1.0,
                "MemoryInfo": {"SizeInMiB": 40960},
            }
        ]
    },
    "VCpuInfo": {"DefaultVCpus": 96},
    "MemoryInfo": {"SizeInMiB": 1179648},
    "InstanceStorageInfo": {"TotalSizeInGB": 8000},
    "NetworkInfo": {
        "NetworkPerformance": "4x 100 Gigabit",
        "EfaInfo": {"MaximumEfaInterfaces": 4},
        "NetworkCards": [{"BaselineBandwidthInGbps": 100.0, "MaximumNetworkInterfaces": 15}] * 4,
    },
    "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
}


def _one(info: dict[str, Any]) -> Any:
    found, skipped = instance_types.parse([info], source="test", as_of=TODAY)
    assert skipped == []
    (instance,) = found.values()
    return instance


def _skip_reason(info: dict[str, Any]) -> str:
    found, skipped = instance_types.parse([info], source="test", as_of=TODAY)
    assert found == {}
    (line,) = skipped
    assert line.place == info["InstanceType"]
    return line.reason


def _gpu(**changes: Any) -> dict[str, Any]:
    return merged(P4D, {"GpuInfo": {"Gpus": [merged(P4D["GpuInfo"]["Gpus"][0], changes)]}})


def test_reads_every_fact() -> None:
    instance = _one(P4D)
    assert (instance.name, instance.gpu.key, instance.gpu_count, instance.gpu_memory_gib) == (
        "p4d.24xlarge",
        "a100-40gb",
        8,
        40,
    )
    assert (instance.vcpus, instance.memory_gib, instance.nvme_gb) == (96, 1152, 8000)
    assert (instance.network_gbit_per_s, instance.network_cards, instance.efa_cards) == (400, 4, 4)
    assert (instance.card_interfaces, instance.gpudirect) == ((15, 15, 15, 15), True)
    assert (instance.interconnect, instance.cpu_architecture) == ("nvswitch", "x86_64")
    assert (instance.source, instance.as_of) == ("test", TODAY)


def test_the_same_name_with_more_memory_is_another_gpu() -> None:
    assert _one(_gpu(MemoryInfo={"SizeInMiB": 81920})).gpu.key == "a100-80gb"


def test_a_fractional_gpu_counts_as_its_share() -> None:
    info = merged(
        _gpu(Name="L4", Count=0, LogicalGpuCount=1, GpuPartitionSize=0.125, MemoryInfo={"SizeInMiB": 2861}),
        {"InstanceType": "g6f.large"},
    )
    instance = _one(info)
    assert (instance.gpu.key, instance.gpu_count, instance.interconnect) == ("l4-24gb", 0.125, "none")
    assert instance.gpu_memory_gib == pytest.approx(instance.gpu.memory_gib / 8)


def test_an_answer_from_before_fractional_gpus_has_whole_ones() -> None:
    gpu = {k: v for k, v in P4D["GpuInfo"]["Gpus"][0].items() if k not in ("LogicalGpuCount", "GpuPartitionSize")}
    assert _one({**P4D, "GpuInfo": {"Gpus": [gpu]}}).gpu_count == 8


@pytest.mark.parametrize(
    ("performance", "cards", "efa", "expected"),
    [
        ("3200 Gigabit", [200.0] * 8, 8, 3200),  # P6-B200: the cards' figures are ENA's
        ("6400 Gigabit", [350.0] + [400.0] * 16, 16, 6400),  # P6-B300: card 0 has no EFA
        ("4x 100 Gigabit", [100.0] * 4, 4, 400),
        ("Up to 25 Gigabit", [5.0], 0, 5),  # a burst is not bandwidth
        ("10 Gigabit", [5.0], 0, 5),  # p3.8xlarge: the headline is a burst too
        ("25 Gigabit", [25.0], 0, 25),
    ],
)
def test_network_bandwidth_is_what_an_instance_keeps_up(
    performance: str, cards: list[float], efa: int, expected: float
) -> None:
    network: dict[str, Any] = {
        "NetworkPerformance": performance,
        "NetworkCards": [{"BaselineBandwidthInGbps": card, "MaximumNetworkInterfaces": 4} for card in cards],
    }
    if efa:
        network["EfaInfo"] = {"MaximumEfaInterfaces": efa}
    instance = _one({**P4D, "NetworkInfo": network})
    assert (instance.network_gbit_per_s, instance.efa_cards) == (expected, efa)


def test_a_type_with_efa_that_nobody_asked_about_gpudirect_is_left_out() -> None:
    assert "data/gpudirect.csv" in _skip_reason({**P4D, "InstanceType": "x9.24xlarge"})


def test_types_without_nvidia_gpus_pass_silently() -> None:
    cpu = {k: v for k, v in P4D.items() if k != "GpuInfo"}
    amd = _gpu(Manufacturer="AMD", Name="Radeon Pro V520")
    assert instance_types.parse([cpu, amd], source="test", as_of=TODAY) == ({}, [])


def test_an_unknown_family_with_one_gpu_needs_no_link() -> None:
    info = merged(_gpu(Count=1, LogicalGpuCount=1), {"InstanceType": "p9.xlarge"})
    assert _one(info).interconnect == "none"


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (_gpu(Name="R100"), "'R100' with 40960 MiB is not in data/gpus.csv"),
        ({**P4D, "InstanceType": "p9.24xlarge"}, "family p9 are linked is not in data/interconnects.csv"),
        ({**_gpu(Name="K80", MemoryInfo={"SizeInMiB": 12288}), "InstanceType": "p2.xlarge"}, "compute capability 3.7"),
        ({**P4D, "ProcessorInfo": {"SupportedArchitectures": ["riscv"]}}, "processor architecture 'riscv'"),
    ],
)
def test_an_unusable_type_says_why(info: dict[str, Any], reason: str) -> None:
    assert reason in _skip_reason(info)


@pytest.mark.parametrize(
    "broken",
    [
        {**P4D, "NetworkInfo": {}},
        {**P4D, "VCpuInfo": None},
        {**P4D, "ProcessorInfo": {"SupportedArchitectures": ["x86_64", "i386"]}},
        _gpu(MemoryInfo=None),
        _gpu(GpuPartitionSize=0),
        _gpu(GpuPartitionSize=2),
        _gpu(LogicalGpuCount=0),
        {**P4D, "GpuInfo": {"Gpus": P4D["GpuInfo"]["Gpus"] * 2}},
    ],
)
def test_a_malformed_answer_is_skipped_with_its_name(broken: dict[str, Any]) -> None:
    assert _skip_reason(broken)
