"""What the account may have, less what it has, against what the plan needs: Service Quotas, one row each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from optimizer.aws import clients, quotas
from optimizer.aws.preflight.model import Context, Level, Row, Unknown, ask
from optimizer.aws.quotas import Quota

_WHY = {
    "vCPUs": "AWS refuses to start instances above it, and a gang needs all of its nodes",
    "TiB": "AWS refuses volumes above it, and with them the nodes",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """What the plan takes of one quota.

    Attributes:
        quota: the quota.
        amount: in its unit.
        what: for what, in words.
        short: the level of not having it.
    """

    quota: Quota
    amount: float
    what: str
    short: Level = "error"


def check_instance_quotas(context: Context) -> Iterator[Row]:
    """vCPUs of running instances by family, on-demand, spot and in Capacity Blocks apart."""
    plan, target = context.plan, context.target
    ec2, service = context.ec2, context.service_quotas
    if target.spot_nodes and quotas.spot(plan.instance_type) is None:
        yield _no_quota_known(context, "spot")
    if plan.purchase.option == "capacity-block" and quotas.capacity_block(plan.instance_type) is None:
        yield _no_quota_known(context, "Capacity Block")
    running = ask(partial(quotas.running, ec2))
    reserved = ask(partial(quotas.reserved, ec2, context.account.id if context.account else None))
    requested = ask(partial(quotas.requested_spot, ec2)) if target.spot_nodes else []
    beside = ask(partial(quotas.vcpus, ec2, context.target.beside))
    if isinstance(beside, Unknown):
        yield beside.row("quota of what is beside the nodes", about=", ".join(context.target.beside))
        beside = {}
    for need in (*_needs(context), *_needs_beside(context, beside)):
        if need.quota.market == "capacity-block":
            used = _used_by_blocks(need.quota, reserved)
        elif need.quota.market == "spot":
            used = _used_by_spot(context, need.quota, running, requested)
        else:
            used = _used_on_demand(context, need.quota, running, reserved)
        yield compare(context, need, ask(partial(quotas.limit, service, need.quota)), used)


def check_network_quotas(context: Context) -> Iterator[Row]:
    """What the stack has yet to make of its own network: VPC, endpoints, and a NAT gateway's way out."""
    target, ec2, service = context.target, context.ec2, context.service_quotas
    if target.vpc_id:
        return

    def listed(operation: Any, key: str) -> list[Any] | Unknown:
        return ask(lambda: [one for page in ec2.get_paginator(operation).paginate() for one in page[key]])

    def own(found: list[Any] | Unknown) -> list[Any]:
        return [] if isinstance(found, Unknown) else [one for one in found if _own(context, one.get("Tags", ()))]

    vpcs, endpoints = listed("describe_vpcs", "Vpcs"), listed("describe_vpc_endpoints", "VpcEndpoints")
    stands = own(vpcs)
    if stands:
        yield Row(check=f"quota {quotas.VPCS.name}", level="ok", found="the stack's network is there already")
    gateways = _of_kind(endpoints, "Gateway")
    # Counted by VPC, so in one that is yet to be made none is in use.
    interfaces = _of_kind(endpoints, "Interface", in_vpc=stands[0]["VpcId"]) if stands else []
    there = {one["ServiceName"].removeprefix(f"com.amazonaws.{context.region}.") for one in own(interfaces)}
    needs = [
        (quotas.VPCS, 0 if stands else 1, vpcs),
        (quotas.INTERFACE_ENDPOINTS, len(set(target.endpoints) - there), interfaces),
        (quotas.GATEWAY_ENDPOINTS, 0 if own(gateways) else 1, gateways),
    ]
    if target.nat:
        internet = listed("describe_internet_gateways", "InternetGateways")
        addresses: list[Any] | Unknown = ask(lambda: list(ec2.describe_addresses()["Addresses"]))
        needs += [
            (quotas.INTERNET_GATEWAYS, 0 if own(internet) else 1, internet),
            (quotas.ELASTIC_IPS, 0 if own(addresses) else 1, addresses),
        ]
    for quota, amount, found in needs:
        if amount:
            need = Need(quota=quota, amount=amount, what="the stack's network")
            used = found if isinstance(found, Unknown) else len(found)
            yield compare(context, need, ask(partial(quotas.limit, service, quota)), used)


