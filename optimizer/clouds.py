"""What the same training would cost on other clouds' GPU types: nodes only, on demand, beside AWS's best plans.

The estimator and the economics are those of ``recommend``. What is not known of other clouds is left out on both sides:
their spot markets' interruption rates (so only on-demand prices are compared) and their prices of disks, storage and
traffic (so only the compute part of AWS's plans is the measure). gpufleet provisions on AWS only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from optimizer.catalog.clouds import (
    NOT_PROVISIONED,
    UNKNOWN_GBIT_PER_S,
    CloudOffer,
    Clouds,
    with_clouds,
)
from optimizer.catalog.model import CLOUDS
from optimizer.economics.outcome import lognormal_percentiles
from optimizer.hardware import Offer
from optimizer.performance.calibration import Calibration
from optimizer.plan import FleetPlan, Parallelism
from optimizer.recommend import Recommendation
from optimizer.request import FleetRequest
from optimizer.search.candidates import Table, search_types
from optimizer.search.plan_builder import cents, parallelism, rounded

BASIS = (
    "compute only: nodes at on-demand prices, without disks, storage and traffic, on both sides; the request's regions "
    "and instance types are AWS's and do not bind here"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """The best fleet of one type of another cloud, over its regions and node counts.

    Attributes:
        cloud, series, instance_type, region, gpu, gpu_count, fabric: what and where.
        node_count: nodes of the fleet.
        parallelism: how the model is laid over them, with the keys of a plan's.
        hours_expected, hours_p95: wall hours.
        compute_usd_expected, compute_usd_p95: USD of the nodes.
        usd_per_node_hour, price_source, price_as_of: the on-demand price they follow from.
        ratio_to_best_aws: compute over that of the best AWS plan, whatever way it is paid for; None without plans.
        ratio_to_best_aws_on_demand: compute over that of the best on-demand AWS plan; None without one.
        keeps_budget, keeps_deadline: whether compute alone, and hours, keep the request's limits at the 95th
            percentile; None where there is no limit.
        measured_rows: training runs measured on this GPU that the estimate rests on.
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
        """Whether no limit is known to be broken."""
        return self.keeps_budget is not False and self.keeps_deadline is not False


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Other clouds beside AWS.

    Attributes:
        rows: the best fleet of each comparable type, those that keep the limits first, then by the request's objective.
        not_compared: types that are left out (cloud, instance_type, reason).
        best_aws, best_aws_on_demand: the plans the ratios are to; None where there is none.
    """

    rows: tuple[Alternative, ...]
    not_compared: tuple[dict[str, str], ...]
    best_aws: FleetPlan | None
    best_aws_on_demand: FleetPlan | None

    def to_dict(self) -> dict[str, Any]:
        """The ``other_clouds`` field of the JSON answer."""
        return {
            "basis": BASIS,
            "note": NOT_PROVISIONED,
            "best_aws": _measure(self.best_aws),
            "best_aws_on_demand": _measure(self.best_aws_on_demand),
            "rows": [asdict(row) for row in self.rows],
            "not_compared": list(self.not_compared),
        }


def compare_clouds(answer: Recommendation, clouds: Clouds) -> Comparison:
    """The same request on other clouds' types, beside ``answer``'s AWS plans.

    Raises:
        InvalidInputError: as ``recommend``.
    """
    problem = answer.problem
    request = problem.request
    on_demand = request.constraints.model_copy(update={"purchase_options": ("on-demand",), "existing_reservations": ()})
    asked = request.model_copy(update={"constraints": on_demand})
    best = answer.plans[0] if answer.plans else None
    paid_on_demand = [plan for plan in answer.plans if plan.purchase.option == "on-demand"]
    best_on_demand = min(paid_on_demand, key=_compute, default=None)
    types: dict[str, list[CloudOffer]] = {}
    left_out = []
    for name, offers in _by_type(clouds).items():
        priced = [other for other in offers if other.offer.on_demand is not None]
        reason = _why_not(offers[0], priced)
        if reason:
            left_out.append({"cloud": offers[0].cloud, "instance_type": name, "reason": reason})
        else:
            types[name] = [_as_estimated(other) for other in priced]
    catalog = with_clouds(
        problem.catalog, Clouds(offers=tuple(o for offers in types.values() for o in offers)), aws=False
    )
    tables = search_types(
        replace(
            problem,
            request=asked,
            catalog=catalog,
            regions=catalog.regions(),
            instance_types=catalog.instance_types,
        )
    )
    rows = []
    for offers, table in zip(types.values(), tables, strict=True):
        if isinstance(table, Table):
            row = _best(offers[0], table, request, problem.calibration)
            rows.append(
                replace(
                    row,
                    ratio_to_best_aws=_ratio(row, best),
                    ratio_to_best_aws_on_demand=_ratio(row, best_on_demand),
                )
            )
        else:
            left_out.append(
                {"cloud": offers[0].cloud, "instance_type": table["instance_type"], "reason": table["reason"]}
            )
    left_out.sort(key=lambda entry: CLOUDS.index(entry["cloud"]))
    by_time = request.objective == "time"
    rows.sort(key=lambda row: (not row.feasible, row.hours_expected if by_time else row.compute_usd_expected))
    return Comparison(rows=tuple(rows), not_compared=tuple(left_out), best_aws=best, best_aws_on_demand=best_on_demand)


def _by_type(clouds: Clouds) -> dict[str, list[CloudOffer]]:
    types: dict[str, list[CloudOffer]] = {}
    for other in clouds.offers:
        types.setdefault(other.offer.instance.name, []).append(other)
    return types


def _why_not(kind: CloudOffer, priced: Sequence[CloudOffer]) -> str:
    """Why a type cannot be compared; empty where it can."""
    if kind.retired is not None:
        return kind.note
    if not priced:
        return f"unpriced: {kind.note}"
    if kind.offer.instance.network_gbit_per_s == UNKNOWN_GBIT_PER_S:
        return f"its network is unknown, so no fleet can be estimated: {kind.note}"
    return ""


def _as_estimated(other: CloudOffer) -> CloudOffer:
    """The estimator knows two kinds of network, with and without kernel bypass, by whether a type has EFA."""
    instance = other.offer.instance
    bypass = replace(instance, efa_cards=instance.network_cards if other.rdma else 0)
    return replace(other, offer=replace(other.offer, instance=bypass))


def _best(kind: CloudOffer, found: Table, request: FleetRequest, calibration: Calibration) -> Alternative:
    """The best fleet of one type's candidates."""
    instance, limits = kind.offer.instance, request.constraints
    run, usd = found.run, found.cost.compute
    usd_p95 = lognormal_percentiles(usd, usd * run.hours_std / run.hours_expected)[1]
    budget = math.inf if limits.budget_usd is None else limits.budget_usd
    deadline = math.inf if limits.deadline_hours is None else limits.deadline_hours
    keeps_budget, keeps_deadline = usd_p95 <= budget, run.hours_p95 <= deadline
    keys = (run.hours_expected, usd) if request.objective == "time" else (usd, run.hours_expected)
    row = int(np.lexsort((*keys[::-1], ~(keeps_budget & keeps_deadline)))[0])
    offer = found.purchases[found.purchase[row]].offer
    return Alternative(
        cloud=kind.cloud,
        series=kind.series,
        instance_type=instance.name,
        region=offer.region,
        gpu=instance.gpu.name,
        gpu_count=int(instance.gpu_count),
        fabric=kind.fabric,
        node_count=int(found.fastest.nodes[found.config[row]]),
        parallelism=Parallelism.model_validate(parallelism(found.fastest, int(found.config[row]))).model_dump(),
        hours_expected=rounded(run.hours_expected[row]),
        hours_p95=rounded(run.hours_p95[row]),
        compute_usd_expected=cents(usd[row]),
        compute_usd_p95=cents(usd_p95[row]),
        **_price(offer),
        ratio_to_best_aws=None,
        ratio_to_best_aws_on_demand=None,
        keeps_budget=None if limits.budget_usd is None else bool(keeps_budget[row]),
        keeps_deadline=None if limits.deadline_hours is None else bool(keeps_deadline[row]),
        measured_rows=calibration.residual(instance.gpu, request.workload.precision).rows,
    )


def _price(offer: Offer) -> dict[str, Any]:
    assert offer.on_demand is not None  # only priced offers are compared
    price = offer.on_demand
    return {
        "usd_per_node_hour": price.usd_per_hour,
        "price_source": price.source,
        "price_as_of": price.as_of.isoformat(),
    }


def _compute(plan: FleetPlan) -> float:
    return plan.cost_usd.breakdown.compute


def _ratio(row: Alternative, plan: FleetPlan | None) -> float | None:
    return round(row.compute_usd_expected / _compute(plan), 3) if plan and _compute(plan) > 0 else None


def _measure(plan: FleetPlan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "instance_type": plan.instance_type,
        "region": plan.region,
        "node_count": plan.node_count,
        "option": plan.purchase.option,
        "hours_expected": plan.hours.expected,
        "compute_usd": _compute(plan),
    }
