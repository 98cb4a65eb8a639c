"""Check Service Quotas: the account's limit less its use against the plan's need, one finding a quota."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bootstrap.contract.words import counted
from optimizer.aws import clients, quotas
from optimizer.aws.paging import filters, pages
from optimizer.aws.quotas import Increase, Quota, Reservation, Running
from optimizer.preflight.model import Context, Finding, Level, Unknown, ask, judge, passed, unknown

_WHY = {
    "vCPUs": "AWS refuses to start instances above it, and a gang needs all of its nodes",
    "TiB": "AWS refuses volumes above it, and with them the nodes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """The plan's need of one quota, in its unit; ``short`` is the level of the finding where too little is free."""

    quota: Quota
    amount: float
    purpose: str
    short: Level = "error"


def check_instance_quotas(context: Context) -> Iterator[Finding]:
    """Check vCPUs of running instances by family; on-demand, spot and Capacity Blocks count apart."""
    plan, target, ec2 = context.plan, context.target, context.ec2
    if target.spot_nodes and quotas.spot(plan.instance_type) is None:
        yield _no_quota_known(context, "spot")
    if plan.purchase.option == "capacity-block" and quotas.capacity_block(plan.instance_type) is None:
        yield _no_quota_known(context, "Capacity Block")
    running = ask(partial(quotas.running, ec2))
    reserved = ask(partial(quotas.reserved, ec2, context.account.id if context.account else None))
    buys_spot = target.spot_nodes or any(alternate.purchase == "spot" for alternate in plan.alternates)
    requested = ask(partial(quotas.requested_spot, ec2)) if buys_spot else []
    needs = list(_node_needs(context))
    for need in (*needs, *_alternate_needs(context, needs)):
        yield compare(context, need, _used(context, need.quota, running, reserved, requested))


def check_network_quotas(context: Context) -> Iterator[Finding]:
    """Check the parts that the stack has yet to create of its own network: VPC, endpoints, and a NAT gateway's."""
    target, ec2 = context.target, context.ec2
    if target.vpc_id:
        return

    def describe(operation: Any, key: str) -> list[Any] | Unknown:
        return ask(lambda: list(pages(ec2, operation, key)))

    def own(resources: list[Any] | Unknown) -> list[Any]:
        return [] if isinstance(resources, Unknown) else [item for item in resources if context.owns(item)]

    vpcs, endpoints = describe("describe_vpcs", "Vpcs"), describe("describe_vpc_endpoints", "VpcEndpoints")
    own_vpcs = own(vpcs)
    if own_vpcs:
        yield passed("the stack's network is there already", check=f"quota {quotas.VPCS.name}")
    gateways = _of_type(endpoints, "Gateway")
    # Counted per VPC, so a VPC that is yet to be made uses none.
    interfaces = _of_type(endpoints, "Interface", in_vpc=own_vpcs[0]["VpcId"]) if own_vpcs else []
    own_services = {item["ServiceName"].removeprefix(f"com.amazonaws.{context.region}.") for item in own(interfaces)}
    needs = [
        (quotas.VPCS, 0 if own_vpcs else 1, vpcs),
        (quotas.INTERFACE_ENDPOINTS, len(set(target.endpoints) - own_services), interfaces),
        (quotas.GATEWAY_ENDPOINTS, 0 if own(gateways) else 1, gateways),
    ]
    if target.nat:
        internet = describe("describe_internet_gateways", "InternetGateways")
        addresses: list[Any] | Unknown = ask(lambda: list(ec2.describe_addresses()["Addresses"]))
        needs += [
            (quotas.INTERNET_GATEWAYS, 0 if own(internet) else 1, internet),
            (quotas.ELASTIC_IPS, 0 if own(addresses) else 1, addresses),
        ]
    for quota, amount, resources in needs:
        if amount:
            need = Need(quota=quota, amount=amount, purpose="the stack's network")
            yield compare(context, need, resources if isinstance(resources, Unknown) else len(resources))


def _of_type(endpoints: list[Any] | Unknown, kind: str, *, in_vpc: str = "") -> list[Any] | Unknown:
    if isinstance(endpoints, Unknown):
        return endpoints
    return [item for item in endpoints if item["VpcEndpointType"] == kind and in_vpc in ("", item["VpcId"])]


