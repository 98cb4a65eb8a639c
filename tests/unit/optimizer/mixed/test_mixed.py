"""Mixed fleets: the search against every mix, one mix by hand, limits, and the answer."""

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

from bootstrap.contract.shares import RankBatch, parse_shares
from bootstrap.trainer.config import parse_config
from optimizer.catalog import Catalog, load
from optimizer.cli import cli
from optimizer.contract.plan import PlanError, read_plan
from optimizer.contract.request import FleetRequest, request_from_dict
from optimizer.economics.checkpoint import checkpoint_gib, checkpoint_usd, checkpoints, interval_s
from optimizer.economics.interruption import FAILURES_PER_GPU_HOUR, RESTART_HOURS
from optimizer.mixed import MAX_FLEETS
from optimizer.mixed.describe import describe_mix, summarise
from optimizer.mixed.groups import NodeGroups
from optimizer.mixed.mix import Mix
from optimizer.mixed.unlike import UnlikeSearch
from optimizer.performance.calibration import Calibration
from optimizer.performance.calibration import load as load_calibration
from optimizer.performance.evaluate import evaluate
from optimizer.performance.types import CHECKPOINTINGS, SHARDINGS, Grid, Hardware, Recipe
from optimizer.recommend import Recommendation, recommend
from optimizer.search.confidence import HOST_MEMORY_ERROR
from optimizer.search.problem import Problem
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


def search_of(wanted: FleetRequest, catalog: Catalog, calibration: Calibration) -> UnlikeSearch:
    problem = Problem.resolve(wanted, catalog, calibration)
    groups = NodeGroups.find(problem)
    return UnlikeSearch(problem=problem, groups=groups, pairs=list(groups.pairs(like=False)))


@settings(max_examples=8, deadline=None)
@given(
    deadline=st.one_of(st.none(), st.floats(2, 60)),
    budget=st.one_of(st.none(), st.floats(50, 3000)),
    batch=st.sampled_from([None, 48, 96, 100, 256]),
    options=st.sampled_from([("on-demand", "reserved"), ("spot", "reserved")]),
    max_nodes=st.integers(2, 4),
)
def test_the_search_finds_the_cheapest_of_all_mixes(
    deadline: float | None, budget: float | None, batch: int | None, options: tuple[str, ...], max_nodes: int
) -> None:
    limits = {"deadline_hours": deadline, "budget_usd": budget, "purchase_options": options, "max_nodes": max_nodes}
    wanted = request(workload={"global_batch": batch}, constraints=limits | {"regions": ["us-east-1"]})
    search = search_of(wanted, load(), load_calibration())
    pair, nodes, bound_usd = search.bounded(math.inf)
    cheapest: dict[object, Mix] = {}
    for row in range(len(pair)):
        mix = search.work_out(pair[row], nodes[row])
        if mix is not None:
            assert mix.usd >= bound_usd[row] * (1 - 1e-9)
            cheapest[mix.type_names] = min(mix, cheapest.get(mix.type_names, mix), key=lambda m: m.rank)
    found: dict[object, Mix] = {}
    for mix in search.cheapest(math.inf):
        found[mix.type_names] = min(mix, found.get(mix.type_names, mix), key=lambda m: m.rank)
    assert {name: mix.usd for name, mix in found.items()} == {name: mix.usd for name, mix in cheapest.items()}