def _of_kind(endpoints: list[Any] | Unknown, kind: str, *, in_vpc: str = "") -> list[Any] | Unknown:
    """Endpoints of one type, of all VPCs or one."""
    if isinstance(endpoints, Unknown):
        return endpoints
    return [one for one in endpoints if one["VpcEndpointType"] == kind and in_vpc in ("", one["VpcId"])]


def check_storage_quota(context: Context) -> Iterator[Row]:
    """gp3 volumes of the nodes, in TiB; those of this stack's own nodes are what the plan asks for."""
    plan = context.plan
    ec2, service = context.ec2, context.service_quotas

    def used() -> float:
        pages = ec2.get_paginator("describe_volumes").paginate(Filters=[{"Name": "volume-type", "Values": ["gp3"]}])
        volumes = (volume for page in pages for volume in page["Volumes"])
        return sum(int(one["Size"]) for one in volumes if not _own(context, one.get("Tags", ()))) / 1024

    need = Need(
        quota=quotas.GP3_STORAGE,
        amount=plan.node_count * plan.volumes.root_gib / 1024,
        what=f"volumes of {plan.node_count} nodes",
    )
    yield compare(context, need, ask(lambda: quotas.limit(service, quotas.GP3_STORAGE)), ask(used))


def check_lambda_concurrency(context: Context) -> Iterator[Row]:
    """The controller is a function of one run a minute; an account whose concurrency is all reserved cannot start it.

    https://docs.aws.amazon.com/lambda/latest/dg/lambda-concurrency.html
    """
    limits: Any = clients.lambda_(context.region).get_account_settings()["AccountLimit"]
    free, total = limits["UnreservedConcurrentExecutions"], limits["ConcurrentExecutions"]
    yield Row(
        check="Lambda concurrency",
        level="ok" if free >= 1 else "error",
        found=f"{free} of {total} executions at once are not reserved, and the controller needs one",
        value=free,
        limit=1,
        why="" if free >= 1 else "without its controller the fleet neither starts nor stops",
        next_step=""
        if free >= 1
        else f"aws lambda delete-function-concurrency --region {context.region} --function-name OTHER",
    )


def compare(context: Context, need: Need, limit: float | Unknown, used: float | Unknown) -> Row:
    """The row of one quota: what is free of it against ``need``.

    A need above the whole quota is an error whatever is in use.
    """
    quota = need.quota
    check = f"quota {quota.name}"
    why = _WHY.get(quota.unit, "pulumi up fails above it")
    wanted = f"{_number(need.amount)} {quota.unit} needed for {need.what}"
    ask_for = quota.increase(need.amount + (0 if isinstance(used, Unknown) else used), context.region)
    if isinstance(limit, Unknown):
        return limit.row(check, about=wanted, why=why)
    if isinstance(used, Unknown):
        if need.amount <= limit:
            return used.row(check, about=f"{wanted}, of a quota of {_number(limit)}, in use unknown", why=why)
        return Row(
            check=check,
            level=need.short,
            found=f"{wanted}, and the quota is {_number(limit)} ({quota.code})",
            value=need.amount,
            limit=limit,
            why=why,
            next_step=ask_for,
        )
    free = limit - used
    enough = need.amount <= free
    return Row(
        check=check,
        level="ok" if enough else need.short,
        found=f"{wanted}, {_number(max(free, 0))} free: quota {_number(limit)} ({quota.code}), {_number(used)} in use",
        value=round(need.amount, 2),
        limit=round(max(free, 0), 2),
        why="" if enough else why,
        next_step="" if enough else ask_for,
    )


def _number(value: float) -> str:
    """vCPUs and counts as whole numbers, TiB to the hundredth."""
    return f"{value:,.2f}".removesuffix("0").removesuffix("0").removesuffix(".")


