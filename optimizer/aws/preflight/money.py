"""Today's prices against the plan's, what they do to its cost, and the limits on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from optimizer.aws import clients
from optimizer.aws.errors import UnusableAnswerError
from optimizer.aws.preflight.model import Context, Level, Row, Unknown, ask
from optimizer.catalog.sources import price_list, spot_history
from optimizer.plan import FleetPlan, NodeItem, PlanPrice

# Less than this is no reason to plan anew: a plan's 95th percentile is further from its expectation than that.
DEARER = 0.05
_AGAIN = "gpufleet catalog refresh --region {region}, then recommend again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Today:
    """What a node costs today.

    Attributes:
        planned: the plan's own price.
        usd: today's, per hour.
        where: its source, in words.
    """

    planned: PlanPrice
    usd: float
    where: str

    @property
    def change(self) -> float:
        """By how much it is dearer than planned, as a fraction; negative for cheaper."""
        return round(self.usd / self.planned.usd - 1, 9)


def check_prices(context: Context) -> Iterator[Row]:
    """A row for each price of a node, then the run's cost at today's prices against budget and ceiling."""
    plan = context.plan
    answers: dict[NodeItem, Today | Unknown] = {}
    for price in plan.prices:
        asked = _question(context, price)
        if asked is not None and price.node and price.usd > 0:
            answers[price.node] = ask(asked)
    for node, today in answers.items():
        yield _price_row(context, node, today)
    yield _budget_row(context, {node: today for node, today in answers.items() if isinstance(today, Today)})


def _question(context: Context, price: PlanPrice) -> Callable[[], Today] | None:
    """How to ask for one price of the plan today; None where it is no node's, or one AWS does not quote.

    The price of a reservation the user owns is the user's; a Capacity Block's is in its offering.
    """
    node = price.node
    if node is None or node.region != context.region:
        return None
    if node.market == "spot":
        return lambda: _spot(context, price, node.instance_type)
    if node.market in ("on-demand", "reserved-1yr"):
        return lambda: _listed(context, price, node.instance_type, reserved=node.market == "reserved-1yr")
    return None


def _listed(context: Context, price: PlanPrice, name: str, *, reserved: bool) -> Today:
    documents = price_list.fetch_instances(clients.pricing(), context.region, name)
    found, skipped = price_list.parse_instances(documents, context.region, {name})
    if name not in found:
        raise UnusableAnswerError(skipped[0].reason if skipped else f"the price list has no {name} in {context.region}")
    usd = found[name].reserved_1yr if reserved else found[name].on_demand
    if usd is None:
        raise UnusableAnswerError(f"AWS sells no one-year no-upfront term of {name} in {context.region}")
    return Today(planned=price, usd=usd, where="the price list")


def _spot(context: Context, price: PlanPrice, name: str) -> Today:
    ec2 = context.ec2
    entries, zone_ids = spot_history.fetch(ec2, [name]), spot_history.fetch_zone_ids(ec2)
    offered = {name: context.zone_ids} if context.zone_ids else None
    found, _ = spot_history.parse(entries, zone_ids, context.region, offered)
    if name not in found:
        raise UnusableAnswerError(f"{name} has no spot price in {', '.join(context.zone_ids) or context.region}")
    usd, zone_id = found[name]
    return Today(planned=price, usd=usd, where=f"spot in {zone_id}")


def _price_row(context: Context, node: NodeItem, today: Today | Unknown) -> Row:
    check, again = f"price of {node}", _AGAIN.format(region=context.region)
    if isinstance(today, Unknown):
        return today.row(check, why="the plan's dollars are of the day it was made", next_step=again)
    planned = today.planned
    dearer = today.change > DEARER
    return Row(
        check=check,
        level="warning" if dearer else "ok",
        found=f"{today.usd:,.4f} USD an hour ({today.where}), and the plan has {planned.usd:,.4f} ({planned.source}, "
        f"{planned.as_of.isoformat()}): {today.change:+.1%}",
        value=today.usd,
        limit=planned.usd,
        why="another type, region or option may be cheaper now" if dearer else "",
        next_step=again if dearer else "",
    )


def dearer_by(plan: FleetPlan, today: dict[NodeItem, Today]) -> float:
    """How much dearer an hour of the whole fleet is today, as a fraction; what nobody quoted counts as planned.

    A spot fleet may be of any of its types: the one that rose most counts.
    """
    by_market = {
        node.market: price
        for node, price in today.items()
        if (node.instance_type, node.region) == (plan.instance_type, plan.region)
    }
    if plan.purchase.option != "spot":
        return max((price.change for price in by_market.values()), default=0.0)
    planned, own = plan.node_prices_usd_per_hour, (plan.instance_type, plan.region)
    spot_usd = planned.get(NodeItem("spot", *own), 0.0)
    base_usd = planned.get(NodeItem("on-demand", *own), 0.0)
    spot_nodes, base = plan.node_count - plan.purchase.on_demand_base, plan.purchase.on_demand_base
    before = spot_nodes * spot_usd + base * base_usd
    if not before:
        return 0.0
    spot_change = max((price.change for node, price in today.items() if node.market == "spot"), default=0.0)
    base_change = by_market["on-demand"].change if "on-demand" in by_market else 0.0
    return (spot_nodes * spot_usd * spot_change + base * base_usd * base_change) / before


def _budget_row(context: Context, today: dict[NodeItem, Today]) -> Row:
    plan, ceiling = context.plan, context.target.ceiling_usd
    cost = plan.cost_usd
    # Nodes alone change; their share of the 95th percentile is taken for that of the expectation.
    change = dearer_by(plan, today)
    factor = 1 + change * (cost.breakdown.compute / cost.expected if cost.expected else 0.0)
    expected, p95 = cost.expected * factor, cost.p95 * factor
    reserve = plan.reserve_usd * factor
    needed = p95 + reserve
    prices = "today's prices" if today else "the plan's prices, as none of today's is known"
    about = f"{expected:,.2f} USD expected and {p95:,.2f} at the 95th percentile at {prices} ({factor - 1:+.1%})"
    limits = {"the budget": plan.job.budget_usd, "the ceiling": ceiling}
    name, limit = min(((n, usd) for n, usd in limits.items() if usd), key=lambda pair: pair[1], default=("", None))
    if limit is None:
        return Row(
            check="budget",
            level="warning",
            found=f"{about}; there is neither a budget nor a ceiling",
            value=round(p95, 2),
            why="nothing ends the spending of a run that never gets done",
            next_step="pulumi config set gpufleet:ceilingUsd USD",
        )
    level: Level = "error" if expected + reserve > limit else "warning" if needed > limit else "ok"
    return Row(
        check="budget",
        level=level,
        found=f"{about}, {reserve:,.2f} more are kept to save and end, and {name} is {limit:,.2f}",
        value=round(needed, 2),
        limit=limit,
        why="" if level == "ok" else "at the ceiling the fleet saves and stops, before the run is done",
        next_step="" if level == "ok" else f"gpufleet recommend --budget {limit:g}, or raise it",
    )


def check_aws_budgets(context: Context) -> Iterator[Row]:
    """Cost budgets of the account that the run's 95th percentile would exceed in their current period.

    What a budget covers (services, tags, accounts) is not worked out, so one that is exceeded only may be.
    """
    if context.account is None:
        yield Row(
            check="AWS budgets",
            level="unknown",
            found="the account's id is not known",
            next_step="aws budgets describe-budgets",
        )
        return
    pages = clients.budgets().get_paginator("describe_budgets").paginate(AccountId=context.account.id)
    budgets: list[Any] = [budget for page in pages for budget in page.get("Budgets", ())]
    p95, tripped, counted = context.plan.cost_usd.p95, 0, 0
    for budget in budgets:
        limit = budget.get("BudgetLimit", {})
        if budget["BudgetType"] != "COST" or limit.get("Unit") != "USD":
            continue
        counted += 1
        spent = float(budget.get("CalculatedSpend", {}).get("ActualSpend", {}).get("Amount", 0))
        left = float(limit["Amount"]) - spent
        if p95 <= left:
            continue
        tripped += 1
        yield Row(
            check=f"AWS budget {budget['BudgetName']}",
            level="warning",
            found=f"{left:,.2f} USD of {float(limit['Amount']):,.2f} are left of it ({budget['TimeUnit']}), and the "
            f"run costs {p95:,.2f} at the 95th percentile",
            value=p95,
            limit=round(left, 2),
            why="where it covers these nodes its alerts go off, and an action of it may stop instances or deny calls",
            next_step="aws budgets describe-budget-actions-for-budget --account-id "
            f"{context.account.id} --budget-name '{budget['BudgetName']}'",
        )
    if not tripped:
        yield Row(
            check="AWS budgets",
            level="ok",
            found=f"none of the account's {counted} cost budgets is too small for the run"
            if counted
            else "the account has none",
            value=counted,
        )
