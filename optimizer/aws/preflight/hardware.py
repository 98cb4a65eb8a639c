"""Whether the type is, in this region today, what the plan takes it for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimizer.aws.preflight.model import Context, Row
from optimizer.catalog.sources import instance_types
from optimizer.hardware import InstanceType
from optimizer.plan import Node

# Plan field, in words.
_FIELDS = {
    "gpu_count": "GPUs",
    "gpu_memory_gib": "GiB of memory of one GPU",
    "vcpus": "vCPUs",
    "network_cards": "network cards",
    "efa_cards": "EFA interfaces",
    "cpu_architecture": "CPU architecture",
}
# A plan's figures have six significant digits at least.
_ROUNDING = 1e-5
_WHY_DIFFERENT = "memory, speed and launch template follow the plan's figures; a node that differs fails or is slower"


def check_hardware(context: Context) -> Iterator[Row]:
    """DescribeInstanceTypes against the plan: GPUs, EFA interfaces, cards, how it is sold, cluster placement."""
    plan = context.plan
    for name in (plan.instance_type, *plan.purchase.spot_types):
        yield from _type(context, name)


def _type(context: Context, name: str) -> Iterator[Row]:
    plan, check = context.plan, f"hardware of {name}"
    pages = context.ec2.get_paginator("describe_instance_types").paginate(
        Filters=[{"Name": "instance-type", "Values": [name]}]
    )
    infos: list[Any] = [info for page in pages for info in page["InstanceTypes"]]
    if not infos:
        yield Row(
            check=check,
            level="error",
            found=f"{context.region} has no {name}",
            value=name,
            why="no node could start",
            next_step="gpufleet catalog refresh, then recommend again",
        )
        return
    found, skipped = instance_types.parse(infos, source=instance_types.ORIGIN, as_of=context.now.date())
    if name not in found:
        yield Row(
            check=check,
            level="unknown",
            found=skipped[0].reason if skipped else f"{name} has no NVIDIA GPU that gpufleet knows",
            why=_WHY_DIFFERENT,
            next_step=f"aws ec2 describe-instance-types --region {context.region} --instance-types {name}",
        )
        return
    fits = True
    for words, actual, planned in _differences(plan.node, found[name], own=name == plan.instance_type):
        fits = False
        yield Row(
            check=check,
            level="error",
            found=f"{name} has {actual} {words}, the plan {planned}",
            value=actual,
            limit=planned,
            why=_WHY_DIFFERENT,
            next_step="gpufleet catalog refresh, then recommend again",
        )
    (info,) = infos
    for refused in _usage(context, name, info):
        fits = False
        yield refused
    if fits:
        node = plan.node
        yield Row(
            check=check,
            level="ok",
            found=f"{name} has {node.gpu_count:g} {node.gpu} of {node.gpu_memory_gib:g} GiB and {node.efa_cards} EFA "
            f"interfaces on {node.network_cards} cards, as planned",
        )


def _differences(node: Node, actual: InstanceType, *, own: bool) -> list[tuple[str, Any, Any]]:
    """What differs: in words, as it is, as planned. A further spot type may have more vCPUs than the plan's own."""
    found: list[tuple[str, Any, Any]] = []
    if actual.gpu.name != node.gpu:
        found.append(("GPUs", actual.gpu.name, node.gpu))
    for field, words in _FIELDS.items():
        is_, planned = getattr(actual, field), getattr(node, field)
        same = is_ == planned if isinstance(planned, str) else abs(is_ - planned) <= _ROUNDING * planned
        if not same and not (field == "vcpus" and not own and is_ > planned):
            found.append((words, is_, planned))
    return found


def _usage(context: Context, name: str, info: Any) -> Iterator[Row]:
    """How AWS sells the type: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceTypeInfo.html."""
    option, check = context.plan.purchase.option, f"hardware of {name}"
    wanted = {"reserved": "on-demand"}.get(option, option)
    sold = info["SupportedUsageClasses"]
    if wanted not in sold:
        yield Row(
            check=check,
            level="error",
            found=f"{name} is sold as {', '.join(sold)}, and the plan buys {option}",
            value=", ".join(sold),
            limit=wanted,
            why="AWS refuses the launch",
            next_step="gpufleet recommend --purchase OPTION",
        )
    if context.target.gang and "cluster" not in info["PlacementGroupInfo"]["SupportedStrategies"]:
        yield Row(
            check=check,
            level="error",
            found=f"{name} cannot be in a cluster placement group",
            why="the stack puts a gang's nodes into one, and AWS refuses the launch",
            next_step="gpufleet recommend --instance-type TYPE",
        )