def _needs(context: Context) -> Iterator[Need]:
    """What the plan takes of the quotas of instances that are known."""
    plan, purchase = context.plan, context.plan.purchase
    vcpus, nodes, spot_nodes = plan.node.vcpus, plan.node_count, context.target.spot_nodes
    on_demand, base = quotas.on_demand(plan.instance_type), purchase.on_demand_base
    if on_demand:
        if purchase.option == "on-demand" or (purchase.option == "reserved" and not purchase.capacity_reservation_id):
            yield Need(quota=on_demand, amount=nodes * vcpus, what=f"{nodes} x {plan.instance_type}")
        if base:
            yield Need(quota=on_demand, amount=base * vcpus, what=f"an on-demand base of {base} x {plan.instance_type}")
        if purchase.fallback == "on-demand" and base < nodes:
            yield Need(
                quota=on_demand,
                amount=nodes * vcpus,
                what=f"falling back to {nodes} x {plan.instance_type} on demand",
                # Spot may come all the same.
                short="warning",
            )
    block = quotas.capacity_block(plan.instance_type)
    if purchase.option == "capacity-block" and not purchase.capacity_reservation_id and block:
        yield Need(quota=block, amount=nodes * vcpus, what=f"{nodes} x {plan.instance_type}")
    if spot_nodes:
        own = quotas.spot(plan.instance_type)
        if own:
            yield Need(quota=own, amount=spot_nodes * vcpus, what=f"{spot_nodes} x {plan.instance_type} on spot")
        others = {quotas.spot(name) for name in purchase.spot_types} - {own, None}
        for quota in sorted(filter(None, others), key=lambda quota: quota.code):
            names = ", ".join(name for name in purchase.spot_types if quotas.spot(name) == quota)
            # The plan's type is enough by itself; more types are more pools.
            yield Need(quota=quota, amount=spot_nodes * vcpus, what=f"{spot_nodes} of {names} on spot", short="warning")


Reserved = list[tuple[dict[str, Any], int]]


def _needs_beside(context: Context, vcpus: Mapping[str, int]) -> Iterator[Need]:
    """What the stack starts besides its nodes: a cluster's system nodes."""
    for name, one in vcpus.items():
        quota, count = quotas.on_demand(name), context.target.beside[name]
        if quota:
            yield Need(quota=quota, amount=one * count, what=f"{count} x {name} beside the nodes")


def _used_on_demand(
    context: Context, quota: Quota, running: list[quotas.Running] | Unknown, reserved: Reserved | Unknown
) -> float | Unknown:
    """vCPUs of running on-demand instances, and of reservations that nothing runs in: they count as if it did."""
    if isinstance(running, Unknown):
        return running
    if isinstance(reserved, Unknown):
        return reserved
    return _running_vcpus(context, quota, running, ("on-demand", "scheduled")) + sum(
        vcpus * quotas.unused(one)
        for one, vcpus in reserved
        if not quotas.is_block(one)
        and quotas.on_demand(one["InstanceType"]) == quota
        and not _own(context, one.get("Tags", ()))
    )


def _used_by_spot(
    context: Context,
    quota: Quota,
    running: list[quotas.Running] | Unknown,
    requested: list[tuple[str, int]] | Unknown,
) -> float | Unknown:
    if isinstance(running, Unknown):
        return running
    if isinstance(requested, Unknown):
        return requested
    waiting = sum(vcpus for name, vcpus in requested if quotas.spot(name) == quota)
    return _running_vcpus(context, quota, running, ("spot",)) + waiting


def _used_by_blocks(quota: Quota, reserved: Reserved | Unknown) -> float | Unknown:
    if isinstance(reserved, Unknown):
        return reserved
    return sum(
        vcpus * int(one["TotalInstanceCount"])
        for one, vcpus in reserved
        if quotas.is_block(one) and quotas.capacity_block(one["InstanceType"]) == quota
    )


def _running_vcpus(context: Context, quota: Quota, running: list[quotas.Running], lifecycles: tuple[str, ...]) -> int:
    """vCPUs that count towards ``quota``; this stack's own nodes are left out, as they are what the plan asks for."""
    quota_of = quotas.spot if quota.market == "spot" else quotas.on_demand
    return sum(
        one.vcpus
        for one in running
        if one.lifecycle in lifecycles and quota_of(one.instance_type) == quota and not _own(context, one.tags)
    )


def _no_quota_known(context: Context, market: str) -> Row:
    plan = context.plan
    return Row(
        check=f"quota of {market} {plan.instance_type}",
        level="unknown",
        found=f"AWS's page of quotas names none of {market} for {quotas.family(plan.instance_type)}",
        why=f"where there is one, it may be 0, and the plan needs {plan.node_count * plan.node.vcpus} vCPUs",
        next_step=f"aws service-quotas list-service-quotas --region {context.region} --service-code ec2",
    )


def _own(context: Context, tags: Any) -> bool:
    """Whether something with ``tags``, as AWS lists them, is of this stack."""
    stack = context.target.stack
    return stack is not None and {"Key": stack.tag, "Value": stack.name} in tags
