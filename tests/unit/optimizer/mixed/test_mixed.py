"""Mixed fleets: the search against weighing every mix, one mix by hand, limits, and what the answer says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.catalog import Catalog, load
from optimizer.cli import cli
from optimizer.economics.checkpoint import checkpoint_gib, interval_s, stall_s
from optimizer.economics.interruption import FAILURES_PER_GPU_HOUR, RESTART_HOURS
from optimizer.hardware import Price
from optimizer.mixed import find
from optimizer.mixed.find import MAX_FLEETS, Search
from optimizer.mixed.mix import Mix
from optimizer.mixed.pricing import Terms
from optimizer.mixed.sources import pairs_of, ways_to_have
from optimizer.performance.calibration import Calibration
from optimizer.performance.calibration import load as load_calibration
from optimizer.performance.evaluate import estimate
from optimizer.performance.machines import share_of_gpu
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS, Recipe
from optimizer.plan import PlanError, read_plan
from optimizer.recommend import Recommendation, recommend
from optimizer.request import FleetRequest, request_from_dict
from optimizer.search.problem import Amount, Problem
from optimizer.search.purchases import Purchase, purchases
from optimizer.workload.resolve import resolve_model

TYPES = ["p4d.24xlarge", "p5.48xlarge", "g6e.48xlarge", "g5.12xlarge", "g6f.xlarge", "p5.4xlarge"]
OWNED = {"instance_type": "p4d.24xlarge", "region": "us-east-1", "count": 2, "usd_per_hour": 0.5}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load()


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return load_calibration()


def request(**changes: Any) -> FleetRequest:
    work = {"samples": 400_000, "seq_len": 1024, "global_batch": 96} | changes.pop("workload", {})
    limits = {
        "instance_types": TYPES,
        "regions": ["us-east-1", "us-west-2"],
        "max_nodes": 4,
        "purchase_options": ["on-demand", "spot", "reserved"],
        "existing_reservations": [OWNED],
    } | changes.pop("constraints", {})
    return request_from_dict({"model": "gpt2-xl", "workload": work, "constraints": limits, **changes})


def search_of(wanted: FleetRequest, catalog: Catalog, calibration: Calibration) -> Search:
    model = resolve_model(wanted.model)
    amount, limits = Amount.resolve(wanted, model), wanted.constraints
    recipe = Problem.resolve(wanted, catalog, calibration).recipe
    types = [i for i in catalog.instance_types if i.name in limits.instance_types and i.gpu_count >= 1]
    ways = list(ways_to_have(types, limits.regions, limits, catalog))
    terms = Terms.of(ways, recipe, checkpoint_gib(model.parameters, recipe.optimizer), catalog, calibration, kind=None)
    search = Search.of(ways, terms, limits, amount, recipe, model, calibration)
    assert search is not None
    return search


def weigh_all(search: Search) -> list[Mix]:
    """Every mix of every pair, none passed over, with its bounds checked."""
    least = search.bounds.least_usd()
    found = []
    for at in range(len(search.pairs)):
        nodes = search.node_counts(at)
        pair = np.full(len(nodes), at)
        for mix in search.weigh(pair, nodes):
            row = int(np.flatnonzero((nodes == mix.nodes).all(axis=1))[0])
            close = search.least_usd_of(pair[:1], nodes[row : row + 1])[0]
            rough = search.bounds.least_usd_of(pair[:1], nodes[row : row + 1])[0]
            assert mix.usd >= close * (1 - 1e-9) >= rough * (1 - 2e-9) >= least[at] * (1 - 1e-6)
            found.append(mix)
    return found


@settings(max_examples=10, deadline=None)
@given(
    deadline=st.one_of(st.none(), st.floats(2, 60)),
    budget=st.one_of(st.none(), st.floats(50, 3000)),
    batch=st.sampled_from([None, 48, 96, 100, 256]),
    options=st.sampled_from([("on-demand",), ("spot", "reserved"), ("on-demand", "spot", "reserved")]),
    max_nodes=st.integers(2, 4),
)
def test_the_pruned_search_finds_what_weighing_every_mix_finds(
    deadline: float | None, budget: float | None, batch: int | None, options: tuple[str, ...], max_nodes: int
) -> None:
    limits = {"deadline_hours": deadline, "budget_usd": budget, "purchase_options": options, "max_nodes": max_nodes}
    owned = [OWNED] if "reserved" in options else []
    wanted = request(
        workload={"global_batch": batch},
        constraints=limits | {"existing_reservations": owned, "regions": ["us-east-1"]},
    )
    search = search_of(wanted, load(), load_calibration())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "_MOST_WEIGHED", 10**9)
        patch.setattr(find, "_MOST_BOUNDED", 10**9)
        compare_with_weighing_all(search)


def compare_with_weighing_all(search: Search) -> None:
    best: dict[object, Mix] = {}
    for mix in sorted(weigh_all(search), key=lambda mix: mix.key):
        best.setdefault(mix.name, mix)
    expected = list(best.values())[:MAX_FLEETS]
    assert [mix.key for mix in search.cheapest(math.inf)] == [mix.key for mix in expected]
    if expected:
        below = expected[0].usd * 1.01
        cheap = [mix.key for mix in best.values() if mix.usd < below]
        assert [mix.key for mix in search.cheapest(below)] == cheap[:MAX_FLEETS]
        assert search.cheapest(expected[0].usd) == []
        assert search.could_cost_less(expected[0].usd + 0.01), "or nobody looks for it"
    assert not search.could_cost_less(search.bounds.least_usd().min())


def test_one_mix_by_hand(catalog: Catalog, calibration: Calibration) -> None:
    """Step, hours and dollars of two owned p4d and one rented p5, from scalar estimates and the page's equations."""
    wanted = request(constraints={"purchase_options": ["on-demand", "reserved"], "regions": ["us-east-1"]})
    search = search_of(wanted, catalog, calibration)
    mix = next(
        mix
        for mix in weigh_all(search)
        if sorted((way.offer.instance.name, n, way.option) for way, n in zip(mix.ways, mix.nodes, strict=True))
        == [("p4d.24xlarge", 2, "reserved"), ("p5.48xlarge", 1, "on-demand")]
    )
    model = resolve_model(wanted.model)
    recipe = Recipe(seq_len=1024)
    p4d, p5 = (catalog.instance_type(name) for name in ("p4d.24xlarge", "p5.48xlarge"))
    # The p4d's network is the slower; NVLink of neither is slower than that, so the p5's own stands for the p4d's.
    network = min(p4d.network_gbit_per_s, p5.network_gbit_per_s)
    computed, shown = {}, []
    for g, way in enumerate(mix.ways):
        found = estimate(
            model,
            recipe,
            replace(share_of_gpu(way.offer.instance), network_gbit_per_s=network),
            calibration,
            nodes=3,
            data=24,
            sharding=mix.sharding,
            micro_batch=mix.micro_batch[g],
            grad_accum=mix.grad_accum[g],
            checkpointing=mix.checkpointing[g],
        )
        assert found.fits
        shown.append(float(found.time_s["data_communication"]))
        computed[way.offer.instance.name] = float(found.step_time_s) - shown[-1]
        assert mix.peak_gib[g] == pytest.approx(float(found.peak_memory_gib))
    assert sum(r * m * k for r, m, k in zip(mix.ranks, mix.micro_batch, mix.grad_accum, strict=True)) == 96
    step = max(computed.values()) + max(shown)
    assert mix.step_time_s == pytest.approx(step, rel=1e-9)

    steps = math.ceil(400_000 / 96)
    error = max(calibration.residual(i.gpu, "bf16").relative_error for i in (p4d, p5))
    rate = FAILURES_PER_GPU_HOUR * 24
    stall = float(stall_s(checkpoint_gib(model.parameters, "adamw"), 1 if SHARDINGS[mix.sharding] == "ddp" else 3))
    interval = float(interval_s(stall, rate))
    useful = steps * step / 3600 * math.exp(error**2 / 2) * (1 + stall / interval)
    hours = RESTART_HOURS + useful / (1 - rate * (RESTART_HOURS + interval / 7200))
    assert float(mix.run.hours_expected) == pytest.approx(hours, rel=1e-9)
    price = catalog.offer("p5.48xlarge", "us-east-1")
    assert price is not None and price.on_demand is not None
    compute = (2 * 0.5 + price.on_demand.usd_per_hour) * hours
    assert float(mix.cost.compute) == pytest.approx(compute, rel=1e-9)
    # p5's shares are larger: it is faster.
    at = [way.offer.instance.name for way in mix.ways].index("p5.48xlarge")
    assert mix.micro_batch[at] * mix.grad_accum[at] > mix.micro_batch[1 - at] * mix.grad_accum[1 - at]