def check_storage_quota(context: Context) -> Iterator[Finding]:
    """Check gp3 volumes of the nodes, TiB; volumes of this stack's own nodes are part of the plan's need."""
    plan = context.plan

    def used_tib() -> float:
        volumes = pages(context.ec2, "describe_volumes", "Volumes", Filters=filters({"volume-type": ["gp3"]}))
        return sum(int(volume["Size"]) for volume in volumes if not context.owns(volume)) / 1024

    need = Need(
        quota=quotas.GP3_STORAGE,
        amount=plan.node_count * plan.volumes.root_gib / 1024,
        purpose=f"volumes of {counted(plan.node_count, 'node')}",
    )
    yield compare(context, need, ask(used_tib))


def check_file_system_quotas(context: Context) -> Iterator[Finding]:
    """Check the file system of the training data and its storage; the stack's own is what the plan needs."""
    lustre = context.plan.lustre
    if lustre is None:
        return

    def others() -> list[Any]:
        return [
            system
            for system in pages(clients.fsx(context.region), "describe_file_systems", "FileSystems")
            if system.get("LustreConfiguration", {}).get("DeploymentType") == "PERSISTENT_2"
            and not context.owns(system)
        ]

    used = ask(others)
    for quota, amount, field in (
        (quotas.LUSTRE_SYSTEMS, 1, None),
        (quotas.LUSTRE_STORAGE, lustre.storage_gib, "StorageCapacity"),
    ):
        in_use = used if isinstance(used, Unknown) else sum(system[field] if field else 1 for system in used)
        yield compare(context, Need(quota=quota, amount=amount, purpose="the data's file system"), in_use)


def check_lambda_concurrency(context: Context) -> Iterator[Finding]:
    """Check that the controller, a function of one run a minute, has concurrency that nothing else has reserved.

    https://docs.aws.amazon.com/lambda/latest/dg/lambda-concurrency.html
    """
    limits: Any = clients.lambda_(context.region).get_account_settings()["AccountLimit"]
    free, total = limits["UnreservedConcurrentExecutions"], limits["ConcurrentExecutions"]
    yield judge(
        "ok" if free >= 1 else "error",
        f"{free} of {total} executions at once are not reserved, and the controller needs one",
        value=free,
        limit=1,
        why="without its controller the fleet neither starts nor stops",
        next_step=f"aws lambda delete-function-concurrency --region {context.region} --function-name OTHER",
    )


def compare(context: Context, need: Need, used: float | Unknown) -> Finding:
    """Compare ``need`` with what is free of its quota. A need above the whole quota is an error whatever is in use."""
    finding = replace(_compare(context, need, used), check=f"quota {need.quota.name}")
    if finding.level not in ("error", "warning"):
        return finding
    total = need.amount + (0 if isinstance(used, Unknown) else used)
    return replace(finding, increase=Increase(need.quota, math.ceil(total)))


def _compare(context: Context, need: Need, used: float | Unknown) -> Finding:
    quota = need.quota
    limit = ask(partial(quotas.limit, context.service_quotas, quota))
    why = _WHY.get(quota.unit, "pulumi up fails above it")
    wanted = f"{_number(need.amount)} {quota.unit} needed for {need.purpose}"
    next_step = quota.increase(need.amount + (0 if isinstance(used, Unknown) else used), context.region)
    if isinstance(limit, Unknown):
        return limit.finding(about=wanted, why=why)
    if isinstance(used, Unknown):
        if need.amount <= limit:
            return used.finding(about=f"{wanted}, of a quota of {_number(limit)}, in use unknown", why=why)
        text = f"{wanted}, and the quota is {_number(limit)} ({quota.code})"
        return Finding(text, level=need.short, value=need.amount, limit=limit, why=why, next_step=next_step)
    free = max(limit - used, 0)
    return judge(
        "ok" if need.amount <= limit - used else need.short,
        f"{wanted}, {_number(free)} free: quota {_number(limit)} ({quota.code}), {_number(used)} in use",
        value=round(need.amount, 2),
        limit=round(free, 2),
        why=why,
        next_step=next_step,
    )


def _number(value: float) -> str:
    return f"{value:,.2f}".removesuffix("0").removesuffix("0").removesuffix(".")


