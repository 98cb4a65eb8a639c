"""Check Service Quotas: the account's limit less its use against the plan's need, one finding a quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from optimizer.aws import quotas
from optimizer.aws.quotas import Quota
from optimizer.commands.preflight.model import Context, Finding, Level, Unknown, ask, passed, unknown

_WHY = "AWS refuses to start instances above it, and a gang needs all of its nodes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """vCPUs that the plan needs of one quota; ``short`` is the level of the finding where too little is free."""

    quota: Quota
    vcpus: int
    purpose: str
    short: Level = "error"


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
    account_id = context.account.id if context.account else None
    used = ask(partial(quotas.used_vcpus, context.ec2, account_id, context.owns))
    for need in _node_needs(context):
        yield _compare(context, need, used)


def _compare(context: Context, need: Need, used: Counter[Quota] | Unknown) -> Finding:
    """Compare ``need`` with what is free of its quota. A need above the whole quota is an error whatever is in use."""
    quota, check = need.quota, f"quota {need.quota.name}"
    wanted = f"{need.vcpus:,} vCPUs needed for {need.purpose}"
    limit = ask(partial(quotas.limit, context.service_quotas, quota))
    if isinstance(limit, Unknown):
        return limit.finding(check=check, about=wanted, why=_WHY)
    in_use = 0 if isinstance(used, Unknown) else used[quota]
    free, total = max(limit - in_use, 0), need.vcpus + in_use
    text = f"{wanted}, {free:,.0f} free: quota {limit:,.0f} ({quota.code}), {in_use:,} in use"
    if isinstance(used, Unknown):
        text = f"{wanted}, of a quota of {limit:,.0f} ({quota.code}), in use unknown"
    if total > limit:
        return Finding(
            text,
            check=check,
            level=need.short,
            value=need.vcpus,
            limit=free,
            why=_WHY,
            next_step=quota.increase(total, context.region),
        )
    if isinstance(used, Unknown):
        return used.finding(check=check, about=text, why=_WHY)
    return passed(text, check=check, value=need.vcpus, limit=free)


def _node_needs(context: Context) -> Iterator[Need]:
    plan, purchase = context.plan, context.plan.purchase
    vcpus, nodes, spot_nodes = plan.node.vcpus, plan.node_count, context.spot_nodes
    on_demand, base = quotas.on_demand(plan.instance_type), purchase.on_demand_base
    if on_demand:
        if purchase.option == "on-demand" or (purchase.option == "reserved" and not purchase.capacity_reservation_id):
            yield Need(quota=on_demand, vcpus=nodes * vcpus, purpose=f"{nodes} x {plan.instance_type}")
        if top_up := purchase.on_demand_top_up:
            purpose = f"{top_up} x {plan.instance_type} on demand beside the reservation"
            yield Need(quota=on_demand, vcpus=top_up * vcpus, purpose=purpose)
        if base:
            purpose = f"an on-demand base of {base} x {plan.instance_type}"
            yield Need(quota=on_demand, vcpus=base * vcpus, purpose=purpose)
        if purchase.fallback == "on-demand" and base < nodes:
            purpose = f"falling back to {nodes} x {plan.instance_type} on demand"
            # Spot may come all the same.
            yield Need(quota=on_demand, vcpus=nodes * vcpus, purpose=purpose, short="warning")
    if spot_nodes:
        own = quotas.spot(plan.instance_type)
        if own:
            yield Need(quota=own, vcpus=spot_nodes * vcpus, purpose=f"{spot_nodes} x {plan.instance_type} on spot")