@pytest.mark.parametrize("nodes", [(1, 1), (2, 1), (1, 2)])
def test_no_configuration_beats_the_chosen_one(
    catalog: Catalog, calibration: Calibration, nodes: tuple[int, int]
) -> None:
    """Every sharding, checkpointing, micro-batch and accumulation of both groups, one scalar estimate at a time."""
    wanted = request(
        workload={"global_batch": 48},
        constraints={
            "instance_types": ["p4d.24xlarge", "g5.12xlarge"],
            "purchase_options": ["on-demand"],
            "existing_reservations": [],
            "regions": ["us-east-1"],
        },
    )
    search = search_of(wanted, catalog, calibration)
    (mix,) = search.weigh(np.array([0]), np.array([nodes]))
    model, recipe = resolve_model(wanted.model), Recipe(seq_len=1024)
    slow = min(way.offer.instance.network_gbit_per_s for way in mix.ways)
    link = catalog.instance_type("g5.12xlarge")
    together = sum(mix.ranks)
    found: dict[tuple[int, ...], tuple[float, float] | None] = {}

    def part(g: int, mode: int, way: int, micro: int, accum: int) -> tuple[float, float] | None:
        """Computation and communication of one group; None where it does not fit."""
        key = (g, mode, way, micro, accum)
        if key not in found:
            hardware = replace(share_of_gpu(mix.ways[g].offer.instance), network_gbit_per_s=slow)
            if hardware.network_gbit_per_s > link.network_gbit_per_s:
                raise AssertionError("the network of g5 is the slower")
            one = estimate(
                model,
                recipe,
                hardware,
                calibration,
                nodes=sum(nodes),
                data=together,
                sharding=mode,
                micro_batch=micro,
                grad_accum=accum,
                checkpointing=way,
            )
            shown = float(one.time_s["data_communication"])
            found[key] = (float(one.step_time_s) - shown, shown) if one.fits else None
        return found[key]

    best = math.inf
    for mode in range(len(SHARDINGS)):
        for ways in np.ndindex(len(CHECKPOINTINGS), len(CHECKPOINTINGS)):
            for share in range(1, 48 // mix.ranks[0] + 1):
                other, left = divmod(48 - share * mix.ranks[0], mix.ranks[1])
                if left or other < 1:
                    continue
                for m_a in (m for m in range(1, share + 1) if share % m == 0):
                    for m_b in (m for m in range(1, other + 1) if other % m == 0):
                        if mode >= 2 and share // m_a != other // m_b:
                            continue
                        a = part(0, mode, ways[0], m_a, share // m_a)
                        b = part(1, mode, ways[1], m_b, other // m_b)
                        if a and b:
                            best = min(best, max(a[0], b[0]) + max(a[1], b[1]))
    # The scalar estimates have each group's own link inside its nodes; the mix waits for the slower one.
    assert mix.step_time_s == pytest.approx(best, rel=2e-3)


def test_mixes_keep_the_limits_and_beat_every_plan(catalog: Catalog, calibration: Calibration) -> None:
    deadline = missed_by_two(catalog, calibration)
    answer = recommend(request(constraints={"deadline_hours": deadline, "budget_usd": 2000}), catalog, calibration)
    assert answer.mixed_fleets
    cheapest = min(plan.cost_usd.expected for plan in answer.plans + answer.pareto)
    usd = [fleet.cost_usd["expected"] for fleet in answer.mixed_fleets]
    assert usd == sorted(usd)
    for fleet in answer.mixed_fleets:
        assert fleet.cost_usd["p95"] <= 2000 and fleet.hours["p95"] <= deadline
        assert fleet.cost_usd["expected"] < cheapest
        assert fleet.saving_usd == pytest.approx(cheapest - fleet.cost_usd["expected"], abs=0.01)
        assert fleet.beats is not None and fleet.beats["cost_usd"] == cheapest
        assert sum(group.node_count for group in fleet.groups) <= 4


def owned_and_rented(catalog: Catalog, calibration: Calibration, **limits: Any) -> Recommendation:
    only = {"instance_types": ["p4d.24xlarge"], "regions": ["us-east-1"], "purchase_options": ["on-demand", "reserved"]}
    return recommend(request(constraints=only | limits), catalog, calibration)


def missed_by_two(catalog: Catalog, calibration: Calibration) -> float:
    """A deadline, in hours, that two p4d nodes miss and three keep."""
    rented = {"existing_reservations": [], "purchase_options": ["on-demand"]}
    two, three = (
        min(plan.hours.p95 for plan in owned_and_rented(catalog, calibration, max_nodes=n, **rented).pareto)
        for n in (2, 3)
    )
    assert three < two
    return (two + three) / 2


def test_owned_nodes_are_topped_up_with_rented_ones_of_their_type(catalog: Catalog, calibration: Calibration) -> None:
    deadline = missed_by_two(catalog, calibration)
    answer = owned_and_rented(catalog, calibration, deadline_hours=deadline, max_nodes=3)
    (fleet,) = answer.mixed_fleets
    pure = next(plan for plan in answer.plans if plan.node_count == 3)
    owned, rented = fleet.groups
    assert (owned.option, owned.node_count, rented.option, rented.node_count) == ("reserved", 2, "on-demand", 1)
    # The GPUs are alike, so the run is that of three rented nodes, parallelism and all; two cost what their owner says.
    assert fleet.hours["expected"] == pure.hours.expected
    assert fleet.step_time_s == pure.step_time_s
    assert fleet.parallelism["tensor"] == pure.parallelism.tensor
    assert fleet.parallelism["pipeline"] == pure.parallelism.pipeline
    assert fleet.parallelism["sequence_parallel"] is pure.parallelism.sequence_parallel
    hourly = pure.prices[0].usd
    share = (2 * 0.5 + hourly) / (3 * hourly)
    assert fleet.cost_usd["breakdown"]["compute"] == pytest.approx(pure.cost_usd.breakdown.compute * share, abs=0.02)
    assert owned.share_of_global_batch == pytest.approx(2 / 3, rel=1e-5)


def test_where_owned_nodes_are_enough_nothing_is_added(catalog: Catalog, calibration: Calibration) -> None:
    answer = owned_and_rented(catalog, calibration, max_nodes=4)
    assert answer.plans[0].purchase.option == "reserved"
    assert answer.mixed_fleets == ()


def test_a_mix_is_offered_where_no_fleet_of_one_type_keeps_the_limits(
    catalog: Catalog, calibration: Calibration
) -> None:
    budget = owned_and_rented(catalog, calibration, max_nodes=3).plans[-1]
    fast = owned_and_rented(catalog, calibration, max_nodes=3, existing_reservations=[], purchase_options=["on-demand"])
    deadline = min(plan.hours.p95 for plan in fast.pareto) * 1.001
    limits = {"deadline_hours": deadline, "budget_usd": budget.cost_usd.p95 * 0.6, "max_nodes": 3}
    answer = owned_and_rented(catalog, calibration, **limits)
    assert not answer.plans
    (fleet,) = answer.mixed_fleets
    assert fleet.beats is None and fleet.saving_usd is None
    assert "saves" not in fleet.summary()


def test_the_groups_add_up(catalog: Catalog, calibration: Calibration) -> None:
    for options in (["on-demand", "reserved"], ["spot", "reserved"]):
        limits = {"deadline_hours": missed_by_two(catalog, calibration), "purchase_options": options, "max_nodes": 8}
        answer = recommend(request(constraints=limits), catalog, calibration)
        assert answer.mixed_fleets
        for fleet in answer.mixed_fleets:
            cost = fleet.cost_usd
            assert round(sum(cost["breakdown"].values()), 2) == cost["expected"]
            nodes = cost["breakdown"]["compute"] + cost["breakdown"]["volumes"]
            assert sum(group.cost_usd for group in fleet.groups) == pytest.approx(nodes, abs=0.05)
            assert cost["p50"] <= cost["p95"] and cost["expected"] <= cost["p95"]
            assert sum(group.share_of_global_batch for group in fleet.groups) == pytest.approx(1, abs=1e-5)
            gpus = sum(group.gpus for group in fleet.groups)
            # The equal average over ranks of weighted means is the mean over samples.
            assert sum(group.gpus * group.gradient_weight for group in fleet.groups) == pytest.approx(gpus, rel=1e-5)
            assert all(group.peak_gib <= group.limit_gib for group in fleet.groups)
            assert fleet.step_time_s >= max(group.step_time_s for group in fleet.groups) * (1 - 1e-5)
            assert 0 <= fleet.idle_share < 0.5
            if fleet.parallelism["sharding"] in ("zero2", "zero3"):
                assert fleet.groups[0].grad_accum == fleet.groups[1].grad_accum
            assert all(price.source and price.as_of for price in fleet.prices)


def test_the_answer_says_that_it_is_no_plan(catalog: Catalog, calibration: Calibration) -> None:
    limits = {"deadline_hours": missed_by_two(catalog, calibration)}
    answer = recommend(request(constraints=limits), catalog, calibration)
    fleets = answer.to_dict()["mixed_fleets"]
    assert fleets and len(fleets) <= MAX_FLEETS
    group = fleets[0]["groups"][0]
    assert {"instance_type", "node_count", "purchase", "micro_batch", "grad_accum", "share_of_global_batch"} <= set(
        group
    )
    assert "pulumi up cannot" in fleets[0]["notes"][0]
    with pytest.raises(PlanError):
        read_plan(json.dumps(fleets[0]))


def test_the_table_says_what_is_cheaper_and_that_no_stack_can_hold_it(
    catalog: Catalog, calibration: Calibration, tmp_path: Path
) -> None:
    limits = {"deadline_hours": missed_by_two(catalog, calibration)}
    path = tmp_path / "request.yaml"
    path.write_text(json.dumps(request(constraints=limits).model_dump(mode="json")), encoding="utf-8")
    result = CliRunner().invoke(cli, ["recommend", str(path)])
    assert result.exit_code == 0, result.output
    assert "Cheaper as a mixed fleet" in result.stdout
    assert "(owned) +" in result.stdout and "saves" in result.stdout
    assert "pulumi up cannot make a mixed fleet yet" in result.stdout


def test_the_larger_error_counts(catalog: Catalog, calibration: Calibration) -> None:
    """A GPU nobody measured makes the mix as uncertain as itself."""
    wanted = request(
        constraints={"instance_types": ["p4d.24xlarge", "g6e.48xlarge"], "regions": ["us-east-1"], "max_nodes": 3}
    )
    for mix in search_of(wanted, catalog, calibration).cheapest(math.inf):
        known = calibration.residual(catalog.instance_type("p4d.24xlarge").gpu).relative_error
        assert mix.log_error == calibration.residuals["pooled"].relative_error > known


def test_a_fraction_of_a_gpu_and_a_megatron_job_are_never_mixed(catalog: Catalog, calibration: Calibration) -> None:
    deadline = missed_by_two(catalog, calibration)
    answer = recommend(request(constraints={"deadline_hours": deadline}), catalog, calibration)
    assert not [g for fleet in answer.mixed_fleets for g in fleet.groups if g.instance_type.startswith("g6f")]
    limits = {"deadline_hours": deadline * 2, "max_nodes": 8}
    megatron = recommend(request(constraints=limits, workload={"framework": "megatron"}), catalog, calibration)
    for fleet in megatron.mixed_fleets:
        assert fleet.groups[0].instance_type == fleet.groups[1].instance_type


def ways_of(catalog: Catalog, names: list[str], **changes: Any) -> list[Purchase]:
    limits = request().constraints
    offers = [offer for name in names if (offer := catalog.offer(name, "us-east-1")) is not None]
    return [
        way
        for offer in offers
        for way in purchases(replace(offer, **changes.get(offer.instance.name, {})), limits)
        if not way.committed and not way.base and way.option != "reserved"
    ]


def pairs(ways: list[Purchase]) -> set[frozenset[tuple[str, str]]]:
    found = pairs_of(ways, np.ones(len(ways), dtype=bool))
    return {frozenset((ways[i].offer.instance.name, ways[i].option) for i in two) for two in found.tolist()}


def test_both_groups_are_in_one_zone_and_of_one_architecture(catalog: Catalog) -> None:
    names = ["p4d.24xlarge", "p5.48xlarge"]
    assert len(pairs(ways_of(catalog, names))) == 4  # on demand or spot, each
    apart = {"p4d.24xlarge": {"zone_ids": ("use1-az1",)}, "p5.48xlarge": {"zone_ids": ("use1-az2", "use1-az3")}}
    assert pairs(ways_of(catalog, names, **apart)) == set()
    # A spot price of one zone holds there only.
    p4d = catalog.offer("p4d.24xlarge", "us-east-1")
    assert p4d is not None and p4d.spot is not None
    spot = Price(usd_per_hour=7, source="a test", as_of=p4d.spot.as_of, zone_id="use1-az1")
    here = {"p4d.24xlarge": {"spot": spot}, "p5.48xlarge": {"zone_ids": ("use1-az2",)}}
    assert {("p4d.24xlarge", "spot")} & set().union(*pairs(ways_of(catalog, names, **here))) == set()
    assert pairs(ways_of(catalog, ["g5g.xlarge", "g5.xlarge"])) == set()  # arm64 and x86_64


def test_types_without_known_zones_are_left_out(catalog: Catalog) -> None:
    limits = request().constraints
    unknown = replace(catalog, offers=tuple(replace(offer, zone_ids=()) for offer in catalog.offers))
    types = [catalog.instance_type(name) for name in ("p4d.24xlarge", "p5.48xlarge")]
    assert list(ways_to_have(types, ["us-east-1"], limits, unknown)) == []