def test_one_mix_by_hand(catalog: Catalog, calibration: Calibration) -> None:
    """Step, hours and dollars of two owned p4d and one rented p5, from scalar estimates and the page's equations."""
    wanted = request(constraints={"purchase_options": ["on-demand", "reserved"], "regions": ["us-east-1"]})
    search = search_of(wanted, catalog, calibration)
    (pair,) = (pair for pair in search.pairs if search.groups.purchases[pair[1]].offer.instance.name == "p5.48xlarge")
    mix = search.work_out(np.array(pair), np.array([2, 1]))
    assert mix is not None
    model = resolve_model(wanted.model)
    recipe = Recipe(seq_len=1024, framework="gpufleet")
    p4d, p5 = (catalog.instance_type(name) for name in ("p4d.24xlarge", "p5.48xlarge"))
    # The p4d's network is the slower; NVLink of neither is slower than that, so the p5's own stands for the p4d's.
    network = min(p4d.network_gbit_per_s, p5.network_gbit_per_s)
    computed, shown = {}, []
    for g, purchase in enumerate(mix.purchases):
        found = evaluate(
            model,
            recipe,
            replace(Hardware.from_instance_type(purchase.offer.instance), network_gbit_per_s=network),
            Grid(
                nodes=3,
                data=24,
                sharding=mix.sharding,
                micro_batch=mix.micro_batch[g],
                grad_accum=mix.grad_accum[g],
                checkpointing=mix.checkpointing[g],
            ),
            calibration,
        )
        assert found.fits_p95
        shown.append(float(found.time_s["data_communication"]))
        computed[purchase.offer.instance.name] = float(found.step_time_s) - shown[-1]
        assert mix.peak_gib[g] == pytest.approx(float(found.peak_memory_gib))
    assert sum(r * m * k for r, m, k in zip(mix.ranks, mix.micro_batch, mix.grad_accum, strict=True)) == 96
    step = max(computed.values()) + max(shown)
    assert mix.step_time_s == pytest.approx(step, rel=1e-9)

    steps = math.ceil(400_000 / 96)
    error = max(calibration.residual(i.gpu, "bf16").relative_error for i in (p4d, p5))
    rate = FAILURES_PER_GPU_HOUR * 24
    price = catalog.offer("p5.48xlarge", "us-east-1")
    assert price is not None and price.on_demand is not None
    usd_per_hour = 2 * 0.5 + price.on_demand.usd_per_hour
    size = checkpoint_gib(model.parameters, "adamw")
    usd = [checkpoint_usd(catalog, "us-east-1", size)]
    saves = checkpoints(size, recipe.framework, nodes=[3], gpus_per_node=[8], writers=[3], usd=usd)
    interval, stall = float(interval_s(saves, rate, [usd_per_hour])[0]), float(saves.stall_s[0])
    useful = steps * step / 3600 * math.exp(error**2 / 2) * (1 + stall / interval)
    redo = interval / 7200 + float(saves.save_s[0]) / 3600
    hours = RESTART_HOURS + useful / (1 - rate * (RESTART_HOURS + redo))
    assert float(mix.outcome.hours_expected) == pytest.approx(hours, rel=1e-9)
    assert float(mix.cost.compute) == pytest.approx(usd_per_hour * hours, rel=1e-9)
    # p5's shares are larger: it is faster.
    at = [purchase.offer.instance.name for purchase in mix.purchases].index("p5.48xlarge")
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
            "purchase_options": ["on-demand", "reserved"],
            "regions": ["us-east-1"],
        },
    )
    search = search_of(wanted, catalog, calibration)
    mix = search.work_out(np.array(search.pairs[0]), np.array(nodes))
    assert mix is not None
    model, recipe = resolve_model(wanted.model), Recipe(seq_len=1024, framework="gpufleet")
    slow = min(way.offer.instance.network_gbit_per_s for way in mix.purchases)
    link = catalog.instance_type("g5.12xlarge")
    together = sum(mix.ranks)
    found: dict[tuple[int, ...], tuple[float, float] | None] = {}

    def part(g: int, mode: int, way: int, micro: int, accum: int) -> tuple[float, float] | None:
        """Computation and communication of one group; None where it does not fit."""
        key = (g, mode, way, micro, accum)
        if key not in found:
            hardware = Hardware.from_instance_type(mix.purchases[g].offer.instance)
            # The g5's network, which passes through host memory.
            hardware = replace(hardware, network_gbit_per_s=slow, gpudirect=False)
            if hardware.network_gbit_per_s > link.network_gbit_per_s:
                raise AssertionError("the network of g5 is the slower")
            one = evaluate(
                model,
                recipe,
                hardware,
                Grid(
                    nodes=sum(nodes),
                    data=together,
                    sharding=mode,
                    micro_batch=micro,
                    grad_accum=accum,
                    checkpointing=way,
                ),
                calibration,
            )
            shown = float(one.time_s["data_communication"])
            found[key] = (float(one.step_time_s) - shown, shown) if one.fits_p95 else None
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
    usd = [fleet["cost_usd"]["expected"] for fleet in answer.mixed_fleets]
    assert usd == sorted(usd)
    for fleet in answer.mixed_fleets:
        assert fleet["cost_usd"]["p95"] <= 2000 and fleet["hours"]["p95"] <= deadline
        assert fleet["cost_usd"]["expected"] < cheapest
        assert fleet["saving_usd"] == pytest.approx(cheapest - fleet["cost_usd"]["expected"], abs=0.01)
        assert fleet["beats"]["cost_usd"] == cheapest
        assert sum(group["node_count"] for group in fleet["groups"]) <= 4


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
    owned, rented = fleet["groups"]
    assert [(g["purchase"]["option"], g["node_count"]) for g in (owned, rented)] == [("reserved", 2), ("on-demand", 1)]
    # The GPUs are alike, so the run is that of three rented nodes, parallelism and all; two cost what their owner says.
    assert fleet["hours"]["expected"] == pure.hours.expected
    assert fleet["step_time_s"] == pure.step_time_s
    assert fleet["parallelism"]["tensor"] == pure.parallelism.tensor
    assert fleet["parallelism"]["pipeline"] == pure.parallelism.pipeline
    assert fleet["parallelism"]["sequence_parallel"] is pure.parallelism.sequence_parallel
    hourly = pure.prices[0].usd
    share = (2 * 0.5 + hourly) / (3 * hourly)
    assert fleet["cost_usd"]["breakdown"]["compute"] == pytest.approx(pure.cost_usd.breakdown.compute * share, abs=0.02)
    assert owned["share_of_global_batch"] == pytest.approx(2 / 3, rel=1e-5)


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
    assert fleet["beats"] is None and fleet["saving_usd"] is None
    assert "saves" not in summarise(fleet)


