"""Contents of a report: every number of an answer, and nothing that the browser would run."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from html import unescape

import pytest

from optimizer.contract.plan import PlanError
from optimizer.report import facts
from optimizer.report.answer import ReportAnswer, read_answer
from optimizer.report.page import age, hours, price, render, usd
from optimizer.report.run import read_run
from optimizer.search.problem import Rejection
from tests.plans import ON_DEMAND_P4D, SPOT_P4DE, sample_plan

NOW = datetime(2026, 11, 23, tzinfo=UTC)
PLAN = sample_plan(step_breakdown_s={"matmul": 5.0, "data_communication": 2.2})
REJECTED = [
    Rejection("g4dn.xlarge", "T4 does not compute in bf16", "precision", "bf16", "fp16, fp32"),
    Rejection("g6.2xlarge", "the cheapest run needs 3,749.43 USD", "budget", 3749.43, 3000.0),
    Rejection("g6.xlarge", "the cheapest run needs 3,500.00 USD", "budget", 3500.0, 3000.0),
    Rejection("g6f.large", "the smallest step needs 145.3 GiB", "memory", 145.3, 1.9),
    Rejection("g6f.xlarge", "the smallest step needs 145.3 GiB", "memory", 145.3, 4.6),
]


def _answer() -> ReportAnswer:
    dearer = sample_plan(purchase={"option": "on-demand", "on_demand_base": 0}, hours={"p95": 5.1})
    document = {
        "plans": [PLAN.model_dump(mode="json"), dearer.model_dump(mode="json")],
        "pareto": [PLAN.model_dump(mode="json"), sample_plan(region="us-west-2", zone_ids=[]).model_dump(mode="json")],
        "rejected": [vars(entry) for entry in REJECTED],
        "catalog": {
            "sources": [
                {"name": "spot prices", "origin": "a catalog", "as_of": "2026-07-09", "newest": "2026-07-10", "rows": 9}
            ]
        },
        "notes": ["a note of the search"],
        "searched_plans": 12345,
        "a later version's field": 1,
    }
    return read_answer(json.dumps(document))


def test_an_answer_numbers_plans_and_marks_the_front() -> None:
    answer = _answer()
    assert [(one.key, one.number, one.on_front) for one in answer.candidates] == [
        ("plan-1", 1, True),
        ("plan-2", 2, False),
        ("front-1", None, True),
    ]
    assert answer.extras.rejected == tuple(REJECTED)
    assert read_answer(PLAN.to_json()).candidates[0].plan == PLAN


def test_other_json_is_refused_with_its_place() -> None:
    document = {"plans": [PLAN.model_dump(mode="json")], "rejected": [{"instance_type": "x"}]}
    with pytest.raises(PlanError, match=r"rejected\.0\.reason"):
        read_answer(json.dumps(document), origin="plans.json")
    with pytest.raises(PlanError, match=r"pareto 1 of plans\.json"):
        read_answer(json.dumps({"plans": [PLAN.model_dump(mode="json")], "pareto": [{}]}), origin="plans.json")


def test_the_page_has_every_reason_price_source_and_age() -> None:
    page = unescape(render(_answer(), now=NOW))
    for entry in REJECTED:
        assert entry.instance_type in page
    for words in (
        "T4 does not compute in bf16",
        "3,749.43 USD",
        "145.3 GiB",
        "a note of the search",
        "12,345",
    ):
        assert words in page
    for each in PLAN.prices:
        assert each.item in page and f">{price(each.usd)}<" in page and each.source in page
    assert "2026-01-21</td><td>306 days" in page
    assert "a catalog" in page and PLAN.calibration.source in page
    # Each candidate has a mark in both sizes and a row.
    for key in ("plan-1", "plan-2", "front-1"):
        assert page.count(f'href="#{key}"') == 2 and page.count(f'id="{key}"') == 1


def test_the_dearest_zone_is_named_where_there_are_several() -> None:
    zones = {"age_days": 136, "limit_days": 1}
    pages = {
        count: render(
            read_answer(sample_plan(spot_range={**zones, "zones": count, "cost_usd_dearest": 555.0}).to_json()),
            now=NOW,
        )
        for count in (1, 4)
    }
    assert "in the dearest of 4 zones this run is expected to cost 555 USD" in pages[4]
    assert "136 days old" in pages[1] and "dearest" not in pages[1]


def test_the_page_lists_the_alternates_and_only_where_there_are_some() -> None:
    assert "Where it goes without capacity" not in render(_answer(), now=NOW)
    plan = sample_plan(alternates=[ON_DEMAND_P4D, SPOT_P4DE])
    page = render(read_answer(plan.to_json()), now=NOW)
    for words in ('<th scope="row">use1-az6</th><td>p4d.24xlarge</td><td>on-demand</td>', ">21.96<", ">p4de.24xlarge<"):
        assert words in page


def test_the_page_says_what_the_spot_policy_and_a_file_system_cost() -> None:
    spread = {"expected": 80.0, "p50": 79.0, "p95": 120.0}
    outlook = {
        "policy": "adaptive", "hours": {"expected": 5.0, "p50": 5.0, "p95": 5.2}, "cost_usd": spread,
        "expected_usd": {"fallback": 100.0, "adaptive": 80.0}, "source": "40 simulated runs",
    }  # fmt: skip
    plan = sample_plan(
        spot_policy=outlook, lustre={"storage_gib": 1200, "data_gib": 900, "usd": 1.5}, alternates=[], staging=None
    )
    page = render(read_answer(plan.to_json()), now=NOW)
    assert "Spot policy: adaptive: 80.00 USD" in page and "gpufleet:spotPolicy adaptive" in page
    parts = facts.usd_by_item(plan)
    assert (parts["storage"], parts["FSx for Lustre"]) == (0.5, 1.5)
    assert sum(parts.values()) == pytest.approx(plan.cost_usd.expected)
    assert "Spot policy:" not in render(_answer(), now=NOW)


def test_parts_add_up() -> None:
    plan = sample_plan(
        step_time_s=7.2, hours={"expected": 4.5}, interruption={"lost_hours": 0.4, "checkpoint_interval_s": 600}
    )
    parts = facts.hours_by_cause(plan)
    assert sum(parts.values()) == pytest.approx(plan.hours.expected)
    assert parts["training steps"] == pytest.approx(4.0)
    bars = facts.bars({"a": 3.0, "b": 1.0, "none": 0.0})
    assert [(bar.name, bar.shown, bar.percent, bar.length_percent) for bar in bars] == [
        ("a", "3.00", 75, 100),
        ("b", "1.00", 25, pytest.approx(100 / 3)),
    ]


def test_numbers_as_people_read_them() -> None:
    assert (usd(633.05), usd(78.15)) == ("633", "78.15")
    assert (price(113.9328), price(0.08), price(2e-07)) == ("113.9328", "0.08", "0.0000002")
    assert (hours(0.25), hours(4.13), hours(48.0), hours(123.7)) == ("15 min", "4.1 h", "48 h", "124 h")
    assert (hours(62.2 / 3600), hours(0.1 / 3600), hours(0.05)) == ("62 s", "0.1 s", "3 min")
    assert age(date(2026, 11, 22), NOW.date()) == "1 day"
    assert age(date(2020, 12, 1), NOW.date()) == "6.0 years"


def _event(event: str, t: float, writer: str = "a", **facts: object) -> str:
    return json.dumps({"event": event, "t": t, "writer": writer, **facts})


def test_a_run_is_read_from_its_ledger() -> None:
    lines = [
        _event("start", 0, boot="x", price_usd_per_hour=36.0),
        _event("train", 360, step=0),
        _event("progress", 2160, step=30, loss_step=29, loss=2.5),
        _event("progress", 3960, step=60, loss_step=60, loss=None),
        _event("start", 3960, "b", boot="x", price_usd_per_hour=36.0),
        _event("train", 4320, "b", step=50),
        _event("progress", 7920, "b", step=110, loss_step=110, loss=1.5),
        _event("done", 10320, "b", step=150),
        "{torn",
    ]
    run = read_run(lines)
    assert {name: round(value, 3) for name, value, *_ in run.ledger_rows} == {
        "training that was kept": 1.833,
        "training that was repeated": 0.167,
        "saving checkpoints": 0.667,
        "starts and restarts": 0.2,
    }
    (lost,) = run.breaks
    assert (lost.hours, lost.step, lost.repeated, lost.gap_hours) == (1.1, 60, 10, 0.1) and "killed" in lost.cause
    assert run.losses == ({"step": 29, "loss": 2.5}, {"step": 110, "loss": 1.5})
    assert run.finished and run.usd == pytest.approx(36.0 * 10320 / 3600)
    going_on = read_run(lines[:4])
    assert not going_on.finished
    page = unescape(render(read_answer(PLAN.to_json()), now=NOW, run=run))
    for words in (
        *("training that was repeated", "103.20"),
        "killed: its last event has no reason",
        # A script of the user's own may end before the plan's last step.
        *(" has done <b>110 of", "in <b>2.9 h</b> for <b>103 USD</b>.", "this run: 2.87 h, 103.20 USD"),
    ):
        assert words in page
    samples = 110 * PLAN.job.global_batch
    amount = {"steps": 110, "samples": samples, "tokens": samples * PLAN.job.seq_len}
    whole = PLAN.model_copy(update={"job": PLAN.job.model_copy(update=amount)}).seal()
    assert " trained llama-2-7b on" in unescape(render(read_answer(whole.to_json()), now=NOW, run=run))
    assert "has done <b>60 of" in render(read_answer(PLAN.to_json()), now=NOW, run=going_on)
    assert "Loss by step" in page
    assert "Loss by step" not in render(read_answer(PLAN.to_json()), now=NOW, run=going_on), "one loss is no curve"
