"""The entry of a mix in the answer's ``mixed_fleets``. Not a FleetPlan: infra cannot carry it out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bootstrap.contract.shares import IN_STEP, RankBatch, format_shares
from bootstrap.contract.trainer import TrainerJob, unsupported
from optimizer.contract.plan import FleetPlan
from optimizer.contract.units import HOURS_PER_MONTH, cents, rounded
from optimizer.economics.interruption import FAILURE_SOURCE
from optimizer.mixed.groups import zones
from optimizer.mixed.mix import Mix
from optimizer.performance.calibration import model_kind
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS
from optimizer.search.plan_builder import list_node_prices, list_unit_prices
from optimizer.search.problem import Problem

# Said wherever a mixed fleet is shown.
NOT_PROVISIONED = "pulumi up cannot make this: of mixed fleets only a reservation topped up on demand is a plan"
# Said of unlike GPUs: the hours assume shares by predicted speeds.
SET_SHARES = "shares follow predicted speeds: time the first steps and set them again by measured ones"
MEASURE_SHARES = f"{SET_SHARES} (python -m bootstrap.trainer --balance measured)"


def describe_mix(mix: Mix, problem: Problem, best: FleetPlan | None) -> dict[str, Any]:
    """Describe ``mix`` as JSON data, with every price, and compare it with ``best``, the cheapest fleet of one type.

    ``idle_share`` is the share of GPU time in a step's computation that the faster group waits. Ranks multiply their
    mean loss by the ``gradient_weight`` of their group: the equal average over ranks is then the mean over samples.
    ``node_environment`` (all nodes) and that of a group (its nodes) are the variables with which the reference trainer
    carries the mix out, ``beyond_trainer`` the reasons why it cannot.
    """
    outcome, cost, ranks = mix.outcome, mix.cost, mix.ranks
    region = mix.purchases[0].offer.region
    breakdown = {part: cents(getattr(cost, part)) for part in ("compute", "volumes", "storage", "transfer")}
    # The sum of the shown parts, so that the bill adds up to the cent.
    expected_usd = round(sum(breakdown.values()), 2)
    volume = problem.running_costs(region).volume_usd_per_month
    reclaims = [
        nodes * purchase.hazard.rate_per_node_hour if purchase.hazard else 0.0
        for nodes, purchase in zip(mix.nodes, mix.purchases, strict=True)
    ]
    groups: list[dict[str, Any]] = []
    # Owned nodes first.
    for i in sorted((0, 1), key=lambda i: mix.purchases[i].reservation is None):
        purchase, instance = mix.purchases[i], mix.purchases[i].offer.instance
        owned, samples = purchase.reservation, mix.micro_batch[i] * mix.grad_accum[i]
        weight = samples * mix.layout["data"] / mix.global_batch
        # A reclaimed node is not paid while the job waits for its replacement.
        absent = reclaims[i] / sum(reclaims) if sum(reclaims) else 0.0
        paid = mix.nodes[i] * float(outcome.running_hours) + (mix.nodes[i] - absent) * float(outcome.waiting_hours)
        volumes = mix.nodes[i] * volume * float(outcome.hours_expected) / HOURS_PER_MONTH
        groups.append(
            {
                "instance_type": instance.name,
                "gpu": instance.gpu.name,
                "node_count": mix.nodes[i],
                "gpus": ranks[i],
                "micro_batch": mix.micro_batch[i],
                "grad_accum": mix.grad_accum[i],
                "activation_checkpointing": CHECKPOINTINGS[mix.checkpointing[i]],
                "samples_per_rank": samples,
                "share_of_global_batch": rounded(weight * ranks[i] / sum(ranks)),
                "gradient_weight": rounded(weight),
                "step_time_s": rounded(mix.computed_s[i]),
                "peak_gib": rounded(mix.peak_gib[i]),
                "limit_gib": rounded(mix.limit_gib[i]),
                "cost_usd": cents(paid * purchase.price.usd_per_hour + volumes),
                "calibration": problem.calibration.describe(
                    instance.gpu,
                    problem.recipe.precision,
                    problem.recipe.framework,
                    kind=model_kind(problem.model),
                ),
                "node_environment": {
                    "GPUFLEET_INSTANCE_TYPE": instance.name,
                    "GPUFLEET_GPU": instance.gpu.name,
                    "GPUFLEET_GPUS_PER_NODE": str(instance.ranks),
                },
                "purchase": {
                    "option": purchase.option,
                    "capacity_reservation_id": owned.capacity_reservation_id if owned else None,
                    "usd_per_hour": purchase.price.usd_per_hour,
                },
            }
        )
    slowest, unlike = max(mix.computed_s), groups[0]["instance_type"] != groups[1]["instance_type"]
    variables, beyond = _node_environment(mix, problem), _beyond_trainer(mix, problem)
    busy = sum(seconds * r for seconds, r in zip(mix.computed_s, ranks, strict=True))
    sources = [*dict.fromkeys(purchase.hazard.source for purchase in mix.purchases if purchase.hazard), FAILURE_SOURCE]
    prices = [price for purchase in mix.purchases for price in list_node_prices(purchase)]
    prices += list_unit_prices(region, problem.catalog, problem.request.workload)
    return {
        "region": region,
        "parallelism": {
            **mix.layout,
            "sequence_parallel": bool(mix.layout["sequence_parallel"]),
            "sharding": SHARDINGS[mix.sharding],
        },
        "global_batch": mix.global_batch,
        "steps": mix.steps,
        "step_time_s": rounded(mix.step_time_s),
        "idle_share": rounded(max(0.0, 1 - busy / (slowest * sum(ranks)))),
        "hours": {name: rounded(getattr(outcome, f"hours_{name}")) for name in ("expected", "p50", "p95")},
        "cost_usd": {
            "expected": expected_usd,
            "p50": cents(float(cost.p50)),
            "p95": max(cents(float(cost.p95)), expected_usd, cents(float(cost.p50))),
            "breakdown": breakdown,
        },
        "interruptions": {
            "rate_per_hour": rounded(float(outcome.rate)),
            "expected_count": rounded(float(outcome.expected_count)),
            "checkpoint_interval_s": rounded(float(outcome.checkpoint_interval_s)),
            "lost_hours": rounded(float(outcome.lost_hours)),
            "source": "; ".join(sources),
        },
        "relative_error": rounded(mix.relative_error),
        "saving_usd": round(best.cost_usd.expected - expected_usd, 2) if best else None,
        "beats": None
        if best is None
        else {
            "instance_type": best.instance_type,
            "region": best.region,
            "node_count": best.node_count,
            "option": best.purchase.option,
            "cost_usd": best.cost_usd.expected,
        },
        "zone_ids": sorted(set(zones(mix.purchases[0])) & set(zones(mix.purchases[1]))),
        "groups": groups,
        "node_environment": variables,
        "beyond_trainer": beyond,
        "prices": [price.model_dump(mode="json") for price in prices],
        "notes": [NOT_PROVISIONED, *([_balance_note(mix, beyond)] if unlike else [])],
    }


def shares(mix: Mix) -> str:
    """Write the shares of a mix as the trainer reads them; empty where all ranks take as many samples."""
    batches = {
        purchase.offer.instance.name: RankBatch(micro_batch, grad_accum, CHECKPOINTINGS[way])
        for purchase, micro_batch, grad_accum, way in zip(
            mix.purchases, mix.micro_batch, mix.grad_accum, mix.checkpointing, strict=True
        )
    }
    return format_shares(batches) if len(set(batches.values())) > 1 else ""


def _node_environment(mix: Mix, problem: Problem) -> Mapping[str, str]:
    """Variables of every node, alike on all: nodes whose layouts differ do not meet (bootstrap/agent/torchrun.py)."""
    work, layout, architecture = problem.request.workload, mix.layout, problem.reach.architecture
    return {
        "GPUFLEET_NODE_COUNT": str(sum(mix.nodes)),
        "GPUFLEET_ARCHITECTURE": json.dumps(architecture, separators=(",", ":")) if architecture else "",
        "GPUFLEET_PRECISION": work.precision,
        "GPUFLEET_OPTIMIZER": work.optimizer,
        "GPUFLEET_COMPILED": str(int(work.compiled)),
        "GPUFLEET_GLOBAL_BATCH": str(mix.global_batch),
        "GPUFLEET_STEPS": str(mix.steps),
        "GPUFLEET_SEQ_LEN": str(problem.recipe.seq_len),
        "GPUFLEET_TARGET_LEN": str(problem.recipe.target_len or ""),
        "GPUFLEET_SHARDING": SHARDINGS[mix.sharding],
        **{
            f"GPUFLEET_{kind.upper()}_PARALLEL": str(int(layout[kind]))
            for kind in ("data", "tensor", "pipeline", "context", "expert")
        },
        "GPUFLEET_SEQUENCE_PARALLEL": str(int(layout["sequence_parallel"])),
        "GPUFLEET_VIRTUAL_STAGES": str(layout["virtual_stages"]),
        "GPUFLEET_MICRO_BATCH": str(max(mix.micro_batch)),
        "GPUFLEET_GRAD_ACCUM": str(max(mix.grad_accum)),
        "GPUFLEET_ACTIVATION_CHECKPOINTING": CHECKPOINTINGS[max(mix.checkpointing)],
        "GPUFLEET_GRADIENT_COMPRESSION": work.gradient_compression,
        "GPUFLEET_SHARES": shares(mix),
    }


def _beyond_trainer(mix: Mix, problem: Problem) -> list[str]:
    work, recipe = problem.request.workload, problem.recipe
    return unsupported(
        TrainerJob(
            architecture=problem.reach.architecture,
            seq_len=recipe.seq_len,
            precision=work.precision,
            optimizer=work.optimizer,
            framework=recipe.framework,
            gpus_per_node=math.gcd(*(purchase.offer.instance.ranks for purchase in mix.purchases)),
            sharding=SHARDINGS[mix.sharding],
            tensor=mix.layout["tensor"],
            pipeline=mix.layout["pipeline"],
            context=mix.layout["context"],
            expert=mix.layout["expert"],
            gradient_compression=work.gradient_compression,
            shares=shares(mix),
        )
    )


def _balance_note(mix: Mix, beyond: list[str]) -> str:
    if beyond:
        return f"{SET_SHARES}. The reference trainer does not carry out this mix: {'; '.join(beyond)}"
    measures = min(mix.grad_accum) > 1 and SHARDINGS[mix.sharding] not in IN_STEP
    return MEASURE_SHARES if measures else SET_SHARES


def summarise(fleet: dict[str, Any]) -> str:
    """Say an entry of ``mixed_fleets`` in one line."""
    cost, hours, beats = fleet["cost_usd"], fleet["hours"], fleet["beats"]
    groups = " + ".join(
        f"{group['node_count']} x {group['instance_type']} ({'owned' if option == 'reserved' else option})"
        for group in fleet["groups"]
        for option in [group["purchase"]["option"]]
    )
    text = (
        f"{groups}, {fleet['region']}: {cost['expected']:,.2f} USD (p95 {cost['p95']:,.2f}), "
        f"{hours['expected']:,.1f} h (p95 {hours['p95']:,.1f})"
    )
    if beats:
        share = fleet["saving_usd"] / beats["cost_usd"] if beats["cost_usd"] else 0.0
        text += f"; saves {fleet['saving_usd']:,.2f} USD ({share:.0%})"
    return text
