"""The audit takes every plan of a recommendation, and refuses one with any number edited that matters."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizer.audit import audit
from optimizer.catalog import Catalog, load
from optimizer.cli import cli
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import QUOTE, PlanError, plan_from_dict
from optimizer.contract.request import request_from_dict
from optimizer.performance.calibration import load as load_calibration
from optimizer.recommend import recommend

# Numbers that a person may change without harm, by path. Limits may move as long as the plan keeps them; a higher p95
# keeps them more strictly; mfu and rows are only shown; memory's limit stays above the peak and within the GPU; parts
# of a GPU's memory below its last digits; what a volume, the checkpoints kept or a unit price adds may be below a cent,
# and so may copies of the data; of the model's description, only numbers that make parameters are compared; rates that
# nodes are tested against; what a spot policy costs is only shown.
HARMLESS = re.compile(
    r"(alternates\.\d+\.)?(mfu|calibration\.rows|memory\.limit_gib|memory\.breakdown\.\w+"
    r"|job\.(budget_usd|deadline_hours)|cost_usd\.p95|staging\.\w+_usd|spot_range\.\w+|spot_policy\..*|volumes\.\w+"
    r"|job\.checkpoints_kept|job\.architecture\..*|expected\..*)"
)
REQUEST: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "workload": {"tokens": "2B", "seq_len": 8192},
    "constraints": {"budget_usd": 3000, "deadline_hours": "48h"},
}
FLEETS: tuple[dict[str, Any], ...] = (
    {"purchase_options": ["on-demand"], "instance_types": ["p5"]},
    {"purchase_options": ["spot"], "instance_types": ["p5", "p4d"]},
    {"purchase_options": ["spot"], "spot_fallback": "on-demand", "instance_types": ["p4d"]},
    {"purchase_options": ["reserved"], "budget_usd": 10**7, "instance_types": ["p4d"]},
    {
        "existing_reservations": [
            {"instance_type": "p5.48xlarge", "region": "us-east-1", "count": 4, "usd_per_hour": 11.0}
        ],
        "purchase_options": ["reserved"],
    },
    {
        "existing_reservations": [
            {
                "instance_type": "p4d.24xlarge",
                "region": "us-east-1",
                "count": 1,
                "usd_per_hour": 2.0,
                "capacity_reservation_id": "cr-0123456789abcdef0",
            }
        ],
        "instance_types": ["p4d"],
    },
)


@cache
def catalog() -> Catalog:
    return load()


SMALL = {
    "model": "gpt2",
    "workload": {"tokens": "50M", "seq_len": 1024, "data_gib": 20},
    "constraints": {"purchase_options": ["spot"], "spot_spread": 5, "instance_types": ["g6"]},
}


@cache
def plans() -> list[dict[str, Any]]:
    answers = []
    requests = [{**REQUEST, "constraints": REQUEST["constraints"] | fleet} for fleet in FLEETS]
    for request in (*requests, SMALL):
        answer = recommend(request_from_dict(request), catalog(), load_calibration())
        answers += [plan.model_dump(mode="json") for plan in (*answer.plans, *answer.pareto)]
    return answers


def numbers(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from numbers(inner, (*path, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def value(plan: dict[str, Any], path: tuple[str | int, ...]) -> Any:
    place: Any = plan
    for key in path:
        place = place[key]
    return place


def edited(plan: dict[str, Any], path: tuple[str | int, ...], factor: float) -> dict[str, Any]:
    out = copy.deepcopy(plan)
    place, old = value(out, path[:-1]), value(plan, path)
    new = old * factor if old else factor
    place[path[-1]] = round(new) if isinstance(old, int) else new
    return out


def refused(plan: dict[str, Any]) -> bool:
    try:
        return bool(audit(plan_from_dict(plan), catalog()))
    except PlanError:
        return True


def test_every_recommended_plan_passes() -> None:
    options = {plan["purchase"]["option"] for plan in plans()}
    assert options == {"on-demand", "spot", "reserved"}
    assert any(plan["purchase"]["on_demand_base"] for plan in plans())
    assert any(plan["purchase"]["spot_types"] for plan in plans())
    assert any(plan["purchase"].get("on_demand_top_up") for plan in plans())
    assert sum(len(plan.get("alternates", ())) for plan in plans()) > 100
    faults = [fault for plan in plans() for fault in audit(plan_from_dict(plan), catalog())]
    assert not faults


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_changed_number_is_refused_or_harmless(data: st.DataObject) -> None:
    plan = plans()[data.draw(st.integers(0, len(plans()) - 1))]
    path = data.draw(st.sampled_from(list(numbers(plan))))
    factor = data.draw(st.one_of(st.floats(0.001, 0.95), st.floats(1.05, 1000)))
    name = ".".join(map(str, path))
    changed = edited(plan, path, factor)
    # Dollars have cents, and a sum of some rounded parts has more than one of them.
    cents = "cost_usd" in path and abs(value(changed, path) - value(plan, path)) < 0.03
    part = path[0] == "step_breakdown_s" and abs(value(changed, path) - value(plan, path)) < 1e-4 * plan["step_time_s"]
    if changed != plan and not cents and not part and not HARMLESS.fullmatch(name):
        assert refused(changed), f"{name} x {factor}"


@pytest.mark.parametrize(
    ("path", "factor"),
    [
        (("job", "budget_usd"), 1 / 3000),
        (("job", "deadline_hours"), 0.05),
        (("cost_usd", "p95"), 0.97),
        (("memory", "limit_gib"), 0.5),
        (("memory", "limit_gib"), 2),
        (("memory", "breakdown", "activations"), 0.5),
        (("volumes", "root_gib"), 5),
        (("parallelism", "expert"), 2),
        (("job", "architecture", "hidden_size"), 0.5),
    ],
)
def test_harmless_numbers_have_their_limits(path: tuple[str, ...], factor: float) -> None:
    assert refused(edited(plans()[0], path, factor))


def test_an_agreed_lie_about_the_price_is_refused_and_a_quote_is_not() -> None:
    plan = copy.deepcopy(plans()[0])
    share = 0.5
    plan["prices"][0]["usd"] *= share
    cost = plan["cost_usd"]
    before = cost["expected"]
    cost["breakdown"]["compute"] = round(cost["breakdown"]["compute"] * share, 2)
    cost["expected"] = round(sum(cost["breakdown"].values()), 2)
    for name in ("p50", "p95"):
        cost[name] = round(cost[name] * cost["expected"] / before, 2)
    (fault,) = audit(plan_from_dict(plan), catalog())
    assert (fault.field, "constraints.quotes" in fault.next_step) == ("prices.0.usd", True)
    plan["prices"][0]["source"] = f"{QUOTE}EDP 2026-17"
    assert not audit(plan_from_dict(plan), catalog())


def test_an_alternate_is_refused_where_it_does_not_fit_keep_the_limits_or_agree_with_the_catalog() -> None:
    other_type, own_type = (
        next(
            (plan, i)
            for plan in plans()
            for i, alternate in enumerate(plan.get("alternates", ()))
            if (alternate["instance_type"] == plan["instance_type"]) == own and alternate["purchase"] == "spot"
        )
        for own in (False, True)
    )
    for plan in map(copy.deepcopy, plans()):
        whole = plan_from_dict(plan)
        needed = [place.cost_usd.p95 + place.reserve_usd for place in (whole, *map(whole.at, whole.alternates))]
        if needed[0] < 0.99 * max(needed):
            plan["job"]["budget_usd"] = (needed[0] + max(needed)) / 2
            break
    (fault, *_) = audit(plan_from_dict(plan), catalog())
    assert re.fullmatch(r"alternates\.\d+: job\.budget_usd", fault.field)
    plan, i = copy.deepcopy(own_type[0]), own_type[1]
    zones = (
        plan["alternates"][i],
        next(a for a in plan["alternates"] if a["zone_id"] != plan["alternates"][i]["zone_id"]),
    )
    zones[0]["zone_id"], zones[1]["zone_id"] = zones[1]["zone_id"], zones[0]["zone_id"]
    fields = [fault.field for fault in audit(plan_from_dict(plan), catalog())]
    assert f"alternates.{i}: prices.0.usd" in fields, "the price of another zone"
    plan, i = copy.deepcopy(other_type[0]), other_type[1]
    memory = plan["alternates"][i]["memory"]
    memory["p95_gib"] = memory["limit_gib"] + 1
    with pytest.raises(PlanError, match=rf"alternates\.{i}: memory\.p95_gib"):
        plan_from_dict(plan)
    plan = copy.deepcopy(other_type[0])
    plan["alternates"][i]["node"]["gpu"] = "H100"
    assert audit(plan_from_dict(plan), catalog())[0].field == f"alternates.{i}: node.gpu"


def test_a_quote_of_the_request_is_the_plans_price() -> None:
    quote = {
        "instance_type": "p5.48xlarge",
        "region": "us-east-1",
        "option": "on-demand",
        "usd_per_hour": 9.5,
        "source": "EDP 2026-17",
        "as_of": date(2026, 11, 1),
    }
    limits = {"instance_types": ["p5.48xlarge"], "purchase_options": ["on-demand"], "quotes": [quote]}
    answer = recommend(request_from_dict({**REQUEST, "constraints": limits}), catalog(), load_calibration())
    best = answer.plans[0]
    assert (best.region, best.prices[0].usd, best.prices[0].source) == ("us-east-1", 9.5, f"{QUOTE}EDP 2026-17")
    assert not audit(best, catalog())
    with pytest.raises(InvalidInputError, match=r"'p5\.48xlarg' is not in the catalog"):
        recommend(
            request_from_dict({**REQUEST, "constraints": {"quotes": [quote | {"instance_type": "p5.48xlarg"}]}}),
            catalog(),
            load_calibration(),
        )


@pytest.mark.parametrize("command", [["stack", "set", "--stack", "dev"], ["preview"]])
def test_commands_refuse_with_value_limit_reason_and_next_step(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(edited(plans()[0], ("prices", 0, "usd"), 0.01)))
    done = CliRunner().invoke(cli, [*command, str(path)])
    assert isinstance(done.exception, InvalidInputError)
    text = str(done.exception)
    for part in ("prices.0.usd is", "limit", "why:", "next: make the plan anew", "docs/request.md"):
        assert part in text
    assert not list(tmp_path.glob("Pulumi.*"))