def test_the_groups_add_up(catalog: Catalog, calibration: Calibration) -> None:
    for options in (["on-demand", "reserved"], ["spot", "reserved"]):
        limits = {"deadline_hours": missed_by_two(catalog, calibration), "purchase_options": options, "max_nodes": 8}
        answer = recommend(request(constraints=limits), catalog, calibration)
        assert answer.mixed_fleets
        for fleet in answer.mixed_fleets:
            cost = fleet["cost_usd"]
            assert round(sum(cost["breakdown"].values()), 2) == cost["expected"]
            nodes = cost["breakdown"]["compute"] + cost["breakdown"]["volumes"]
            assert sum(group["cost_usd"] for group in fleet["groups"]) == pytest.approx(nodes, abs=0.05)
            assert cost["p50"] <= cost["p95"] and cost["expected"] <= cost["p95"]
            assert sum(group["share_of_global_batch"] for group in fleet["groups"]) == pytest.approx(1, abs=1e-5)
            gpus = sum(group["gpus"] for group in fleet["groups"])
            # The equal average over ranks of weighted means is the mean over samples.
            assert sum(group["gpus"] * group["gradient_weight"] for group in fleet["groups"]) == pytest.approx(
                gpus, rel=1e-5
            )
            assert all(group["peak_gib"] <= group["limit_gib"] for group in fleet["groups"])
            assert fleet["step_time_s"] >= max(group["step_time_s"] for group in fleet["groups"]) * (1 - 1e-5)
            assert 0 <= fleet["idle_share"] < 0.5
            if fleet["parallelism"]["sharding"] in ("zero2", "zero3"):
                assert fleet["groups"][0]["grad_accum"] == fleet["groups"][1]["grad_accum"]
            assert all(price["source"] and price["as_of"] for price in fleet["prices"])
            check_the_trainer_carries_it_out(fleet)


def check_the_trainer_carries_it_out(fleet: dict[str, Any]) -> None:
    """The variables of a node of each group make the trainer's configuration, and its shares the global batch."""
    assert fleet["beyond_trainer"] == []
    samples = 0
    for group in fleet["groups"]:
        config = parse_config([], fleet["node_environment"] | group["node_environment"])
        assert (config.steps, config.sharding) == (fleet["steps"], fleet["parallelism"]["sharding"])
        assert config.gpus_per_node * group["node_count"] == group["gpus"]
        batch = RankBatch(config.micro_batch, config.grad_accum, config.activation_checkpointing)
        if config.shares:
            shares = parse_shares(config.shares)
            assert isinstance(shares, dict)
            batch = shares[group["instance_type"]]
        assert tuple(batch) == (group["micro_batch"], group["grad_accum"], group["activation_checkpointing"])
        samples += batch.samples * group["gpus"] // (config.tensor_parallel * config.context_parallel)
    assert samples == config.global_batch == fleet["global_batch"]
    unlike = fleet["groups"][0]["instance_type"] != fleet["groups"][1]["instance_type"]
    assert len(fleet["notes"]) == 1 + unlike


def test_the_trainer_carries_out_unlike_groups(catalog: Catalog, calibration: Calibration) -> None:
    """Two owned p4d and one rented p5: shares by instance type, or the reason why not."""
    limits = {"purchase_options": ["on-demand", "reserved"], "regions": ["us-east-1"]}
    search = search_of(request(constraints=limits), catalog, calibration)
    (pair,) = (pair for pair in search.pairs if search.groups.purchases[pair[1]].offer.instance.name == "p5.48xlarge")
    mix = search.work_out(np.array(pair), np.array([2, 1]))
    assert mix is not None and mix.micro_batch[0] * mix.grad_accum[0] != mix.micro_batch[1] * mix.grad_accum[1]
    fleet = describe_mix(mix, search.problem, None)
    assert fleet["node_environment"]["GPUFLEET_SHARES"].startswith("p4d.24xlarge=")
    check_the_trainer_carries_it_out(fleet)
    sharded = replace(mix, sharding=SHARDINGS.index("zero3"), grad_accum=(mix.grad_accum[0], mix.grad_accum[0] + 1))
    refused = describe_mix(sharded, search.problem, None)
    assert "sharding zero3 exchanges states in every micro-batch" in refused["beyond_trainer"][0]
    assert refused["beyond_trainer"][0] in refused["notes"][1]


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
    result = CliRunner().invoke(cli, ["recommend", str(path), "--all"])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "Cheaper as a mixed fleet" in text
    assert "(owned) +" in text and "saves" in text
    assert "of mixed fleets only a reservation topped up on demand is a plan" in text


