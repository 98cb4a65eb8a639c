"""``gpufleet what-if``: its points are recommend's plans."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import click
import pytest
from click.testing import CliRunner

from optimizer.cli import cli
from optimizer.contract.errors import InvalidInputError, NothingFeasibleError
from tests.unit.optimizer.search.requests import answer

ASKED = "--model gpt2-xl --samples 200k --seq-len 1024 --global-batch 64 --region us-east-1 --region us-west-2"
TYPES = ("p4d.24xlarge", "g5.12xlarge")
FLAGS = (*ASKED.split(), *(word for name in TYPES for word in ("--instance-type", name)), "--max-nodes", "4")


def what_if(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["what-if", *FLAGS, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def rows(*arguments: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(what_if(*arguments, "--format", "json"))
    return listed


def test_points_are_the_plans_of_recommend_with_that_limit() -> None:
    limits: dict[str, Any] = {"instance_types": TYPES}
    by_deadline = rows("--against", "deadline=3h,1d")
    assert [(row["against"], row["value"]) for row in by_deadline] == [("deadline", 3), ("deadline", 24)]
    for row in by_deadline:
        plan = answer(**limits, deadline_hours=row["value"]).plans[0]
        assert (row["instance_type"], row["cost_usd_p95"]) == (plan.instance_type, plan.cost_usd.p95)
    (by_budget,) = rows("--against", "budget=0.1k")
    plan = answer(objective="time", **limits, budget_usd=100).plans[0]
    assert (by_budget["hours_p95"], by_budget["cost_usd_expected"]) == (plan.hours.p95, plan.cost_usd.expected)
    none, one = rows("--against", "nodes=1,3")[::-1]
    assert none["value"] == 3 and none["instance_type"] is None  # 24 ranks, or 12, do not divide 64
    assert one["node_count"] == 1


def test_default_curves_go_from_the_fastest_to_the_cheapest_plan() -> None:
    listed = list(csv.DictReader(io.StringIO(what_if("--format", "csv"))))
    curves = {name: [row for row in listed if row["against"] == name] for name in ("deadline", "nodes", "budget")}
    assert [row["value"] for row in curves["nodes"]] == ["1.0", "2.0", "4.0"]
    for name, falling in (("deadline", "cost_usd_expected"), ("budget", "hours_p95")):
        values = [float(row[falling]) for row in curves[name]]
        assert len(values) > 3 and values == sorted(values, reverse=True) and values[0] > values[-1]
    for row in curves["deadline"]:
        assert float(row["hours_p95"]) <= float(row["value"])


@pytest.mark.parametrize(
    "more", [(), ("--budget", "300")], ids=["at current prices", "spot alone is within the budget"]
)
def test_a_later_deadline_never_costs_more(more: tuple[str, ...]) -> None:
    """A measured H200 that ties with a B200 was dearer at 11 h (512 USD) than the B200 at 6 h (470)."""
    asked = "what-if --model llama-3.1-8b --tokens 2B --seq-len 8192 --format json"
    deadlines = ("--against", "deadline=90min,3h,6h,11h,21h,40h")
    done = CliRunner().invoke(cli, [*asked.split(), *deadlines, *more], catch_exceptions=False)
    usd = [row["cost_usd_expected"] for row in json.loads(done.stdout) if row["cost_usd_expected"]]
    assert usd == sorted(usd, reverse=True) and usd[0] > usd[-1]


def test_seconds_that_an_answer_does_not_show_are_not_bought() -> None:
    """A budget of 1,260 USD bought two seconds of 43 minutes in Seoul for 218 USD more."""
    asked = "what-if --model llama-3.1-8b --tokens 2B --seq-len 8192 --deadline 48h --format json"
    done = CliRunner().invoke(cli, [*asked.split(), "--against", "budget=982,1260"], catch_exceptions=False)
    first, second = json.loads(done.stdout)
    assert first["cost_usd_expected"] == second["cost_usd_expected"] < 710


def test_a_row_at_an_old_spot_price_is_marked_as_in_recommend() -> None:
    def curve(purchase: str, form: str) -> tuple[str, str]:
        arguments = (*FLAGS, "--against", "nodes=1", "--purchase", purchase, "--format", form)
        done = CliRunner().invoke(cli, ["what-if", *arguments], catch_exceptions=False)
        return done.stdout, done.stderr

    (row,) = json.loads(curve("spot", "json")[0])
    assert row["price_stale"] == "yes" and isinstance(row["cost_usd_expected"], float)
    table, notes = curve("spot", "table")
    assert f"~{row['cost_usd_expected']:.4g}" in table and "truer: gpufleet recommend REQUEST.yaml --refresh" in notes
    table, notes = curve("on-demand", "table")
    assert "~" not in table + notes and json.loads(curve("on-demand", "json")[0])[0]["price_stale"] == "no"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--against", "deadline=soon"), InvalidInputError, "--against is 'deadline=soon'"),
        (("--against", "budget=1k,-5"), InvalidInputError, "--against is 'budget=1k,-5'"),
        (("--against", "nodes=1,8"), InvalidInputError, "--max-nodes 8"),
        (("--against", "nodes=1.5"), InvalidInputError, "is not a whole number above 0"),
        (("--against", "hours=3"), click.BadParameter, "'hours' is none of deadline, nodes, budget"),
        # recommend has a plan: its request has no budget.
        (("--against", "budget=0.01"), NothingFeasibleError, "without values of budget"),
        (("--against", "budget=100", "--deadline", "1min"), NothingFeasibleError, "without values of budget"),
        (("--against", "nodes", "--budget", "0.01"), NothingFeasibleError, "names the nearest plan"),
    ],
)
def test_what_cannot_be_shown_is_said(arguments: tuple[str, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message.replace(".", r"\.")):
        CliRunner().invoke(cli, ["what-if", *FLAGS, *arguments], catch_exceptions=False, standalone_mode=False)
