"""EC2 DescribeInstanceTypes: facts of instance types.

https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceTypeInfo.html
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from datetime import date
from typing import TYPE_CHECKING, Any, get_args

from optimizer.aws.paging import filters, pages
from optimizer.catalog.gpus import find_gpu, has_gpudirect, interconnects, why_left_out
from optimizer.catalog.sources import Skipped, UnusableRowError
from optimizer.contract.hardware import CpuArchitecture, InstanceType, Interconnect

if TYPE_CHECKING:
    from mypy_boto3_ec2 import EC2Client

NAME = "instance types"
ORIGIN = "EC2 DescribeInstanceTypes"

# Families with GPUs. The API has no filter on GPUs; the pattern keeps an answer to a tenth of all types.
FAMILIES = ("p*.*", "g*.*")


def fetch(client: EC2Client, types: Collection[str] = FAMILIES) -> list[dict[str, Any]]:
    """Answers of DescribeInstanceTypes in the client's region, by default for families that may hold a GPU."""
    chosen = filters({"instance-type": types})
    return list(pages(client, "describe_instance_types", "InstanceTypes", Filters=chosen))


def parse(
    infos: Iterable[Mapping[str, Any]], *, source: str, as_of: date
) -> tuple[dict[str, InstanceType], list[Skipped]]:
    """Instance types with NVIDIA GPUs, by name, and unusable answers; other types pass silently."""
    types: dict[str, InstanceType] = {}
    skipped: list[Skipped] = []
    for info in infos:
        gpus = info.get("GpuInfo", {}).get("Gpus", [])
        if not any(gpu.get("Manufacturer") == "NVIDIA" for gpu in gpus):
            continue
        name = str(info.get("InstanceType", "?"))
        try:
            types[name] = _instance_type(name, info, source=source, as_of=as_of)
        except UnusableRowError as error:
            skipped.append(Skipped(source=NAME, place=name, reason=str(error)))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            skipped.append(Skipped(source=NAME, place=name, reason=f"malformed answer: {error!r}"))
    return types, skipped


def _instance_type(name: str, info: Mapping[str, Any], *, source: str, as_of: date) -> InstanceType:
    gpus = info["GpuInfo"]["Gpus"]
    if len(gpus) != 1:
        raise UnusableRowError(f"{len(gpus)} GPU models in one instance")
    device = gpus[0]
    if why := why_left_out(name):
        raise UnusableRowError(why)
    # A fractional GPU has Count 0, LogicalGpuCount 1, its share in GpuPartitionSize and the share's memory. Answers
    # recorded before 2026 have whole GPUs only and lack the last two fields.
    fraction = float(device.get("GpuPartitionSize", 1.0))
    logical = int(device.get("LogicalGpuCount", device["Count"]))
    memory_mib = int(device["MemoryInfo"]["SizeInMiB"])
    if not 0 < fraction <= 1 or logical < 1 or memory_mib <= 0:
        raise UnusableRowError(f"{logical} GPUs of partition {fraction} with {memory_mib} MiB")
    gpu = find_gpu(device["Name"], memory_mib / fraction)
    if gpu is None:
        raise UnusableRowError(
            f"GPU {device['Name']!r} with {memory_mib / fraction:.0f} MiB is not in data/gpus.csv; "
            "add its datasheet figures there"
        )
    network = info["NetworkInfo"]
    efa_cards = int(network.get("EfaInfo", {}).get("MaximumEfaInterfaces", 0))
    (architecture,) = info["ProcessorInfo"]["SupportedArchitectures"]
    if architecture not in get_args(CpuArchitecture):
        raise UnusableRowError(f"processor architecture {architecture!r}")
    return InstanceType(
        name=name,
        gpu=gpu,
        gpu_count=logical * fraction,
        gpu_memory_gib=memory_mib / 1024,
        vcpus=int(info["VCpuInfo"]["DefaultVCpus"]),
        memory_gib=int(info["MemoryInfo"]["SizeInMiB"]) / 1024,
        nvme_gb=float(info.get("InstanceStorageInfo", {}).get("TotalSizeInGB", 0)),
        network_gbit_per_s=_network_gbit_per_s(network, efa_cards),
        card_interfaces=tuple(int(card["MaximumNetworkInterfaces"]) for card in network["NetworkCards"]),
        efa_cards=efa_cards,
        gpudirect=efa_cards > 0 and _gpudirect(name),
        interconnect=_interconnect(name, logical),
        cpu_architecture=architecture,
        source=source,
        as_of=as_of,
    )


def _network_gbit_per_s(network: Mapping[str, Any], efa_cards: int) -> float:
    """Sustained bandwidth of an instance, all cards together, Gbit/s.

    With EFA the headline ("3200 Gigabit", "4x 100 Gigabit"): the cards' figures are ENA's, on P6-B200 half of EFA's.
    Without EFA the cards' baseline: the headline "Up to 10 Gigabit" (and p3.8xlarge's "10 Gigabit") is a burst.
    """
    headline = re.fullmatch(r"(?:([0-9]+)x )?([0-9.]+) Gigabit", network["NetworkPerformance"])
    if efa_cards and headline:
        return int(headline[1] or 1) * float(headline[2])
    return float(sum(card["BaselineBandwidthInGbps"] for card in network["NetworkCards"]))


def _gpudirect(name: str) -> bool:
    direct = has_gpudirect(name)
    if direct is None:
        raise UnusableRowError(
            f"whether EFA of {name} reaches GPU memory is not in data/gpudirect.csv; add a line there"
        )
    return direct


def _interconnect(name: str, gpus: int) -> Interconnect:
    if gpus == 1:
        return "none"
    family = name.split(".", maxsplit=1)[0]
    if family not in interconnects():
        raise UnusableRowError(
            f"how the {gpus} GPUs of family {family} are linked is not in data/interconnects.csv; add the family there"
        )
    return interconnects()[family]
