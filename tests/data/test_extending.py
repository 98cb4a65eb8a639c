"""docs/CONTRIBUTING.md's steps for a new GPU and a new instance type, followed on a copy of the catalog's data."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimizer.catalog import gpus
from optimizer.catalog.snapshot import DIRECTORY_VARIABLE, write_snapshot
from tests.unit.optimizer.commands.conftest import Gpufleet, gpufleet
from tools import build_snapshot

__all__ = ["gpufleet"]  # a fixture

SOURCE = "https://example.com/datasheet"


def add_row(path: Path, **values: Any) -> None:
    """Append a line; a column without a value stays empty."""
    with path.open(encoding="utf-8", newline="") as file:
        (header, *_) = csv.reader(file)
    assert set(values) <= set(header)
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.DictWriter(file, header, restval="", lineterminator="\n").writerow(values)


def describe(name: str, gpu: str, memory_mib: int, count: int) -> dict[str, Any]:
    """An answer of DescribeInstanceTypes."""
    return {
        "InstanceType": name,
        "GpuInfo": {
            "Gpus": [{"Name": gpu, "Manufacturer": "NVIDIA", "Count": count, "MemoryInfo": {"SizeInMiB": memory_mib}}]
        },
        "VCpuInfo": {"DefaultVCpus": 192},
        "MemoryInfo": {"SizeInMiB": 2097152},
        "InstanceStorageInfo": {"TotalSizeInGB": 30400},
        "NetworkInfo": {
            "NetworkPerformance": "6400 Gigabit",
            "EfaInfo": {"MaximumEfaInterfaces": 16},
            "NetworkCards": [{"BaselineBandwidthInGbps": 400.0, "MaximumNetworkInterfaces": 4}] * 16,
        },
        "ProcessorInfo": {"SupportedArchitectures": ["x86_64"]},
    }


def clear_caches() -> None:
    for table in (gpus.gpu_table, gpus.interconnects, gpus._rows, gpus._gpudirect):
        table.cache_clear()


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The catalog with a new GPU and two new types."""
    data = tmp_path_factory.mktemp("extended") / "data"
    shutil.copytree(gpus.DATA, data)
    # A new GPU: its row, and how the family's GPUs are linked.
    add_row(
        data / "gpus.csv",
        key="r100-288gb",
        name="R100",
        ec2_name="R100",
        ec2_memory_mib=294912,
        architecture="Rubin",
        memory_bandwidth_gb_per_s=13000,
        fp32_tflop_per_s=130,
        tf32_tflop_per_s=2000,
        fp16_tflop_per_s=4000,
        bf16_tflop_per_s=4000,
        fp8_tflop_per_s=8000,
        nvlink_gb_per_s=3600,
        pcie_gb_per_s=126,
        network_gbit_per_s=1600,
        source=SOURCE,
        as_of="2026-11-21",
    )
    add_row(data / "interconnects.csv", family="p9", interconnect="nvswitch", source=SOURCE, as_of="2026-11-21")
    # New instance types: EC2's answer, a price, the Spot Advisor's line.
    types = {"p9.48xlarge": describe("p9.48xlarge", "R100", 294912, 8)}
    types["p5en.24xlarge"] = describe("p5en.24xlarge", "H200", 144384, 4)
    answer = {"source": "EC2 DescribeInstanceTypes", "as_of": "2026-11-21", "InstanceTypes": list(types.values())}
    (data / "inputs" / "describe_instance_types_new.json").write_text(json.dumps(answer), encoding="utf-8")
    for name in types:
        place = {"instance_type": name, "region": "us-east-1", "as_of": "2026-11-20"}
        add_row(data / "inputs" / "prices.csv", **place, on_demand_usd_per_hour=40)
        add_row(
            data / "inputs" / "spot_advisor.csv",
            **place,
            savings_over_on_demand_pct=50,
            interruption_frequency_per_month="<5%",
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "DATA", data)
        patch.setattr(build_snapshot, "INPUTS", data / "inputs")
        clear_caches()
        tables, _ = build_snapshot.build()
        write_snapshot(data / "snapshot", tables, made_at=build_snapshot.MADE_AT)
        yield data / "snapshot"
    clear_caches()


@pytest.fixture(autouse=True)
def _in_use(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(snapshot))


def test_the_catalog_is_sound(gpufleet: Gpufleet, snapshot: Path) -> None:
    code, _, err = gpufleet("catalog", "verify", str(snapshot))
    assert code == 0 and "70 types" in err


@pytest.mark.parametrize(("gpu", "name", "count"), [("R100", "p9.48xlarge", 8), ("H200", "p5en.24xlarge", 4)])
def test_offers_estimate_and_recommend_know_the_new_type(gpufleet: Gpufleet, gpu: str, name: str, count: int) -> None:
    _, out, _ = gpufleet("offers", "--gpu", gpu, "--instance-type", name, "--format", "json")
    (offer,) = json.loads(out)
    assert (offer["gpu_count"], offer["on_demand_usd_per_hour"], offer["spot_usd_per_hour"]) == (count, 40, 20)
    model = ("--model", "llama-3.1-8b", "--instance-type", name, "--format", "json")
    code, out, err = gpufleet("estimate", *model, "--micro-batch", "1", "--sharding", "zero3", "--seq-len", "4096")
    assert code == 0, err
    assert json.loads(out)["fits"] is True
    code, out, err = gpufleet("recommend", *model, "--tokens", "1B", "--seq-len", "4096", "--max-nodes", "2")
    assert code == 0, err
    assert {plan["instance_type"] for plan in json.loads(out)["plans"]} == {name}
