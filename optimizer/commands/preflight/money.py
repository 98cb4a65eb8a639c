"""Check today's prices against the plan's, the run's cost at today's prices, and the limits on that cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from optimizer.aws import clients
from optimizer.aws.errors import UnusableAnswerError
from optimizer.catalog.sources import price_list, spot_history
from optimizer.commands.preflight.model import Context, Finding, Level, Unknown, ask, named, warning
from optimizer.contract.plan import QUOTE, FleetPlan, Market, NodeItem, PlanPrice

# A smaller rise is no reason to plan anew: a plan's 95th percentile is further from its expectation than that.
DEARER = 0.05
# The price of an owned reservation is the user's, and a Capacity Block's is in its offering: AWS quotes neither.
QUOTED_MARKETS = ("on-demand", "spot", "reserved-1yr")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeQuote:
    """Today's price of a node, USD per hour, beside the plan's."""

    planned: PlanPrice
    usd: float
    source: str

    @property
    def change(self) -> float:
        """Rise over the plan's price, as a fraction; negative where it fell."""
        return round(self.usd / self.planned.usd - 1, 9)


def check_prices(context: Context) -> Iterator[Finding]:
    """Compare each price of a node, then the run's cost at today's prices with budget and ceiling."""
    quotes: dict[NodeItem, NodeQuote] = {}
    prices = {price.node: price for price in context.plan.prices if price.node and price.usd > 0}
    for node, price in prices.items():
        # A price that the user negotiated holds whatever the list says.
        if node.region != context.region or node.market not in QUOTED_MARKETS or price.source.startswith(QUOTE):
            continue
        answer = ask(partial(_quote, context, node, price))
        yield from named(f"price of {node}", [_judge_price(context, answer)])
        if isinstance(answer, NodeQuote):
            quotes[node] = answer
    yield from named("budget", [_judge_budget(context, quotes)])


def _quote(context: Context, node: NodeItem, planned: PlanPrice) -> NodeQuote:
    """Ask AWS for today's price of a node.

    Raises:
        UnusableAnswerError: AWS names no such price.
    """
    name, region = node.instance_type, context.region
    if node.market == "spot":
        entries, zone_ids = spot_history.fetch(context.ec2, [name]), spot_history.fetch_zone_ids(context.ec2)
        offered = {name: context.zone_ids} if context.zone_ids else None
        spot, _ = spot_history.parse(entries, zone_ids, offered)
        if name not in spot:
            raise UnusableAnswerError(f"{name} has no spot price in {', '.join(context.zone_ids) or region}")
        usd, zone_id = spot[name][0]
        return NodeQuote(planned=planned, usd=usd, source=f"spot in {zone_id}")
    documents = price_list.fetch_instances(clients.pricing(), region, name)
    listed, skipped = price_list.parse_instances(documents, region, {name})
    if name not in listed:
        raise UnusableAnswerError(skipped[0].reason if skipped else f"the price list has no {name} in {region}")
    usd_or_none = listed[name].on_demand if node.market == "on-demand" else listed[name].reserved_1yr
    if usd_or_none is None:
        raise UnusableAnswerError(f"AWS sells no one-year no-upfront term of {name} in {region}")
    return NodeQuote(planned=planned, usd=usd_or_none, source="the price list")


def _judge_price(context: Context, quote: NodeQuote | Unknown) -> Finding:
    again = f"gpufleet catalog refresh --region {context.region}, then recommend again"
    if isinstance(quote, Unknown):
        return quote.finding(why="the plan's dollars are of the day it was made", next_step=again)
    planned = quote.planned
    return Finding(
        f"{quote.usd:,.4f} USD an hour ({quote.source}), and the plan has {planned.usd:,.4f} ({planned.source}, "
        f"{planned.as_of.isoformat()}): {quote.change:+.1%}",
        level="warning" if quote.change > DEARER else "ok",
        value=quote.usd,
        limit=planned.usd,
        why="another type, region or option may be cheaper now",
        next_step=again,
    )


def price_rise(plan: FleetPlan, quotes: dict[NodeItem, NodeQuote]) -> float:
    """Return the rise of the fleet's hourly price as a fraction."""
    own, purchase = (plan.instance_type, plan.region), plan.purchase
    changes = {node.market: quote.change for node, quote in quotes.items() if node[1:] == own}
    planned = {node.market: usd for node, usd in plan.node_prices_usd_per_hour.items() if node[1:] == own}
    if purchase.option != "spot" and not purchase.on_demand_top_up:
        return max(changes.values(), default=0.0)
    rented = purchase.on_demand_top_up or purchase.on_demand_base
    counts: dict[Market, int] = {"on-demand": rented}
    if purchase.option == "spot":
        counts["spot"] = plan.node_count - rented
    usd = {market: count * planned.get(market, 0.0) for market, count in counts.items()}
    whole_usd = plan.compute_usd_per_hour if purchase.on_demand_top_up else sum(usd.values())
    return sum(usd[market] * changes.get(market, 0.0) for market in usd) / (whole_usd or 1.0)


def _judge_budget(context: Context, quotes: dict[NodeItem, NodeQuote]) -> Finding:
    plan, cost = context.plan, context.plan.cost_usd
    # Only node prices change; the nodes' share of the 95th percentile is taken to be their share of the expectation.
    share = cost.breakdown.compute / cost.expected if cost.expected else 0.0
    factor = 1 + price_rise(plan, quotes) * share
    expected, p95, reserve = cost.expected * factor, cost.p95 * factor, plan.reserve_usd * factor
    prices = "today's prices" if quotes else "the plan's prices, as none of today's is known"
    about = f"{expected:,.2f} USD expected and {p95:,.2f} at the 95th percentile at {prices} ({factor - 1:+.1%})"
    limits = {"the budget": plan.job.budget_usd, "the ceiling": context.settings.ceiling_usd}
    name, limit = min(((n, usd) for n, usd in limits.items() if usd), key=lambda pair: pair[1], default=("", None))
    if limit is None:
        return warning(
            f"{about}; there is neither a budget nor a ceiling",
            value=round(p95, 2),
            why="nothing ends the spending of a run that never gets done",
            next_step="pulumi config set gpufleet:ceilingUsd USD",
        )
    dear = [
        f"{place.instance_type} {place.purchase} in {place.zone_id} at {place.price.usd:,.2f} USD an hour a node"
        for place in plan.alternates
        if place.cost_usd.p95 + plan.reserve_usd_at(place) > limit
    ]
    level: Level = "error" if expected + reserve > limit else "warning" if p95 + reserve > limit or dear else "ok"
    return Finding(
        f"{about}, {reserve:,.2f} more are kept to save and end, and {name} is {limit:,.2f}"
        + (f"; above it at their 95th percentile are the next places, {'; '.join(dear)}" if dear else ""),
        level=level,
        value=round(p95 + reserve, 2),
        limit=limit,
        why="at the ceiling the fleet saves and stops, before the run is done",
        next_step=f"gpufleet recommend --budget {limit:g}, or raise it",
    )
