"""``gpufleet blocks``: finding Capacity Blocks, and buying one only for its exact price."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ReadTimeoutError

from bootstrap.contract.timings import BOOT, HOUR
from optimizer.commands import blocks
from optimizer.contract.plan import CapacityBlock
from optimizer.contract.request import Constraints
from tests.plans import SPOT_P4D
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.commands.preflight.account import (
    END,
    NOW,
    RESERVATION,
    START,
    Answer,
    FakeAws,
    Frozen,
    Refusal,
    aws,
    capacity_block,
    offering,
)

__all__ = ["aws"]

ID, BLOCK = "cb-0123456789abcdef0", RESERVATION
BUY = ("blocks", "buy", ID)
SPENT = offering("cb-end", "9", StartDate=NOW - timedelta(days=1), EndDate=NOW + timedelta(hours=1))


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "datetime", Frozen)


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(SPOT_P4D))
    return str(path)


def block(**changes: Any) -> dict[str, Any]:
    """The bought block, as AWS describes a reservation."""
    return capacity_block(**{"State": "payment-pending", **changes})


@pytest.fixture
def market(aws: FakeAws) -> FakeAws:
    """An account that may buy, without a block, and two offers."""

    other = [block(State="payment-failed"), block(TotalInstanceCount=4), block(ReservationType="default")]
    aws.answers = {
        "DescribeCapacityBlockOfferings": [
            {"CapacityBlockOfferings": [offering(ID, "566.4000"), offering("cb-yen", "1", CurrencyCode="JPY")]},
            {"CapacityBlockOfferings": [offering("cb-short", "60", StartDate=END - timedelta(hours=5)), SPENT]},
        ],
        "DescribeCapacityReservations": {"CapacityReservations": other},
        "PurchaseCapacityBlock": {"CapacityReservation": block()},
    }
    return aws


def purchases(market: FakeAws) -> list[dict[str, Any]]:
    """Purchases asked for."""
    return market.asked("PurchaseCapacityBlock")


def test_find_lists_price_times_and_whether_the_plan_fits(gpufleet: Gpufleet, market: FakeAws, plan: str) -> None:
    code, out, err = gpufleet("blocks", "find", plan, "--until", "2026-12-24", "--format", "json")
    _, short, day = json.loads(out)
    assert (code, short["offering_id"], short["fits_p95"], short["usable_hours"]) == (0, "cb-short", False, 4.5)
    assert day == {
        "offering_id": ID,
        "instance_type": "p4d.24xlarge",
        "region": "us-east-1",
        "zone": "us-east-1a",
        "nodes": 2,
        "start": "2026-11-22T12:00:00Z",
        "end": "2026-11-23T12:00:00Z",
        "hours": 24.0,
        "upfront_usd": 566.4,
        "usd_per_node_hour": 11.8,
        "surplus_nodes": 0,
        "usable_hours": 23.5,
        "fits_p95": True,
    }
    assert f"next: gpufleet blocks buy {ID} {plan} --region us-east-1 --until 2026-12-24T00:00:00Z" in err
    asked = market.asked("DescribeCapacityBlockOfferings")[0]
    assert (asked["CapacityDurationHours"], f"{asked['EndDateRange']:%Y-%m-%d %z}") == (24, "2026-12-24 +0000")

    code, out, _ = gpufleet("blocks", "find", plan)
    assert code == 0 and "566.4" in out and "2026-11-22T12:00:00Z" in out
    code, out, _ = gpufleet("blocks", "find", plan, "--format", "csv")
    assert out.splitlines()[0] == ",".join(blocks.COLUMNS) and len(out.splitlines()) == 4


def test_find_says_when_there_is_none_or_a_wrong_question(gpufleet: Gpufleet, market: FakeAws, plan: str) -> None:
    for wrong, says in [
        ((), "Missing argument 'PLAN'"),
        ((plan, "--from", "2026-12-24", "--until", "2026-12-23"), "is not after"),
        ((plan, "--region", "mars-1"), "region 'mars-1' is not in the catalog"),
    ]:
        code, _, err = gpufleet("blocks", "find", *wrong)
        assert code == 2 and says in err and not market.calls
    market.answers["DescribeCapacityBlockOfferings"] = {"CapacityBlockOfferings": [SPENT]}
    code, out, err = gpufleet("blocks", "find", plan)
    assert code == 3 and "cb-end" in out and "1 are too short" in err
    market.answers["DescribeCapacityBlockOfferings"] = {"CapacityBlockOfferings": []}
    assert gpufleet("blocks", "find", plan)[0] == 3
    market.answers["DescribeCapacityBlockOfferings"] = Refusal("UnauthorizedOperation", 403)
    code, _, err = gpufleet("blocks", "find", plan)
    assert code == 1 and "allow ec2:DescribeCapacityBlockOfferings" in err


def test_a_calendar_asks_for_each_week_and_names_the_cheapest_that_fits(
    gpufleet: Gpufleet, market: FakeAws, plan: str
) -> None:
    later = offering("cb-later", "500", StartDate=START + timedelta(days=30), EndDate=END + timedelta(days=30))
    weeks = {2: [offering(ID, "566.40"), offering("cb-short", "60", StartDate=END - timedelta(hours=5))], 4: [later]}
    first = [offering(ID, "566.40")]

    def answer(asked: dict[str, Any]) -> Answer:
        week = (asked["StartDateRange"] - NOW) // timedelta(weeks=1) if "StartDateRange" in asked else 0
        return {"CapacityBlockOfferings": weeks.get(week, []) if week else first}

    market.answers["DescribeCapacityBlockOfferings"] = answer
    code, out, err = gpufleet("blocks", "calendar", plan, "--format", "json")
    assert code == 0, err
    rows = json.loads(out)
    assert code == 0 and [row["offering_id"] for row in rows] == [ID, "cb-short", "cb-later"]
    assert [row["fits_p95"] for row in rows] == [True, False, True]
    asked = market.asked("DescribeCapacityBlockOfferings")
    assert len(asked) == 8, "a question a week"
    starts = [call["StartDateRange"] for call in asked[1:]]
    assert "StartDateRange" not in asked[0] and starts == [NOW + timedelta(weeks=week) for week in range(1, 8)]
    ends = [call["EndDateRange"] - timedelta(hours=call["CapacityDurationHours"]) for call in asked]
    assert ends[:-1] == starts and ends[-1] == NOW + timedelta(days=60), "no day is left out"
    start = (NOW + timedelta(weeks=4)).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert f"gpufleet blocks buy cb-later {plan} --region us-east-1 --from {start}" in err
    market.answers["DescribeCapacityBlockOfferings"] = {"CapacityBlockOfferings": []}
    assert gpufleet("blocks", "calendar", plan)[0] == 3
    assert purchases(market) == []


def test_buy_shows_and_buys_nothing_without_the_exact_price(
    gpufleet: Gpufleet, market: FakeAws, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = gpufleet(*BUY, plan)
    assert code == 0 and "price: 566.4000 USD upfront, 11.80 USD a node and hour" in out
    assert f"nothing was bought; to buy it: gpufleet blocks buy {ID} {plan} --region us-east-1 --buy" in out
    code, out, _ = gpufleet(*BUY, plan, "--buy", "--price", "566.40", "--dry-run")
    assert code == 0 and "nothing was bought; to buy it: gpufleet blocks buy" in out
    assert purchases(market) == []
    for arguments, status, says in [
        (("--buy",), 2, "standard input is no terminal"),
        (("--price", "566.40"), 2, "--price buys nothing without --buy"),
        (("--buy", "--price", "566.41"), 2, "limit: 566.4000 USD"),
        (("--buy", "--price", "566"), 2, "limit: 566.4000 USD"),
        (("--buy", "--price", "cheap"), 2, "is not a price"),
    ]:
        code, _, err = gpufleet(*BUY, plan, *arguments)
        assert (code, says in err) == (status, True), err
    for answer in ("yes\n", "566\n"):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert gpufleet(*BUY, plan, "--buy")[0] == 2
    code, _, err = gpufleet("blocks", "buy", "cb-yen", plan, "--buy", "--price", "1")
    assert code == 3 and "cb-yen is not among the 3 blocks" in err
    code, _, err = gpufleet("blocks", "buy", "cb-end", plan, "--buy", "--price", "9")
    assert code == 3 and "ends before the run trains" in err
    market.answers["DescribeCapacityReservations"] = {"CapacityReservations": [block(State="scheduled")]}
    code, _, err = gpufleet(*BUY, plan, "--buy", "--price", "566.40")
    assert code == 1 and f"has this block already: {BLOCK}" in err
    assert purchases(market) == []


def test_a_block_that_is_shorter_than_the_run_is_a_part_of_it(gpufleet: Gpufleet, market: FakeAws, plan: str) -> None:
    """Blocks of the same nodes follow each other in one run; a window of days finds one for a part of a long run."""
    code, out, _ = gpufleet("blocks", "buy", "cb-short", plan, "--buy", "--price", "60")
    assert code == 0 and "a part of the run: it trains 4." in out and len(purchases(market)) == 1
    long = {"hours": {"expected": 5000.0, "p50": 5000.0, "p95": 6000.0}}
    Path(plan).write_text(json.dumps(SPOT_P4D | long))
    for until, length in ((), 4368), (("--until", "2026-12-16"), 504), (("--until", "2026-11-24"), 48):
        gpufleet("blocks", "find", plan, *until)
        assert market.asked("DescribeCapacityBlockOfferings")[-1]["CapacityDurationHours"] == length


def test_days_between_two_blocks_of_a_plan_are_not_asked_for(gpufleet: Gpufleet, market: FakeAws, plan: str) -> None:
    """The plan's hours count the gap, in which no node runs; 22 h train."""
    held = {"start": "2026-11-22T12:00:00Z", "end": "2026-11-23T12:00:00Z"}
    later = {"start": "2026-12-03T12:00:00Z", "end": "2026-12-04T12:00:00Z", "capacity_reservation_id": BLOCK}
    purchase = {"option": "capacity-block", "on_demand_base": 0, "capacity_reservation_id": BLOCK}
    purchase |= {"capacity_block": held, "next_blocks": [later]}
    gap_h = 240.5 + BOOT / HOUR
    gapped = {"purchase": purchase, "hours": {"expected": 20.0 + gap_h, "p50": 19.0 + gap_h, "p95": 22.0 + gap_h}}
    Path(plan).write_text(json.dumps(SPOT_P4D | gapped))
    code, out, _ = gpufleet("blocks", "find", plan, "--format", "json")
    assert code == 0 and [row["fits_p95"] for row in json.loads(out)] == [False, False, True]
    assert market.asked("DescribeCapacityBlockOfferings")[-1]["CapacityDurationHours"] == 24


