"""A plan that recommend wrote is taken, also after other tools wrote it; a changed one and one without a digest not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from optimizer.cli import cli
from optimizer.contract.errors import InvalidInputError
from optimizer.contract.plan import QUOTE, PlanError, plan_from_dict
from optimizer.recommend import recommend

REQUEST: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "workload": {"tokens": "2B", "seq_len": 8192},
    "constraints": {"budget_usd": 3000, "deadline_hours": "48h", "spot_fallback": "on-demand"},
}


@cache
def plans() -> list[dict[str, Any]]:
    answer = recommend(REQUEST)
    return [plan.model_dump(mode="json") for plan in (*answer.plans, *answer.pareto)]


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


def changed(plan: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    out = copy.deepcopy(plan)
    place: Any = out
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    return out


def test_every_recommended_plan_passes_also_after_other_tools_wrote_it(tmp_path: Path) -> None:
    assert {plan["purchase"]["option"] for plan in plans()} == {"on-demand", "spot"}
    whole = json.dumps(plans()[0]).replace(".0,", ",").replace(".0}", "}")
    assert plan_from_dict(json.loads(whole)).digest == plans()[0]["digest"]
    path = tmp_path / "plan.yaml"
    YAML(typ="safe").dump(plans()[0], path)
    again = plan_from_dict(json.loads(json.dumps(YAML(typ="safe").load(path), default=str)))
    assert again.digest == plans()[0]["digest"]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_changed_field_is_refused(data: st.DataObject) -> None:
    plan = data.draw(st.sampled_from(plans()))
    paths = [path for path in leaves(plan) if path[0] not in ("spot_policy", "digest")]
    path = data.draw(st.sampled_from(paths))

    def change(value: Any) -> Any:
        return (
            not value if isinstance(value, bool) else value * 2 + 1 if isinstance(value, int | float) else f"{value}x"
        )

    with pytest.raises(PlanError):
        plan_from_dict(changed(plan, path, change))


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
    best = recommend({**REQUEST, "constraints": limits}).plans[0]
    assert (best.region, best.prices[0].usd, best.prices[0].source) == ("us-east-1", 9.5, f"{QUOTE}EDP 2026-17")
    with pytest.raises(InvalidInputError, match=r"'p5\.48xlarg' is not in the catalog"):
        recommend({**REQUEST, "constraints": {"quotes": [quote | {"instance_type": "p5.48xlarg"}]}})
    with pytest.raises(InvalidInputError, match="as_of 2999-01-01 is to come"):  # a spot price that never gets old
        recommend({**REQUEST, "constraints": {"quotes": [quote | {"as_of": date(2999, 1, 1)}]}})


@pytest.mark.parametrize("command", [["stack", "set", "--stack", "dev"], ["preview"]])
def test_commands_refuse_a_changed_plan(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "plan.json"
    for text, named in (
        (changed(plans()[0], ("job", "budget_usd"), 9e9), "was changed since recommend wrote"),
        (changed(plans()[0], ("digest",), ""), "no digest"),
    ):
        path.write_text(json.dumps(text))
        done = CliRunner().invoke(cli, [*command, str(path)])
        assert isinstance(done.exception, InvalidInputError) and named in str(done.exception)
        assert not list(tmp_path.glob("Pulumi.*"))
