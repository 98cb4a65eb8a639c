"""Estimate the same training on other clouds' GPU types and compare its cost with AWS's best plans.

The estimator and the economics are those of ``recommend``. Both sides count nodes at on-demand prices only, for other
clouds' interruption rates and their prices of disks, storage and traffic are not known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from optimizer.clouds.offers import CLOUDS, NOT_PROVISIONED, UNKNOWN_GBIT_PER_S, CloudOffer, join_catalog
from optimizer.contract.plan import FleetPlan
from optimizer.contract.request import FleetRequest
from optimizer.contract.units import cents, rounded
from optimizer.economics.outcome import lognormal_percentiles
from optimizer.performance.calibration import Calibration
from optimizer.performance.types import arithmetic
from optimizer.recommend import Recommendation
from optimizer.search.candidates import CandidateTable, find_candidates

BASIS = (
    "compute only: nodes at on-demand prices, without disks, storage and traffic, on both sides; the request's regions "
    "and instance types are AWS's and do not bind here"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudFleet:
    """The best fleet of one type of another cloud; a row of the JSON answer.

    Ratios are of compute USD to the best AWS plan's, None without a plan; ``keeps_budget`` (compute alone) and
    ``keeps_deadline`` are at the 95th percentile, None without a limit; ``measured_rows`` counts training runs measured
    on this GPU.
    """

    cloud: str
    series: str
    instance_type: str
    region: str
    gpu: str
    gpu_count: int
    fabric: str
    node_count: int
    parallelism: dict[str, Any]
    hours_expected: float
    hours_p95: float
    compute_usd_expected: float
    compute_usd_p95: float
    usd_per_node_hour: float
    price_source: str
    price_as_of: str
    ratio_to_best_aws: float | None
    ratio_to_best_aws_on_demand: float | None
    keeps_budget: bool | None
    keeps_deadline: bool | None
    measured_rows: int

    @property
    def feasible(self) -> bool:
        """True unless a limit is known to be broken."""
        return self.keeps_budget is not False and self.keeps_deadline is not False


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Other clouds' fleets beside AWS's plans: first fleets within the limits, then by the request's objective."""

    rows: tuple[CloudFleet, ...]
    not_compared: tuple[dict[str, str], ...]
    best_aws: FleetPlan | None
    best_aws_on_demand: FleetPlan | None

    def to_dict(self) -> dict[str, Any]:
        """The ``other_clouds`` field of the JSON answer."""
        return {
            "basis": BASIS,
            "note": NOT_PROVISIONED,
            "best_aws": _describe(self.best_aws),
            "best_aws_on_demand": _describe(self.best_aws_on_demand),
            "rows": [asdict(row) for row in self.rows],
            "not_compared": list(self.not_compared),
        }


def compare_clouds(answer: Recommendation, clouds: Sequence[CloudOffer]) -> Comparison:
    """Search the same request over other clouds' types; raises what ``recommend`` does."""
    problem, request = answer.problem, answer.problem.request
    best = answer.plans[0] if answer.plans else None
    on_demand_plans = [plan for plan in answer.plans if plan.purchase.option == "on-demand"]
    best_on_demand = min(on_demand_plans, key=_compute_usd, default=None)
    offers_by_type: dict[str, list[CloudOffer]] = defaultdict(list)
    for other in clouds:
        offers_by_type[other.offer.instance.name].append(other)
    compared: dict[str, list[CloudOffer]] = {}
    left_out = []
    for name, offers in offers_by_type.items():
        priced = [other for other in offers if other.offer.on_demand is not None]
        if reason := _reason_left_out(offers[0], priced):
            left_out.append({"cloud": offers[0].cloud, "instance_type": name, "reason": reason})
        else:
            compared[name] = [_with_kernel_bypass(other) for other in priced]
    every_offer = [other for offers in compared.values() for other in offers]
    catalog = join_catalog(problem.catalog, every_offer, aws=False)
    # Types that are asked for by name need no image of ours (``Problem.undriven``).
    asked = {"purchase_options": ("on-demand",), "existing_reservations": (), "instance_types": tuple(compared)}
    constraints = request.constraints.model_copy(update=asked)
    tables = find_candidates(
        replace(
            problem,
            request=request.model_copy(update={"constraints": constraints}),
            catalog=catalog,
            regions=catalog.regions(),
            instance_types=catalog.instance_types,
        )
    )
    rows = []
    for offers, table in zip(compared.values(), tables, strict=True):
        if isinstance(table, CandidateTable):
            rows.append(_best_fleet(offers[0], table, request, problem.calibration, best, best_on_demand))
        else:
            left_out.append({"cloud": offers[0].cloud, "instance_type": table.instance_type, "reason": table.reason})
    left_out.sort(key=lambda entry: list(CLOUDS).index(entry["cloud"]))
    by_time = request.objective == "time"
    rows.sort(key=lambda row: (not row.feasible, row.hours_expected if by_time else row.compute_usd_expected))
    return Comparison(rows=tuple(rows), not_compared=tuple(left_out), best_aws=best, best_aws_on_demand=best_on_demand)


