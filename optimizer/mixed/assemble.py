"""From a weighed mix to a MixedFleet, with every price it used, its source and its date."""

from __future__ import annotations

from optimizer.catalog import Catalog
from optimizer.economics.interruption import FAILURE_SOURCE
from optimizer.economics.running_costs import volume_usd_per_month
from optimizer.mixed.fleet import Group, MixedFleet
from optimizer.mixed.mix import Mix
from optimizer.mixed.sources import zones
from optimizer.performance.calibration import Calibration, model_kind
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS
from optimizer.plan import FleetPlan
from optimizer.request import FleetRequest
from optimizer.search.plan_builder import cents, node_prices, rounded, unit_prices
from optimizer.units import HOURS_PER_MONTH
from optimizer.workload.model import ModelSpec


def assemble_mixed(
    mix: Mix,
    request: FleetRequest,
    model: ModelSpec,
    catalog: Catalog,
    calibration: Calibration,
    best: FleetPlan | None,
) -> MixedFleet:
    """The fleet that ``mix`` describes, against the cheapest fleet of one type."""
    run, cost, ranks = mix.run, mix.cost, mix.ranks
    region = mix.ways[0].offer.region
    breakdown = {part: cents(getattr(cost, part)) for part in ("compute", "volumes", "storage", "transfer")}
    # The sum of what is shown, so that the bill adds up to the cent.
    expected_usd = round(sum(breakdown.values()), 2)
    volume = volume_usd_per_month(catalog, region)
    reclaims = [
        nodes * way.hazard.rate_per_node_hour if way.hazard else 0.0
        for nodes, way in zip(mix.nodes, mix.ways, strict=True)
    ]
    groups = []
    # What is owned first.
    for i in sorted((0, 1), key=lambda i: mix.ways[i].reservation is None):
        way, instance = mix.ways[i], mix.ways[i].offer.instance
        samples = mix.micro_batch[i] * mix.grad_accum[i]
        weight = samples * mix.layout["data"] / mix.global_batch
        # While the job waits for a reclaimed node, that node is not paid.
        absent = reclaims[i] / sum(reclaims) if sum(reclaims) else 0.0
        paid = mix.nodes[i] * float(run.running_hours) + (mix.nodes[i] - absent) * float(run.waiting_hours)
        volumes = mix.nodes[i] * volume * float(run.hours_expected) / HOURS_PER_MONTH
        groups.append(
            Group(
                instance_type=instance.name,
                gpu=instance.gpu.name,
                node_count=mix.nodes[i],
                gpus=ranks[i],
                option=way.option,
                capacity_reservation_id=way.reservation.capacity_reservation_id if way.reservation else None,
                usd_per_hour=way.price.usd_per_hour,
                micro_batch=mix.micro_batch[i],
                grad_accum=mix.grad_accum[i],
                activation_checkpointing=CHECKPOINTINGS[mix.checkpointing[i]],
                samples_per_rank=samples,
                share_of_global_batch=rounded(weight * ranks[i] / sum(ranks)),
                gradient_weight=rounded(weight),
                step_time_s=rounded(mix.computed_s[i]),
                peak_gib=rounded(mix.peak_gib[i]),
                limit_gib=rounded(mix.limit_gib[i]),
                cost_usd=cents(paid * way.price.usd_per_hour + volumes),
                calibration=calibration.describe(
                    instance.gpu,
                    request.workload.precision,
                    request.workload.framework,
                    kind=model_kind(model),
                ),
            )
        )
    slowest = max(mix.computed_s)
    busy = sum(seconds * r for seconds, r in zip(mix.computed_s, ranks, strict=True))
    sources = [*dict.fromkeys(way.hazard.source for way in mix.ways if way.hazard), FAILURE_SOURCE]
    return MixedFleet(
        region=region,
        zone_ids=tuple(sorted(set(zones(mix.ways[0])) & set(zones(mix.ways[1])))),
        groups=(groups[0], groups[1]),
        parallelism={
            **mix.layout,
            "sequence_parallel": bool(mix.layout["sequence_parallel"]),
            "sharding": SHARDINGS[mix.sharding],
        },
        global_batch=mix.global_batch,
        steps=mix.steps,
        step_time_s=rounded(mix.step_time_s),
        idle_share=rounded(max(0.0, 1 - busy / (slowest * sum(ranks)))),
        hours={name: rounded(getattr(run, f"hours_{name}")) for name in ("expected", "p50", "p95")},
        cost_usd={
            "expected": expected_usd,
            "p50": cents(float(cost.p50)),
            "p95": max(cents(float(cost.p95)), expected_usd, cents(float(cost.p50))),
            "breakdown": breakdown,
        },
        interruptions={
            "rate_per_hour": rounded(float(run.rate)),
            "expected_count": rounded(float(run.expected_count)),
            "checkpoint_interval_s": rounded(float(run.checkpoint_interval_s)),
            "lost_hours": rounded(float(run.lost_hours)),
            "source": "; ".join(sources),
        },
        relative_error=rounded(mix.log_error),
        saving_usd=round(best.cost_usd.expected - expected_usd, 2) if best else None,
        beats=None
        if best is None
        else {
            "instance_type": best.instance_type,
            "region": best.region,
            "node_count": best.node_count,
            "option": best.purchase.option,
            "cost_usd": best.cost_usd.expected,
        },
        prices=(*node_prices(mix.ways[0]), *node_prices(mix.ways[1]), *unit_prices(region, catalog)),
    )
