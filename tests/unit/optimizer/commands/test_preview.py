from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optimizer.cli import cli
from tests.plans import LLAMA, ON_DEMAND_P4D, SPOT_P4D, SPOT_P4DE, merged, sealed

RESERVED = merged(SPOT_P4D, {"purchase": {"option": "reserved", "on_demand_base": 0}})


def preview(tmp_path: Path, plan: Any, *arguments: str) -> str:
    path = tmp_path / "plan.json"
    plans = [sealed(each) for each in plan.get("plans", [plan])]
    path.write_text(json.dumps({"plans": plans}))
    done = CliRunner().invoke(cli, ["preview", str(path), *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    number = f" {' '.join(arguments[:2])}" if arguments[:1] == ("--plan",) else ""
    assert done.stderr.splitlines()[-1].startswith(f"truer: gpufleet preflight {path}{number} asks your account")
    return done.stdout


def test_json_has_the_programs_resources_and_the_plans_dollars(tmp_path: Path) -> None:
    answer = json.loads(
        preview(tmp_path, {"plans": [RESERVED, SPOT_P4D]}, "--plan", "2", "--stack", "nlp", "--format", "json")
    )
    assert answer["schema_version"] == 1
    assert answer["stack"] == "nlp"
    rows = answer["resources"]
    assert all(set(row) == {"type", "name", "parent", "protected", "detail"} for row in rows)
    spot, base = [row for row in rows if row["type"] == "aws:autoscaling/group:Group"]
    assert spot["parent"] == base["parent"] == "fleet"
    held = "at most 2 nodes while the controller holds them, else 0; protected from scale-in"
    assert (spot["detail"], base["detail"]) == (f"{held}; spot", held)
    for template in [row for row in rows if row["type"] == "aws:ec2/launchTemplate:LaunchTemplate"]:
        assert template["detail"].startswith("p4d.24xlarge, 4 EFA interfaces, encrypted gp3 of 200 GiB, IMDSv2")
    assert {row["name"] for row in rows if row["protected"]} == {"gpufleet-nlp-key", "gpufleet-nlp-checkpoints"}
    assert answer["cost_usd"] == {**SPOT_P4D["cost_usd"]}
    assert answer["prices"] == [{**price, "usd": price["usd"]} for price in SPOT_P4D["prices"]]
    assert answer["compute_usd_per_hour"] == pytest.approx(95 / 4.5)
    assert any("000000000000" in note for note in answer["notes"])


@pytest.mark.parametrize("form", [(), ("--all",)])
def test_each_form_says_where_the_plan_goes_without_capacity(tmp_path: Path, form: tuple[str, ...]) -> None:
    plan = SPOT_P4D | {"alternates": [ON_DEMAND_P4D, SPOT_P4DE]}
    out = preview(tmp_path, plan, *form)
    rows = [line.split() for line in out[out.index("The plan's place, and the next") :].splitlines()[2:5]]
    assert [row[:5] for row in rows] == [
        ["us-east-1", "p4d.24xlarge", "spot", "(+1", "on-demand)"],
        ["use1-az6", "p4d.24xlarge", "on-demand", "21.96", "4.5"],
        ["use1-az6", "p4de.24xlarge", "spot", "14", "4.5"],
    ]
    alternates = json.loads(preview(tmp_path, plan, "--format", "json"))["alternates"]
    assert [(one["zone_id"], one["purchase"], one["price"]["usd"]) for one in alternates] == [
        ("use1-az6", "on-demand", 21.96),
        ("use1-az6", "spot", 14.0),
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"job": {"architecture": LLAMA}}, "The reference trainer (python -m bootstrap.trainer) carries out this plan"),
        (
            {
                "job": {"architecture": LLAMA},
                "parallelism": {"tensor": 2, "pipeline": 4, "data": 2, "grad_accum": 16, "sharding": "ddp"},
            },
            "does not carry out this plan: pipeline parallelism is 4, and the trainer has none. The hours and memory "
            "are those of code that implements TP (tensor parallelism 2), PP (pipeline parallelism 4). "
            "`gpufleet launch-config PLAN --engine ENGINE`",
        ),
        ({}, "code that implements zero3 sharding. To train it, run code of your own with gpufleet:trainCommand"),
    ],
)
def test_it_says_who_trains_the_plan(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    notes = " ".join(json.loads(preview(tmp_path, merged(SPOT_P4D, changes), "--format", "json"))["notes"])
    assert says in notes


def test_csv_has_one_row_a_resource(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(preview(tmp_path, SPOT_P4D, "--format", "csv"))))
    assert list(rows[0]) == ["type", "name", "parent", "protected", "detail", "usd_per_hour", "usd_per_month"]
    (gateway,) = [row for row in rows if row["name"] == "gpufleet-dev-logs"]
    assert (gateway["usd_per_hour"], gateway["usd_per_month"]) == ("0.01", "7.3")
    expected = json.loads(preview(tmp_path, SPOT_P4D, "--format", "json"))["resources"]
    assert [row["name"] for row in rows] == [row["name"] for row in expected]


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"node_count": 3}, (), "parallelism covers"),
        ({"node": {"gpu": "V100"}}, (), "starts with Turing"),
        ({}, ("--config", "nat"), "'nat' is not KEY=VALUE"),
        ({}, ("--config", "ceilingUSD=500"), "gpufleet:ceilingUSD is no key"),
    ],
)
def test_what_cannot_be_deployed_ends_with_2(
    tmp_path: Path, changes: dict[str, Any], config: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(sealed(merged(SPOT_P4D, changes))))
    done = CliRunner().invoke(cli, ["preview", str(path), *config])
    assert getattr(done.exception, "exit_code", done.exit_code) == 2
    assert message in f"{done.exception} {done.output}"


