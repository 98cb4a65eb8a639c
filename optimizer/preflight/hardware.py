"""Check that the instance type has, in this region today, the hardware that the plan assumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from bootstrap.contract.words import counted
from optimizer.catalog.sources import instance_types
from optimizer.contract.hardware import InstanceType
from optimizer.contract.plan import NodeSpec
from optimizer.preflight.model import Context, Finding, failure, passed, problems_or, unknown

# Words for the plan's fields.
_FIELDS = {
    "gpu_count": "GPUs",
    "gpu_memory_gib": "GiB of memory of one GPU",
    "vcpus": "vCPUs",
    "network_cards": "network cards",
    "efa_cards": "EFA interfaces",
    "cpu_architecture": "CPU architecture",
}
# A plan's figures have at least six significant digits.
_ROUNDING = 1e-5
_WHY_DIFFERENT = "memory, speed and launch template follow the plan's figures; a node that differs fails or is slower"


def check_hardware(context: Context) -> Iterator[Finding]:
    """Compare DescribeInstanceTypes with the plan: GPUs, EFA interfaces, cards, how it is sold, cluster placement."""
    plan = context.plan
    for name in (plan.instance_type, *plan.purchase.spot_types):
        yield from _check_type(context, name)
    other_types = {alternate.instance_type: plan.at(alternate) for alternate in plan.alternates if alternate.node}
    for name, there in other_types.items():
        for finding in _check_type(replace(context, target=replace(context.target, plan=there)), name):
            yield replace(finding, level="warning" if finding.level == "error" else finding.level)


def _check_type(context: Context, name: str) -> Iterator[Finding]:
    node, check = context.plan.node, f"hardware of {name}"
    pages = context.ec2.get_paginator("describe_instance_types").paginate(
        Filters=[{"Name": "instance-type", "Values": [name]}]
    )
    infos: list[Any] = [info for page in pages for info in page["InstanceTypes"]]
    if not infos:
        yield failure(
            check,
            f"{context.region} has no {name}",
            value=name,
            why="no node could start",
            next_step="gpufleet catalog refresh, then recommend again",
        )
        return
    types, skipped = instance_types.parse(infos, source=instance_types.ORIGIN, as_of=context.now.date())
    if name not in types:
        yield unknown(
            check,
            skipped[0].reason if skipped else f"{name} has no NVIDIA GPU that gpufleet knows",
            why=_WHY_DIFFERENT,
            next_step=f"aws ec2 describe-instance-types --region {context.region} --instance-types {name}",
        )
        return
    (info,) = infos
    yield from problems_or(
        _problems(context, check, info, types[name]),
        lambda: passed(
            check,
            f"{name} has {node.gpu_count:g} {node.gpu} of {node.gpu_memory_gib:g} GiB and {node.efa_cards} EFA "
            f"interfaces on {counted(node.network_cards, 'card')}, as planned",
        ),
    )


def _problems(context: Context, check: str, info: Any, actual: InstanceType) -> Iterator[Finding]:
    name, error = actual.name, partial(failure, check)
    for words, is_, planned in _differences(context, actual):
        yield error(
            f"{name} has {is_} {words}, the plan {planned}",
            value=is_,
            limit=planned,
            why=_WHY_DIFFERENT,
            next_step="gpufleet catalog refresh, then recommend again",
        )
    for card, text, value, limit in _unfit_interfaces(context.plan.node, info["NetworkInfo"]["NetworkCards"]):
        yield error(
            f"{name}'s network card {card} {text}",
            value=value,
            limit=limit,
            why="AWS refuses the launch template's interfaces "
            "(https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-eni.html)",
            next_step="gpufleet catalog refresh, then recommend again",
        )
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InstanceTypeInfo.html
    option = context.plan.purchase.option
    wanted = "on-demand" if option == "reserved" else option
    sold = ", ".join(info["SupportedUsageClasses"])
    if wanted not in info["SupportedUsageClasses"]:
        yield error(
            f"{name} is sold as {sold}, and the plan buys {option}",
            value=sold,
            limit=wanted,
            why="AWS refuses the launch",
            next_step="gpufleet recommend --purchase OPTION",
        )
    if context.target.gang and "cluster" not in info["PlacementGroupInfo"]["SupportedStrategies"]:
        yield error(
            f"{name} cannot be in a cluster placement group",
            why="the stack puts a gang's nodes into one, and AWS refuses the launch",
            next_step="gpufleet recommend --instance-type TYPE",
        )


def _unfit_interfaces(node: NodeSpec, cards: Iterable[Any]) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield each card that cannot have the plan's interfaces: its index, the reason, value and limit.

    https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_NetworkCardInfo.html
    """
    by_index = {card["NetworkCardIndex"]: card for card in cards}
    if len(by_index) != node.network_cards:
        return  # a difference of its own
    declared = Counter(interface.card for interface in node.interfaces)
    for index, count in declared.items():
        most = by_index[index]["MaximumNetworkInterfaces"]
        if count > most:
            yield index, f"takes {most} interfaces, the plan attaches {count}", count, most
    for card, _, kind in node.interfaces:
        # Older answers lack the types.
        kinds = by_index[card].get("InterfaceTypes")
        if kinds and kind not in kinds:
            yield card, f"takes no {kind} interface", kind, ", ".join(kinds)


def _differences(context: Context, actual: InstanceType) -> Iterator[tuple[str, Any, Any]]:
    """Yield the words, actual and planned value of each difference. A further spot type may have more vCPUs."""
    node = context.plan.node
    if actual.gpu.name != node.gpu:
        yield "GPUs", actual.gpu.name, node.gpu
    for field, words in _FIELDS.items():
        is_, planned = getattr(actual, field), getattr(node, field)
        if field == "vcpus" and actual.name != context.plan.instance_type and is_ > planned:
            continue
        same = is_ == planned if isinstance(planned, str) else abs(is_ - planned) <= _ROUNDING * planned
        if not same:
            yield words, is_, planned