def _node_needs(context: Context) -> Iterator[Need]:
    plan, purchase = context.plan, context.plan.purchase
    vcpus, nodes, spot_nodes = plan.node.vcpus, plan.node_count, context.target.spot_nodes
    on_demand, base = quotas.on_demand(plan.instance_type), purchase.on_demand_base
    if on_demand:
        if purchase.option == "on-demand" or (purchase.option == "reserved" and not purchase.capacity_reservation_id):
            yield Need(quota=on_demand, amount=nodes * vcpus, purpose=f"{nodes} x {plan.instance_type}")
        if top_up := purchase.on_demand_top_up:
            purpose = f"{top_up} x {plan.instance_type} on demand beside the reservation"
            yield Need(quota=on_demand, amount=top_up * vcpus, purpose=purpose)
        if base:
            purpose = f"an on-demand base of {base} x {plan.instance_type}"
            yield Need(quota=on_demand, amount=base * vcpus, purpose=purpose)
        if purchase.fallback == "on-demand" and base < nodes:
            purpose = f"falling back to {nodes} x {plan.instance_type} on demand"
            # Spot may come all the same.
            yield Need(quota=on_demand, amount=nodes * vcpus, purpose=purpose, short="warning")
    block = quotas.capacity_block(plan.instance_type)
    if purchase.option == "capacity-block" and not purchase.capacity_reservation_id and block:
        yield Need(quota=block, amount=nodes * vcpus, purpose=f"{nodes} x {plan.instance_type}")
    if spot_nodes:
        own = quotas.spot(plan.instance_type)
        if own:
            yield Need(quota=own, amount=spot_nodes * vcpus, purpose=f"{spot_nodes} x {plan.instance_type} on spot")
        others = {quotas.spot(name) for name in purchase.spot_types} - {own, None}
        for quota in sorted(filter(None, others), key=lambda quota: quota.code):
            names = ", ".join(name for name in purchase.spot_types if quotas.spot(name) == quota)
            purpose = f"{spot_nodes} of {names} on spot"
            # The plan's type is enough by itself; more types are more pools.
            yield Need(quota=quota, amount=spot_nodes * vcpus, purpose=purpose, short="warning")


def _alternate_needs(context: Context, needs: Iterable[Need]) -> Iterator[Need]:
    """Needs of the alternates beyond ``needs``, one a quota: the plan's own place is enough by itself."""
    plan = context.plan
    covered = {need.quota: need.amount for need in needs}
    for alternate in plan.alternates:
        quota_of = quotas.spot if alternate.purchase == "spot" else quotas.on_demand
        quota, vcpus = quota_of(alternate.instance_type), (alternate.node or plan.node).vcpus
        if quota and plan.node_count * vcpus > covered.get(quota, 0):
            covered[quota] = plan.node_count * vcpus
            purpose = f"alternates, {plan.node_count} x {alternate.instance_type} {alternate.purchase}"
            yield Need(quota=quota, amount=covered[quota], purpose=purpose, short="warning")


def _used(
    context: Context,
    quota: Quota,
    running: list[Running] | Unknown,
    reserved: list[Reservation] | Unknown,
    requested: list[tuple[str, int]] | Unknown,
) -> float | Unknown:
    """Sum the vCPUs that count towards ``quota``: on demand also those of unused reservations, on spot of requests."""
    if quota.market == "capacity-block":
        return reserved if isinstance(reserved, Unknown) else quotas.used_by_blocks(quota, reserved)
    if isinstance(running, Unknown):
        return running
    # Without this stack's own nodes: they are part of the plan's need.
    if quota.market == "spot":
        if isinstance(requested, Unknown):
            return requested
        return quotas.used_on_spot(quota, running, requested, context.owns)
    return reserved if isinstance(reserved, Unknown) else quotas.used_on_demand(quota, running, reserved, context.owns)


def _no_quota_known(context: Context, market: str) -> Finding:
    plan = context.plan
    return unknown(
        check=f"quota of {market} {plan.instance_type}",
        text=f"AWS's page of quotas names none of {market} for {quotas.family(plan.instance_type)}",
        why=f"where there is one, it may be 0, and the plan needs {plan.node_count * plan.node.vcpus} vCPUs",
        next_step=f"aws service-quotas list-service-quotas --region {context.region} --service-code ec2",
    )
