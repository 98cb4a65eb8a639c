"""The search against brute force, its limits, its rejections and its Pareto set."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.catalog import Catalog, load
from optimizer.economics.checkpoint import checkpoint_gib, interval_s, stall_s
from optimizer.economics.interruption import FAILURES_PER_GPU_HOUR, RESTART_HOURS
from optimizer.errors import InvalidInputError
from optimizer.performance.calibration import Calibration
from optimizer.performance.calibration import load as load_calibration
from optimizer.performance.evaluate import evaluate
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS, Grid, Hardware, Recipe
from optimizer.plan import FleetPlan, read_plan
from optimizer.recommend import Recommendation, recommend
from optimizer.request import FleetRequest, read_request_file, request_from_dict
from optimizer.search.branch_and_bound import TIE
from optimizer.search.candidates import CandidateTable, find_candidates
from optimizer.search.plan_builder import PlanBuilder, can_stand_in
from optimizer.search.problem import Amount, Problem
from optimizer.search.ranking import pareto_front
from optimizer.search.rejections import Rejection
from optimizer.workload.resolve import resolve_model

TYPES = ("p4d.24xlarge", "g5.12xlarge", "g6f.xlarge", "p5.48xlarge")


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load()


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return load_calibration()


def request(**changes: object) -> FleetRequest:
    work = {"samples": 200_000, "seq_len": 1024, "global_batch": 64} | dict(changes.pop("workload", {}))  # type: ignore[call-overload]
    limits = {"instance_types": TYPES, "regions": ["us-east-1", "us-west-2"], "max_nodes": 4}
    limits |= dict(changes.pop("constraints", {}))  # type: ignore[call-overload]
    return request_from_dict({"model": "gpt2-xl", "workload": work, "constraints": limits, **changes})


def brute_force(wanted: FleetRequest, catalog: Catalog, calibration: Calibration) -> Iterator[tuple[float, float]]:
    """Expected hours and on-demand dollars of every legal configuration, one scalar estimate at a time."""
    model = resolve_model(wanted.model)
    amount = Amount.resolve(wanted, model)
    assert amount.global_batch is not None
    recipe = Recipe(seq_len=amount.seq_len, precision=wanted.workload.precision, optimizer=wanted.workload.optimizer)
    size = checkpoint_gib(model.parameters, recipe.optimizer)
    for name, nodes in itertools.product(TYPES, range(1, wanted.constraints.max_nodes + 1)):
        instance = catalog.instance_type(name)
        hardware = Hardware.from_instance_type(instance)
        ranks = nodes * hardware.gpus_per_node
        if instance.gpu_count < 1 and nodes > 1:
            continue
        for micro, accum in itertools.product(range(1, 65), repeat=2):
            if ranks * micro * accum != amount.global_batch:
                continue
            for sharding, checkpointing in itertools.product(range(len(SHARDINGS)), range(len(CHECKPOINTINGS))):
                if (ranks == 1 and sharding) or SHARDINGS[sharding] not in wanted.constraints.sharding:
                    continue
                found = evaluate(
                    model,
                    recipe,
                    hardware,
                    Grid(
                        nodes=nodes,
                        data=ranks,
                        sharding=sharding,
                        micro_batch=micro,
                        grad_accum=accum,
                        checkpointing=checkpointing,
                    ),
                    calibration,
                )
                if not found.fits:
                    continue
                train = math.ceil(amount.samples / amount.global_batch) * float(found.step_time_s) / 3600
                error = calibration.residual(hardware.gpu, recipe.precision).relative_error
                rate = FAILURES_PER_GPU_HOUR * ranks
                stall = float(stall_s(size, 1 if sharding == 0 else nodes))
                interval = float(interval_s(stall, rate))
                mean = train * math.exp(error**2 / 2) * (1 + stall / interval)
                hours = RESTART_HOURS + mean / (1 - rate * (RESTART_HOURS + interval / 7200))
                for region in wanted.constraints.regions:
                    offer = catalog.offer(name, region)
                    if offer is None or offer.on_demand is None:
                        continue
                    month = hours / 730
                    other = nodes * month * (
                        200 * catalog.unit_price("gp3-storage", region).usd
                        + 125 * catalog.unit_price("gp3-throughput", region).usd
                    ) + month * (
                        3 * size * catalog.unit_price("s3-standard-storage", region).usd
                        + catalog.unit_price("kms-key", region).usd
                    )
                    endpoints = 6 * hours * catalog.unit_price("vpc-endpoint", region).usd
                    yield hours, nodes * hours * offer.on_demand.usd_per_hour + other + endpoints


@pytest.mark.parametrize("objective", ["cost", "time"])
def test_best_plan_is_the_best_of_all(catalog: Catalog, calibration: Calibration, objective: str) -> None:
    wanted = request(objective=objective, constraints={"purchase_options": ["on-demand"], "parallelism": ["data"]})
    best = recommend(wanted, catalog, calibration).plans[0]
    everything = list(brute_force(wanted, catalog, calibration))
    assert len(everything) > 400
    if objective == "cost":
        found, least = best.cost_usd.expected, min(cost for _, cost in everything)
    else:
        found, least = best.hours.expected, min(hours for hours, _ in everything)
    # Of configurations that are tied, the simplest; four parts of a cost are rounded to cents.
    assert least * (1 - 1e-4) - 0.02 <= found <= least * (1 + TIE) + 0.02


@pytest.mark.parametrize("kinds", [["ddp"], ["zero1", "zero2"], ["zero3"]])
def test_only_shardings_that_are_asked_for_are_planned(
    catalog: Catalog, calibration: Calibration, kinds: list[str]
) -> None:
    limits = {"purchase_options": ["on-demand"], "parallelism": ["data"], "sharding": kinds}
    wanted = request(constraints=limits)
    answer = recommend(wanted, catalog, calibration)
    assert {plan.parallelism.sharding for plan in answer.plans} <= set(kinds)
    least_usd = min(usd for _, usd in brute_force(wanted, catalog, calibration))
    whole = answer.plans[0].cost_usd.breakdown
    assert whole.total() - whole.head_node == pytest.approx(least_usd, rel=0.002)


def test_a_lone_gpu_has_nothing_to_shard(catalog: Catalog, calibration: Calibration) -> None:
    limits = {"instance_types": ["g5.xlarge"], "max_nodes": 1, "sharding": ["zero3"]}
    answer = recommend(request(constraints=limits), catalog, calibration)
    (why,) = answer.rejected
    assert (why.binding_constraint, why.limit) == ("sharding", "ddp")


def test_a_framework_without_the_sharding_is_named(catalog: Catalog, calibration: Calibration) -> None:
    with pytest.raises(InvalidInputError, match="megatron has ddp, zero1"):
        recommend(
            request(workload={"framework": "megatron"}, constraints={"sharding": ["zero3"]}), catalog, calibration
        )


def test_pareto_set_is_that_of_all_configurations(catalog: Catalog, calibration: Calibration) -> None:
    wanted = request(constraints={"purchase_options": ["on-demand"], "parallelism": ["data"]})
    everything = np.array(list(brute_force(wanted, catalog, calibration)))
    found = {(round(p.hours.expected, 3), p.cost_usd.expected) for p in recommend(wanted, catalog, calibration).pareto}
    front = everything[pareto_front(everything[:, 0], everything[:, 1])]
    for hours, cost in front:
        assert any(abs(h - hours) <= TIE * hours and abs(c - cost) <= TIE * cost for h, c in found)
    assert len(found) <= len(front)


@given(points=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=40))
def test_pareto_front_has_exactly_the_undominated(points: list[tuple[float, float]]) -> None:
    hours, cost = (np.array(axis) for axis in zip(*points, strict=True))
    front = {points[i] for i in pareto_front(hours, cost)}
    undominated = {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
    assert front == undominated


def test_a_budget_takes_suffixes_in_flags_and_files(tmp_path: Path) -> None:
    file = tmp_path / "request.yaml"
    file.write_text("model: gpt2-xl\nworkload: {tokens: 1B, seq_len: 1024}\nconstraints: {budget_usd: 2.5k}\n")
    assert request_from_dict(read_request_file(file)).constraints.budget_usd == 2500
    assert request(constraints={"budget_usd": "2M"}).constraints.budget_usd == 2e6


@settings(max_examples=25, deadline=None)
@given(budget=st.floats(1, 3000), deadline=st.floats(1, 200))
def test_limits_are_kept_at_the_95th_percentile(budget: float, deadline: float) -> None:
    wanted = request(constraints={"budget_usd": budget, "deadline_hours": deadline})
    answer = recommend(wanted, load(), load_calibration())
    for plan in answer.plans + answer.pareto:
        assert plan.cost_usd.p95 + plan.reserve_usd <= budget + 0.02
        assert plan.hours.p95 <= deadline * 1.00001
    for entry in answer.rejected:
        if entry.binding_constraint in ("budget", "deadline"):
            assert entry.value > entry.limit
    # Every considered type is either in a plan or rejected, never lost.
    assert {e.instance_type for e in answer.rejected} | {p.instance_type for p in answer.plans} == set(TYPES)
    assert not {e.instance_type for e in answer.rejected} & {p.instance_type for p in answer.plans}


def test_a_rejections_value_is_the_limit_that_would_do(catalog: Catalog, calibration: Calibration) -> None:
    tight = recommend(request(constraints={"budget_usd": 1.0}), catalog, calibration)
    entry = next(e for e in tight.rejected if e.instance_type == "p4d.24xlarge")
    assert entry.binding_constraint == "budget"
    enough = recommend(request(constraints={"budget_usd": entry.value * 1.001}), catalog, calibration)
    assert "p4d.24xlarge" in {plan.instance_type for plan in enough.plans}
    short = recommend(request(constraints={"budget_usd": entry.value * 0.999}), catalog, calibration)
    assert "p4d.24xlarge" not in {plan.instance_type for plan in short.plans}


@pytest.mark.parametrize("option", ["on-demand", "spot", "reserved"])
def test_the_plan_keeps_what_the_search_asked_for(option: str, catalog: Catalog, calibration: Calibration) -> None:
    """preflight asks the plan: it must not refuse what the search found within the budget."""
    limits = {"instance_types": ["p4d"], "regions": ["us-east-1"], "purchase_options": [option], "max_nodes": 2}
    refused = recommend(request(constraints={**limits, "budget_usd": 1.0}), catalog, calibration)
    (needed,) = [entry.value for entry in refused.rejected if entry.instance_type == "p4d.24xlarge"]
    plan = recommend(request(constraints={**limits, "budget_usd": needed + 0.01}), catalog, calibration).plans[0]
    assert plan.cost_usd.p95 + plan.reserve_usd == pytest.approx(needed, abs=0.03)


def bindings(answer: Recommendation) -> dict[str, str]:
    return {entry.instance_type: entry.binding_constraint for entry in answer.rejected}


def test_the_budget_pays_for_the_end_too(catalog: Catalog, calibration: Calibration) -> None:
    """The controller drains while the ceiling still pays for it, so a budget of the 95th percentile is too little."""
    limits = {"instance_types": ["p4d"], "regions": ["us-east-1"], "purchase_options": ["on-demand"], "max_nodes": 1}
    free = recommend(request(constraints=limits), catalog, calibration).plans[0]
    (price,) = [price.usd for price in free.prices if price.item.startswith("on-demand")]
    assert free.reserve_usd == pytest.approx(price * free.reserve_s / 3600, rel=0.02)
    at_p95 = recommend(request(constraints={**limits, "budget_usd": free.cost_usd.p95}), catalog, calibration)
    assert not at_p95.plans
    (why,) = [entry for entry in at_p95.rejected if entry.instance_type == "p4d.24xlarge"]
    assert why.value == pytest.approx(free.cost_usd.p95 + free.reserve_usd, abs=0.02)
    assert "at the 95th percentile, with its drain, the budget is" in why.reason
    enough = {**limits, "budget_usd": free.cost_usd.p95 + free.reserve_usd + 0.02}
    assert recommend(request(constraints=enough), catalog, calibration).plans[0].cost_usd == free.cost_usd


def test_each_binding_constraint_is_named(catalog: Catalog, calibration: Calibration) -> None:
    found = bindings(
        recommend(
            request(
                model="llama-3.1-70b",
                workload={"seq_len": 8192},
                constraints={"instance_types": ["g6f", "p3", "p5e", "p4de", "p5.4xlarge"], "max_nodes": 1},
            ),
            catalog,
            calibration,
        )
    )
    assert found["g6f.xlarge"] == "memory"
    assert found["p3.16xlarge"] == "precision"  # V100 has no bf16
    assert found["p5.4xlarge"] == "memory"
    assert found["p5e.48xlarge"] in ("region", "price")


def test_a_batch_that_does_not_divide_is_named(catalog: Catalog, calibration: Calibration) -> None:
    found = bindings(
        recommend(
            request(
                workload={"global_batch": 7}, constraints={"instance_types": ["p4d"], "parallelism": ["data", "tensor"]}
            ),
            catalog,
            calibration,
        )
    )
    assert found == {"p4d.24xlarge": "global_batch"}


def test_owned_capacity_is_used_and_costs_what_the_owner_says(catalog: Catalog, calibration: Calibration) -> None:
    owned = {
        "instance_type": "p4d.24xlarge",
        "region": "us-east-1",
        "count": 2,
        "capacity_reservation_id": "cr-0abcdef1",
    }
    answer = recommend(request(constraints={"existing_reservations": [owned]}), catalog, calibration)
    best = answer.plans[0]
    assert best.purchase.option == "reserved"
    assert best.purchase.capacity_reservation_id == "cr-0abcdef1"
    assert best.node_count <= 2
    assert best.cost_usd.breakdown.compute == 0


def block(*, hours: float, instance_type: str = "p4d.24xlarge", count: int = 1) -> dict[str, object]:
    """A Capacity Block of one p4d.24xlarge that began just now."""
    now = datetime.now(UTC)
    times = {"start": now.isoformat(), "end": (now + timedelta(hours=hours)).isoformat()}
    return {
        "instance_type": instance_type,
        "region": "us-east-1",
        "count": count,
        "capacity_reservation_id": "cr-0abcdef1",
        "capacity_block": times,
    }


@pytest.mark.parametrize(
    ("model", "instance_type", "count", "kept_s"),
    [
        # The shortest time to save; 783 GiB at the 0.396 GiB/s of one node, and two steps.
        ("gpt2-xl", "p4d.24xlarge", 1, (540, 541)),
        ("llama-3.1-70b", "p4d.24xlarge", 8, (783 / 0.396 + 300, 783 / 0.396 + 400)),
    ],
)
def test_a_capacity_block_is_used_when_the_run_ends_before_it(
    model: str, instance_type: str, count: int, kept_s: tuple[float, float], catalog: Catalog, calibration: Calibration
) -> None:
    limits = {"purchase_options": ["capacity-block"], "instance_types": [instance_type], "max_nodes": count}

    def answer(hours: float) -> Recommendation:
        owned = block(hours=hours, instance_type=instance_type, count=count)
        wanted = request(
            model=model, workload={"samples": 20_000}, constraints={**limits, "existing_reservations": [owned]}
        )
        return recommend(wanted, catalog, calibration)

    plan = answer(2000).plans[0]
    assert plan.purchase.option == "capacity-block"
    assert plan.purchase.capacity_block is not None
    assert kept_s[0] <= plan.reserve_s < kept_s[1]
    # The controller drains this long before the end, so that all is saved before AWS ends the instances.
    kept = 0.5 + plan.reserve_s / 3600
    assert answer(plan.hours.p95 + kept + 0.01).plans[0].hours == plan.hours
    short = answer(plan.hours.p95 + kept - 0.01)
    assert not short.plans
    (why,) = short.rejected
    assert why.binding_constraint == "capacity-block"
    assert why.value == pytest.approx(plan.hours.p95, rel=1e-3)
    assert why.limit == pytest.approx(plan.hours.p95 - 0.01, abs=5e-3)


def test_a_capacity_block_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="bought first"):
        request(constraints={"existing_reservations": [block(hours=9) | {"capacity_reservation_id": None}]})


def test_a_fallback_binds_the_budget_at_the_on_demand_price(catalog: Catalog, calibration: Calibration) -> None:
    limits = {"instance_types": ["p4d"], "regions": ["us-east-1"], "purchase_options": ["spot"], "max_nodes": 2}
    plain = recommend(request(constraints=limits), catalog, calibration).plans[0]
    both = recommend(request(constraints={**limits, "spot_fallback": "on-demand"}), catalog, calibration).plans[0]
    assert (plain.purchase.fallback, both.purchase.fallback) == ("none", "on-demand")
    assert both.cost_usd.expected == plain.cost_usd.expected
    on_demand = {price.item: price.usd for price in both.prices}["on-demand p4d.24xlarge us-east-1"]
    assert both.cost_usd.p95 >= on_demand * both.node_count * both.hours.p50
    between = (plain.cost_usd.p95 + both.cost_usd.p95) / 2
    bound = {**limits, "max_nodes": both.node_count, "budget_usd": between}
    assert recommend(request(constraints=bound), catalog, calibration).plans
    assert not recommend(request(constraints={**bound, "spot_fallback": "on-demand"}), catalog, calibration).plans


def test_a_spot_fleet_takes_types_that_train_no_slower_and_pays_for_the_dearest(
    catalog: Catalog, calibration: Calibration
) -> None:
    small = {"model": "llama-3.2-1b", "workload": {"tokens": "200M", "seq_len": 2048, "global_batch": 32}}
    limits = {"instance_types": ["g5"], "regions": ["us-east-1"], "purchase_options": ["spot"], "max_nodes": 2}

    def plan(**more: object) -> FleetPlan:
        answer = recommend(request_from_dict({**small, "constraints": {**limits, **more}}), catalog, calibration)
        return next(plan for plan in answer.plans if plan.instance_type == "g5.xlarge")

    alone, several = plan(spot_spread=0), plan(spot_spread=2)
    assert alone.purchase.spot_types == ()
    assert "g5.2xlarge" in several.purchase.spot_types
    own = catalog.instance_type("g5.xlarge")
    for name in several.purchase.spot_types:
        other = catalog.instance_type(name)
        assert can_stand_in(own, other)
        assert not can_stand_in(other, own), "a smaller one is none"
        assert f"spot {name} us-east-1" in {price.item for price in several.prices}
    dearest = max(price.usd for price in several.prices if price.item.startswith("spot")) / several.prices[0].usd
    assert several.cost_usd.expected == alone.cost_usd.expected
    assert several.cost_usd.p95 >= alone.cost_usd.p95 + (dearest - 1) * alone.cost_usd.breakdown.compute
    tight = plan(spot_spread=2, budget_usd=alone.cost_usd.p95 + alone.reserve_usd + 0.02)
    assert tight.purchase.spot_types == (), "none whose price would break the budget"


def test_a_new_commitment_costs_its_whole_year(catalog: Catalog, calibration: Calibration) -> None:
    answer = recommend(
        request(constraints={"purchase_options": ["reserved"], "instance_types": ["p4d"], "max_nodes": 1}),
        catalog,
        calibration,
    )
    plan = answer.plans[0]
    offer = catalog.offer("p4d.24xlarge", plan.region)
    assert offer is not None and offer.reserved_1yr is not None
    assert plan.cost_usd.breakdown.compute == pytest.approx(offer.reserved_1yr.usd_per_hour * 8760, rel=1e-6)


def test_every_plan_survives_the_contract(catalog: Catalog, calibration: Calibration) -> None:
    answer = recommend(request(), catalog, calibration)
    for plan in answer.plans + answer.pareto:
        assert read_plan(plan.to_json()) == plan
        priced = [price for price in plan.prices if price.per == "hour"]
        assert priced and all(price.source and price.as_of for price in plan.prices)


def test_compute_is_price_times_paid_hours(catalog: Catalog, calibration: Calibration) -> None:
    answer = recommend(request(constraints={"purchase_options": ["on-demand"]}), catalog, calibration)
    for plan in answer.plans:
        hourly = plan.prices[0].usd * plan.node_count
        assert plan.cost_usd.breakdown.compute == pytest.approx(hourly * plan.hours.expected, rel=1e-3, abs=0.01)


def test_candidates_of_a_type_are_the_same_beside_other_types(catalog: Catalog, calibration: Calibration) -> None:
    limits = {"instance_types": ["g6*", "g5*", "p4d"], "purchase_options": ["on-demand", "spot"]}
    wanted = request(constraints=limits | {"regions": ["us-east-1", "us-west-2", "eu-west-1"]})
    problem = Problem.resolve(wanted, catalog, calibration)
    together = find_candidates(problem)
    assert len(together) == len(problem.instance_types) > 12
    for instance, table in zip(problem.instance_types, together, strict=True):
        (alone,) = find_candidates(replace(problem, instance_types=(instance,)))
        if isinstance(table, Rejection):
            assert table == alone
            continue
        assert isinstance(alone, CandidateTable)
        assert table.fastest.instance.name == instance.name and table.purchases == alone.purchases
        for name in ("configuration", "purchase", "reserve_hours"):
            assert np.array_equal(getattr(table, name), getattr(alone, name))
        assert np.allclose(table.outcome.hours_p95, alone.outcome.hours_p95, rtol=1e-12, equal_nan=True)
        assert np.allclose(table.cost.p95, alone.cost.p95, rtol=1e-12, equal_nan=True)


def test_spot_with_a_base_pays_both_prices(catalog: Catalog, calibration: Calibration) -> None:
    limits = {"purchase_options": ["spot"], "instance_types": ["p4d"], "regions": ["us-east-1"]}
    problem = Problem.resolve(request(constraints=limits), catalog, calibration)
    (table,) = find_candidates(problem)
    assert isinstance(table, CandidateTable)
    based = [row for row, index in enumerate(table.purchase) if table.purchases[index].base]
    assert based
    for row in based:
        purchase = table.purchases[table.purchase[row]]
        assert purchase.offer.on_demand is not None
        nodes = int(table.fastest.nodes[table.configuration[row]])
        hourly = purchase.offer.on_demand.usd_per_hour + (nodes - 1) * purchase.price.usd_per_hour
        waiting = table.outcome.waiting_hours[row] * (hourly - purchase.price.usd_per_hour)
        assert table.cost.compute[row] == pytest.approx(hourly * table.outcome.running_hours[row] + waiting)
        (plan,) = PlanBuilder(problem).build([(table, row)])
        assert plan.purchase.on_demand_base == 1
        assert [price.item.split()[0] for price in plan.prices if price.per == "hour"] == ["spot", "on-demand"]


def test_without_a_batch_the_search_comes_near_the_published_one(catalog: Catalog, calibration: Calibration) -> None:
    free = request(workload={"global_batch": None})
    for plan in recommend(free, catalog, calibration).plans:
        tokens = plan.job.global_batch * plan.job.seq_len
        assert 0.5 * 1e6 < tokens <= 1e6  # 1.5B parameters: 1M tokens


@pytest.mark.parametrize("samples", [1, 7, 64, 1000, 10_000, 300_000, 10**9])
@pytest.mark.parametrize("model", ["gpt2", "bert-large", "resnet50"])
def test_a_run_of_any_size_has_plans_that_add_up(
    catalog: Catalog, calibration: Calibration, model: str, samples: int
) -> None:
    """Cents rounded apart must not make a plan contradict itself, however small the run."""
    limits = {"max_nodes": 4, "regions": ["us-*"]}
    work = {"samples": samples, "seq_len": 512}
    answer = recommend(
        request_from_dict({"model": model, "workload": work, "constraints": limits}), catalog, calibration
    )
    assert answer.plans
    for plan in answer.plans + answer.pareto:
        parts = plan.cost_usd.breakdown
        assert round(parts.total(), 2) == plan.cost_usd.expected


def test_a_sequence_longer_than_the_usual_batch_is_still_trained(catalog: Catalog, calibration: Calibration) -> None:
    work = {"tokens": "1B", "seq_len": 131072}
    answer = recommend(
        request_from_dict({"model": "llama-3.2-1b", "workload": work, "constraints": {"instance_types": ["p6-b200"]}}),
        catalog,
        calibration,
    )
    assert not [entry for entry in answer.rejected if entry.binding_constraint == "global_batch"]


def test_steps_samples_and_tokens_ask_for_the_same(catalog: Catalog, calibration: Calibration) -> None:
    by_samples = recommend(request(workload={"samples": 64_000}), catalog, calibration).plans
    by_steps = recommend(request(workload={"samples": None, "steps": 1000}), catalog, calibration).plans
    by_tokens = recommend(request(workload={"samples": None, "tokens": 64_000 * 1024}), catalog, calibration).plans
    assert by_samples == by_steps == by_tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"constraints": {"regions": ["mars-1"]}}, "mars-1"),
        ({"constraints": {"instance_types": ["p99"]}}, "p99"),
        ({"workload": {"seq_len": None}}, "seq_len"),
        ({"workload": {"seq_len": 4096}}, "1024"),  # gpt2-xl has 1024 positions
        (
            {
                "constraints": {
                    "existing_reservations": [
                        {"instance_type": "p99.xl", "region": "us-east-1", "count": 1, "usd_per_hour": 1}
                    ]
                }
            },
            "p99.xl",
        ),
    ],
)
def test_what_the_catalog_or_model_does_not_know_is_refused(
    catalog: Catalog, calibration: Calibration, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        recommend(request(**changes), catalog, calibration)


def test_images_need_no_sequence_length(catalog: Catalog, calibration: Calibration) -> None:
    wanted = request_from_dict(
        {
            "model": "resnet50",
            "workload": {"samples": 1_281_167 * 90},
            "constraints": {"instance_types": ["p4d"], "max_nodes": 2},
        }
    )
    plan = recommend(wanted, catalog, calibration).plans[0]
    assert plan.job.seq_len == 1
    assert plan.job.tokens == plan.job.samples


def test_a_plan_says_when_its_parallelism_was_never_measured(catalog: Catalog, calibration: Calibration) -> None:
    wanted = request(
        model="llama-3.1-70b",
        workload={"seq_len": 8192, "samples": 10_000, "global_batch": 384},
        constraints={"instance_types": ["p5en"], "parallelism": ["pipeline"], "max_nodes": 2},
    )
    plan = recommend(wanted, catalog, calibration).plans[0]
    assert plan.parallelism.beyond_data == ("pipeline",)
    assert "no measured run on H200 has pipeline parallelism" in plan.calibration.source
    assert plan.calibration.relative_error == pytest.approx(calibration.residuals["pooled"].relative_error, rel=1e-4)
    plain = recommend(request(constraints={"instance_types": ["p5en"]}), catalog, calibration).plans[0]
    assert not plain.parallelism.beyond_data and "parallelism" not in plain.calibration.source
