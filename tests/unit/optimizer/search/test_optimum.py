"""The best plans and the Pareto front against brute force: every configuration, one by one, with on-demand prices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.contract.request import FleetRequest
from optimizer.economics.checkpoint import checkpoint_usd, checkpoints, interval_s
from optimizer.economics.interruption import FAILURES_PER_GPU_HOUR, RESTART_HOURS
from optimizer.performance.confidence import DENSE
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS, Grid, Hardware
from optimizer.search.fastest import SAME
from optimizer.search.problem import Problem
from optimizer.search.ranking import EXPONENTS, SHORTEST_HOURS, pareto_front
from tests.unit.optimizer.performance.fixtures import evaluate
from tests.unit.optimizer.search.requests import TYPES, answer, calibration, catalog, request

SIMPLE: dict[str, Any] = {"purchase_options": ["on-demand"], "parallelism": ["data"]}


def brute_force(wanted: FleetRequest) -> Iterator[tuple[float, float]]:
    """Expected hours and on-demand dollars of every legal configuration, one scalar estimate at a time."""
    problem = Problem.resolve(wanted, catalog(), calibration())
    batch, size = problem.amount.global_batch, problem.checkpoint_gib
    for name, nodes in itertools.product(TYPES, range(1, wanted.constraints.max_nodes + 1)):
        instance = catalog().instance_type(name)
        hardware = Hardware.from_instance_type(instance)
        ranks = nodes * hardware.gpus_per_node
        if instance.gpu_count < 1 and nodes > 1:
            continue
        for micro, accum in itertools.product(range(1, 65), repeat=2):
            if ranks * micro * accum != batch:
                continue
            for sharding, checkpointing in itertools.product(range(len(SHARDINGS)), range(len(CHECKPOINTINGS))):
                if (ranks == 1 and sharding) or SHARDINGS[sharding] not in problem.reach.shardings:
                    continue
                grid = Grid(
                    nodes=nodes,
                    data=ranks,
                    sharding=sharding,
                    micro_batch=micro,
                    grad_accum=accum,
                    checkpointing=checkpointing,
                )
                estimates = evaluate(problem.model, problem.recipe, hardware, grid, calibration())
                if not estimates.fits_p95:
                    continue
                train = math.ceil(problem.amount.samples / batch) * float(estimates.step_time_s) / 3600
                error = calibration().residuals[DENSE].relative_error
                rate = FAILURES_PER_GPU_HOUR * ranks
                for region in wanted.constraints.regions:
                    offer = catalog().offer(name, region)
                    if not (offer and offer.on_demand):
                        continue
                    usd_per_hour = nodes * offer.on_demand.usd_per_hour
                    save_usd = checkpoint_usd(catalog(), region, size)
                    saves = checkpoints(
                        size,
                        problem.recipe.framework,
                        nodes=[nodes],
                        gpus_per_node=[hardware.gpus_per_node],
                        writers=[1 if sharding == 0 else nodes],
                        usd=[save_usd],
                    )
                    interval = float(interval_s(saves, rate, [usd_per_hour])[0])
                    redo = interval / 7200 + float(saves.save_s[0]) / 3600
                    mean = train * math.exp(error**2 / 2) * (1 + float(saves.stall_s[0]) / interval)
                    running = mean / (1 - rate * (RESTART_HOURS + redo))
                    hours = RESTART_HOURS + running
                    saved_usd = running * 3600 / interval * save_usd
                    yield hours, usd_per_hour * hours + saved_usd + other_usd(region, nodes, hours, size)


def other_usd(region: str, nodes: int, hours: float, checkpoint_gib: float) -> float:
    """Dollars of volumes, storage and endpoints."""

    def usd(item: str) -> float:
        return catalog().unit_price(item, region).usd

    volumes = nodes * (200 * usd("gp3-storage") + 125 * usd("gp3-throughput"))
    storage = 3 * checkpoint_gib * usd("s3-standard-storage") + usd("kms-key")
    return (volumes + storage) * hours / 730 + 7 * hours * usd("vpc-endpoint")


@pytest.mark.parametrize("objective", ["cost", "time"])
def test_no_configuration_has_a_better_score_than_the_best_plan(objective: str) -> None:
    """Expected values alone, as the brute force has no 95th percentiles; the fleets here have one error."""
    best = answer(objective=objective, **SIMPLE).plans[0]
    everything = list(brute_force(request(objective=objective, **SIMPLE)))
    assert len(everything) > 400
    exponent = EXPONENTS[objective]
    score = best.cost_usd.expected * max(best.hours.expected, SHORTEST_HOURS) ** exponent
    least = min(usd * max(hours, SHORTEST_HOURS) ** exponent for hours, usd in everything)
    # Two choices within SAME follow each other; four parts of a cost are rounded to cents.
    assert least * 0.99 - 0.02 <= score <= least * (1 + SAME) ** 3 + 0.02


@pytest.mark.parametrize("kinds", [["ddp"], ["zero1", "zero2"], ["zero3"]])
def test_only_shardings_that_are_asked_for_are_planned(kinds: list[str]) -> None:
    plans = answer(sharding=kinds, **SIMPLE).plans
    assert {plan.parallelism.sharding for plan in plans} <= set(kinds)
    everything = brute_force(request(sharding=kinds, **SIMPLE))
    _, best_usd = min(everything, key=lambda pair: pair[1] * max(pair[0], SHORTEST_HOURS) ** EXPONENTS["cost"])
    parts = plans[0].cost_usd.breakdown
    assert parts.total() - parts.head_node == pytest.approx(best_usd, rel=SAME)


def test_pareto_front_is_that_of_all_configurations() -> None:
    everything = np.array(list(brute_force(request(**SIMPLE))))
    plans = {(round(plan.hours.expected, 3), plan.cost_usd.expected) for plan in answer(**SIMPLE).pareto}
    front = everything[pareto_front(everything[:, 0], everything[:, 1])]
    for hours, usd in front:
        assert any(abs(h - hours) <= SAME * hours and abs(u - usd) <= SAME * usd for h, u in plans)
    assert len(plans) <= len(front)


@given(points=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=40))
def test_pareto_front_has_exactly_the_undominated(points: list[tuple[float, float]]) -> None:
    hours, usd = (np.array(axis) for axis in zip(*points, strict=True))
    front = {points[i] for i in pareto_front(hours, usd)}
    assert front == {p for p in points if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in points)}
