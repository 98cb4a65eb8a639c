"""Advice beside an answer: what its first plan needs and waits for; what other purchases, code or batches change."""

from __future__ import annotations

from dataclasses import replace

from bootstrap.contract.trainer import loader_workers
from optimizer.contract.hardware import Offer, break_even_hours
from optimizer.contract.plan import FleetPlan
from optimizer.contract.units import HOURS_PER_YEAR, short, usd_text
from optimizer.performance.frameworks import CNN_DEFAULT, TRAINER
from optimizer.search.candidates import find_tables
from optimizer.search.problem import Problem
from optimizer.search.ranking import rank_first

# (nodes, share of the time that a zone had at least so many spot nodes at once): median of 16 zones with 16 one-GPU
# nodes, V100 on AWS in August 2023 (three zones, https://github.com/skypilot-org/spot-traces) and H100 on another cloud
# in October 2025 (13, SkyNomad, NSDI'27).
SPOT_TOGETHER = ((16, 0.42), (12, 0.44), (8, 0.53), (4, 0.63), (2, 0.75))
# A run of a tenth of the break-even hours: ten a year make a reservation pay.
_LONG_SHARE = 0.1
# Least saving worth a note, of the plan's expected dollars.
_LEAST_SAVING = 0.05


def describe_input(plan: FleetPlan, samples_per_vcpu_s: float) -> list[str]:
    """Say that a step waits for its samples, where it does."""
    workers = loader_workers(plan.node.vcpus, plan.node.ranks)
    rate = samples_per_vcpu_s * workers
    samples = plan.parallelism.micro_batch * plan.parallelism.grad_accum
    if not rate or plan.step_time_s > samples / rate * 1.005:
        return []
    return [
        f"the GPUs wait for their input: {workers} of the {plan.node.vcpus} vCPUs prepare {rate:,.0f} samples/s for "
        f"each GPU, at {samples_per_vcpu_s:,.0f} a vCPU (docs/data.md); smaller files or decoding on the GPU help; the "
        "request's samples_per_vcpu_s says how fast your own loader is"
    ]


def describe_capacity(plan: FleetPlan) -> list[str]:
    """Warn of a plan whose nodes may not come together."""
    nodes = plan.node_count
    together = next((entry for entry in SPOT_TOGETHER if nodes >= entry[0]), None)
    if plan.purchase.option == "spot" and together is not None:
        advice = "" if plan.purchase.fallback == "on-demand" else "; --spot-fallback on-demand shortens the wait"
        return [
            f"{nodes} spot nodes must come together: the median zone of published traces had {together[0]} at once "
            f"{together[1]:.0%} of the time, one 81%; the hours begin with their launch{advice}"
        ]
    return []


def describe_network(plan: FleetPlan) -> list[str]:
    """Warn of a plan whose nodes talk through host memory."""
    node = plan.node
    if plan.node_count == 1 or not node.efa_cards or node.gpudirect:
        return []
    return [
        f"{plan.instance_type} has EFA without GPUDirect RDMA: {plan.node_count} nodes exchange through host "
        "memory, measured on no run, so that time may be half or double (docs/estimator.md); one node, or P types from "
        "p4d on, have no such doubt"
    ]


def describe_commitments(plan: FleetPlan, offer: Offer | None, *, only_long: bool) -> list[str]:
    """Say what a plan's new reservation bills, or from which use on a commitment would beat the plan's purchase.

    ``only_long`` leaves out what does not matter to a short run.
    """
    hours, nodes, option = plan.hours.expected, plan.node_count, plan.purchase.option
    if offer is None or offer.on_demand is None or plan.purchase.capacity_reservation_id:
        return []
    place = f"{plan.instance_type} in {plan.region}"
    bought = any(node.market == "reserved-1yr" for node in plan.node_prices_usd_per_hour)
    if bought and offer.reserved_1yr:
        year_usd = offer.reserved_1yr.usd_per_hour * HOURS_PER_YEAR
        return [
            f"a one-year reservation of {nodes} x {place} bills {nodes * year_usd:,.0f} USD, used or "
            "not, all in the plan; its "
            f"{short(hours)} h cost {nodes * hours * offer.on_demand.usd_per_hour:,.0f} USD on "
            "demand; buy it first: the "
            "stack buys none"
        ]
    if option not in ("on-demand", "spot") or (only_long and option == "spot"):
        return []
    price = offer.reserved_1yr
    needed = break_even_hours(price, offer.on_demand)
    if price is None or needed is None or (only_long and hours < _LONG_SHARE * needed):
        return []
    spot_hours = break_even_hours(price, offer.spot)
    spot = "never" if spot_hours is None else f"above {spot_hours:,.0f} h"
    return [
        f"a 1-year reservation of {place} costs {price.usd_per_hour * HOURS_PER_YEAR:,.0f} USD a "
        f"node, used or not ({price.source}, {price.as_of}): it beats on-demand above {needed:,.0f} h of use"
        f"{f', spot {spot}' if offer.spot else ''}; this run uses {short(hours)} h"
    ]


def describe_compiler(problem: Problem, plan: FleetPlan) -> list[str]:
    """Say what compiled code saves on the plan's instance type, of models that the trainer is known to compile."""
    model, recipe = problem.model, problem.recipe
    kinds = ("decoder", "encoder", "cnn")
    known = recipe.framework in (TRAINER, CNN_DEFAULT) and model.architecture in kinds and not model.experts
    if recipe.compiled or not known or not recipe.tuning.trains_all or problem.request.objective != "cost":
        return []
    # One type: all of them would double the time of an answer.
    own = tuple(instance for instance in problem.instance_types if instance.name == plan.instance_type)
    compiled = replace(problem.revise(compiled=True), instance_types=own)
    candidate = rank_first(find_tables(compiled), compiled.request)
    if candidate is None:
        return []
    (table, row), purchase = candidate, candidate.purchase
    usd = float(table.cost.expected[row])
    if usd > (1 - _LEAST_SAVING) * plan.cost_usd.expected:
        return []
    saved = plan.cost_usd.expected - usd
    takes = f"{short(table.outcome.hours_expected[row])} h and {usd_text(usd, is_old=purchase.stale)} USD"
    bought = (purchase.in_short, purchase.offer.region, purchase.price.zone_id)
    planned = (plan.purchase.in_short, plan.region, plan.purchase.zone_id or "")
    if bought == planned and candidate.fleet == f"{plan.node_count} x {plan.instance_type}":
        where = f"{takes} on the same nodes"
    else:
        where = f"{candidate.fleet}, {purchase.in_short} in {purchase.offer.region}, {takes} expected"
    return [f"--compile would save {saved:,.{0 if saved >= 10 else 2}f} USD: {where}"]