def test_it_needs_no_cli_no_account_and_no_traceback(tmp_path: Path) -> None:
    """Run in a process of its own, without PATH, home and credentials."""
    path = tmp_path / "plan.json"
    asked = ["--model", "llama-3.1-8b", "--tokens", "2B", "--seq-len", "8192", "--instance-type", "p4d.24xlarge"]
    answer = CliRunner().invoke(cli, ["recommend", *asked, "--purchase", "on-demand", "--format", "json"])
    plan = json.loads(answer.stdout)["plans"][0]
    path.write_text(json.dumps(plan))
    program = Path(sys.executable).parent / "gpufleet"
    done = subprocess.run(
        [program, "preview", path], env={}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[:-1] in ([], ["running the Pulumi program offline ..."]), "a busy machine is slow"
    assert "Fleet" in done.stdout
    path.write_text(json.dumps(merged(plan, {"node": {"gpu": "V100"}})))
    done = subprocess.run(
        [program, "preview", path], env={}, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 2
    assert "\nerror: " in f"\n{done.stderr}" and "Traceback" not in done.stderr


def test_costs_name_every_price_with_source_and_date(tmp_path: Path) -> None:
    answer = json.loads(preview(tmp_path, SPOT_P4D, "--config", "nat=true", "--format", "json"))
    lines = answer["costs"]
    assert all(line["source"] and line["as_of"] for line in lines if line["unit_usd"] is not None)
    (nat,) = [line for line in lines if line["item"] == "NAT gateway"]
    assert (nat["usd_per_hour"], nat["per"], nat["basis"]) == (0.045, "gateway-hour", "always")
    assert nat["usd_per_month"] == pytest.approx(0.045 * 730)
    (data,) = [line for line in lines if line["type"].endswith("NatGateway") and line["basis"] == "usage"]
    assert (data["unit_usd"], data["usd_per_hour"]) == (0.045, None)
    # The plan's own prices come first; the node on demand, which the plan does not price, has the catalog's.
    nodes = {line["item"]: line["usd_per_hour"] for line in lines if line["per"] == "node-hour"}
    assert nodes["p4d.24xlarge, spot"] == 10 and nodes["p4d.24xlarge, on-demand"] > 20
    always = sum(line["usd_per_hour"] for line in lines if line["basis"] == "always")
    running = sum(line["usd_per_hour"] for line in lines if line["basis"] == "nodes")
    assert answer["totals"]["without_nodes_usd_per_hour"] == pytest.approx(always)
    assert answer["totals"]["usd_per_hour"] == pytest.approx(always + running)
    assert answer["totals"]["usd_per_month"] == pytest.approx((always + running) * 730)


def test_the_short_answer_counts_resources_and_has_the_dollars(tmp_path: Path) -> None:
    text = preview(tmp_path, SPOT_P4D)
    assert len(text.splitlines()) <= 12
    assert "stack dev: 2 x p4d.24xlarge (spot, 1 on-demand) in us-east-1 for llama-2-7b\n" in text
    assert "Network" in text and "100.00 USD expected (compute 95.00" in text and "120.00 at p95" in text
    assert "until `pulumi destroy --exclude-protected`" in text and "VpcEndpoint" not in text


def test_further_places_are_groups_of_the_fleet_and_cost_nothing_beside_the_first(tmp_path: Path) -> None:
    plan = SPOT_P4D | {"alternates": [ON_DEMAND_P4D, SPOT_P4DE]}
    lone, several = (json.loads(preview(tmp_path, item, "--format", "json")) for item in (SPOT_P4D, plan))
    groups = [row["parent"] for row in several["resources"] if row["type"] == "aws:autoscaling/group:Group"]
    assert groups == ["fleet"] * 4, "the first place has a group for its base on demand"
    assert several["totals"]["usd_per_hour"] == pytest.approx(lone["totals"]["usd_per_hour"])
    assert "Group gpufleet-dev-nodes-4" in preview(tmp_path, plan, "--all")