def _reason_left_out(other: CloudOffer, priced: Sequence[CloudOffer]) -> str:
    """Why a type cannot be compared; empty where it can."""
    if other.retired is not None:
        return other.note
    if not priced:
        return f"unpriced: {other.note}"
    if other.offer.instance.network_gbit_per_s == UNKNOWN_GBIT_PER_S:
        return f"its network is unknown, so no fleet can be estimated: {other.note}"
    return ""


def _with_kernel_bypass(other: CloudOffer) -> CloudOffer:
    """Give RDMA types EFA cards: the estimator tells networks with kernel bypass by EFA."""
    instance = other.offer.instance
    efa_cards = instance.network_cards if other.rdma else 0
    instance = replace(instance, efa_cards=efa_cards, gpudirect=other.rdma)
    return replace(other, offer=replace(other.offer, instance=instance))


def _best_fleet(
    other: CloudOffer,
    table: CandidateTable,
    request: FleetRequest,
    calibration: Calibration,
    best_aws: FleetPlan | None,
    best_on_demand: FleetPlan | None,
) -> CloudFleet:
    instance, limits = other.offer.instance, request.constraints
    outcome, usd = table.outcome, table.cost.compute
    usd_p95 = lognormal_percentiles(usd, usd * outcome.hours_std / outcome.hours_expected)[1]
    keeps_budget = usd_p95 <= (math.inf if limits.budget_usd is None else limits.budget_usd)
    keeps_deadline = outcome.hours_p95 <= (math.inf if limits.deadline_hours is None else limits.deadline_hours)
    keys = (outcome.hours_expected, usd) if request.objective == "time" else (usd, outcome.hours_expected)
    row = int(np.lexsort((*keys[::-1], ~(keeps_budget & keeps_deadline)))[0])
    offer = table.purchases[table.purchase[row]].offer
    configuration = int(table.configuration[row])
    price = offer.on_demand
    assert price is not None  # only priced offers are compared
    return CloudFleet(
        cloud=other.cloud,
        series=other.series,
        instance_type=instance.name,
        region=offer.region,
        gpu=instance.gpu.name,
        gpu_count=int(instance.gpu_count),
        fabric=other.fabric,
        node_count=int(table.fastest.nodes[configuration]),
        parallelism=table.fastest.parallelism(configuration).model_dump(),
        hours_expected=rounded(outcome.hours_expected[row]),
        hours_p95=rounded(outcome.hours_p95[row]),
        compute_usd_expected=cents(usd[row]),
        compute_usd_p95=cents(usd_p95[row]),
        usd_per_node_hour=price.usd_per_hour,
        price_source=price.source,
        price_as_of=price.as_of.isoformat(),
        ratio_to_best_aws=_ratio(cents(usd[row]), best_aws),
        ratio_to_best_aws_on_demand=_ratio(cents(usd[row]), best_on_demand),
        keeps_budget=None if limits.budget_usd is None else bool(keeps_budget[row]),
        keeps_deadline=None if limits.deadline_hours is None else bool(keeps_deadline[row]),
        measured_rows=calibration.residual(instance.gpu, arithmetic(request.workload.precision)).rows,
    )


def _compute_usd(plan: FleetPlan) -> float:
    return plan.cost_usd.breakdown.compute


def _ratio(usd: float, plan: FleetPlan | None) -> float | None:
    return round(usd / _compute_usd(plan), 3) if plan and _compute_usd(plan) > 0 else None


def _describe(plan: FleetPlan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "instance_type": plan.instance_type,
        "region": plan.region,
        "node_count": plan.node_count,
        "option": plan.purchase.option,
        "hours_expected": plan.hours.expected,
        "compute_usd": _compute_usd(plan),
    }