class Terminal:
    """Standard input of a person who types ``text``."""

    def __init__(self, text: str) -> None:
        self.text = text

    def isatty(self) -> bool:
        return True

    def readline(self, *_: int) -> str:
        text, self.text = self.text, ""
        return text


def test_a_bought_block_comes_with_the_request_that_plans_for_it(
    gpufleet: Gpufleet, market: FakeAws, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("566.4\n"))
    for arguments in ((*BUY, plan, "--buy"), (*BUY, plan, "--buy", "--price", "566.40")):
        code, out, _ = gpufleet(*arguments)
        assert code == 0 and f"bought: {BLOCK} (payment-pending) for 566.4000 USD" in out
        lines = out[out.index("constraints:") : out.index("(blocks of")]
        (reservation,) = Constraints(**yaml.safe_load(lines)["constraints"]).existing_reservations
        assert (reservation.capacity_reservation_id, reservation.count) == (BLOCK, 2)
        assert reservation.capacity_block == CapacityBlock(start=START, end=END, zone_id="use1-az2")
    assert purchases(market) == 2 * [{"CapacityBlockOfferingId": ID, "InstancePlatform": "Linux/UNIX"}]


def test_a_price_that_changes_while_a_person_types_buys_nothing(
    gpufleet: Gpufleet, market: FakeAws, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fees = iter(["566.40", "600.00"])
    market.answers["DescribeCapacityBlockOfferings"] = lambda _: {"CapacityBlockOfferings": [offering(ID, next(fees))]}
    monkeypatch.setattr(sys, "stdin", Terminal("566.40\n"))
    code, _, err = gpufleet(*BUY, plan, "--buy")
    assert code == 2 and "limit: 600.00 USD" in err and purchases(market) == []


def test_an_unknown_outcome_says_where_to_look_and_a_refusal_that_nothing_was_bought(
    gpufleet: Gpufleet, market: FakeAws, plan: str
) -> None:
    def lost(_: dict[str, Any]) -> Any:
        raise ReadTimeoutError(endpoint_url="https://ec2.us-east-1.amazonaws.com")

    def interrupted(_: dict[str, Any]) -> Any:
        raise KeyboardInterrupt

    unknown: list[Answer] = [lost, interrupted, Refusal("InternalError", 500), {}]
    for number, answer in enumerate(unknown, 1):
        market.answers["PurchaseCapacityBlock"] = answer
        code, out, err = gpufleet(*BUY, plan, "--buy", "--price", "566.40")
        assert code == 1 and "bought:" not in out and len(purchases(market)) == number
        assert "whether cb-0123456789abcdef0 was bought for 566.4000 USD is not known" in err
        assert "aws ec2 describe-capacity-reservations --region us-east-1" in err and "describe-capacity-blocks" in err
    market.answers["PurchaseCapacityBlock"] = Refusal("UnauthorizedOperation", 403)
    code, _, err = gpufleet(*BUY, plan, "--buy", "--price", "566.40")
    assert code == 1 and "was not bought" in err
