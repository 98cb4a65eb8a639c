"""``gpufleet catalog learn``: a stack's own capacity events in the catalog, and in the next plan."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from bootstrap.contract.pools import learned_factor
from optimizer.catalog.snapshot import SHIPPED, learned_file
from optimizer.economics.interruption import GANG_RECLAIMS, GANG_WAITS
from tests.unit.optimizer.commands.conftest import Gpufleet
from tests.unit.optimizer.deployed import DeployedStack, ago

POOL = "us-east-1/use1-az1/p4d.24xlarge/spot"
FIRST, LAST = ago(days=23), ago(days=2)
EVENTS: dict[str, Any] = {
    "first_at": FIRST,
    "last_at": LAST,
    "asked": 4,
    "launched": 40,
    "refused": 25,
    "reclaimed": 12,
    "reclaims": 6,
    "node_hours": 480.0,
    "hours": 120.0,
    "returns": 5,
    "empty_hours": 40.0,
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def learn(deployed: DeployedStack) -> tuple[str, ...]:
    """The command that reads the events of a deployed stack."""
    other = {**EVENTS, "reclaims": 0, "returns": 0, "node_hours": 0.0, "hours": 0.0, "empty_hours": 0.0}
    other |= {"empty_since": ago(hours=72), "empty_at": ago(hours=66)}
    capacity = {POOL: EVENTS, POOL.replace("az1", "az2"): other, POOL.replace("spot", "on-demand"): EVENTS}
    deployed.write_state(capacity=capacity)
    return "catalog", "learn", deployed.names.stack, "--directory", str(deployed.directory)


def recommended(gpufleet: Gpufleet, *flags: str) -> dict[str, Any]:
    """The answer for a spot run on p4d, whose cheapest zone is use1-az1."""
    request = "--model llama-3.1-8b --tokens 200M --seq-len 4096 --purchase spot --instance-type p4d.24xlarge"
    code, out, err = gpufleet("recommend", *request.split(), "--region", "us-east-1", "--format", "json", *flags)
    assert code == 0, err
    return dict(json.loads(out))


def hazard(answer: dict[str, Any]) -> dict[str, Any]:
    return dict(answer["plans"][0]["interruption"])


def test_the_next_plan_has_the_pools_own_events_and_names_them(
    gpufleet: Gpufleet, learn: tuple[str, ...], tmp_path: Path
) -> None:
    prior = recommended(gpufleet)
    assert prior["plans"][0]["purchase"]["zone_id"] == "use1-az1"
    code, out, err = gpufleet(*learn, "--format", "json")
    assert code == 0 and "written to" in err
    rows = {row["pool"]: row for row in json.loads(out)}
    # The prior expects so many events of a gang of four, and weighs ten; events of two to 23 days weigh 0.46.
    band = -math.log1p(-0.15) / 730
    expected = band * 120 * 4 ** GANG_RECLAIMS[0]
    own, kept = rows[POOL], rows[POOL]["weight"]
    assert kept == pytest.approx((2**-0.2 - 2**-2.3) / (2.1 * math.log(2)), abs=1e-3)
    assert own["reclaims_per_node_hour"] == pytest.approx(band * learned_factor(kept * 6, kept * expected), rel=2e-3)
    wait = hazard(prior)["wait_hours"]
    expected = 40 / (wait * 4 ** (GANG_WAITS[0] - GANG_RECLAIMS[0]))
    assert own["wait_hours"] == pytest.approx(wait / learned_factor(kept * 5, kept * expected), rel=1e-3)
    assert rows[POOL.replace("spot", "on-demand")]["wait_hours"] is None
    # A drought that lasts counts up to its last refusal.
    assert rows[POOL.replace("az1", "az2")]["wait_hours"] > wait
    answer = recommended(gpufleet, "--save", str(tmp_path / "answer.json"))
    learned = hazard(answer)
    assert learned["wait_hours"] == pytest.approx(own["wait_hours"], rel=1e-4)
    assert learned["rate"] > hazard(prior)["rate"]
    seen = (
        f"learned from stack {learn[2]}, {FIRST[:10]} to {LAST[:10]}: 6 reclaims in 120 h, 5 returns in 40.0 h without"
    )
    assert seen in learned["source"] and "Spot Advisor band 10%-15% a month, 2025-07-28" in learned["source"]
    source = answer["catalog"]["sources"][-1]
    assert (source["name"], source["newest"], source["rows"]) == ("capacity events", LAST[:10], 3)
    assert answer["plans"][0]["hours"]["expected"] > prior["plans"][0]["hours"]["expected"]


def test_show_lists_the_pools_of_all_stacks(gpufleet: Gpufleet, learn: tuple[str, ...]) -> None:
    for _ in range(2):
        assert gpufleet(*learn)[0] == 0
    stacks = json.loads(learned_file().read_text())["stacks"]
    own, other = learn[2], "other"
    stacks["s3://elsewhere"] = next(iter(stacks.values())) | {"stack": other}
    learned_file().write_text(json.dumps({"schema_version": 1, "stacks": stacks}))
    shown = json.loads(gpufleet("catalog", "show", "--format", "json")[1])
    # The second reading of a stack replaces the first.
    assert [row["stack"] for row in shown["learned"]] == 3 * [own] + 3 * [other]
    assert shown["learned"][0]["pool"] == POOL and shown["learned"][0]["refused"] == 25
    assert POOL in gpufleet("catalog", "show")[1]


def test_a_stacks_events_are_read_from_its_bucket(
    deployed: DeployedStack, gpufleet: Gpufleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = deployed.names.stack
    monkeypatch.chdir(deployed.directory)
    code, _, err = gpufleet("catalog", "learn", stack)
    assert code == 4 and f"s3://{deployed.names.bucket}/control/state.json is missing" in err
    deployed.write_state()
    code, _, err = gpufleet("catalog", "learn", stack)
    assert code == 4 and "holds no capacity events" in err and "pulumi up" in err
    deployed.write_state(capacity={POOL: EVENTS})
    code, out, _ = gpufleet("catalog", "learn", "--format", "csv")
    assert code == 0 and f"{POOL},40,25" in out
    assert f"stack {stack}" in hazard(recommended(gpufleet))["source"]
    deployed.write_state(capacity={"nowhere": EVENTS})
    code, _, err = gpufleet("catalog", "learn", stack)
    assert code == 1 and "'nowhere' is no pool" in err


def test_a_bad_file_is_named_and_a_fixed_catalog_is_left_as_it_is(
    gpufleet: Gpufleet, learn: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned_file().parent.mkdir(parents=True)
    learned_file().write_text('{"schema_version": 1, "stacks": {"x": {"stack": "x"}}}')
    code, _, err = gpufleet("catalog", "show")
    assert code == 0 and "lacks learned_at, pools" in err and "delete the file" in err
    assert gpufleet(*learn)[0] == 4
    learned_file().unlink()
    monkeypatch.setenv("GPUFLEET_CATALOG", str(SHIPPED))
    assert "GPUFLEET_CATALOG is set" in gpufleet(*learn)[2]
    assert "learned" not in hazard(recommended(gpufleet))["source"]


def test_a_zone_that_was_seen_empty_loses_its_plan_to_the_next(
    gpufleet: Gpufleet, learn: tuple[str, ...], deployed: DeployedStack
) -> None:
    deadline = ("--deadline", "5h")
    assert recommended(gpufleet, *deadline)["plans"][0]["purchase"]["zone_id"] == "use1-az1"
    drought = {**EVENTS, "asked": 1, "reclaims": 3000, "hours": 480.0, "returns": 0, "empty_hours": 900.0}
    deployed.write_state(capacity={POOL: drought})
    assert gpufleet(*learn)[0] == 0
    plan = recommended(gpufleet, *deadline)["plans"][0]
    assert plan["purchase"]["zone_id"] == "use1-az6" and "learned" not in plan["interruption"]["source"]