def test_the_larger_error_counts(catalog: Catalog, calibration: Calibration) -> None:
    """A GPU and a network nobody measured make the mix as uncertain as themselves."""
    wanted = request(
        constraints={"instance_types": ["p4d.24xlarge", "g6e.48xlarge"], "regions": ["us-east-1"], "max_nodes": 3}
    )
    mixes = search_of(wanted, catalog, calibration).cheapest(math.inf)
    known = calibration.residual(catalog.instance_type("p4d.24xlarge").gpu).relative_error
    assert mixes
    unmeasured = max(calibration.residuals["pooled"].relative_error, HOST_MEMORY_ERROR)
    assert all(mix.relative_error == unmeasured > known for mix in mixes)


def test_a_fraction_of_a_gpu_and_a_megatron_job_are_never_mixed(catalog: Catalog, calibration: Calibration) -> None:
    deadline = missed_by_two(catalog, calibration)
    answer = recommend(request(constraints={"deadline_hours": deadline}), catalog, calibration)
    assert not [g for fleet in answer.mixed_fleets for g in fleet["groups"] if g["instance_type"].startswith("g6f")]
    limits = {"deadline_hours": deadline * 2, "max_nodes": 8}
    megatron = recommend(request(constraints=limits, workload={"framework": "megatron"}), catalog, calibration)
    for fleet in megatron.mixed_fleets:
        assert fleet["groups"][0]["instance_type"] == fleet["groups"][1]["instance_type"]


def joined(catalog: Catalog, names: list[str], calibration: Calibration, **changes: Any) -> set[tuple[str, str]]:
    """Types and options that may join two owned p4d nodes, with ``changes`` of the offers by type."""
    offers = tuple(replace(offer, **changes.get(offer.instance.name, {})) for offer in catalog.offers)
    wanted = request(constraints={"instance_types": names, "regions": ["us-east-1"]})
    problem = Problem.resolve(wanted, replace(catalog, offers=offers), calibration)
    groups = NodeGroups.find(problem)
    return {(groups.purchases[b].offer.instance.name, groups.purchases[b].option) for _, b in groups.pairs(like=False)}


def test_both_groups_are_in_one_zone_and_of_one_architecture(catalog: Catalog, calibration: Calibration) -> None:
    names = ["p4d.24xlarge", "p5.48xlarge", "g5g.16xlarge"]  # g5g is arm64
    p5 = {("p5.48xlarge", "on-demand"), ("p5.48xlarge", "spot")}
    assert joined(catalog, names, calibration) == p5
    offer = catalog.offer("p5.48xlarge", "us-east-1")
    assert offer is not None and offer.spot is not None
    spot = replace(offer.spot, zone_id="use1-az2")
    elsewhere = {"spot": spot, "dearer_spot": (), "zone_ids": ("use1-az2", "use1-az3")}
    apart = {"p4d.24xlarge": {"zone_ids": ("use1-az1",)}, "p5.48xlarge": elsewhere}
    assert joined(catalog, names, calibration, **apart) == set()
    # A spot price of one zone holds there only.
    spot = replace(offer.spot, zone_id="use1-az1")
    here = {
        "p5.48xlarge": {"spot": spot, "dearer_spot": (), "zone_ids": ("use1-az1", "use1-az2")},
        "p4d.24xlarge": {"zone_ids": ("use1-az2",)},
    }
    assert joined(catalog, names, calibration, **here) == {("p5.48xlarge", "on-demand")}


def test_types_without_known_zones_are_left_out(catalog: Catalog, calibration: Calibration) -> None:
    assert joined(catalog, ["p4d.24xlarge", "p5.48xlarge"], calibration, **{"p5.48xlarge": {"zone_ids": ()}}) == set()


def test_without_owned_nodes_nothing_is_mixed(catalog: Catalog, calibration: Calibration) -> None:
    answer = recommend(request(constraints={"existing_reservations": []}), catalog, calibration)
    assert answer.mixed_fleets == ()
