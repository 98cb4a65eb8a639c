"""Check Service Quotas: the account's limit less its use against the plan's need, one finding a quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from optimizer.aws import quotas
from optimizer.aws.quotas import Quota
from optimizer.commands.preflight.model import Context, Finding, Level, Unknown, ask, unknown

_WHY = "AWS refuses to start instances above it, and a gang needs all of its nodes"


# A quota, the plan's nodes that count there, what they are for, and the level of a finding where too little is free.
Need = tuple[Quota, int, str, Level]


def check_instance_quotas(context: Context) -> Iterator[Finding]:
    """Check vCPUs of running instances by family; on-demand and spot count apart, and AWS checks a block's purchase."""
    plan = context.plan
    if context.spot_nodes and quotas.spot(plan.instance_type) is None:
        yield unknown(
            check=f"quota of spot {plan.instance_type}",
            text=f"AWS's page of quotas names none of spot for {plan.instance_type.partition('.')[0]}",
            why=f"where there is one, it may be 0, and the plan needs {plan.node_count * plan.node.vcpus} vCPUs",
            next_step=f"aws service-quotas list-service-quotas --region {context.region} --service-code ec2",
        )
    # This stack's own nodes are part of the plan's need.
    used = ask(partial(quotas.used_vcpus, context.ec2, context.account_id, context.owns))
    for need in _node_needs(context):
        yield _compare(context, need, used)


def _compare(context: Context, need: Need, used: Counter[Quota] | Unknown) -> Finding:
    """Compare a need with what is free of its quota. A need above the whole quota is an error whatever is in use."""
    quota, nodes, purpose, short = need
    vcpus, check = nodes * context.plan.node.vcpus, f"quota {quota.name}"
    wanted = f"{vcpus:,} vCPUs needed for {purpose}"
    limit = ask(partial(quotas.limit, context.service_quotas, quota))
    if isinstance(limit, Unknown):
        return limit.finding(check=check, about=wanted, why=_WHY)
    if isinstance(used, Unknown) and vcpus <= limit:
        return used.finding(check=check, about=f"{wanted}, of a quota of {limit:,.0f} ({quota.code})", why=_WHY)
    in_use = 0 if isinstance(used, Unknown) else used[quota]
    free, total = max(limit - in_use, 0), vcpus + in_use
    known = "unknown" if isinstance(used, Unknown) else f"{in_use:,}"
    return Finding(
        f"{wanted}, {free:,.0f} free: quota {limit:,.0f} ({quota.code}), {known} in use",
        check=check,
        level=short if total > limit else "ok",
        value=vcpus,
        limit=free,
        why=_WHY,
        next_step=quota.increase(total, context.region),
    )


def _node_needs(context: Context) -> Iterator[Need]:
    plan, purchase, spot_nodes = context.plan, context.plan.purchase, context.spot_nodes
    name, nodes, base = plan.instance_type, plan.node_count, purchase.on_demand_base
    if on_demand := quotas.on_demand(name):
        if purchase.option == "on-demand" or (purchase.option == "reserved" and not purchase.capacity_reservation_id):
            yield on_demand, nodes, f"{nodes} x {name}", "error"
        if top_up := purchase.on_demand_top_up:
            yield on_demand, top_up, f"{top_up} x {name} on demand beside the reservation", "error"
        if base:
            yield on_demand, base, f"an on-demand base of {base} x {name}", "error"
        if purchase.fallback == "on-demand" and base < nodes:
            # Spot may come all the same.
            yield on_demand, nodes, f"falling back to {nodes} x {name} on demand", "warning"
    if spot_nodes and (spot := quotas.spot(name)):
        yield spot, spot_nodes, f"{spot_nodes} x {name} on spot", "error"
