"""Advice beside an answer: what its first plan needs and waits for; what other purchases, code or batches change."""

from __future__ import annotations

import math
from dataclasses import replace

from bootstrap.contract.trainer import loader_workers
from optimizer.contract.hardware import Offer, break_even_hours
from optimizer.contract.plan import FleetPlan, describe_undriven
from optimizer.contract.units import HOURS_PER_YEAR, short, usd_text
from optimizer.performance.frameworks import CNN_DEFAULT, TRAINER
from optimizer.search.candidates import find_candidates
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


def list_advice(problem: Problem, plan: FleetPlan) -> list[str]:
    """Say what matters of plan 1 to whom buys it."""
    image = describe_undriven(plan.node.gpu, plan.node.gpu_count)
    return [
        *describe_compiler(problem, plan),
        *([f"{plan.instance_type} {image}: first set gpufleet:amiId to an image of your own"] if image else []),
        *describe_commitments(plan, problem.catalog.offer(plan.instance_type, plan.region)),
        *describe_network(plan),
        *describe_capacity(plan),
        *describe_input(plan, problem.recipe.samples_per_vcpu_s),
    ]


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


def describe_commitments(plan: FleetPlan, offer: Offer | None) -> list[str]:
    """Say what a plan's new reservation bills; of a long run on demand, from which use on one would cost less."""
    if offer is None or offer.on_demand is None or offer.reserved_1yr is None:
        return []
    hours, nodes, place = plan.hours.expected, plan.node_count, f"{plan.instance_type} in {plan.region}"
    price, needed = offer.reserved_1yr, break_even_hours(offer.reserved_1yr, offer.on_demand)
    year_usd = price.usd_per_hour * HOURS_PER_YEAR
    if any(node.market == "reserved-1yr" for node in plan.node_prices_usd_per_hour):
        return [
            f"a one-year reservation of {nodes} x {place} bills {nodes * year_usd:,.0f} USD, used or not, all in the "
            f"plan; its {short(hours)} h cost {nodes * hours * offer.on_demand.usd_per_hour:,.0f} USD on demand; buy "
            "it first: the stack buys none"
        ]
    if plan.purchase.option != "on-demand" or needed is None or hours < _LONG_SHARE * needed:
        return []
    return [
        f"a 1-year reservation of {place} costs {year_usd:,.0f} USD a node, used or not ({price.source}, "
        f"{price.as_of}): it beats on-demand above {needed:,.0f} h of use; this run uses {short(hours)} h"
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
    candidate = rank_first(find_candidates(compiled)[0], compiled.request)
    usd = float(candidate.table.cost.expected[candidate.row]) if candidate else math.inf
    saved = plan.cost_usd.expected - usd
    if candidate is None or saved < _LEAST_SAVING * plan.cost_usd.expected:
        return []
    purchase, hours = candidate.purchase, candidate.table.outcome.hours_expected[candidate.row]
    return [
        f"--compile would save {saved:,.{0 if saved >= 10 else 2}f} USD: {candidate.fleet}, {purchase.in_short} in "
        f"{purchase.offer.region}, {short(hours)} h and {usd_text(usd, is_old=purchase.stale)} USD expected"
    ]
